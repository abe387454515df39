"""Compression of segments that are not compressed: from an earlier version, without zstd, or with log.compression=none.

A compressed segment replaces the original once it is completely on the disk and was read back with the same frames. If
that is interrupted, one of the two exists; the next run does the rest.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from zlib import crc32

from events.errors import LogDamaged, LogError, NotALog, ZstdMissing
from events.files.safe import create_file
from events.log import segments
from events.log.durable import sync_directory, sync_file, write_all
from events.log.frames import (
    AFTER_SYNC,
    FRAME_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    VERSION,
    FrameHeader,
    SegmentHeader,
    pack_frame_header,
    seed_of,
)
from events.log.snapshots import UNFINISHED_SUFFIX
from events.log.zstd import MAX_WINDOW_LOG, Block, expanded_frame, has_zstd
from kvcache.errors import invariant
from kvcache.maintenance.files import exclusive_access, writing

_ADVICE = (
    "free disk space or fix the disk, and compress again: the log is intact, and finished segments stay so"
)
Parts = Sequence[bytes | memoryview]


@dataclass
class Compressed:
    """Result of a compression."""

    segments: int = 0
    bytes_before: int = 0
    bytes: int = 0
    left: int = 0
    """Segments left as they are, because they are damaged or the disk cannot read them."""


def compress(directory: Path, progress: Callable[[int], None] = lambda _: None) -> Compressed:
    """Compress all uncompressed segments except the one being written. A writer may be at work.

    `progress` receives the number of each batch. Raises NotALog, LogBusy if another process is at work, LogTooNew,
    ZstdMissing, NotWritten on a full disk, OSError; segments compressed before stay so.
    """
    if not segments.is_log(directory):
        raise NotALog(directory)
    if not has_zstd():
        raise ZstdMissing(directory)
    with exclusive_access(directory):
        for path in directory.glob(f"*{segments.SEGMENT_SUFFIX}{UNFINISHED_SUFFIX}"):
            path.unlink(missing_ok=True)
        done = Compressed()
        for path in directory.glob(f"*{segments.OUTDATED_SUFFIX}"):
            _attempt(_restore, path, done)
        paths = segments.segment_paths(directory)
        headers = {path: _header(path) for path in paths}
        newest = dict[bytes, int]()
        for found in filter(None, headers.values()):
            newest[found.log_id] = max(found.number, newest.get(found.log_id, 0))
        for path in paths[:-1]:
            # A later file, by name, may be no segment of this log, and this may be the segment being written.
            header = headers[path]
            if path.suffix == segments.OUTDATED_SUFFIX:
                continue  # It is damaged.
            if header is None or (not header.window_log and header.number < newest[header.log_id]):
                _attempt(lambda path, done: _compress(path, done, progress), path, done)
        return done


def _header(path: Path) -> SegmentHeader | None:
    """Return the header; None if it is damaged or the file is gone, which its reader reports."""
    with suppress(LogError, OSError), segments.Segment(path) as segment:
        return segment.header()
    return None


def _attempt(work: Callable[[Path, Compressed], None], path: Path, done: Compressed) -> None:
    """Replace a segment; leave it as it is if it is damaged or gone."""
    try:
        work(path, done)
    except BaseException as error:
        with suppress(OSError):
            _unfinished(path).unlink(missing_ok=True)
        unreadable = isinstance(error, OSError) and error.errno in segments.UNREADABLE
        if not unreadable and not isinstance(error, LogDamaged | FileNotFoundError):
            raise
        done.left += path.exists()


def _unfinished(path: Path) -> Path:
    return path.with_suffix(segments.SEGMENT_SUFFIX + UNFINISHED_SUFFIX)


def _restore(path: Path, done: Compressed) -> None:
    """Restore a segment that format 1 had compressed to its original form."""
    target = path.with_suffix(segments.SEGMENT_SUFFIX)
    if not target.exists():
        with path.open("rb") as file:
            stored = file.read()
        try:
            data = expanded(path, stored)
        except (ValueError, struct.error) as error:
            raise LogDamaged(path, 0, None, f"the compressed segment is not whole: {error}") from None
        with writing(target, _ADVICE):
            os.close(segments.make_segment(target, [[data]]))
    path.unlink()
    sync_directory(path.parent)


def _compress(path: Path, done: Compressed, progress: Callable[[int], None]) -> None:
    with segments.Segment(path) as segment:
        header, before = segment.header(), segment.size()
    if header is None:
        raise LogDamaged(path, 0, None, segments.SHORT_HEADER)
    made = _unfinished(path)
    with writing(made, _ADVICE):
        descriptor = create_file(made)
        try:
            for portion in _portions(path, header, progress):
                write_all(descriptor, portion)
            sync_file(descriptor)
        finally:
            os.close(descriptor)
    equal = False
    with suppress(LogDamaged):
        equal = all(one == other for one, other in zip_longest(_frames(path), _frames(made)))
    invariant(equal, "a compressed segment is not what it was made of")
    done.segments += 1
    done.bytes_before += before
    done.bytes += made.stat().st_size
    made.replace(path)
    sync_directory(path.parent)


def _portions(path: Path, header: SegmentHeader, progress: Callable[[int], None]) -> Iterator[Parts]:
    """Yield a segment's bytes, compressed. Raises LogDamaged."""
    yield [header._replace(version=VERSION, window_log=MAX_WINDOW_LOG).pack()]
    seed = seed_of(header.log_id, header.epoch)
    block = Block(seed, MAX_WINDOW_LOG)
    for frame, payload in _frames(path):
        size = FRAME_HEADER_BYTES + frame.payload_bytes
        if (block.is_full or not block.takes(size, frame.flags)) and (portion := block.take(AFTER_SYNC)):
            yield portion.parts
            progress(frame.seq)
        if block.takes(size, frame.flags):
            block.add(frame, payload)
        else:
            yield [pack_frame_header(frame._replace(flags=frame.flags | AFTER_SYNC), seed), payload]
    if portion := block.take(AFTER_SYNC):
        yield portion.parts


