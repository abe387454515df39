"""Replay of a log, once, for many combinations of settings and policies, also in parallel processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from os import PathLike
from pathlib import Path
from typing import Any

from events.log import LogEnd, LogReader
from kvcache.audit.fleet import interrupts_ignored, processes
from kvcache.audit.prefill import hours_between
from kvcache.config import PRIMARY_LIMITS, KVCacheConfig, Values, merged
from kvcache.decide.eviction_order import ORDERS
from kvcache.whatif.commands import Admit, Create, Remove, Unplayable, prompts, recorded
from kvcache.whatif.playback import Playback, Tally
from kvcache.whatif.policies import BASE, BOUND, HINTED, Clairvoyant, Future, blaming, policy, with_outlook

POLICY_SETTING = "eviction_policy"
SECONDARY_LIMITS = ("secondary_blocks", "host_cache_size")


@dataclass(frozen=True)
class Trial:
    """One combination of settings and policy."""

    sets: Values = field(default_factory=dict)
    """Settings that differ from the recorded ones."""
    policy: str | None = None
    """Eviction order, overriding the settings; None: that of the settings."""

    def settings(self, config: KVCacheConfig) -> KVCacheConfig:
        """Return the cache's settings, given the recorded ones. Raises `ConfigError`.

        If the size of a level is given, no other recorded setting limits it.
        """
        values = config.model_dump()
        for limits in (PRIMARY_LIMITS, SECONDARY_LIMITS):
            if any(name in self.sets for name in limits):
                values |= dict.fromkeys(limits)
        values = merged(values, self.sets)
        if self.policy is not None:
            # Orders other than the cache's own need a state without counted uses.
            values = merged(values, {POLICY_SETTING: self.policy if self.policy in ORDERS else BASE})
        return KVCacheConfig(**values)


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of a trial, or of the recording."""

    config: KVCacheConfig
    """Settings of the last cache in the log."""
    tally: Tally
    end: LogEnd | None = None
    """End of the log when it was read; of the recording only."""
    engine: str = ""
    """Engine that decided, of the recording only; empty: a manager of this library."""
    passed_over: int = 0
    """Cached prompt tokens that this engine did not reuse; of the recording only."""
    hours: float | None = None
    """Hours from the first batch to the last, of the recording only; None: no time has passed."""
    stops: Counter[str] = field(default_factory=Counter)
    """Number of outputs by why they ended, of the recording only."""


def first_config(log: str | PathLike[str]) -> KVCacheConfig:
    """Return the settings of the first cache in a log. Raises what `recorded` raises."""
    for batch in recorded(log):
        for command in batch.commands:
            if isinstance(command, Create):
                return command.config
    raise Unplayable(str(log), "it has no cache")


def play(
    log: str | PathLike[str], trials: Iterable[Trial], progress: Callable[[int], None] = lambda _: None
) -> list[TrialOutcome]:
    """Replay the requests of a log for each trial; return the outcomes, the first of which is the recording's.

    The log is read once, or twice if there are clairvoyant policies. Raises what `recorded` raises, `ConfigError`,
    `UnknownPolicy` and `PolicyFailed`. `progress` receives the number of batches done.
    """
    chosen = list(trials)
    futures: dict[Any, Future] = {}
    players = [playback_of(log, trial, futures) for trial in chosen]
    created, passed_over, then, reader = None, 0, Tally(), LogReader(Path(log))
    first_ts = last_ts = 0
    stops = Counter[str]()
    for number, batch in enumerate(recorded(log, reader)):
        first_ts, last_ts = first_ts or batch.ts, batch.ts
        for command in batch.commands:
            if isinstance(command, Create):
                created = command
            elif isinstance(command, Admit):
                passed_over += sum(each.passed_over for each in command.prompts if not each.resumed)
            elif isinstance(command, Remove) and command.stop is not None:
                stops[command.stop] += 1
        for event in batch.events:
            then.count(event)
        for trial, player in zip(chosen, players, strict=True):
            with blaming(trial.policy):
                player.play(batch)
        progress(number + 1)
    if created is None:
        raise Unplayable(str(log), "it has no cache")
    config = created.config
    hours = hours_between(first_ts, last_ts)
    outcomes = [TrialOutcome(config, then, reader.end, created.engine, passed_over, hours, stops)]
    for trial, player in zip(chosen, players, strict=True):
        with blaming(trial.policy):
            outcomes.append(TrialOutcome(trial.settings(config), player.finish()))
    return outcomes


def playback_of(log: str | PathLike[str], trial: Trial, futures: dict[Any, Future]) -> Playback:
    """Return the replay of a trial. Trials with the same block size share a future, in `futures`."""
    order = None if trial.policy is None else policy(trial.policy)
    named = order is not None and order.needs_names
    if order is None or not issubclass(order, Clairvoyant):
        return Playback(trial.settings, order, named=named)
    size = trial.sets.get("tokens_per_block")
    if size not in futures:
        sized = ((trial.settings(config).tokens_per_block, prompt) for config, prompt in prompts(log))
        futures[size] = Future.of(sized)
    seeing, outlook = with_outlook(order, futures[size])
    return Playback(trial.settings, seeing, named=True, foresee=outlook.note)


