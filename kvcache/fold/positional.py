"""Further groups of layers, in the pool of the first group or in pools of their own: slots, and the names found there.

Such a group has no prefix tree. A sequence has a slot for some indices of its table only, a slot has names, each of the
first `position` tokens of some sequence, and nothing follows from one name for another. A slot is used while a sequence
has it, or a name is left; the first group counts a slot of its pool as blank then.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterator

from events import types as ev
from events.ids import GroupIndex
from events.types import CHUNKED, FULL, SLIDING, STATE, UNCACHED
from kvcache.errors import invariant
from kvcache.fold.group import Level

KINDS = (FULL, SLIDING, CHUNKED, STATE, UNCACHED)
MOST_TOKENS = 2**30
"""Upper bound of positions and block sizes."""


class PositionalGroup:
    """The slots of one group, by sequence and index, and their names."""

    def __init__(self, index: int, created: ev.SharingGroup, key_bytes: int, first_slot: int = 0) -> None:
        self.index, self.key_bytes = GroupIndex(index), key_bytes
        self.created = ev.SharingGroup(
            created.kind, created.tokens_per_block, created.window, created.layers, blocks=created.blocks
        )
        self.pool = range(first_slot, first_slot + created.blocks) if created.blocks else range(0)
        """Slots of its own; empty if it takes those of the first group."""
        self.names: dict[int, dict[bytes, int]] = {}
        """Tokens that each name of a slot stands for, by slot."""
        self.tables: dict[int, dict[int, int]] = {}
        """Slots by handle and index."""
        self.holders: Counter[int] = Counter()
        """Number of table entries by slot; no zeros are kept."""
        self.idle = 0
        """Slots with names that no sequence holds."""

    def uses(self, slot: int) -> bool:
        """True if a sequence holds the slot, or it has a name."""
        return slot in self.holders or slot in self.names

    def are_free(self, slots: array[int]) -> bool:
        """True if all of these are unused slots of its own pool, and none is named twice."""
        return len(set(slots)) == len(slots) and all(
            slot in self.pool and not self.uses(slot) for slot in slots
        )

    def used(self) -> set[int]:
        """All slots that are not free."""
        return self.holders.keys() | self.names.keys()

    def ends_in(self, slot: int, index: int) -> bool:
        """True if a name of the slot stands for tokens that end in the block with this index."""
        size = self.created.tokens_per_block
        return any(-(-position // size) == index + 1 for position in self.names.get(slot, {}).values())

    def keys_of(self, event: ev.SlotsNamed | ev.SlotsUnnamed) -> Iterator[tuple[int, bytes]]:
        """Yield the slots and keys of an event."""
        slots, size, keys = array("i", event.slots), self.key_bytes, event.keys
        invariant(len(keys) == len(slots) * size > 0, "the number of names differs from the number of slots")
        return zip(slots, [keys[at : at + size] for at in range(0, len(keys), size)], strict=True)

    def take(self, handle: int, rows: Iterator[tuple[int, int]]) -> None:
        """Give a sequence slots at indices at which it has none."""
        table = self.tables.setdefault(handle, {})
        for index, slot in rows:
            invariant(index not in table, "a sequence gets a second slot at one index")
            table[index] = slot
            self.idle -= slot in self.names and slot not in self.holders
            self.holders[slot] += 1

    def leave(self, handle: int, rows: Iterator[tuple[int, int]]) -> None:
        """Remove slots from a sequence."""
        table = self.tables[handle]
        for index, slot in rows:
            invariant(table.pop(index, None) == slot, "a sequence releases a slot that it does not have")
            self._drop(slot)
        if not table:
            del self.tables[handle]

    def end(self, handle: int) -> None:
        """End a sequence."""
        for slot in self.tables.pop(handle, {}).values():
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        self.holders[slot] -= 1
        if not self.holders[slot]:
            del self.holders[slot]
            self.idle += slot in self.names

    def name(self, event: ev.SlotsNamed) -> None:
        """Add names to slots."""
        own = self.tables[event.handle].values()
        for (slot, key), position in zip(self.keys_of(event), array("I", event.positions), strict=True):
            names = self.names.setdefault(slot, {})
            invariant(
                slot in own and 0 < position <= MOST_TOKENS, "a sequence names a slot that it does not have"
            )
            invariant(key not in names, "a slot already has a name")
            names[key] = position

    def unname(self, event: ev.SlotsUnnamed) -> None:
        """Remove names from slots."""
        for slot, key in self.keys_of(event):
            names = self.names[slot]
            invariant(names.pop(key, None) is not None, "a slot loses a name that it does not have")
            if not names:
                del self.names[slot]
                self.idle -= slot not in self.holders

    def forget_names(self) -> None:
        """Forget all names."""
        self.names.clear()
        self.idle = 0

    def install(self, exported: ev.SharingGroup) -> None:
        """Fill this new group from an exported one."""
        size, keys, slots = self.key_bytes, exported.keys, array("i", exported.named)
        invariant(len(keys) == len(slots) * size, "the number of names differs from the number of slots")
        for at, (slot, position) in enumerate(zip(slots, array("I", exported.positions), strict=True)):
            names = self.names.setdefault(slot, {})
            invariant(
                names.setdefault(keys[at * size : (at + 1) * size], position) > 0, "a name has no position"
            )
        self.idle = len(self.names)
        columns = (array("q", exported.handles), array("I", exported.indices), array("i", exported.slots))
        for handle, index, slot in zip(*columns, strict=True):
            self.take(handle, iter([(index, slot)]))

    def export(self) -> ev.SharingGroup:
        """Export the whole group in a fixed order."""
        named = [
            (slot, *name) for slot, names in sorted(self.names.items()) for name in sorted(names.items())
        ]
        held = [
            (handle, *row) for handle, table in sorted(self.tables.items()) for row in sorted(table.items())
        ]
        made = self.created
        return ev.SharingGroup(
            kind=made.kind,
            tokens_per_block=made.tokens_per_block,
            window=made.window,
            layers=made.layers,
            named=array("i", [slot for slot, _, _ in named]).tobytes(),
            keys=b"".join([key for _, key, _ in named]),
            positions=array("I", [position for _, _, position in named]).tobytes(),
            handles=array("q", [handle for handle, _, _ in held]).tobytes(),
            indices=array("I", [index for _, index, _ in held]).tobytes(),
            slots=array("i", [slot for _, _, slot in held]).tobytes(),
            blocks=made.blocks,
        )


def shared_slots(groups: list[PositionalGroup]) -> tuple[int, int]:
    """Count the slots of the first group's primary pool that these groups use: held by sequences, and the others."""
    sharing = [group for group in groups if not group.pool]
    return sum([len(group.holders) for group in sharing]), sum([group.idle for group in sharing])


def check_shared(groups: list[PositionalGroup], first: Level, handles: Container[int]) -> None:
    """Prove that each slot belongs to one group or is free. Raises `InvariantViolated`."""
    seen: set[int] = set()
    blank = set(first.blank) if groups else set()
    for group in groups:
        held = Counter([slot for table in group.tables.values() for slot in table.values()])
        invariant(held == group.holders, "the holders of a slot are counted wrongly")
        invariant(all(handle in handles for handle in group.tables), "an ended sequence has slots")
        invariant(all(group.tables.values()) and all(group.names.values()), "an empty row is kept")
        invariant(group.idle == len(group.names.keys() - held.keys()), "idle slots are counted wrongly")
        used = group.used()
        there = set(group.pool) or blank
        invariant(used <= there, "a slot belongs to another group, or is out of range")
        invariant(used.isdisjoint(seen), "two groups use a slot")
        seen |= used
