"""What the feed knows about the block in each slot of one level, as columns.

Most calls concern one block (a decode step) or hundreds (a prompt); few blocks are handled by a loop, many by numpy
on the same memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from events.packed import NAME_BYTES, TOKEN_BYTES
from events.types import Namespace

if TYPE_CHECKING:
    from events.feed import Stored

ABSENT, IN_FLIGHT, WAITING, ANNOUNCED = 0, 1, 2, 3
"""No full block; one whose copy has not landed; one whose parent routers do not know yet; one that they know."""
_FEW = 4
_NO_PARENT = bytes(NAME_BYTES)


class Columns:
    """One entry per slot."""

    def __init__(self, size: int, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._state = np.zeros(size, np.uint8)
        self._names = np.zeros(size, f"V{NAME_BYTES}")
        self._parents = np.zeros(size, f"V{NAME_BYTES}")
        self._tokens = np.zeros((size, tokens_per_block), np.int32)
        self._transfers = np.zeros(size, np.int64)
        self._namespaces = np.zeros(size, np.int32)
        self._known: list[Namespace] = []
        self._numbers: dict[Namespace, int] = {}
        # The same memory without numpy's overhead per call.
        self._state_bytes = self._state.data
        self._name_bytes = self._names.view(np.uint8).data
        self._parent_bytes = self._parents.view(np.uint8).data
        self._token_bytes = self._tokens.reshape(-1).view(np.uint8).data

    def write(self, slots: array[int], stored: Stored, state: int, transfer: int = 0) -> None:
        """Note consecutive blocks."""
        parents = (stored.parent or _NO_PARENT) + stored.names[:-NAME_BYTES]
        namespace = self._number(stored.namespace)
        if len(slots) <= _FEW:
            self._write_few(slots, stored, parents)
        elif len(slots):
            at = np.frombuffer(slots, np.int32)
            self._names[at] = np.frombuffer(stored.names, self._names.dtype)
            self._parents[at] = np.frombuffer(parents, self._parents.dtype)
            self._tokens[at] = np.frombuffer(stored.tokens, np.int32).reshape(-1, self._tokens_per_block)
        self._mark(slots, state, transfer, namespace)

    def _write_few(self, slots: array[int], stored: Stored, parents: bytes) -> None:
        size = self._tokens_per_block * TOKEN_BYTES
        for index, slot in enumerate(slots):
            name, from_ = slot * NAME_BYTES, index * NAME_BYTES
            self._name_bytes[name : name + NAME_BYTES] = stored.names[from_ : from_ + NAME_BYTES]
            self._parent_bytes[name : name + NAME_BYTES] = parents[from_ : from_ + NAME_BYTES]
            self._token_bytes[slot * size : (slot + 1) * size] = stored.tokens[
                index * size : (index + 1) * size
            ]

    def _mark(self, slots: array[int], state: int, transfer: int, namespace: int) -> None:
        if len(slots) <= _FEW and state != IN_FLIGHT:
            for slot in slots:
                self._state_bytes[slot] = state
                if namespace or self._namespaces[slot]:
                    self._namespaces[slot] = namespace
            return
        at = np.frombuffer(slots, np.int32)
        self._state[at] = state
        self._transfers[at] = transfer
        self._namespaces[at] = namespace

    def _number(self, namespace: Namespace) -> int:
        number = self._numbers.get(namespace)
        if number is None:
            number = self._numbers[namespace] = len(self._known)
            self._known.append(namespace)
        return number

    def read(self, slots: array[int], group: int, level: int) -> Stored:
        """Consecutive blocks as they are told to routers."""
        from events.feed import Stored  # feed is made of columns

        at = np.frombuffer(slots, np.int32)
        first = slots[0]
        return Stored(
            group,
            level,
            self._names[at].tobytes(),
            self.parent_of(first),
            self._tokens[at].tobytes(),
            self._tokens_per_block,
            self._known[self._namespaces[first]],
        )

    def parent_of(self, slot: int) -> bytes:
        """The parent's name; empty at the start of a prompt."""
        parent = bytes(self._parent_bytes[slot * NAME_BYTES : (slot + 1) * NAME_BYTES])
        return b"" if parent == _NO_PARENT else parent

    def await_transfer(self, slot: int, transfer: int) -> None:
        """The block arrives with this copy."""
        self._transfers[slot] = transfer

    def set_state(self, slots: array[int], state: int) -> None:
        """Mark blocks."""
        self._state[np.frombuffer(slots, np.int32)] = state

    def names_in(self, slots: array[int]) -> bytes:
        """The names of the full blocks in these slots."""
        if len(slots) <= _FEW:
            held = [slot * NAME_BYTES for slot in slots if self._state_bytes[slot] != ABSENT]
            return b"".join([self._name_bytes[at : at + NAME_BYTES] for at in held])
        at = np.frombuffer(slots, np.int32)
        return bytes(self._names[at[self._state[at] != ABSENT]].tobytes())

    def take_out(self, slots: array[int]) -> bytes:
        """Forget the blocks in these slots; returns the names of those that routers know."""
        states, names = self._state_bytes, self._name_bytes
        if len(slots) <= _FEW:
            known = []
            for slot in slots:
                if states[slot] == ANNOUNCED:
                    known.append(bytes(names[slot * NAME_BYTES : (slot + 1) * NAME_BYTES]))
                states[slot] = ABSENT
            return b"".join(known)
        at = np.frombuffer(slots, np.int32)
        announced = at[self._state[at] == ANNOUNCED]
        self._state[at] = ABSENT
        return bytes(self._names[announced].tobytes())

    def copy_from(self, source: Columns, from_slots: array[int], to_slots: array[int], transfer: int) -> None:
        """Take over blocks of another level, shallowest first; they are on their way until they arrive."""
        at, to = np.frombuffer(from_slots, np.int32), np.frombuffer(to_slots, np.int32)
        self._names[to] = source._names[at]
        self._parents[to] = source._parents[at]
        self._tokens[to] = source._tokens[at]
        self._transfers[to] = transfer
        self._state[to] = np.where(source._state[at] == ABSENT, ABSENT, IN_FLIGHT)
        used = set(source._namespaces[at].tolist())
        numbers = {
            number: self._number(source._known[number]) for number in used if number < len(source._known)
        }
        self._namespaces[to] = [numbers.get(number, 0) for number in source._namespaces[at].tolist()]

    def chains(self, slots: array[int], transfer: int) -> Iterator[array[int]]:
        """The blocks among these that this transfer has brought, in pieces without a hole, shallowest first."""
        at = np.frombuffer(slots, np.int32)
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

    def count_kept(self, slots: array[int], names: bytes, state: int) -> int:
        """How many of these blocks, from the shallowest on, are still there and in this state."""
        at = np.frombuffer(slots, np.int32)
        same = (self._names[at] == np.frombuffer(names, self._names.dtype)) & (self._state[at] == state)
        return len(slots) if same.all() else int(same.argmin())

    def announced(self) -> Iterator[tuple[bytes, int]]:
        """(name, slot) of every block that routers know."""
        for slot in np.flatnonzero(self._state == ANNOUNCED).tolist():
            yield bytes(self._name_bytes[slot * NAME_BYTES : (slot + 1) * NAME_BYTES]), slot

    def announced_names(self) -> set[bytes]:
        """Their names."""
        return {name for name, _ in self.announced()}

    def clear(self) -> None:
        """Forget all blocks."""
        self._state[:] = ABSENT