def _frames(path: Path) -> Iterator[tuple[FrameHeader, memoryview]]:
    """Yield the frames of a segment, without their references to earlier frames."""
    with segments.Segment(path, is_named=False) as segment:
        header = segment.header()
        assert header is not None
        chain = header.chain()
        chain.enter(header)
        while isinstance(found := segment.read(chain), segments.Frame):
            yield found.header._replace(flags=found.header.flags & ~AFTER_SYNC), found.payload
        if found is not None or segment.offset == SEGMENT_HEADER_BYTES:
            raise LogDamaged(path, segment.offset, chain.seq, "it does not hold whole frames")


_SYNC = b"\xc1KVG"
_HEADER = struct.Struct("<4sHHIIQQII")
_KEY = 32
_MOST_TIMES, _MOST_HASHED = 1024, 16
"""Limits for a group: bytes per byte in the file, and bytes hashed for names per byte."""


def expanded(path: Path, data: bytes) -> bytes:
    """Return the segment as it was written. Raises ValueError or struct.error if it is damaged, and ZstdMissing."""
    parts, at, begin, whole = list[bytes](), 0, 0, 1
    while begin < whole:
        sync, _, method, stored, size, begins, whole, crc, own = _HEADER.unpack(data[at : at + _HEADER.size])
        body = data[at + _HEADER.size : at + _HEADER.size + stored]
        if (sync, begins, crc, own) != (_SYNC, begin, crc32(body), crc32(data[at : at + _HEADER.size - 4])):
            raise ValueError("a group is not intact")
        if size > _MOST_TIMES * stored:
            raise ValueError("a group claims an implausible size")
        parts.append(_in_order(expanded_frame(path, body, 2 * size + 8), size) if method else body)
        at, begin = at + _HEADER.size + stored, begin + len(parts[-1])
    if begin != whole or at != len(data):
        raise ValueError("it has another size")
    return b"".join(parts)


def _in_order(data: bytes, size: int) -> bytes:
    """Return a group's bytes in the order of the segment."""
    count, numbers = struct.unpack_from("<2I", data)
    rest, quarter = 8 + numbers, numbers // 4
    if rest > len(data) or 16 * count > numbers or numbers % 4 or count * _KEY > size:
        raise ValueError("its pieces are not intact")
    column = bytearray(4 * quarter)
    for plane in range(4):
        column[plane::4] = data[8 + plane * quarter : 8 + (plane + 1) * quarter]
    out, at, keys = bytearray(), 16 * count, list[tuple[int, int, int, int]]()
    for gap, length, tokens, block in struct.iter_unpack("<4I", column[: 16 * count]):
        if len(out) + gap + length > size:
            raise ValueError("its pieces are too long")
        out += data[rest : rest + gap]
        rest += gap
        if block:
            keys.append((len(out), length, tokens, block))
            out += bytes(length)
        else:
            out += column[at : at + length]
            at += length
    out += data[rest:]
    if sum(length // _KEY * block for _, length, _, block in keys) > _MOST_HASHED * size:
        raise ValueError("its keys are made of too many tokens")
    for begin, length, tokens, block in keys:
        key, whole = bytes(out[begin - _KEY : begin]), bytes(out[tokens : tokens + length // _KEY * block])
        for number in range(length // _KEY):
            key = sha256(key + whole[number * block : (number + 1) * block]).digest()
            out[begin + number * _KEY : begin + (number + 1) * _KEY] = key
    if len(out) != size:
        raise ValueError("it has another size")
    return bytes(out)
