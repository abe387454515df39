"""How long a request wants its blocks to be kept, as callers say it, and as the events have it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from events import structs
from kvcache.errors import UsageError
from kvcache.fold.slots import DEFAULT_PRIORITY, PRIORITY_MAX
from kvcache.inputs.arguments import checked_integer, listed

_NS_PER_MS = 1_000_000
_LONGEST_MS = 2**62 // _NS_PER_MS
"""Some 146 years."""


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """How to keep the blocks whose first token is one of a prompt's tokens [start, stop)."""

    start: int
    stop: int | None = None
    """None: up to the end of the prompt; only in the last range."""
    priority: int = DEFAULT_PRIORITY
    """0 to 100; lower ones are evicted first."""
    duration_ms: int | None = None
    """For how long the priority holds from when the last sequence lets go of a block; then it is 35, and the block goes
    after all others of that priority. None: for good."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How to keep the blocks of a request.

    A new block takes the range of its first token, or, in none, the default: priority 35, for good. One that was cached
    already takes what its range states, and stays as it is in none. Ranges are given in order and do not overlap.
    """

    ranges: Items[RetentionRange] = ()
    decode_priority: int = DEFAULT_PRIORITY
    """Of blocks that begin with a sampled token."""
    decode_duration_ms: int | None = None

    @classmethod
    def stated(cls, recorded: structs.StatedRetention) -> Retention:
        """As an event has it."""
        ranges = [
            RetentionRange(each.start, each.stop, each.priority, each.duration // _NS_PER_MS or None)
            for each in recorded.ranges
        ]
        return cls(ranges, recorded.priority, recorded.duration // _NS_PER_MS or None)


def checked_retention(value: Any) -> structs.StatedRetention | None:
    """As events have it; None where nothing else than the default is stated. Raises `UsageError`."""
    if value is None:
        return None
    if not isinstance(value, Retention):
        raise UsageError(f"retention must be a Retention, not {type(value).__name__}")
    ranges, end = [], 0
    for each in listed(value.ranges, "the ranges of a retention"):
        checked = _checked_range(each)
        if end < 0:
            raise UsageError("only the last range of a retention may have no stop")
        if checked.start < end:
            raise UsageError(
                f"the ranges of a retention must be in order and not overlap: one starts at {checked.start}, "
                f"the one before stops at {end}"
            )
        ranges.append(checked)
        end = -1 if checked.stop is None else checked.stop
    priority, duration = _checked(value.decode_priority, value.decode_duration_ms, "decode_")
    if not ranges and (priority, duration) == (DEFAULT_PRIORITY, 0):
        return None
    return structs.StatedRetention(tuple(ranges), priority, duration)


def _checked_range(value: object) -> structs.StatedRange:
    if not isinstance(value, RetentionRange):
        raise UsageError(f"a range of a retention must be a RetentionRange, not {type(value).__name__}")
    start = checked_integer(value.start, "start")
    stop = None if value.stop is None else checked_integer(value.stop, "stop")
    if not 0 <= start < (2**63 if stop is None else min(stop, 2**63)):
        raise UsageError(
            f"a range of a retention must have 0 <= start < stop: start is {start}, stop is {stop}"
        )
    return structs.StatedRange(start, stop, *_checked(value.priority, value.duration_ms))


def _checked(priority: object, duration_ms: object, prefix: str = "") -> tuple[int, int]:
    """A priority, and a duration in nanoseconds."""
    number = checked_integer(priority, f"{prefix}priority")
    if not 0 <= number <= PRIORITY_MAX:
        raise UsageError(f"{prefix}priority must be from 0 to {PRIORITY_MAX}, not {number}")
    if duration_ms is None:
        return number, 0
    duration = checked_integer(duration_ms, f"{prefix}duration_ms")
    if not 0 < duration <= _LONGEST_MS:
        raise UsageError(f"{prefix}duration_ms must be from 1 to {_LONGEST_MS}, not {duration}")
    return number, duration * _NS_PER_MS
