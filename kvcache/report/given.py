"""What other commands worked out about the log, as their JSON: `kvcache curve --json` and `kvcache whatif --json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from kvcache.errors import UsageError


class Size(msgspec.Struct):
    """One size of the cache."""

    blocks: int
    hit_rate: float
    best_hits: int | None = None


class Curve(msgspec.Struct):
    """Hit rates by size."""

    sizes: list[Size]
    block_requests: int = 0
    num_blocks: dict[str, int] = {}
    knee: int | None = None


class Trial(msgspec.Struct):
    """One cache that was tried, or the recorded one."""

    hit_rate: float
    policy: str | None = None
    of_bound: float | None = None
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    blocks_onboarded: int = 0
    preempted: int = 0
    config: dict[str, Any] = {}


class WhatIf(msgspec.Struct):
    """What was recorded, and what was tried."""

    recorded: Trial
    trials: list[Trial]

    def differing(self) -> list[str]:
        """The settings that are not the same in all of them, as dotted names."""
        flat = [dict(_flat(trial.config)) for trial in (self.recorded, *self.trials)]
        names = dict.fromkeys(name for each in flat for name in each)
        return [name for name in names if len({repr(each.get(name)) for each in flat}) > 1]


_Form = TypeVar("_Form", Curve, WhatIf)


def understood(given: Mapping[str, Any], form: type[_Form]) -> _Form:
    """The JSON of a command as what a report shows of it. Raises `UsageError` if it is something else."""
    try:
        return msgspec.convert(given, form)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"this is not what `kvcache {form.__name__.lower()} LOG --json` prints: {error}"
        ) from error


def setting(trial: Trial, name: str) -> str:
    """A setting of a trial, for people."""
    value = dict(_flat(trial.config)).get(name, "")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