@dataclass(frozen=True)
class TrialRow:
    """Row of one combination, or of the recording."""

    trial: Trial | None
    """The trial; None for the recording."""
    outcome: TrialOutcome
    of_bound: float | None
    """Reused tokens as a part of the bound's with the same settings; None without a bound, if that reused none, or with
    rules of retention, which decide before any eviction order."""
    of_gap: float | None
    """Gain over the base (`lru`) as a part of the bound's gain; None if these reuse the same, or if one was not
    replayed with the same settings."""

    @property
    def policy(self) -> str:
        """Eviction order."""
        return _policy(self.trial, self.outcome)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers, and the settings of the last cache."""
        tally = self.outcome.tally
        counts = {name: count for name, count in asdict(tally).items() if isinstance(count, int)}
        return {
            "policy": None if self.trial is None else self.policy,
            **counts,
            "reused_tokens": tally.reused_tokens,
            "hit_rate": tally.hit_rate,
            "of_bound": self.of_bound,
            "of_gap": self.of_gap,
            "computed_tokens": tally.computed_tokens,
            "config": self.outcome.config.model_dump(mode="json"),
        }


def with_bounds(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials, followed by the missing ones that they are compared with."""
    bounds = [Trial(_other_sets(trial), BOUND) for trial in trials]
    bounds += [Trial(_other_sets(trial), BASE) for trial in trials if trial.policy == HINTED]
    return [*trials, *{repr(bound): bound for bound in bounds if bound not in trials}.values()]


def _other_sets(trial: Trial) -> Values:
    """Return a trial's settings without the eviction order."""
    return {name: value for name, value in trial.sets.items() if name != POLICY_SETTING}


def compared(trials: Sequence[Trial], outcomes: Sequence[TrialOutcome], shown: int) -> list[TrialRow]:
    """Return rows of the recording, the first outcome, and of the first `shown` trials, each relative to its bound."""
    then, *played = outcomes
    reused = {
        (_policy(trial, outcome), _settings(outcome)): outcome.tally.reused_tokens
        for trial, outcome in zip(trials, played, strict=True)
    }
    pairs: list[tuple[Trial | None, TrialOutcome]] = [
        (None, then),
        *zip(trials[:shown], played, strict=False),
    ]
    rows = []
    for trial, outcome in pairs:
        settings, own = _settings(outcome), outcome.tally.reused_tokens
        base, bound = reused.get((BASE, settings)), reused.get((BOUND, settings))
        of_gap = None if base is None or bound is None or bound <= base else (own - base) / (bound - base)
        of_bound = own / bound if bound and not outcome.config.stop_retention else None
        rows.append(TrialRow(trial, outcome, of_bound, of_gap))
    return rows


def _settings(outcome: TrialOutcome) -> str:
    """Return the settings without the eviction order, as a key."""
    return outcome.config.model_dump_json(exclude={POLICY_SETTING})


def _policy(trial: Trial | None, outcome: TrialOutcome) -> str:
    named = None if trial is None else trial.policy
    return named or outcome.config.eviction_policy


_SECONDS_BETWEEN = 0.1
"""Seconds between checks of `stop` and reports of progress."""
Prepare = Callable[[], None]
"""Setup function of a process; must be picklable."""
_batches: Any = None
"""In a process: number of batches that each process has done, shared by all."""


class Stopped(Exception):
    """Signal, not an error: the trials were abandoned."""


def play_side_by_side(
    log: str | PathLike[str],
    trials: Sequence[Trial],
    jobs: int,
    *,
    stop: Callable[[], bool],
    progress: Callable[[int], None],
    prepare: Prepare,
) -> list[TrialOutcome]:
    """Run `play` in `jobs` processes, each of which reads the log for its part of the trials.

    One job runs in this process. Raises `Stopped` once `stop()` is true, and what `play` raises. `progress` receives
    the number of batches that the slowest process has done.
    """

    def go_on(batches: int) -> None:
        if stop():
            raise Stopped
        progress(batches)

    jobs = max(1, min(jobs, len(trials)))
    if jobs == 1:
        return play(log, trials, go_on)
    batches = get_context("spawn").RawArray("q", jobs)
    with processes(jobs, partial(_set_up, prepare, batches)) as pool:
        with interrupts_ignored():
            parts = [pool.submit(_play_part, log, list(trials[at::jobs]), at) for at in range(jobs)]
        while (so_far := wait(parts, _SECONDS_BETWEEN, FIRST_EXCEPTION)).not_done:
            for part in so_far.done:
                part.result()
            go_on(min(batches))
        outcomes = [part.result() for part in parts]
    # The recording, with which each part begins, comes first; then the trials in the given order.
    return [outcomes[0][0], *(outcomes[at % jobs][1 + at // jobs] for at in range(len(trials)))]


def _set_up(prepare: Prepare, batches: Any) -> None:
    global _batches  # noqa: PLW0603  a process has no other place for what it shares
    _batches = batches
    prepare()


def _play_part(log: str | PathLike[str], trials: list[Trial], number: int) -> list[TrialOutcome]:
    return play(log, trials, partial(_batches.__setitem__, number))
