"""Batches to send, sinks that misbehave, and the check that a sink's stream leaves nothing out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

import msgspec

from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex, Slot
from events.types import (
    AdmissionRefused,
    AllocateReason,
    AnyEvent,
    BlocksAllocated,
    BlocksCopied,
    BlocksDetached,
    BlocksFilled,
    BlocksMoved,
    BlocksPinned,
    BlocksRemoved,
    BlocksReturned,
    BlocksReused,
    BlocksStored,
    BlocksUnpinned,
    BlocksUpdated,
    CacheCleared,
    CacheCreated,
    Checkpoint,
    ContextComputed,
    EncoderAdded,
    EncoderRemoved,
    EpochStarted,
    EventBatch,
    FeedCleared,
    FeedGap,
    FeedReceived,
    FeedRemoved,
    FeedRestarted,
    FeedStarted,
    FeedStored,
    FeedUnknown,
    Gap,
    GroupCreated,
    GroupExported,
    HitDeferred,
    LoadFailed,
    MoveReason,
    Namespace,
    PoolCreated,
    PoolShared,
    RemoveReason,
    SequenceAdded,
    SequenceExported,
    SequenceForked,
    SequenceRemoved,
    SequenceRewound,
    SharingGroup,
    SlotsLeft,
    SlotsNamed,
    SlotsTaken,
    SlotsUnnamed,
    StateExported,
    SymbolPage,
    SymbolsForgotten,
    SymbolsInterned,
    TokensAppended,
    TransferExported,
    TransferFailed,
    TransferLanded,
    WorkerSeen,
)
from sinks import Sink
from tests.support.columns import pack_i32, pack_i64, pack_u32
from tests.support.waiting import WAIT

KEY_BYTES = 32
PLANTED = 1_234_567_891
"""A token id that appears in a text only if token ids are shown."""

NAME = bytes.fromhex("1f2e3d4c00000001")
KEYS = NAME + bytes(24) + bytes.fromhex("9a8b7c6d00000002") + bytes(24)
NAMES = NAME + bytes.fromhex("9a8b7c6d00000002")
TWO = pack_i32([4, 5])
TOKENS = pack_i32([PLANTED] * 3)
SPACE = Namespace(3, "adapter", b"\xab" * 32)

EXTRA = msgspec.msgpack.encode({"extra_keys": [["salt"], None]})

SAMPLES: tuple[AnyEvent, ...] = (
    CacheCreated(
        "{}",
        4,
        (
            GroupCreated(64, "sliding", (0, 1), (PoolCreated(2, (0, 1), 512),), (8, 16)),
            GroupCreated(1024, "full", (2,), (PoolCreated(2, (2,), 256),), (32, 0)),
        ),
        "v2_sha256_64",
        32,
        "c",
        engine="toy 1",
    ),
    EpochStarted(2, b"\x01" * 16, 1, 99, False, True, "kvcache 1"),
    StateExported(
        (GroupExported((SPACE,), bytes(72), TOKENS, TWO, KEYS, (TWO, b""), b"", bytes(96)),),
        (SequenceExported(Handle(7), "chat-1", SPACE, 3, TOKENS, 3, 3, (0,), (TWO,), KEYS),),
        (TransferExported(1, GroupIndex(0), LevelIndex(1), TWO, None),),
        8,
        2,
        5,
        6,
        (SymbolPage(4, PLANTED),),
    ),
    Gap(3, 9, "overflow"),
    SequenceAdded(Handle(7), "chat-1", SPACE, 812, TOKENS, 579, (128, 500), (64, 76), 3),
    BlocksAllocated(pack_i64([7]), pack_u32([2]), GroupIndex(0), TWO, AllocateReason.DECODE),
    BlocksReused(Handle(7), GroupIndex(1), LevelIndex(0), BlockIndex(2), TWO, NAMES, pack_i32([9])),
    BlocksCopied(Handle(7), GroupIndex(0), LevelIndex(1), Slot(4), Slot(5), 3, BlockIndex(2), 11),
    BlocksStored(
        Handle(7),
        GroupIndex(0),
        BlockIndex(35),
        bytes.fromhex("0011223344556677"),
        KEYS,
        TWO,
        LevelIndex(0),
        36,
        4,
    ),
    BlocksFilled(pack_i64([7, 8]), GroupIndex(0), pack_u32([35, 4]), NAMES, KEYS, TWO, 36),
    BlocksUpdated(GroupIndex(0), LevelIndex(0), TWO, NAMES, 35, 80, Handle(7)),
    BlocksMoved(
        GroupIndex(0), NAMES, LevelIndex(0), TWO, LevelIndex(1), TWO, MoveReason.OFFLOAD, 12, Handle(7)
    ),
    BlocksRemoved(GroupIndex(0), LevelIndex(1), TWO, NAMES, RemoveReason.CAPACITY, Handle(7)),
    BlocksPinned(1, Handle(7), (TWO, b"")),
    BlocksUnpinned(1, (b"", TWO[:4])),
    TokensAppended(pack_i64([7, 8]), pack_u32([2, 1]), TOKENS, True),
    ContextComputed(Handle(7), 40),
    BlocksDetached(pack_i64([7, 8]), pack_u32([1, 1]), GroupIndex(0), TWO, TWO[:4]),
    BlocksReturned(pack_i64([7]), pack_u32([2]), GroupIndex(0), TWO),
    SequenceForked(Handle(7), Handle(8), "chat-2"),
    SequenceRewound(Handle(7), 812, (TWO, b"")),
    SequenceRemoved(Handle(7), (2, 1), (TWO, b""), 815, 814),
    EncoderAdded(Handle(9), Handle(7), GroupIndex(1), SPACE, 9, TOKENS, 1, 2),
    EncoderRemoved(Handle(9), GroupIndex(1), TWO),
    TransferLanded(pack_i64([12, 13, 14, 16]), NAMES),
    TransferFailed(pack_i64([12]), "lost device"),
    CacheCleared(((3, 4), (5, 0)), (2, 1)),
    Checkpoint(bytes.fromhex("c0ffee00") + bytes(28), 2, ((3, 4), (5, 0))),
    SymbolsInterned((SymbolPage(5, PLANTED, 0, b"\xcd" * 32, 256), SymbolPage(6, PLANTED, 9))),
    SymbolsForgotten(pack_u32([5, 6])),
    AdmissionRefused("chat-2", (3, 10), (7, 9)),
    LoadFailed(Handle(7), 17),
    PoolShared(
        (
            SharingGroup(
                "sliding", 4, 8, 3, TWO, KEYS, pack_u32([4, 8]), pack_i64([7]), pack_u32([1]), pack_i32([5])
            ),
            SharingGroup("state", 8, 0, 9),
        )
    ),
    SlotsTaken(Handle(7), GroupIndex(2), pack_u32([1, 3]), TWO, reused=True),
    SlotsLeft(Handle(7), GroupIndex(2), pack_u32([1]), pack_i32([4])),
    SlotsNamed(Handle(7), GroupIndex(2), TWO, KEYS, pack_u32([8, 16])),
    SlotsUnnamed(GroupIndex(2), TWO, KEYS, RemoveReason.CAPACITY, Handle(7)),
    HitDeferred("chat-2", GroupIndex(2)),
    FeedStarted(("tcp://engine:5557", "tcp://*:5560")),
    WorkerSeen(3, "tcp://engine:5557", "kv@10.0.0.5:8000@m", 1, False),
    FeedReceived(3, 41, 1_000, True),
    FeedStored(
        3, (0x1F2E3D4C00000001, -1), 0x0011223344556677, TOKENS, 2, "CPU", 1, 4, "adapter", more=EXTRA
    ),
    FeedRemoved(3, (bytes(24) + NAME,), "GPU", 0),
    FeedCleared(3),
    FeedGap(3, 42, 44, "not received"),
    FeedRestarted(3, 44, 0),
    FeedUnknown(3, "BlockMoved"),
)
"""One event of each type."""


def make_batch(seq: int, events: int = 1, padding: int = 0) -> EventBatch:
    """A batch of `events` events; the first one has a column of `padding` bytes."""
    first = TokensAppended(pack_i64([seq]), b"", bytes(padding))
    return EventBatch(seq, 1000 + seq, (first, *[ContextComputed(Handle(seq), 0)] * (events - 1)))


def gaps(stream: Iterable[EventBatch]) -> list[Gap]:
    """The gaps of a stream."""
    return [event for batch in stream for event in batch.events if isinstance(event, Gap)]


def check_stream(stream: Iterable[EventBatch], put: int) -> None:
    """Assert that the stream's batches and gaps cover seq 0 up to `put`, each once and in order."""
    expected = 0
    for batch in stream:
        found = gaps([batch])
        first = found[0].first_seq if found else batch.seq
        last = found[-1].last_seq if found else batch.seq
        assert first == expected, f"seq {expected} is followed by {first}"
        assert batch.seq == last
        expected = last + 1
    assert expected == put


