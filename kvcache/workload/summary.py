"""Results of a played trace."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from events.errors import LogWriteFailed
from kvcache.workload.copies import TimedCopier

MAX_NAMED_REFUSALS = 100
"""Maximum number of refusals that are named; all are counted."""


class StepTimes:
    """Time inside the manager, per step, without time between timed calls.

    The time of `copies` inside the calls does not count either.
    """

    def __init__(self, copies: TimedCopier | None = None) -> None:
        self._copies = copies
        self._steps = array("q")
        self._current = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the body to the current step."""
        copying, started = self._copying(), time.perf_counter_ns()
        try:
            yield
        finally:
            self._current += time.perf_counter_ns() - started - (self._copying() - copying)

    def _copying(self) -> int:
        return 0 if self._copies is None else self._copies.nanoseconds

    def end_step(self) -> None:
        """Close the current step."""
        self._steps.append(self._current)
        self._current = 0

    def __len__(self) -> int:
        return len(self._steps)

    def seconds(self) -> float:
        """Return the sum, including a step that has not ended."""
        return (sum(self._steps) + self._current) / 1e9

    def percentile_us(self, percent: float) -> float:
        """Return a percentile over the ended steps in microseconds; 0 if there is none."""
        if not self._steps:
            return 0.0
        return float(np.percentile(np.frombuffer(self._steps, dtype=np.int64), percent)) / 1e3


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that could not be served even by an idle cache."""

    request_id: int
    reason: str


@dataclass(slots=True)
class WindowBlocks:
    """Blocks of one attention window over a run."""

    most_held: int = 0
    """Maximum number of primary blocks that running sequences held at once."""
    cached: tuple[int, int] = (0, 0)
    """Cached blocks at the end, per level."""


@dataclass(slots=True)
class RunResult:
    """Counts of a run, in addition to its manager's. Equal inputs give equal counts."""

    times: StepTimes
    """Time inside the manager's calls, without the copies if these are measured."""
    windows: dict[int, WindowBlocks] = field(default_factory=dict)
    """Blocks by window in tokens, ascending."""
    requests: int = 0
    """Requests that ran to their end."""
    refused: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    """First refusals, by request id."""
    output_tokens: int = 0
    recomputed_tokens: int = 0
    """Reused tokens that had to be computed because their copy failed."""
    checked_blocks: int = 0
    """Reused blocks with compared bytes, over all groups."""
    checked_final_blocks: int = 0
    """Blocks compared once more when their request ended, over all groups."""
    interrupted: bool = False
    """True if the run ended before the trace did: by the stop flag, or by its log."""
    log_failure: LogWriteFailed | None = None
    """Log failure that ended the run (`overflow` "block"); None if there was none."""

    def refuse(self, request_id: int, reason: str) -> None:
        """Count a refusal."""
        self.refused += 1
        if len(self.refusals) < MAX_NAMED_REFUSALS:
            self.refusals.append(Refusal(request_id, reason))
