"""How many blocks of prompts would be reused if blocks were dropped when they had been idle for some time.

A cache without bounds drops a block that was not used for longer than a timeout. A block is used when a request comes
whose prompt has it, and who uses a block uses all before it. So along a prompt the times since the last use only grow:
behind the first block that was dropped all were dropped, and a prefix ends there by itself. A block therefore hits if
it was there before, and the time since its last use is at most the timeout. The spans of `Reuses` have these times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.audit.curve import CurveRecorder, Reuses

TIMEOUTS = (10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 86_400)
"""Seconds: those that a table has."""
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class IdleTimes:
    """How long the blocks that prompts ask for had been idle, of those that were there before."""

    ages: npt.NDArray[np.int64]
    """In ns, ascending."""
    blocks: npt.NDArray[np.int64]
    """How many had been idle for so long or less."""
    asked: int
    """Block requests, those for new blocks included."""

    @classmethod
    def of(cls, reuses: Reuses) -> IdleTimes:
        """Those of a workload."""
        at, spans = reuses.times, list(reuses.prompts())
        ages = np.array(
            [at[now] - at[user] for now, (_, each) in enumerate(spans) for user, _ in each], np.int64
        )
        counts = np.array([blocks for _, each in spans for _, blocks in each], np.int64)
        order = np.argsort(ages, kind="stable")
        return cls(ages[order], np.cumsum(counts[order]), sum(reuses.lengths))

    def within(self, ns: float) -> int:
        """Block requests of blocks that had been idle for so long or less."""
        place = int(np.searchsorted(self.ages, ns, "right"))
        return int(self.blocks[place - 1]) if place else 0


@dataclass(frozen=True, slots=True, eq=False)
class TimeoutCurve:
    """Block requests that a cache without bounds serves, by its timeout."""

    block_requests: int
    samples: tuple[IdleTimes, ...]
    rate: float = 1.0
    """The part of the blocks that is in each sample; 1: all of them, and the curve is exact."""
    seconds: float = 0.0
    """From the first request to the last: no idle time is longer."""

    @classmethod
    def of(cls, recorder: CurveRecorder) -> TimeoutCurve:
        """That of the prompts that were recorded up to now."""
        idle = tuple(map(IdleTimes.of, recorder.workloads))
        return cls(recorder.block_requests, idle, recorder.rate, recorder.seconds)

    def hits(self, timeout: float = np.inf) -> int:
        """Block requests served if blocks are dropped that were idle for longer than this, in seconds."""
        misses = [each.asked - each.within(timeout * _NS) for each in self.samples]
        return max(round(self.block_requests - float(np.mean(misses)) / self.rate), 0)

    def hit_rate(self, timeout: float = np.inf) -> float:
        """The same as a part of all block requests, from 0 to 1."""
        return self.hits(timeout) / max(self.block_requests, 1)

    def quantile(self, part: float) -> float | None:
        """Seconds that this part of the served block requests does not exceed; None if nothing is served."""
        ages = [
            float(each.ages[np.searchsorted(each.blocks, part * each.blocks[-1])])
            for each in self.samples
            if len(each.ages)
        ]
        return float(np.mean(ages)) / _NS if ages else None
