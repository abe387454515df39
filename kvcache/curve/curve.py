"""The curve itself: hits at any size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.curve.distances import Int64s

KNEE = 0.01
"""Doubling the cache is worth it if it gains this part of all block requests."""
ENOUGH = 32
"""Different blocks of a sample. With fewer in one of the samples, neither knee nor standard error says anything."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Block requests that LRU serves, by the size of the cache in blocks."""

    block_requests: int
    """Of all prompts."""
    misses: tuple[Int64s, ...]
    """Of each sample, by the size of a cache for the sampled blocks alone; entry 0: all requests for these."""
    rate: float = 1.0
    """The part of the blocks that is in each sample; 1: all of them, and the curve is exact."""

    @property
    def distinct_blocks(self) -> int:
        """How many different blocks there are: at this size everything hits that was there before."""
        return round(float(np.mean(self.sampled_blocks)) / self.rate)

    @property
    def sampled_blocks(self) -> tuple[int, ...]:
        """How many different blocks each sample has."""
        return tuple(int(misses[-1]) for misses in self.misses)

    @property
    def is_vague(self) -> bool:
        """Whether the samples are too small for a knee and for standard errors; `enough_for` names a rate that does."""
        return self.rate < 1 and min(self.sampled_blocks) < ENOUGH

    def hits(self, size: int) -> int:
        """Block requests served by a cache of `size` blocks."""
        return round(float(self._hits(np.array([size])).mean()))

    def hit_rate(self, size: int) -> float:
        """The same as a part of all block requests, from 0 to 1."""
        return self.hits(size) / max(self.block_requests, 1)

    def error(self, size: int) -> float | None:
        """Standard error of the hit rate, from how much the samples differ; 0 if the curve is exact.

        None if it is vague.
        """
        if self.is_vague:
            return None
        if len(self.misses) == 1:
            return 0.0
        each = self._hits(np.array([size]))[:, 0] / max(self.block_requests, 1)
        return float(each.std(ddof=1) / np.sqrt(len(each)))

    def by_level(self, primary: int, secondary: int) -> tuple[int, int]:
        """Hits in a primary level of so many blocks, and in a secondary one that takes what primary evicts."""
        served = self.hits(primary)
        return served, self.hits(primary + secondary) - served

    @property
    def knee(self) -> int | None:
        """The smallest size from which on no doubling gains a hundredth (`KNEE`) of all block requests.

        None if no size has any hits, or the curve is vague.
        """
        if self.is_vague or not self.hits(self.distinct_blocks):
            return None
        step = max(round(1 / self.rate), 1)
        sizes = np.arange(1, self.distinct_blocks + 1, step)
        gains = (self._hits(2 * sizes) - self._hits(sizes)).mean(axis=0)
        worth = np.flatnonzero(gains >= KNEE * self.block_requests)
        return int(sizes[worth[-1]]) + step if len(worth) else 1

    def _hits(self, sizes: Int64s) -> npt.NDArray[np.float64]:
        """A row for each sample. A sampled block hits where as many sampled ones fit as there should be before it."""
        places = np.where(sizes > 0, 1 + np.floor((sizes - 1) * self.rate), 0).astype(np.int64)
        rows = [misses[np.minimum(places, len(misses) - 1)] / self.rate for misses in self.misses]
        hits = np.clip(self.block_requests - np.array(rows), 0, None)
        return np.asarray(np.where(sizes > 0, hits, 0.0))


def enough_for(distinct_blocks: float) -> float:
    """A rate with which samples of so many different blocks have `ENOUGH`, most likely: one digit, at most 1.

    Twice as many are aimed at, since samples differ in size.
    """
    rate = 2 * ENOUGH / max(distinct_blocks, 1)
    digit = 10.0 ** math.floor(math.log10(rate))
    return min(1.0, float(f"{math.ceil(rate / digit) * digit:.0e}"))
