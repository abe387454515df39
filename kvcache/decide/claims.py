"""What a request takes of what one window has cached, and what the requests of a batch take together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from events.ids import LevelIndex, Slot
from events.types import PRIMARY, SECONDARY
from kvcache.fold.matching import GroupMatch
from kvcache.fold.places import indexes
from kvcache.fold.retention import Kept
from kvcache.fold.sliding_group import SlidingGroup


class BlockNames(NamedTuple):
    """Consecutive cached blocks at one level, shallowest first."""

    level: LevelIndex
    first: int
    """Blocks before them in the prompt."""
    slots: array[int]
    names: bytes


@dataclass(frozen=True, slots=True)
class CopySource:
    """A block whose first `num_tokens` tokens are to be copied."""

    level: LevelIndex
    slot: Slot
    num_tokens: int
    kept: Kept
    """How the source is kept."""
    cached: bool = True


class Claims:
    """What the requests of a batch hold together in one window: each cached block counts once, whoever claims it."""

    __slots__ = ("_taken", "available", "needed")

    def __init__(self, available: int) -> None:
        self._taken: dict[int, int] = {}
        self.needed = 0
        """Primary slots that must be found: for new blocks, and for secondary ones to be onboarded."""
        self.available = available
        """Primary slots that can be had, less those of claimed blocks."""

    def add(self, found: GroupMatch, claimed: Items[BlockNames], new_blocks: int) -> None:
        """Count one more request."""
        self.needed += new_blocks
        for run, take in found.runs:
            more = take - self._taken.get(run.id, 0)
            if more <= 0:
                continue
            self._taken[run.id] = take
            if run.level == SECONDARY:
                self.needed += more
            elif not run.refs:
                self.available -= more


class SlidingClaims(Claims):
    """Counts block by block: requests of a batch may claim different parts of one prefix."""

    __slots__ = ("_before", "_group", "_is_claimed")

    def __init__(self, group: SlidingGroup) -> None:
        super().__init__(group.levels[PRIMARY].available)
        self._group = group
        self._before: list[npt.NDArray[np.intp]] = []
        """Places that the first request claims."""
        self._is_claimed: npt.NDArray[np.bool_] | None = None
        """By place; a batch of one request, the usual one, needs none."""

    def add(self, found: GroupMatch, claimed: Items[BlockNames], new_blocks: int) -> None:
        """Count one more request."""
        self.needed += new_blocks
        if self._before and self._is_claimed is None:
            self._is_claimed = np.zeros(len(self._group.refs), np.bool_)
            self._is_claimed[np.concatenate(self._before)] = True
        for blocks in claimed:
            at = indexes(blocks.slots)
            if blocks.level == SECONDARY:
                at += self._group.levels[PRIMARY].size
            if self._is_claimed is None:
                self._before.append(at)
            else:
                at = at[~self._is_claimed[at]]
                self._is_claimed[at] = True
            if blocks.level == SECONDARY:
                self.needed += len(at)
            else:
                self.available -= len(at) - int(np.count_nonzero(self._group.views["refs"][at]))
