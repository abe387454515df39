"""Batches and logs for tests to write, read and damage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from events import (
    AllocateReason,
    BlocksAllocated,
    BlocksStored,
    EventBatch,
    LogWriteFailed,
    Namespace,
    SequenceAdded,
    TokensAppended,
)
from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex
from events.log import LogEnd, LogReader, LogWriter
from events.log.frames import AFTER_SYNC, FrameHeader
from events.log.segments import Frame, Segment
from tests.support.columns import pack_i32, pack_i64, pack_u32

LOG_ID = bytes(range(16))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compressed: each batch is a frame of its own, which stands in the file as it is."""
    monkeypatch.setattr(LogWriter, "_window", lambda *_: 0)


@pytest.fixture(params=["compressed", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either way in which logs are written."""
    if request.param == "plain":
        monkeypatch.setattr(LogWriter, "_window", lambda *_: 0)
    return str(request.param)


TIME = 1_700_000_000_000_000_000


def batch(seq: int, tokens: Sequence[int] = (11, 12, 13)) -> EventBatch:
    """A small batch; those of different `seq` differ in bytes and size."""
    return EventBatch(
        seq,
        TIME + seq,
        (
            SequenceAdded(
                Handle(seq),
                f"request-{seq}",
                Namespace(),
                len(tokens),
                pack_i32(tokens),
                0,
                (0,) * (seq % 3),
                (0,),
                0,
            ),
            BlocksAllocated(
                pack_i64([seq]),
                pack_u32([seq % 5]),
                GroupIndex(0),
                pack_i32(range(seq % 5)),
                AllocateReason.PROMPT,
            ),
            TokensAppended(pack_i64([seq]), b"", pack_i32(tokens[:1])),
        ),
    )


def large_batch(seq: int, size: int) -> EventBatch:
    """A batch of a little more than `size` bytes."""
    return EventBatch(
        seq,
        TIME,
        (BlocksStored(Handle(0), GroupIndex(0), BlockIndex(0), b"", bytes(size), b"", LevelIndex(0), 35, 4),),
    )


def batches(count: int, start: int = 0) -> list[EventBatch]:
    """Consecutive batches."""
    return [batch(seq) for seq in range(start, start + count)]


def write_log(directory: Path, content: Iterable[EventBatch], **options: Any) -> Path:
    """Write a log in one go and close it; returns the directory."""
    with LogWriter(directory, **{"log_id": LOG_ID, "fsync": "never", **options}) as log:
        for item in content:
            assert log.append(item)
    return directory


def write_synced(directory: Path, content: Iterable[EventBatch], **options: Any) -> Path:
    """The same with each batch made durable before the next, so that each frame vouches for those before it."""
    with LogWriter(directory, **{"log_id": LOG_ID, **options}) as log:
        for item in content:
            assert log.append(item)
            log.flush()
    return directory


def settle(log: LogWriter) -> None:
    """Wait until the disk has taken all. A try that was under way may still fail when the disk has been mended."""
    while True:
        with suppress(LogWriteFailed):
            log.flush()
            return


def without_syncs(segment: Path) -> bytes:
    """A segment's bytes but for what says which frames were on disk when others were written."""
    data = bytearray(segment.read_bytes())
    for at in frame_offsets(bytes(data))[:-1]:
        data[at + 20] &= ~AFTER_SYNC
        del data[at + 32 : at + 36]  # the header's checksum
        data[at + 32 : at + 32] = bytes(4)
    return bytes(data)


def frames_of(directory: Path) -> list[tuple[FrameHeader, bytes]]:
    """All frames of a log, but for what says which of them were on disk when others were written."""
    return [frame for path in segments(directory) for frame in frames_in(path)]


def frames_in(path: Path) -> Iterator[tuple[FrameHeader, bytes]]:
    """Those of a segment."""
    with Segment(path) as segment:
        header = segment.header()
        assert header is not None
        chain = header.chain()
        chain.enter(header)
        while isinstance(frame := segment.read(chain), Frame):
            yield frame.header._replace(flags=frame.header.flags & ~AFTER_SYNC), bytes(frame.payload)


def segments(directory: Path) -> list[Path]:
    """The files of a log that hold batches."""
    return sorted([*directory.glob("*.kvlog"), *directory.glob("*.kvlogz")])


def read_log(directory: Path) -> tuple[list[EventBatch], LogEnd]:
    """All of a log."""
    reader = LogReader(directory)
    content = list(reader)
    return content, reader.end


def frame_offsets(data: bytes) -> list[int]:
    """Where the frames of a segment begin, and where the last one ends, by its lengths."""
    offsets = [64]
    while offsets[-1] < len(data):
        start = offsets[-1]
        offsets.append(start + 36 + int.from_bytes(data[start + 4 : start + 8], "little"))
    return offsets
