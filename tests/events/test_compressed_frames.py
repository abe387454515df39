"""Frames that are compressed together: what is in them, how they are read while they come, and what is refused."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest

from events import EventBatch, LogDamaged, LogWriteFailed
from events.codec import encode_batch
from events.log import LogReader, LogWriter
from events.log.frames import (
    BEGINS_STREAM,
    COMPRESSED,
    MAX_EXPANDED,
    FrameHeader,
    parse_frame_header,
    parse_segment_header,
    seed_of,
)
from events.log.zstd import MAX_WINDOW_LOG, Block, Compressor
from tests.oracles.log_scan import Damage, Scan
from tests.oracles.packer import frame, segment_header
from tests.support.logs.held_disk import HoldDisk
from tests.support.logs.logs import (
    LOG_ID,
    batch,
    batches,
    frame_offsets,
    frames_of,
    large_batch,
    read_log,
    segments,
    settle,
    write_log,
    write_synced,
)

SEED = seed_of(LOG_ID, 0)
NAME = f"{0:020d}.kvlog"


def outer(path: Path) -> list[FrameHeader]:
    """The frames that stand in a file."""
    data = path.read_bytes()
    found = [parse_frame_header(data[at : at + 36], SEED) for at in frame_offsets(data)[:-1]]
    assert None not in found
    return [each for each in found if each is not None]


def damage(log: Path) -> list[Damage]:
    """What the other reader finds wrong."""
    found = [each for each in Scan(log) if isinstance(each, Damage)]
    damaged = list[LogDamaged]()
    list(LogReader(log, damaged=damaged.append))
    assert [(each.path, each.offset) for each in damaged] == [(each.path, each.offset) for each in found]
    return found


def test_what_is_written_together_is_compressed_together(tmp_path: Path) -> None:
    """Each write is a frame of its own, and all of them, the first one aside, go on with the stream of a segment."""
    write_synced(tmp_path, batches(6))
    headers = outer(segments(tmp_path)[0])
    assert [header.flags & COMPRESSED for header in headers] == [COMPRESSED] * 6 + [0]
    assert [bool(header.flags & BEGINS_STREAM) for header in headers] == [True] + [False] * 6
    assert [header.seq for header in headers] == list(range(7))
    write_log(tmp_path / "at once", batches(6))
    assert frames_of(tmp_path) == frames_of(tmp_path / "at once")


def test_what_comes_again_is_found_however_far_back(tmp_path: Path) -> None:
    """A prompt takes next to nothing when it comes again behind megabytes of others; with a small window, not."""
    rng = random.Random(1)
    prompts = [[rng.randrange(2**31) for _ in range(50_000)] for _ in range(10)]
    content = [batch(seq, prompts[seq % 10]) for seq in range(20)]
    sizes = []
    for window in (1 << 27, 1 << 16):
        write_synced(tmp_path / f"{window}", content, window=window)
        assert read_log(tmp_path / f"{window}")[0] == content
        sizes.append(segments(tmp_path / f"{window}")[0].stat().st_size)
    assert sizes[0] < 10 * 205_000
    assert sizes[1] > 19 * 195_000
    assert read_log(tmp_path / f"{1 << 27}")[1].kind == "clean"


def test_loss_begins_a_stream(tmp_path: Path, hold_disk: HoldDisk) -> None:
    """So the state behind it can be read whatever becomes of what was before."""
    with LogWriter(tmp_path, log_id=LOG_ID, max_queued_batches=2, overflow="drop") as log:
        with hold_disk():
            assert [log.append(item) for item in batches(4)] == [True, True, False, False]
        log.flush()
        assert log.pop_gap() is not None
        log.append(batch(4))
        log.append(batch(5))
        log.flush()
    headers = [header for header in outer(segments(tmp_path)[0]) if header.flags & COMPRESSED]
    assert [header.seq for header in headers if header.flags & BEGINS_STREAM] == [0, 4]
    assert [item.seq for item in read_log(tmp_path)[0]] == [0, 1, 4, 5]


def test_a_window_reaches_no_further_than_a_segment(tmp_path: Path) -> None:
    """A log of small segments asks readers for no more memory than these may have."""
    for segment_bytes, window in ((4096, 15), (64 << 20, MAX_WINDOW_LOG)):
        log = write_log(tmp_path / f"{segment_bytes}", batches(1), segment_bytes=segment_bytes)
        header = parse_segment_header(segments(log)[0].read_bytes()[:64])
        assert header is not None
        assert header.window_log == window


def test_a_large_batch_is_not_compressed(tmp_path: Path) -> None:
    """What no reader would expand is written as it is, between others that are."""
    content = [batch(0), large_batch(1, MAX_EXPANDED), batch(2), batch(3)]
    write_log(tmp_path, content, segment_bytes=200 << 20, max_queued_bytes=200 << 20)
    assert read_log(tmp_path)[0] == content
    flags = [header.flags & COMPRESSED for header in outer(segments(tmp_path)[0])]
    assert 0 in flags[1:-1]
    assert flags[0] == COMPRESSED


def test_followers_expand_what_is_new_only(tmp_path: Path) -> None:
    """A segment that grows is read once: each byte of the file, and each frame in it."""
    reads = [0]
    pread = os.pread

    def counting(descriptor: int, count: int, offset: int) -> bytes:
        data = pread(descriptor, count, offset)
        reads[0] += len(data)
        return data

    with LogWriter(tmp_path / "log") as log:
        log.append(batch(0))
        log.flush()
        follower = iter(LogReader(tmp_path / "log", follow=True, poll_seconds=0.001))
        assert next(follower) == batch(0)
        with patch.object(os, "pread", counting):
            for item in batches(200, 1):
                log.append(item)
                log.flush()
                assert next(follower) == item
        follower.close()  # type: ignore[attr-defined]
    size = segments(tmp_path / "log")[0].stat().st_size
    assert size - 500 <= reads[0] < 3 * size  # what is at the end may be looked at more than once


def test_what_was_refused_is_written_as_it_was(tmp_path: Path) -> None:
    """Followers that have read it find it in the same place, though nothing can be taken back from a stream."""
    real, refuses = os.fdatasync if hasattr(os, "fdatasync") else os.fsync, threading.Event()

    def sync(descriptor: int) -> None:
        if refuses.is_set():
            raise OSError(5, os.strerror(5))
        real(descriptor)

    with patch.object(os, real.__name__, sync), LogWriter(tmp_path / "log") as log:
        for item in batches(5):
            log.append(item)
            log.flush()
        follower = iter(LogReader(tmp_path / "log", follow=True, poll_seconds=0.001))
        read = [next(follower) for _ in range(5)]
        for first in (5, 10):
            refuses.set()
            for item in batches(5, first):
                log.append(item)
                with pytest.raises(LogWriteFailed):
                    log.flush()
            refuses.clear()
            settle(log)
            read += [next(follower) for _ in range(5)]
        follower.close()  # type: ignore[attr-defined]
    assert read == batches(15)
    assert read_log(tmp_path / "log")[0] == batches(15)
    assert damage(tmp_path / "log") == []


# -- what no writer writes


def put(tmp_path: Path, *frames: bytes, window: int = 20) -> Path:
    data = bytearray(segment_header(LOG_ID, 0, 0, 0, version=2, window=window))
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / NAME).write_bytes(bytes(data) + b"".join(frames))
    return tmp_path


def inner(seq: int, previous: int = 0, **options: Any) -> bytes:
    payload = encode_batch(batch(seq))
    return frame(LOG_ID, 0, seq, payload, 3, previous_crc=previous, **options)


def packed(content: bytes, size: int | None = None, flags: int = COMPRESSED | BEGINS_STREAM) -> bytes:
    """A compressed frame of this content, which is said to have `size` bytes."""
    block = Compressor(20).compressed(content)
    return frame(LOG_ID, 0, 0, block, len(content) if size is None else size, flags=flags)


LIES = {
    "too short": lambda: packed(inner(0), len(inner(0)) - 1),
    "too long": lambda: packed(inner(0), len(inner(0)) + 1),
    "nothing": lambda: packed(b""),
    "no zstd": lambda: frame(LOG_ID, 0, 0, inner(0), len(inner(0)), flags=COMPRESSED | BEGINS_STREAM),
    "no frames": lambda: packed(b"x" * 100),
    "half a frame behind one": lambda: packed(inner(0) + inner(1)[:-1]),
    "frames that do not continue each other": lambda: packed(inner(0) + inner(1)),
    "goes on with nothing": lambda: packed(inner(0), flags=COMPRESSED),
    "compressed once more": lambda: packed(packed(inner(0))),
    "the mark of an end": lambda: packed(frame(LOG_ID, 0, 0, b"", 0, flags=1)),
    "more than may be": lambda: packed(frame(LOG_ID, 0, 0, encode_batch(large_batch(0, MAX_EXPANDED)), 1)),
    "gigabytes": lambda: packed(bytes(1 << 20), 1 << 31),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_after_valid_checksums_are_damage(tmp_path: Path, lie: str) -> None:
    """Both readers say so, at the same place, and nothing is written behind it."""
    log = put(tmp_path, LIES[lie](), inner(1))
    with pytest.raises(LogDamaged) as raised:
        read_log(log)
    assert (raised.value.path, raised.value.offset) == (log / NAME, 64)
    found = damage(log)
    assert (found[0].path, found[0].offset) == (log / NAME, 64)
    with pytest.raises(LogDamaged):
        LogWriter(log, resume=True)


def test_a_window_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """Neither the header nor the stream may ask for more memory."""
    log = put(tmp_path / "a", packed(inner(0)), window=MAX_WINDOW_LOG + 1)
    with pytest.raises(LogDamaged, match="refers back too far"):
        read_log(log)
    assert damage(log)
    rng = random.Random(3)
    far = b"".join(inner(seq) for seq in range(1)) + b""
    block = Compressor(24).compressed(far + rng.randbytes(10))
    log = put(tmp_path / "b", frame(LOG_ID, 0, 0, block, len(far) + 10, flags=24), window=12)
    with pytest.raises(LogDamaged):
        read_log(log)
    assert damage(log)


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    """A file of some kilobytes that would be gigabytes takes no more than a frame may be."""

    def bombs() -> Iterator[bytes]:
        stream = Compressor(20)
        for at in range(20):
            block = stream.compressed(bytes(MAX_EXPANDED))
            yield frame(LOG_ID, 0, 0, block, MAX_EXPANDED, flags=COMPRESSED | BEGINS_STREAM * (not at))

    log = put(tmp_path, *bombs())
    assert (log / NAME).stat().st_size < 300_000

    def read() -> None:
        with pytest.raises(LogDamaged):
            read_log(log)
        assert damage(log)

    tracemalloc.start()
    read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * MAX_EXPANDED


def test_after_damage_a_stream_is_gone(tmp_path: Path) -> None:
    """What is behind it in a segment is lost up to where a stream begins; the next segment is not."""
    content = [batch(seq, range(seq, seq + 40)) for seq in range(30)]
    write_synced(tmp_path, content, segment_bytes=2000)
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[frame_offsets(bytes(data))[1] + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogDamaged):
        read_log(tmp_path)
    second = int(segments(tmp_path)[1].stem)
    damaged = list[LogDamaged]()
    whole = [each.seq for each in LogReader(tmp_path, damaged=damaged.append)]
    assert whole == [0, *range(second, len(content))]
    assert {each.path for each in damaged} <= set(segments(tmp_path)[:2])
    damage(tmp_path)


def test_a_block_that_failed_begins_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compressor has taken in before it failed is in no frame, so it is not gone on with."""
    block, payload = Block(SEED, 20), encode_batch(EventBatch(0, 0, ()))
    header = FrameHeader(len(payload), 0, 0, 0, 0, crc32(payload))
    block.add(header, payload)
    first = block.take()
    assert first is not None
    block.add(header, payload)
    with monkeypatch.context() as broken:
        broken.setattr(Compressor, "compressed", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            block.take()
    second = block.take()
    assert second is not None
    flags = [parse_frame_header(each.parts[0], SEED) for each in (first, second)]
    assert [each is not None and each.flags for each in flags] == [COMPRESSED | BEGINS_STREAM] * 2