class RecordingSink(Sink):
    """Keeps what it gets; says when it has as much as one waits for."""

    def __init__(self) -> None:
        self.stream: list[EventBatch] = []
        self.closed = threading.Event()
        self.arrived = threading.Condition()

    def open(self) -> None:
        pass

    def write(self, batch: EventBatch) -> None:
        with self.arrived:
            self.stream.append(batch)
            self.arrived.notify_all()

    def close(self) -> None:
        self.closed.set()

    def wait_for(self, seq: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.stream and self.stream[-1].seq >= seq, WAIT)

    def seqs(self) -> list[int]:
        return [batch.seq for batch in self.stream]


class SlowSink(RecordingSink):
    """Takes one batch for each time that `let` allows it to."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = threading.Semaphore(0)

    def let(self, batches: int = 1) -> None:
        self._turns.release(batches)

    def write(self, batch: EventBatch) -> None:
        self._turns.acquire()
        super().write(batch)


class HangingSink(RecordingSink):
    """Does not return from `write` until released."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging = threading.Event()
        self.release = threading.Event()

    def write(self, batch: EventBatch) -> None:
        self.hanging.set()
        self.release.wait()
        super().write(batch)


class RaisingSink(RecordingSink):
    """Raises for the batches with the seqs of `bad` (None: for all)."""

    def __init__(self, bad: set[int] | None, error: BaseException | None = None) -> None:
        super().__init__()
        self.bad = bad
        self.error = error or OSError(28, "No space left on device")
        self.calls = 0

    def write(self, batch: EventBatch) -> None:
        self.calls += 1
        if self.bad is None or (batch.seq in self.bad and not gaps([batch])):
            raise self.error
        super().write(batch)


class ExitingSink(RecordingSink):
    """Tries to end its thread at every second batch."""

    def write(self, batch: EventBatch) -> None:
        if batch.seq % 2 and not gaps([batch]):
            sys.exit(1)
        super().write(batch)
