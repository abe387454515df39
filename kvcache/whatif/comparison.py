"""What was recorded beside what would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.settings.sources import Values
from kvcache.whatif.policies.registry import BASE, BOUND, HINTED
from kvcache.whatif.trial import POLICY_SETTING, Outcome, Trial


@dataclass(frozen=True)
class Row:
    """One combination, or what was recorded."""

    trial: Trial | None
    """None: it was recorded."""
    outcome: Outcome
    of_bound: float | None
    """Its reused tokens, as a part of those of the bound with the same settings; None: that reused none, or was not
    played."""
    of_gap: float | None
    """What it reuses beyond the base (`lru`), as a part of what the bound does; None: these reuse the same, or one of
    them was not played with the same settings."""

    @property
    def policy(self) -> str:
        """The order of eviction."""
        return _policy(self.trial, self.outcome)

    def to_json(self) -> dict[str, Any]:
        """All numbers, and the settings of the last cache."""
        tally = self.outcome.tally
        return {
            "policy": None if self.trial is None else self.policy,
            "requests": tally.requests,
            "prompt_tokens": tally.prompt_tokens,
            "reused_tokens": tally.reused_tokens,
            "reused_tokens_primary": tally.reused_primary,
            "reused_tokens_secondary": tally.reused_secondary,
            "reused_tokens_partial": tally.reused_partial,
            "hit_rate": tally.hit_rate,
            "of_bound": self.of_bound,
            "of_gap": self.of_gap,
            "computed_tokens": tally.computed_tokens,
            "recomputed_tokens": tally.recomputed_tokens,
            "waited": tally.waited,
            "waited_batches": tally.waited_batches,
            "preempted": tally.preempted,
            "cut_short": tally.cut_short,
            "too_long": tally.too_long,
            "unserved": tally.unserved,
            "unserved_tokens": tally.unserved_tokens,
            "blocks_offloaded": tally.offloaded_blocks,
            "blocks_onboarded": tally.onboarded_blocks,
            "blocks_removed_primary": tally.removed_primary,
            "blocks_removed_secondary": tally.removed_secondary,
            "config": self.outcome.config.model_dump(mode="json"),
        }


def with_bounds(trials: Sequence[Trial]) -> list[Trial]:
    """The trials, and behind them those that they are compared with, as far as these are not among them."""
    return [*trials, *{repr(bound): bound for bound in _bounds(trials) if bound not in trials}.values()]


def _bounds(trials: Sequence[Trial]) -> list[Trial]:
    bounds = [Trial(_other_sets(trial), BOUND) for trial in trials]
    return bounds + [Trial(_other_sets(trial), BASE) for trial in trials if trial.policy == HINTED]


def _other_sets(trial: Trial) -> Values:
    """What a trial sets beside the order of eviction."""
    return {name: value for name, value in trial.sets.items() if name != POLICY_SETTING}


def compared(trials: Sequence[Trial], outcomes: Sequence[Outcome], shown: int) -> list[Row]:
    """What was recorded, which is the first outcome, and the first so many trials, each beside its bound."""
    then, *played = outcomes
    reused = {
        (_policy(trial, outcome), _settings(outcome)): outcome.tally.reused_tokens
        for trial, outcome in zip(trials, played, strict=True)
    }
    rows: list[tuple[Trial | None, Outcome]] = [(None, then), *zip(trials[:shown], played, strict=False)]
    return [_row(trial, outcome, reused) for trial, outcome in rows]


def _row(trial: Trial | None, outcome: Outcome, reused: dict[tuple[str, str], int]) -> Row:
    settings, own = _settings(outcome), outcome.tally.reused_tokens
    base, bound = reused.get((BASE, settings)), reused.get((BOUND, settings))
    of_gap = None if base is None or bound is None or bound <= base else (own - base) / (bound - base)
    return Row(trial, outcome, own / bound if bound else None, of_gap)


def _settings(outcome: Outcome) -> str:
    """What the order of eviction does not say."""
    return outcome.config.model_dump_json(exclude={POLICY_SETTING})


def _policy(trial: Trial | None, outcome: Outcome) -> str:
    named = None if trial is None else trial.policy
    return named or outcome.config.eviction_policy
