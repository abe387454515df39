"""Prompts as they come, made into a curve: of all blocks, or of samples of them.

A sample has the blocks whose hash falls under a bound, whatever prompt they are in, and is a workload of its own, in
which everything is `rate` times as far apart. It is drawn block by block, not by conversations: most prompts
may begin with the same few blocks, and then a sample by first blocks would have nearly everything or nearly nothing.
Of the samples misses are taken, and hits are what is left of all block requests, which are counted: the misses are
spread over many blocks that are each asked for once or twice, while a block that every prompt begins with has a
large part of the hits alone, and be it in a sample or not would move the curve by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.curve.curve import Curve, enough_for
from kvcache.curve.distances import misses_by_size
from kvcache.curve.reuses import Reuses
from kvcache.errors import UsageError

SAMPLES = 4
"""Independent ones are drawn; how much they differ tells how far off their mean may be."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1
_ALL = 2.0**64
"""So many hashes there can be."""


@dataclass(eq=False, repr=False)
class EmptySamples(UsageError):
    """None of the prompts' blocks is in a sample of this `rate`; `enough` is one that would do."""

    rate: float
    enough: float

    def __str__(self) -> str:
        more = f"{self.enough:g} or more" if self.enough < 1 else "1, which takes all"
        return (
            f"no block of the prompts is in a sample of {self.rate:g} of them: give a sample rate of {more}"
        )


class Recorder:
    """Takes prompts one after the other, and keeps what a curve needs of them.

    `rate` is the part of the blocks that is in each of the samples, which `seed` makes; with 1 there is one, of all.
    Raises `UsageError` for a rate that is not above 0 and at most 1.
    """

    def __init__(self, rate: float = 1.0, *, samples: int = SAMPLES, seed: int = 0) -> None:
        if not 0 < rate <= 1:
            raise UsageError(
                f"a sample has a part of the blocks: give a rate above 0 and at most 1, not {rate}"
            )
        self.rate = rate
        self.prompts = 0
        self.block_requests = 0
        seeds = range(seed, seed + samples) if rate < 1 else range(1)
        self._samples = [(each * _GOLDEN & _MASK64, Reuses()) for each in seeds]
        self._lowest = [1.0] * len(self._samples)
        """Of each sample that is empty, the lowest hash, as a part of all that there can be."""

    @property
    def reuses(self) -> Reuses:
        """The whole workload. Raises `UsageError` where only samples are kept."""
        if self.rate < 1:
            raise UsageError("the bound needs all blocks, not samples: leave the sample rate out")
        return self._samples[0][1]

    def add(self, blocks: Sequence[int]) -> None:
        """The next prompt's full blocks, numbered from 0 to 2**64 - 1; raises `InconsistentBlocks` (see `Reuses`)."""
        self.prompts += 1
        self.block_requests += len(blocks)
        if self.rate == 1:
            self._samples[0][1].add(blocks)
            return
        numbers = np.array(blocks, np.uint64)
        for index, (salt, reuses) in enumerate(self._samples):
            hashed = _hashed(numbers, salt)
            chosen = numbers[hashed < self.rate * _ALL]
            if len(chosen):
                reuses.add(chosen.tolist())
            elif len(hashed) and not reuses.distinct:
                self._lowest[index] = min(self._lowest[index], float(hashed.min()) / _ALL)

    def curve(self) -> Curve:
        """The curve of what was added up to now. Raises `EmptySamples` where that has blocks, and no sample has any."""
        if self.block_requests and not any(reuses.distinct for _, reuses in self._samples):
            # The lowest of n hashes is about 1/n of all there can be: within a factor of 2, from several samples.
            raise EmptySamples(self.rate, enough_for(len(self._samples) / sum(self._lowest) / 2))
        misses = tuple(misses_by_size(reuses) for _, reuses in self._samples)
        return Curve(self.block_requests, misses, self.rate)


def measure(prompts: Iterable[Sequence[int]], rate: float = 1.0) -> Curve:
    """The curve of prompts, each given by numbers for its blocks: equal ones for equal blocks behind equal blocks.

    Raises what `Recorder` does.
    """
    recorder = Recorder(rate)
    for blocks in prompts:
        recorder.add(blocks)
    return recorder.curve()


def _hashed(numbers: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[np.uint64]:
    """Numbers that look random (the finalizer of SplitMix64)."""
    mixed = numbers + np.uint64(salt)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
