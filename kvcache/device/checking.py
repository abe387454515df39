"""Comparing blocks with their checksums before they are read from the file of the secondary level (`verify_secondary`).

The checksum of what lies in a slot is known from when its copy was recorded as landed, until another copy is submitted.
A slot of which it is not known is read as it is: its copy has not landed yet, and nobody has read it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cuda_ops.copier import Copier, Copy, FinishedTicket, Ticket
from events.types import SECONDARY
from kvcache.fold.state import CacheState

if TYPE_CHECKING:
    from kvcache.device.secondary_file import SecondaryFile

CHANGED = "a block in the file of secondary_path is not what was written there"


class CheckingCopier:
    """Submits to a copier those batches which read from the file what was written there; the others fail unmoved."""

    def __init__(self, copier: Copier, file: SecondaryFile) -> None:
        self._copier, self._file = copier, file
        self._known: list[npt.NDArray[np.uint64]] = []
        """Per group and slot; 0: nothing is known."""
        self._awaited: list[npt.NDArray[np.int32]] = []
        """Per group and slot: copies to it that were submitted and have not landed."""

    def begin(self, state: CacheState) -> None:
        """What lies in the file as a cache begins, or has begun again."""
        self._known, self._awaited = [], []
        for group in state.groups:
            size, known = group.levels[SECONDARY].size, group.landed_checksums()
            self._known.append(np.zeros(size, np.uint64) if known is None else known)
            self._awaited.append(np.zeros(size, np.int32))

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """As a `Copier`. The ticket has failed where a block has other bytes than were written."""
        if any(copy.source_level == SECONDARY and self._has_changed(copy) for copy in copies):
            return FinishedTicket(CHANGED)
        for copy in copies:
            if copy.target_level == SECONDARY:
                self._known[copy.group][copy.target] = 0
                self._awaited[copy.group][copy.target] += 1
        return self._copier.submit(copies)

    def landed(self, group: int, slots: npt.NDArray[np.int32], checksums: bytes) -> None:
        """A copy to these slots has landed, and they have these checksums."""
        awaited = self._awaited[group]
        awaited[slots] = np.maximum(awaited[slots] - 1, 0)
        # What a later copy is about to overwrite, or already has in part, is not this one's.
        last = awaited[slots] == 0
        self._known[group][slots[last]] = np.frombuffer(checksums, np.uint64)[last]

    def _has_changed(self, copy: Copy) -> bool:
        expected = self._known[copy.group][copy.source]
        slots, expected = copy.source[expected != 0], expected[expected != 0]
        found: bytes = self._file.checksums(copy.group, slots)
        return found != bytes(expected.tobytes())
