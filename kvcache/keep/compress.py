"""Compressing the segments of which the writer is done. What they say stays what it is, to the last byte.

A compressed segment gets its name when all of it is on the disk and has been read back, by code that has no part in
making it (`kvcache.keep.raw`), and found equal; then the segment as it was written goes. Wherever that is interrupted,
one of the two is there, or both, which are equal; the next go does the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from events.errors import LogDamaged, LogError, NotALog
from events.files.safe import create_file
from events.log.durable import sync_directory, sync_file, write_all
from events.log.frames import FRAME_HEADER_BYTES, SEGMENT_HEADER_BYTES, SegmentHeader
from events.log.groups import group_of
from events.log.segments import Frame, Segment, compressed_path, is_log, segment_paths
from events.log.snapshots import UNFINISHED_SUFFIX
from events.log.stored import COMPRESSED_SUFFIX
from events.log.zstd import require_zstd
from kvcache.errors import invariant
from kvcache.keep import raw
from kvcache.keep.alone import alone
from kvcache.keep.columns import Columns
from kvcache.keep.writing import writing

_GROUP_BYTES = 2 << 20
"""Frames of so many bytes are gone where a byte is damaged. With half as much the log is larger by 3 to 9 %."""

_ADVICE = (
    "make room or mend the disk, and compress it again: the log is whole, and what was compressed stays so"
)


@dataclass
class Compressed:
    """What was done."""

    segments: int = 0
    whole: int = 0
    """Bytes that these had."""
    bytes: int = 0
    """And that they have now."""
    left: int = 0
    """Segments that are damaged or that the disk does not give back, and so were left as they are."""


def compress(directory: Path, progress: Callable[[int], None] = lambda _: None) -> Compressed:
    """Compress all segments but the last one. A writer may be at work.

    `progress` is told the number of each batch. Raises NotALog, LogBeingKept if another process is at it, LogTooNew,
    ZstdMissing, NotWritten on a full disk, OSError; what was done is for good then.
    """
    if not is_log(directory):
        raise NotALog(directory)
    require_zstd(directory)
    with alone(directory):
        for path in directory.glob(f"*{COMPRESSED_SUFFIX}{UNFINISHED_SUFFIX}"):
            path.unlink(missing_ok=True)
        done, paths = Compressed(), segment_paths(directory)
        headers = {path: _header(path) for path in paths}
        newest = dict[bytes, int]()
        for found in filter(None, headers.values()):
            newest[found.log_id] = max(found.number, newest.get(found.log_id, 0))
        for path in paths[:-1]:
            # What stands behind it by its name only may be no segment of this log, and it the one that is written.
            is_last = (header := headers[path]) is not None and header.number == newest[header.log_id]
            if path.suffix != COMPRESSED_SUFFIX and not is_last:
                _compress(path, done, progress)
        return done


def _header(path: Path) -> SegmentHeader | None:
    """None: it has none that is whole, or is gone; who reads it tells."""
    with suppress(LogError, OSError), Segment(path) as segment:
        return segment.header()
    return None


def _compress(path: Path, done: Compressed, progress: Callable[[int], None]) -> None:
    target = compressed_path(path)
    unfinished = target.with_name(target.name + UNFINISHED_SUFFIX)
    try:
        with Segment(path) as segment:
            _write(unfinished, _groups(segment, progress))
            whole, size = segment.size(), unfinished.stat().st_size
            invariant(_is_equal(segment, unfinished), "a compressed segment is not what it was made of")
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        unreadable = getattr(error, "errno", None) in raw.UNREADABLE
        if unreadable or isinstance(error, LogDamaged | FileNotFoundError):
            done.left += path.exists()
            return
        raise
    unfinished.replace(target)
    sync_directory(path.parent)
    path.unlink(missing_ok=True)
    sync_directory(path.parent)
    done.segments, done.whole, done.bytes = done.segments + 1, done.whole + whole, done.bytes + size


def _write(path: Path, groups: Iterator[bytes]) -> None:
    """Write a file, and have it on the disk."""
    with writing(path, _ADVICE):
        descriptor = create_file(path)
    try:
        for group in groups:
            with writing(path, _ADVICE):
                write_all(descriptor, [group])
        with writing(path, _ADVICE):
            sync_file(descriptor)
    finally:
        os.close(descriptor)


def _groups(segment: Segment, progress: Callable[[int], None]) -> Iterator[bytes]:
    """A segment's groups: the header, the first frame, and then frames together. Raises LogDamaged."""
    header = segment.header()
    if header is None:
        raise LogDamaged(segment.path, 0, None, "the segment has no header")
    whole, columns = segment.size(), Columns()
    yield group_of(segment.data(0, SEGMENT_HEADER_BYTES), 0, whole, None)
    chain, begin, payloads = header.chain(), SEGMENT_HEADER_BYTES, list[tuple[int, int]]()
    chain.enter(header)
    while isinstance(found := segment.read(chain), Frame):
        payloads.append((found.offset + FRAME_HEADER_BYTES - begin, segment.offset - begin))
        # What retention asks of a segment is in its first frame.
        is_first = found.offset == SEGMENT_HEADER_BYTES
        if is_first or segment.offset - begin >= _GROUP_BYTES or segment.offset == whole:
            data = segment.data(begin, segment.offset - begin)
            yield group_of(data, begin, whole, columns.of(data, payloads))
            begin, payloads = segment.offset, []
            progress(found.header.seq)
    if found is not None or begin == SEGMENT_HEADER_BYTES:
        raise LogDamaged(segment.path, segment.offset, chain.seq, "it does not hold whole frames")


def _is_equal(segment: Segment, compressed: Path) -> bool:
    """Whether a compressed segment, read back, is the segment."""
    with raw.File(compressed) as file:
        size = segment.size()
        return file.size() == size and all(
            file.read(offset, _GROUP_BYTES) == segment.data(offset, _GROUP_BYTES)
            for offset in range(0, size, _GROUP_BYTES)
        )
