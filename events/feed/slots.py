"""The feed's state per slot of one level, as columns; and the whole state, for late routers.

Most calls concern one block (decoding) or hundreds (a prompt): one is written without numpy, because its calls cost
microseconds each, many by numpy on the same memory.

A block in flight between two levels is in none for routers, though its children may stay visible: routers received them
in time, and keep them below a block that is nowhere at that moment. A late router must be able to do the same. So such
a block is sent as if it had arrived, and removed again at the end; when it lands, it is announced to all. There may be
millions of blocks, so all of this works on columns: `freeze` copies them at once, in tens of nanoseconds per block, and
`visible_blocks` makes changes of the copy, piece by piece, while the fold goes on.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from events.feed.changes import Removed, Stored
from events.packed import NAME_BYTES, SLOT_BYTES, TOKEN_BYTES
from events.types import PRIMARY, SECONDARY, Namespace

ABSENT, IN_FLIGHT, WAITING, ANNOUNCED = range(4)
"""Visibility of a slot's block to routers: no full block, one with a copy in flight, one with a parent that they do not
know yet, one that they know. Plain numbers: numpy takes longer to compare with others."""
_FEW = 8
"""Up to this count a loop takes less time than numpy."""
_NO_PARENT = bytes(NAME_BYTES)
_unpack_slots = struct.Struct("<i").iter_unpack
_Column = npt.NDArray[Any]


class SlotColumns:
    """One entry per slot of a level; as `both`, one per slot of primary and then of secondary, in the same memory."""

    def __init__(
        self,
        tokens_per_block: int,
        columns: Sequence[_Column],
        known: list[Namespace],
        numbers: dict[Namespace, int],
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self._token_size = tokens_per_block * TOKEN_BYTES
        self._state, self._names, self._parents, self._tokens, self._transfers, self._namespaces = columns
        self.known = known
        """The namespaces of blocks, by number."""
        self._numbers = numbers
        # The same memory without numpy's overhead per call.
        self._state_bytes = self._state.data
        self._name_bytes = self._names.view(np.uint8).data
        self._parent_bytes = self._parents.view(np.uint8).data
        self._token_bytes = self._tokens.view(np.uint8).data
        self._namespace_numbers = self._namespaces.data

    @classmethod
    def of_levels(cls, primary: int, secondary: int, tokens_per_block: int) -> tuple[Self, tuple[Self, Self]]:
        """Make columns of all slots: of both levels, and of each."""
        types = ("u1", f"V{NAME_BYTES}", f"V{NAME_BYTES}", f"V{tokens_per_block * TOKEN_BYTES}", "i8", "i4")
        both = [np.zeros(primary + secondary, each) for each in types]
        parts = both, [each[:primary] for each in both], [each[primary:] for each in both]
        known, numbers = list[Namespace](), dict[Namespace, int]()
        whole, *levels = (cls(tokens_per_block, each, known, numbers) for each in parts)
        return whole, (levels[0], levels[1])

    def write(self, slots: array[int], stored: Stored, state: int, transfer: int = 0) -> None:
        """Write consecutive blocks."""
        if len(slots) == 1 and state != IN_FLIGHT:
            self.write_one(slots[0], stored, state)
        elif slots:
            at = _places(slots)
            parents = (stored.parent or _NO_PARENT) + stored.names[:-NAME_BYTES]
            self._names[at] = np.frombuffer(stored.names, self._names.dtype)
            self._parents[at] = np.frombuffer(parents, self._parents.dtype)
            self._tokens[at] = np.frombuffer(stored.tokens, self._tokens.dtype)
            self._state[at] = state
            if state == IN_FLIGHT:
                self._transfers[at] = transfer
            namespace = self._number(stored.namespace)
            if len(self.known) > 1:  # else it is 0 everywhere
                self._namespaces[at] = namespace

    def write_one(self, slot: int, stored: Stored, state: int) -> None:
        """Write a single block that no copy brings."""
        name, size = slot * NAME_BYTES, self._token_size
        self._name_bytes[name : name + NAME_BYTES] = stored.names
        self._parent_bytes[name : name + NAME_BYTES] = stored.parent or _NO_PARENT
        self._token_bytes[slot * size : (slot + 1) * size] = stored.tokens
        self._state_bytes[slot] = state
        self._namespace_numbers[slot] = self._number(stored.namespace)

    def _number(self, namespace: Namespace) -> int:
        number = self._numbers.get(namespace)
        if number is None:
            number = self._numbers[namespace] = len(self.known)
            self.known.append(namespace)
        return number

    def read(self, slots: array[int], group: int, level: int) -> Stored:
        """Return consecutive blocks as published to routers."""
        at = _places(slots)
        first = slots[0]
        parent = bytes(self._parent_bytes[first * NAME_BYTES : (first + 1) * NAME_BYTES])
        return Stored(
            group,
            level,
            self._names[at].tobytes(),
            b"" if parent == _NO_PARENT else parent,
            self._tokens[at].tobytes(),
            self.tokens_per_block,
            self.known[self._namespaces[first]],
        )

    def set_state(self, slots: array[int], state: int) -> None:
        """Set the visibility of blocks."""
        self._state[_places(slots)] = state

    def names_in(self, slots: bytes) -> bytes:
        """Return the names of the full blocks in these slots."""
        at = _places(slots)
        return bytes(self._names[at[self._state[at] != ABSENT]].tobytes())

    def take_out(self, slots: bytes, names: bytes) -> bytes:
        """Clear these slots, which have blocks of these names; return the names that routers know."""
        if len(slots) <= _FEW * SLOT_BYTES and self._take_out_known(slots):
            return names
        at = _places(slots)
        known = self._state[at] == ANNOUNCED
        self._state[at] = ABSENT
        return names if known.all() else bytes(np.frombuffer(names, self._names.dtype)[known].tobytes())

    def _take_out_known(self, slots: bytes) -> bool:
        """Clear slots if routers know all of their blocks, as nearly always; False: nothing was done."""
        states = self._state_bytes
        for (slot,) in _unpack_slots(slots):
            if states[slot] != ANNOUNCED:
                return False
        for (slot,) in _unpack_slots(slots):
            states[slot] = ABSENT
        return True

    def copy_from(
        self, source: SlotColumns, from_slots: array[int], to_slots: array[int], transfer: int
    ) -> None:
        """Copy blocks from another level, shallowest first; they are in flight until they land."""
        at, to = _places(from_slots), _places(to_slots)
        self._names[to] = source._names[at]
        self._parents[to] = source._parents[at]
        self._tokens[to] = source._tokens[at]
        self._transfers[to] = transfer
        self._state[to] = np.where(source._state[at] == ABSENT, ABSENT, IN_FLIGHT)
        self._namespaces[to] = source._namespaces[at]

    def chains(self, slots: array[int], transfer: int) -> Iterator[array[int]]:
        """Yield the blocks among these that this transfer has brought, in runs without a hole, shallowest first."""
        at = _places(slots)
        there = (self._state[at] == IN_FLIGHT) & (self._transfers[at] == transfer)
        chain = array("i")
        for slot, is_there in zip(slots, there.tolist(), strict=True):
            if not is_there:
                continue
            if chain and self._parents[slot] != self._names[chain[-1]]:
                yield chain
                chain = array("i")
            chain.append(slot)
        if chain:
            yield chain

    def pieces(self, slots: array[int], names: bytes, state: int) -> Iterator[array[int]]:
        """Yield those of these consecutive blocks that are still there and in this state, in runs without a hole."""
        at = _places(slots)
        kept = (self._names[at] == np.frombuffer(names, self._names.dtype)) & (self._state[at] == state)
        if kept.all():
            ends = [0, len(slots)] if slots else []
        else:
            # Start and end of each run.
            ends = np.flatnonzero(np.diff(kept, prepend=False, append=False)).tolist()
        for begin, end in zip(ends[::2], ends[1::2], strict=True):
            yield slots[begin:end]

    def clear(self) -> None:
        """Clear all slots."""
        self._state[:] = ABSENT

    def freeze(self, primary: int, slides: bool) -> FrozenBlocks:
        """Copy the blocks visible now in both levels, of which the first has `primary` slots.

        In a sliding window blocks may be visible without the one before.
        """
        seen = np.flatnonzero(self._state == ANNOUNCED)
        at = seen if slides else np.concatenate([seen, self._bridges(seen)])
        return FrozenBlocks(
            self._names[at].view(np.uint64),
            self._parents[at].view(np.uint64),
            (at >= primary).astype(np.uint8),
            np.arange(len(at)) >= len(seen),
            self._namespaces[at],
            tuple(self.known),
            self._tokens[at],
            self.tokens_per_block,
            slides,
        )

    def _bridges(self, seen: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the slots of blocks that are not visible but have visible descendants."""
        hidden = np.flatnonzero((self._state == IN_FLIGHT) | (self._state == WAITING))
        if not len(hidden):
            return hidden
        names, parents = self._names.view(np.uint64), self._parents.view(np.uint64)
        places = zip(parents[hidden].tolist(), hidden.tolist(), strict=True)
        left = dict(zip(names[hidden].tolist(), places, strict=True))
        visible, found = set(names[seen].tolist()), list[int]()
        missing = left.keys() & set(parents[seen].tolist()) - visible
        while missing:
            parent, slot = left.pop(missing.pop())
            found.append(slot)
            if parent in left and parent not in visible:
                missing.add(parent)
        return np.array(found, np.intp)


