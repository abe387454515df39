"""What the feed knows about the block in each slot of one level, as columns.

Most calls concern one block (decoding) or hundreds (a prompt): one is written without numpy, whose calls cost
microseconds each, many by numpy on the same memory.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from events.feed.changes import Stored
from events.feed.life import Visibility
from events.packed import NAME_BYTES, SLOT_BYTES, TOKEN_BYTES
from events.types import Namespace

ABSENT, IN_FLIGHT, WAITING, ANNOUNCED = map(int, Visibility)
"""Plain numbers: numpy takes longer to compare with others."""
_FEW = 8
"""Up to here a loop takes less time than numpy."""
_NO_PARENT = bytes(NAME_BYTES)
_unpack_slots = struct.Struct("<i").iter_unpack
Rows = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.void], npt.NDArray[np.int64]]
"""Names and parents' names as numbers (0: the start of a prompt), tokens, numbers of namespaces."""


class Columns:
    """One entry per slot."""

    def __init__(self, size: int, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self._token_size = tokens_per_block * TOKEN_BYTES
        self._state = np.zeros(size, np.uint8)
        self._names = np.zeros(size, f"V{NAME_BYTES}")
        self._parents = np.zeros(size, f"V{NAME_BYTES}")
        self._tokens = np.zeros(size, f"V{self._token_size}")
        self._transfers = np.zeros(size, np.int64)
        self._namespaces = np.zeros(size, np.int32)
        self.known: list[Namespace] = []
        """The namespaces of blocks, by the number that `rows` gives."""
        self._numbers: dict[Namespace, int] = {}
        # The same memory without numpy's overhead per call.
        self._state_bytes = self._state.data
        self._name_bytes = self._names.view(np.uint8).data
        self._parent_bytes = self._parents.view(np.uint8).data
        self._token_bytes = self._tokens.view(np.uint8).data
        self._namespace_numbers = self._namespaces.data

    def write(self, slots: array[int], stored: Stored, state: int, transfer: int = 0) -> None:
        """Note consecutive blocks."""
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
        """Note a single block that no copy brings."""
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
        """Consecutive blocks as they are told to routers."""
        at = _places(slots)
        first = slots[0]
        return Stored(
            group,
            level,
            self._names[at].tobytes(),
            self.parent_of(first),
            self._tokens[at].tobytes(),
            self.tokens_per_block,
            self.known[self._namespaces[first]],
        )

    def parent_of(self, slot: int) -> bytes:
        """The parent's name; empty at the start of a prompt."""
        parent = bytes(self._parent_bytes[slot * NAME_BYTES : (slot + 1) * NAME_BYTES])
        return b"" if parent == _NO_PARENT else parent

    def set_state(self, slots: array[int], state: int) -> None:
        """Mark blocks."""
        self._state[_places(slots)] = state

    def names_in(self, slots: bytes) -> bytes:
        """The names of the full blocks in these slots."""
        at = _places(slots)
        return bytes(self._names[at[self._state[at] != ABSENT]].tobytes())

    def take_out(self, slots: bytes, names: bytes) -> bytes:
        """Forget the blocks in these slots, which have these names; returns the names of those that routers know."""
        if len(slots) <= _FEW * SLOT_BYTES and self._take_out_known(slots):
            return names
        at = _places(slots)
        known = self._state[at] == ANNOUNCED
        self._state[at] = ABSENT
        return names if known.all() else bytes(np.frombuffer(names, self._names.dtype)[known].tobytes())

    def _take_out_known(self, slots: bytes) -> bool:
        """Forget blocks if routers know all of them, which they nearly always do; False: nothing was done."""
        states = self._state_bytes
        for (slot,) in _unpack_slots(slots):
            if states[slot] != ANNOUNCED:
                return False
        for (slot,) in _unpack_slots(slots):
            states[slot] = ABSENT
        return True

    def copy_from(self, source: Columns, from_slots: array[int], to_slots: array[int], transfer: int) -> None:
        """Take over blocks of another level, shallowest first; they are on their way until they arrive."""
        at, to = _places(from_slots), _places(to_slots)
        self._names[to] = source._names[at]
        self._parents[to] = source._parents[at]
        self._tokens[to] = source._tokens[at]
        self._transfers[to] = transfer
        self._state[to] = np.where(source._state[at] == ABSENT, ABSENT, IN_FLIGHT)
        used = set(source._namespaces[at].tolist())
        numbers = {old: self._number(source.known[old]) for old in used if old < len(source.known)}
        self._namespaces[to] = [numbers.get(number, 0) for number in source._namespaces[at].tolist()]

    def chains(self, slots: array[int], transfer: int) -> Iterator[array[int]]:
        """The blocks among these that this transfer has brought, in pieces without a hole, shallowest first."""
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
        """Those of these consecutive blocks that are still there and in this state, in pieces without a hole."""
        at = _places(slots)
        kept = (self._names[at] == np.frombuffer(names, self._names.dtype)) & (self._state[at] == state)
        if kept.all():
            ends = [0, len(slots)] if slots else []
        else:
            # Where a piece begins, and where it ends.
            ends = np.flatnonzero(np.diff(kept, prepend=False, append=False)).tolist()
        for begin, end in zip(ends[::2], ends[1::2], strict=True):
            yield slots[begin:end]

    def announced_slots(self) -> npt.NDArray[np.intp]:
        """The slots of all blocks that routers know."""
        return np.flatnonzero(self._state == ANNOUNCED)

    def hidden_slots(self) -> npt.NDArray[np.intp]:
        """The slots of all full blocks that they do not know yet."""
        return np.flatnonzero((self._state == IN_FLIGHT) | (self._state == WAITING))

    def rows(self, slots: npt.NDArray[np.intp]) -> Rows:
        """A copy of what is known of these blocks."""
        namespaces = self._namespaces[slots].astype(np.int64)
        names, parents = self._names[slots].view(np.uint64), self._parents[slots].view(np.uint64)
        return names, parents, self._tokens[slots], namespaces

    def announced_names(self) -> set[bytes]:
        """The names of the blocks that routers know."""
        names = self._names[self.announced_slots()].tobytes()
        return {names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)}

    def states(self) -> list[int]:
        """Return the `Visibility` of each slot."""
        return self._state.tolist()

    def clear(self) -> None:
        """Forget all blocks."""
        self._state[:] = ABSENT


def _places(slots: array[int] | bytes) -> npt.NDArray[np.intp]:
    """The slots as numpy's own indices: it would convert any others at each use, at several times the cost."""
    return np.frombuffer(slots, np.int32).astype(np.intp)
