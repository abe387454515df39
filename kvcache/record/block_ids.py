"""Which slots of a log stand for the blocks of an engine that keeps its own cache manager.

A log has each content once, in a slot that has the number of the engine's block. Some engines name a block though
another one holds the same content already. Such copies share one slot, and the slots in which they lay are blank. When
the block is evicted whose number the slot has, another copy takes its place: only then do numbers of blocks and slots
differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from kvcache.errors import Contradiction, UsageError, invariant
from kvcache.inputs.arguments import checked_integer, listed

Blocks = Items[int] | Any
"""An engine's block ids: a list, `array` or numpy array of integers."""

_FEW = 16
"""Up to so many blocks a loop is faster than numpy."""


class Copies:
    """Blocks of an engine that hold the same content, for which the log has one slot."""

    __slots__ = ("first", "holders", "spares", "unnamed")

    def __init__(self, first: int, holders: int) -> None:
        self.first = first
        """The block that sequences hold of which nothing else is noted."""
        self.holders = {first: holders}
        """By block, the sequences that hold it."""
        self.spares: list[int] = []
        """The slots that the other copies left blank."""
        self.unnamed: set[int] = set()
        """Copies that cannot be found any more, and are there only as long as they are held."""

    @property
    def can_be_found(self) -> bool:
        """Whether there is another copy than these."""
        return len(self.unnamed) < len(self.holders)