def _places(slots: array[int] | bytes) -> npt.NDArray[np.intp]:
    """Return the slots as numpy's own indices: it would convert any others at each use, at several times the cost."""
    return np.frombuffer(slots, np.int32).astype(np.intp)


_GATHERED = 4096
"""Number of blocks with columns put into order at a time."""

_Indices = npt.NDArray[np.int64]
_Names = npt.NDArray[np.uint64]
"""Names as numbers, which sort and compare fast; their values have no meaning. 0: no parent."""


@dataclass(frozen=True, slots=True)
class FrozenBlocks:
    """The visible blocks of a group, in no order, with blocks in flight that have visible descendants."""

    names: _Names
    parents: _Names
    levels: npt.NDArray[np.uint8]
    on_their_way: npt.NDArray[np.bool_]
    namespaces: npt.NDArray[np.int32]
    """Indices into `known`."""
    known: tuple[Namespace, ...]
    tokens: npt.NDArray[np.void]
    tokens_per_block: int
    slides: bool
    """True if a block is published without its parent."""


def visible_blocks(group: int, blocks: FrozenBlocks) -> Iterator[Stored | Removed]:
    """Yield chains from the roots on, each within one level; at the end removals of blocks in flight."""
    gathered: list[list[int]] = []
    total = 0
    for chain in _chains(blocks):
        gathered.append(chain)
        total += len(chain)
        if total >= _GATHERED:
            yield from _stores(group, blocks, gathered)
            gathered, total = [], 0
    yield from _stores(group, blocks, gathered)
    if blocks.on_their_way.any():
        # The reverse of the published order: leaves first.
        announced = [index for chain in _chains(blocks) for index in chain if blocks.on_their_way[index]][
            ::-1
        ]
        for level in (PRIMARY, SECONDARY):
            gone = [index for index in announced if blocks.levels[index] == level]
            if gone:
                yield Removed(group, level, blocks.names[gone].tobytes())


