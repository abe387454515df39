"""Hand-made batches of events of one prompt in a full and a sliding window."""

from __future__ import annotations

from collections.abc import Sequence

from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex
from events.types import (
    PRIMARY,
    SECONDARY,
    BlocksFilled,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    GroupCreated,
    MoveReason,
    Namespace,
    RemoveReason,
    SequenceAdded,
)
from tests.support.columns import pack_i32, pack_i64, pack_u32

SIZE = 2
"""Tokens per block."""
SLIDES, FULL = GroupCreated(4, "sliding", (0,), (), (16, 16)), GroupCreated(64, "full", (1,), (), (16, 16))
PLAIN = Namespace()


def names(*blocks: int) -> bytes:
    """The names, and keys, of these blocks of the only prompt that there is."""
    return b"".join(bytes([0xAA]) * 7 + bytes([block]) for block in blocks)


def tokens(first: int, count: int) -> bytes:
    """Of so many of its blocks."""
    return pack_i32(range(100 + first * SIZE, 100 + (first + count) * SIZE))


def added(handle: int, blocks: int = 8) -> SequenceAdded:
    """A sequence with this prompt, which reuses nothing."""
    prompt = tokens(0, blocks)
    return SequenceAdded(Handle(handle), handle, PLAIN, blocks * SIZE, prompt, 0, (0, 0), (0, 0), 0)


def stored(
    first: int, slots: Sequence[int], group: int = 0, handle: int = 1, keys: bytes | None = None
) -> BlocksStored:
    """Blocks in primary; without `keys`, all of them are given."""
    return BlocksStored(
        handle=Handle(handle),
        group=GroupIndex(group),
        first_block=BlockIndex(first),
        parent=names(first - 1) if first else b"",
        keys=names(*range(first, first + len(slots))) if keys is None else keys,
        slots=pack_i32(slots),
        level=PRIMARY,
        priority=35,
        last_tokens=SIZE,
    )


def filled(block: int, slot: int, group: int, keys: bytes) -> BlocksFilled:
    """One block of the sequence 1."""
    handle, parent = pack_i64([1]), names(block - 1)
    return BlocksFilled(handle, GroupIndex(group), pack_u32([block]), parent, keys, pack_i32([slot]), 35)


def removed(blocks: Sequence[int], slots: Sequence[int], level: LevelIndex = PRIMARY) -> BlocksRemoved:
    """Blocks of group 0 that were evicted."""
    return BlocksRemoved(GroupIndex(0), level, pack_i32(slots), names(*blocks), RemoveReason.CAPACITY)


def offloaded(blocks: Sequence[int], slots: Sequence[int], to: Sequence[int], transfer: int) -> BlocksMoved:
    """Blocks of group 0 on their way to secondary."""
    return BlocksMoved(
        group=GroupIndex(0),
        names=names(*blocks),
        from_level=PRIMARY,
        from_slots=pack_i32(slots),
        to_level=SECONDARY,
        to_slots=pack_i32(to),
        why=MoveReason.OFFLOAD,
        transfer=transfer,
    )


def onboarded(block: int, slot: int, to: int, transfer: int, handle: int) -> BlocksMoved:
    """A block of group 0 on its way back."""
    return BlocksMoved(
        group=GroupIndex(0),
        names=names(block),
        from_level=SECONDARY,
        from_slots=pack_i32([slot]),
        to_level=PRIMARY,
        to_slots=pack_i32([to]),
        why=MoveReason.ONBOARD,
        transfer=transfer,
        handle=Handle(handle),
        first_block=BlockIndex(block),
    )
