"""Reuse of prompts' blocks in a cache that drops blocks after an idle time.

An unbounded cache drops a block that was not used for longer than a timeout. A request uses all blocks of its prompt,
so using a block uses all before it. Therefore along a prompt the times since the last use only grow: after the first
dropped block all were dropped, and the prefix ends there. A block therefore hits if
it was there before, and the time since its last use is at most the timeout. The spans of `Reuses` have these times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.audit.curve import CurveRecorder, Reuses

TIMEOUTS = (10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 86_400)
"""Timeouts in a table, in seconds."""
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class SpanAges:
    """Idle times of the blocks of all prompts' spans, which are concatenated."""

    ages: npt.NDArray[np.int64]
    """Idle time of each span, in ns."""
    counts: npt.NDArray[np.int64]
    """Number of blocks of each span."""
    stops: npt.NDArray[np.int64]
    """By request, the number of spans up to its last."""

    @classmethod
    def of(cls, reuses: Reuses) -> SpanAges:
        """Return the idle times of a workload."""
        at, spans = reuses.times, [each for _, each in reuses.prompts()]
        ages = [at[now] - at[user] for now, each in enumerate(spans) for user, _ in each]
        counts = [blocks for each in spans for _, blocks in each]
        stops = np.cumsum([len(each) for each in spans], dtype=np.int64)
        return cls(np.array(ages, np.int64), np.array(counts, np.int64), stops)

    def hits(self, timeout: float = np.inf) -> npt.NDArray[np.int64]:
        """Return the blocks of each prompt that hit if blocks are dropped after `timeout` idle seconds."""
        sums = np.concatenate([[0], np.cumsum(np.where(self.ages <= timeout * _NS, self.counts, 0))])
        return np.diff(sums[self.stops], prepend=0)


@dataclass(frozen=True, slots=True, eq=False)
class IdleTimes:
    """Idle times of requested blocks that had been cached before."""

    ages: npt.NDArray[np.int64]
    """Idle times in ns, ascending."""
    blocks: npt.NDArray[np.int64]
    """Cumulative number of blocks up to each idle time."""
    asked: int
    """Block requests, including those for new blocks."""

    @classmethod
    def of(cls, reuses: Reuses) -> IdleTimes:
        """Return the idle times of a workload."""
        spans = SpanAges.of(reuses)
        order = np.argsort(spans.ages, kind="stable")
        return cls(spans.ages[order], np.cumsum(spans.counts[order]), sum(reuses.lengths))

    def within(self, ns: float) -> int:
        """Return the requests of blocks that had been idle for at most `ns`."""
        place = int(np.searchsorted(self.ages, ns, "right"))
        return int(self.blocks[place - 1]) if place else 0


@dataclass(frozen=True, slots=True, eq=False)
class TimeoutCurve:
    """Block requests that an unbounded cache serves, by timeout."""

    block_requests: int
    samples: tuple[IdleTimes, ...]
    rate: float = 1.0
    """Part of the blocks in each sample; 1: all blocks, and the curve is exact."""
    seconds: float = 0.0
    """Seconds from the first request to the last: no idle time is longer."""

    @classmethod
    def of(cls, recorder: CurveRecorder) -> TimeoutCurve:
        """Return the curve of the prompts recorded so far."""
        idle = tuple(map(IdleTimes.of, recorder.workloads))
        return cls(recorder.block_requests, idle, recorder.rate, recorder.seconds)

    def hits(self, timeout: float = np.inf) -> int:
        """Return the block requests served if blocks are dropped after `timeout` idle seconds."""
        misses = [each.asked - each.within(timeout * _NS) for each in self.samples]
        return max(round(self.block_requests - float(np.mean(misses)) / self.rate), 0)

    def hit_rate(self, timeout: float = np.inf) -> float:
        """Return the hit rate at a timeout, from 0 to 1."""
        return self.hits(timeout) / max(self.block_requests, 1)

    def quantile(self, part: float) -> float | None:
        """Return the seconds that this part of the served block requests does not exceed; None if none are served."""
        ages = [
            float(each.ages[np.searchsorted(each.blocks, part * each.blocks[-1])])
            for each in self.samples
            if len(each.ages)
        ]
        return float(np.mean(ages)) / _NS if ages else None