def _chains(blocks: FrozenBlocks) -> Iterator[list[int]]:
    """Yield indices of consecutive blocks in one level, parents first, without those not reached from a root."""
    parents = _parent_indices(blocks)
    inner = np.flatnonzero(parents >= 0)
    count = np.bincount(parents[inner], minlength=len(parents))
    # A chain continues at a block with a single child, in the same level.
    above = parents[inner]
    goes_on = (count[above] == 1) & (blocks.levels[above] == blocks.levels[inner])
    following = np.full(len(parents), -1)
    following[above[goes_on]] = inner[goes_on]
    branches: dict[int, list[int]] = {}
    for parent, head in zip(above[~goes_on].tolist(), inner[~goes_on].tolist(), strict=True):
        branches.setdefault(parent, []).append(head)
    heads = np.flatnonzero(parents < 0 if blocks.slides else blocks.parents == 0)[::-1].tolist()
    after: list[int] = following.tolist()
    while heads:
        index = heads.pop()
        chain = [index]
        while (index := after[index]) >= 0:
            chain.append(index)
        yield chain
        if chain[-1] in branches:
            heads += reversed(branches[chain[-1]])


def _parent_indices(blocks: FrozenBlocks) -> _Indices:
    """Return for each block the index of its parent; -1 if that is not among them."""
    order = np.argsort(blocks.names)
    names = blocks.names[order]
    # Looked up in their own order: then neighbours find neighbours, at a third of the time.
    by_parent = np.argsort(blocks.parents)
    wanted = blocks.parents[by_parent]
    at = np.searchsorted(names, wanted)
    at[at == len(names)] = 0
    indices = np.full(len(names), -1)
    indices[by_parent] = np.where((names[at] == wanted) & (wanted != 0), order[at], -1) if len(names) else 0
    return indices


def _stores(group: int, blocks: FrozenBlocks, chains: list[list[int]]) -> Iterator[Stored]:
    """Yield the chains as published; their columns are gathered together, which costs little per chain."""
    order = np.array([index for chain in chains for index in chain], np.int64)
    if not len(order):
        return
    names, tokens = blocks.names[order].tobytes(), blocks.tokens[order].tobytes()
    size = blocks.tokens.itemsize
    begin = 0
    for chain in chains:
        end = begin + len(chain)
        head = chain[0]
        yield Stored(
            group,
            int(blocks.levels[head]),
            names[begin * NAME_BYTES : end * NAME_BYTES],
            blocks.parents[head].tobytes() if blocks.parents[head] else b"",
            tokens[begin * size : end * size],
            blocks.tokens_per_block,
            blocks.known[blocks.namespaces[head]],
        )
        begin = end
