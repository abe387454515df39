"""Playing a log once for many combinations of settings and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from events.log import LogEnd, LogReader
from kvcache.config import PRIMARY_LIMITS, KVCacheConfig
from kvcache.decide.reuse_levels import ORDERS
from kvcache.settings.sources import Values, merged
from kvcache.whatif.commands import Admit, Create
from kvcache.whatif.future import Future
from kvcache.whatif.playback import Playback
from kvcache.whatif.policies.clairvoyant import Clairvoyant, with_outlook
from kvcache.whatif.policies.registry import BASE, blaming, policy
from kvcache.whatif.recorded import Unplayable, prompts, recorded
from kvcache.whatif.tally import Tally

POLICY_SETTING = "eviction_policy"
SECONDARY_LIMITS = ("secondary_blocks", "host_cache_size")


@dataclass(frozen=True)
class Trial:
    """One combination."""

    sets: Values = field(default_factory=dict)
    """Settings that differ from the recorded ones."""
    policy: str | None = None
    """The order of eviction, whatever the settings say; None: theirs."""

    def settings(self, config: KVCacheConfig) -> KVCacheConfig:
        """The settings of its cache where a recorded one had these; raises `ConfigError`.

        Where the size of a level is given, nothing else that was recorded limits it.
        """
        values = config.model_dump()
        for limits in (PRIMARY_LIMITS, SECONDARY_LIMITS):
            if any(name in self.sets for name in limits):
                values |= dict.fromkeys(limits)
        values = merged(values, self.sets)
        if self.policy is not None:
            # Orders other than the cache's own ones find a state in which no uses are counted.
            values = merged(values, {POLICY_SETTING: self.policy if self.policy in ORDERS else BASE})
        return KVCacheConfig(**values)


@dataclass(frozen=True)
class Outcome:
    """What came out of a trial, or was recorded."""

    config: KVCacheConfig
    """Of the last cache in the log."""
    tally: Tally
    end: LogEnd | None = None
    """Of what was recorded: how the log ended when it was read."""
    engine: str = ""
    """Of what was recorded: who decided; empty: a manager of this library."""
    passed_over: int = 0
    """Of what was recorded: prompt tokens that were cached, and that this engine did not reuse."""


def first_config(log: str | PathLike[str]) -> KVCacheConfig:
    """The settings of the first cache in a log. Raises what `recorded` raises."""
    for batch in recorded(log):
        for command in batch.commands:
            if isinstance(command, Create):
                return command.config
    raise Unplayable(str(log), "it holds no cache yet")


def play(
    log: str | PathLike[str], trials: Iterable[Trial], progress: Callable[[int], None] = lambda _: None
) -> list[Outcome]:
    """Play the requests of a log for each trial; the first outcome is what was recorded.

    The log is read once, or once more where policies know what comes. Raises what `recorded` raises, `ConfigError`,
    `UnknownPolicy` and `PolicyFailed`. `progress` hears how many batches are done.
    """
    chosen = list(trials)
    futures: dict[Any, Future] = {}
    players = [playback_of(log, trial, futures) for trial in chosen]
    created, passed_over, then, reader = None, 0, Tally(), LogReader(Path(log))
    for number, batch in enumerate(recorded(log, reader)):
        for command in batch.commands:
            if isinstance(command, Create):
                created = command
            elif isinstance(command, Admit):
                passed_over += sum(each.passed_over for each in command.prompts if not each.resumed)
        for event in batch.events:
            then.count(event)
        for trial, player in zip(chosen, players, strict=True):
            with blaming(trial.policy):
                player.play(batch)
        progress(number + 1)
    if created is None:
        raise Unplayable(str(log), "it holds no cache yet")
    config = created.config
    outcomes = [Outcome(config, then, reader.end, created.engine, passed_over)]
    for trial, player in zip(chosen, players, strict=True):
        with blaming(trial.policy):
            outcomes.append(Outcome(trial.settings(config), player.finish()))
    return outcomes


def playback_of(log: str | PathLike[str], trial: Trial, futures: dict[Any, Future]) -> Playback:
    """What plays a trial. Trials with blocks of one size share what is known of the future, in `futures`."""
    order = None if trial.policy is None else policy(trial.policy)
    named = bool(getattr(order, "needs_names", False))
    if order is None or not issubclass(order, Clairvoyant):
        return Playback(trial.settings, order, named=named)
    size = trial.sets.get("tokens_per_block")
    if size not in futures:
        sized = ((trial.settings(config).tokens_per_block, prompt) for config, prompt in prompts(log))
        futures[size] = Future.of(sized)
    seeing, outlook = with_outlook(order, futures[size])
    return Playback(trial.settings, seeing, named=True, foresight=outlook)