class BlockIds:
    """Which slot of the log stands for each block of an engine. Blocks are counted from the first id here."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self._count = first, count
        self._slots, self._blocks = array("i", range(count)), array("i", range(count))
        """By block its slot, and back; of a slot that several copies share, the latter says nothing."""
        self._straight = True
        """Whether each slot has the number of its block still."""
        self.copies: dict[int, Copies] = {}
        """By slot."""
        self._held: dict[int, dict[int, int]] = {}
        """By sequence and slot, which copy it holds, where that is not the first."""

    def slots(self, blocks: Blocks) -> array[int]:
        """Where blocks lie in the log. Raises `UsageError` for what is no id, `Contradiction` for one out of range."""
        if not isinstance(blocks, list) or len(blocks) > _FEW:
            return self._many(blocks)
        slots, first, count, found = self._slots, self.first, self._count, array("i")
        for block in blocks:
            at = (block if type(block) is int else checked_integer(block, "a block id")) - first
            if not 0 <= at < count:
                raise self._unknown(at)
            found.append(slots[at])
        return found

    def _many(self, blocks: Blocks) -> array[int]:
        try:
            given = np.asarray(blocks)
        except Exception:  # noqa: BLE001  whatever it is, it is no row of numbers
            raise UsageError(f"block ids must be integers, not {type(blocks).__name__}") from None
        if not given.size:
            return array("i")
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise UsageError(f"block ids must be one row of integers, not {given.ndim} of {given.dtype}")
        low, high = int(given.min()), int(given.max())
        if low < self.first or high >= self.first + self._count:
            raise self._unknown((low if low < self.first else high) - self.first)
        at = given - self.first if self.first else given
        if self._straight:
            return array("i", at.astype(np.int32, copy=False).tobytes())
        return array("i", np.frombuffer(self._slots, np.int32)[at].tobytes())

    def _unknown(self, at: int) -> Contradiction:
        first, last = self.first, self.first + self._count - 1
        return Contradiction(
            f"there is no block {at + first}: ids go from {first} to {last}", block=at + first
        )

    def id_of(self, slot: int) -> int:
        """The block that lies in a slot, or one of several."""
        copies = self.copies.get(slot)
        return self.first + (self._blocks[slot] if copies is None else next(iter(copies.holders)))

    # -- copies

    def share(self, handle: int, own: int, slot: int, holders: int) -> None:
        """The block of a sequence in the slot `own` is a copy of what lies in another, which has so many holders."""
        block = self._blocks[own]
        copies = self.copies.get(slot)
        if copies is None:
            copies = self.copies[slot] = Copies(self._blocks[slot], holders)
        copies.holders[block] = 1
        copies.spares.append(own)
        self._slots[block] = slot
        self._held.setdefault(handle, {})[slot] = block
        self._straight = False

    def hold(self, handle: int, blocks: Blocks, slots: array[int]) -> None:
        """A sequence holds these blocks, which are cached in these slots."""
        if not self.copies:
            return
        for block, slot in zip(blocks, slots, strict=True):
            copies = self.copies.get(slot)
            if copies is not None:
                at = int(block) - self.first
                copies.holders[at] += 1
                if at != copies.first:
                    self._held.setdefault(handle, {})[slot] = at

    def release(self, handle: int, table: array[int]) -> None:
        """A sequence with this table has let go of all its blocks."""
        held = self._held.pop(handle, {})
        if not self.copies:
            return
        for slot in self.copies.keys() & set(table):
            copies = self.copies[slot]
            block = held.get(slot, copies.first)
            copies.holders[block] -= 1
            if block in copies.unnamed and not copies.holders[block]:
                self.leave(block, slot)

    def leave(self, block: int, slot: int) -> None:
        """A copy is gone, others are left: it gets one of the slots that these do not need."""
        copies = self.copies[slot]
        del copies.holders[block]
        copies.unnamed.discard(block)
        spare = copies.spares.pop()
        self._slots[block], self._blocks[spare] = spare, block
        if len(copies.holders) == 1:
            (self._blocks[slot],) = copies.holders
            del self.copies[slot]

    def forget_names(self) -> None:
        """Nothing is cached any more: copies that nobody holds are blank."""
        for slot, copies in list(self.copies.items()):
            for block in list(copies.holders):
                self._forget(block, slot)

    def _forget(self, block: int, slot: int) -> None:
        """A copy cannot be found any more: it is blank, unless it is held or there is no other one."""
        copies = self.copies.get(slot)
        if copies is not None:
            copies.unnamed.add(block)
            if not copies.holders[block]:
                self.leave(block, slot)

    def invalidate(self, blocks: Blocks, slots: array[int]) -> array[int]:
        """These blocks cannot be found any more; returns the slots whose content cannot, either."""
        lost = array("i")
        for block, slot in zip(blocks, slots, strict=True):
            copies = self.copies.get(slot)
            self._forget(int(block) - self.first, slot)
            if copies is None or not copies.can_be_found:
                lost.append(slot)
        return lost

    def lose(self, slots: array[int]) -> list[int]:
        """What these slots hold cannot be found any more; returns the blocks of which it is news."""
        lost = list[int]()
        for slot in slots:
            copies = self.copies.get(slot)
            found = [self._blocks[slot]] if copies is None else list(copies.holders.keys() - copies.unnamed)
            lost += [block + self.first for block in found]
            for block in found:
                self._forget(block, slot)
        return lost

    def evictable(self, blocks: Blocks, slots: array[int]) -> tuple[list[tuple[int, int]], array[int]]:
        """Which of these blocks leave copies, with their slots, and the slots whose content goes with them."""
        if not self.copies:
            return [], slots
        leaving, going, left = list[tuple[int, int]](), array("i"), dict[int, int]()
        for block, slot in zip(blocks, slots, strict=True):
            copies, at = self.copies.get(slot), int(block) - self.first
            if copies is None:
                going.append(slot)
                continue
            if copies.holders[at]:
                raise Contradiction(
                    f"block {block} is evicted, and a running request holds it", block=int(block)
                )
            if (at, slot) in leaving:
                raise Contradiction(f"block {block} is evicted twice in one call", block=int(block))
            left[slot] = left.get(slot, len(copies.holders) - len(copies.unnamed)) - 1
            if left[slot]:
                leaving.append((at, slot))
            elif copies.unnamed:
                raise Contradiction(
                    f"block {block} is evicted, and a running request holds a copy of it that was invalidated",
                    block=int(block),
                )
            else:
                going.append(slot)
        return leaving, going

    def check(self) -> None:
        """Raise `InvariantViolated` if two blocks have one slot and are no copies."""
        shared = [slot for copies in self.copies.values() for slot in copies.spares]
        of_block = [slot for slot in self._slots if slot not in self.copies]
        invariant(
            sorted([*of_block, *shared, *self.copies]) == list(range(self._count)),
            "a slot has no block, or two",
        )
        for copies in self.copies.values():
            invariant(
                len(copies.holders) == len(copies.spares) + 1 > 1, "copies have other slots than they need"
            )


def listed_blocks(blocks: Blocks) -> Blocks:
    """Block ids as something that can be looked at twice."""
    return blocks if isinstance(blocks, list | array | np.ndarray) else listed(blocks, "block ids")
