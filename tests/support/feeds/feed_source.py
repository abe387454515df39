"""Batches as a manager makes them, a reader that believes only what it is told, and a transport in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from events.feed.changes import AnyChange, Cleared, Removed, Stored
from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex
from events.types import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCreated,
    ContextComputed,
    EventBatch,
    Gap,
    GroupCreated,
    GroupExported,
    Namespace,
    PoolCreated,
    RemoveReason,
    SequenceAdded,
    StateExported,
)
from sinks.router.feed import FeedBatch, FeedSnapshot
from tests.support.columns import pack_i32

BLOCK = 4
"""Tokens per block."""
SLOTS = 1 << 16
GROUP = GroupCreated(1 << 20, "full", (0,), (PoolCreated(1, (0,), 64),), (SLOTS, 0))


def name(handle: int, block: int) -> bytes:
    return hashlib.sha256(f"{handle}/{block}".encode()).digest()[:8]


def names(handle: int, count: int) -> bytes:
    return b"".join(name(handle, block) for block in range(count))


def tokens(handle: int, count: int, size: int = BLOCK) -> bytes:
    """Different ones in each block."""
    return (np.arange(count * size, dtype="<i4") + handle * 10_000).tobytes()


class Source:
    """Makes the batches of one cache: each sequence is a prompt of its own, in slots of its own."""

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.seq = 0
        self.slots: dict[int, list[int]] = {}
        self._free = list(range(SLOTS))[::-1]

    def batch(self, *events: AnyEvent) -> EventBatch:
        self.seq += 1
        return EventBatch(self.seq - 1, 10**9 * self.seq, events)

    def created(self) -> EventBatch:
        return self.batch(CacheCreated("{}", self.block, (GROUP,), "xxh3_64", 8, "c"))

    def silent(self) -> EventBatch:
        """Something that no router needs to know."""
        return self.batch(ContextComputed(Handle(1), 1))

    def store(self, handle: int, blocks: int, namespace: Namespace | None = None) -> EventBatch:
        self.slots[handle] = slots = [self._free.pop() for _ in range(blocks)]
        prompt = tokens(handle, blocks, self.block)
        return self.batch(
            SequenceAdded(
                handle=Handle(handle),
                request_id=handle,
                namespace=namespace or Namespace(),
                num_tokens=blocks * self.block,
                tokens=prompt,
                reused=0,
                reused_primary=(0,),
                reused_secondary=(0,),
                reused_partial=0,
            ),
            BlocksStored(
                Handle(handle),
                GroupIndex(0),
                BlockIndex(0),
                b"",
                names(handle, blocks),
                pack_i32(slots),
                LevelIndex(0),
                35,
                self.block,
            ),
        )

    def remove(self, handle: int) -> EventBatch:
        slots = self.slots.pop(handle)
        self._free += slots
        gone = b"".join(name(handle, block) for block in reversed(range(len(slots))))
        return self.batch(
            BlocksRemoved(GroupIndex(0), LevelIndex(0), pack_i32(slots[::-1]), gone, RemoveReason.CAPACITY)
        )

    def gap(self, batches: int) -> EventBatch:
        """Stands for the last batches, as a runner writes it when it has lost them."""
        return EventBatch(self.seq - 1, 0, (Gap(self.seq - batches, self.seq - 1, "overflow"),))

    def exported(self) -> EventBatch:
        runs, symbols, slots, keys = [], b"", [], b""
        for handle, held in self.slots.items():
            runs += [-1, len(held), self.block, 0, 35, 0, 0, -1, 0, 0]
            symbols += tokens(handle, len(held), self.block)
            slots += held
            keys += names(handle, len(held))
        group = GroupExported(
            (Namespace(),),
            np.array(runs, "<i8").tobytes(),
            symbols,
            pack_i32(slots),
            keys,
            (pack_i32(self._free), b""),
            b"",
        )
        return self.batch(StateExported((group,), (), (), 99, 1, 1, 0))


State = dict[tuple[Any, bytes], tuple[bytes, bytes]]
"""(level or medium, name) to (parent, tokens)."""


class Reader:
    """A router that keeps what it is told, and does not put up with anything inconsistent."""

    def __init__(self) -> None:
        self.state: State = {}
        self.cleared = 0

    def take(self, changes: Iterable[AnyChange]) -> None:
        for change in changes:
            if isinstance(change, Cleared):
                self.clear()
            elif isinstance(change, Removed):
                self.remove(change.level, split(change.names, 8))
            else:
                assert isinstance(change, Stored)
                size = change.tokens_per_block * 4
                self.store(change.level, split(change.names, 8), change.parent, split(change.tokens, size))

    def take_payload(self, payload: bytes) -> None:
        """Decoded by msgspec as plain maps and lists, not by our own decoder."""
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(ts, float)
        assert isinstance(rank, int)
        for event in events:
            self._take_event(event)

    def _take_event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.clear()
            return
        hashes = [value.to_bytes(8, "big") for value in event["block_hashes"]]
        if kind == "BlockRemoved":
            self.remove(event["medium"], hashes)
            return
        assert kind == "BlockStored"
        parent = event["parent_block_hash"]
        size = event["block_size"]
        ids = event["token_ids"]
        assert len(ids) == len(hashes) * size
        cut = [pack_i32(ids[at : at + size]) for at in range(0, len(ids), size)]
        self.store(event["medium"], hashes, b"" if parent is None else parent.to_bytes(8, "big"), cut)

    def clear(self) -> None:
        self.state.clear()
        self.cleared += 1

    def store(self, level: Any, hashes: list[bytes], parent: bytes, cut: list[bytes]) -> None:
        assert len(hashes) == len(cut)
        assert not parent or (level, parent) in self.state, "a parent that nobody announced"
        for block, ids in zip(hashes, cut, strict=True):
            assert (level, block) not in self.state, "stored twice"
            self.state[level, block] = (parent, ids)
            parent = block

    def remove(self, level: Any, hashes: list[bytes]) -> None:
        for block in hashes:
            assert all(parent != block for parent, _ in self.state.values()), "a parent before its child"
            del self.state[level, block]


def split(column: bytes, size: int) -> list[bytes]:
    return [column[at : at + size] for at in range(0, len(column), size)]


@dataclass
class RecordingTransport:
    """Keeps what it is sent; asks for the state when told to."""

    subscribers: int = 0
    sent: list[FeedBatch] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    states: list[FeedSnapshot] = field(default_factory=list)
    wants_state: bool = False
    fails: int = 0
    """So many calls of `send` raise."""
    first: int | None = None

    def open(self, next_seq: int, worker: object) -> None:
        self.calls.append("open")
        self.first = next_seq

    def send(self, batch: FeedBatch) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError(5, "broken")
        self.sent.append(batch)

    def tick(self, take_state: Callable[[], FeedSnapshot]) -> None:
        if self.wants_state:
            self.wants_state = False
            self.states.append(take_state())

    def close(self) -> None:
        self.calls.append("close")

    def changes(self) -> list[AnyChange]:
        return [change for batch in self.sent for change in batch.changes]


def state_of(batches: Sequence[Sequence[AnyChange]]) -> State:
    reader = Reader()
    for changes in batches:
        reader.take(changes)
    return reader.state


__all__ = [
    "BLOCK",
    "Cleared",
    "Reader",
    "RecordingTransport",
    "Removed",
    "Source",
    "Stored",
    "name",
    "names",
    "state_of",
    "tokens",
]
