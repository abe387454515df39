"""Making segment files: none has its name before what it begins with is on disk.

A file of which a sync has failed is not used any more: the system may take what it did not write for written, and a
second sync would succeed without it. What is known to be on disk of it is copied into a new one, which gets its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from events.errors import LogDamaged, LogTooNew, LogWriteFailed
from events.files.safe import create_file
from events.log import frames
from events.log.durable import sync_directory, sync_file, write_all
from events.log.segments import UNFINISHED_SUFFIX, Frame, Segment


def make_segment(path: Path, parts: Iterable[Sequence[bytes | memoryview]]) -> int:
    """Make a file of these bytes, which gets the name `path` when they are on disk; open for writing behind them.

    Raises OSError, and what `parts` raises; then the file is not used any more, whether it has got its name or not.
    """
    unfinished = unfinished_path(path)
    descriptor = create_file(unfinished, os.O_WRONLY | os.O_APPEND)
    try:
        for part in parts:
            write_all(descriptor, part)
        # Whatever the policy of syncs: once per segment costs nothing, and a header cut short looks like damage.
        sync_file(descriptor)
        unfinished.rename(path)
        sync_directory(path.parent)
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    return descriptor


def renew_segment(path: Path, reached: frames.Chain, end: int) -> int:
    """Put a copy of a segment's first `end` bytes, with which the log has got to `reached`, into its place.

    Raises OSError, and LogWriteFailed if these bytes are not there any more: nobody has them then.
    """
    try:
        with Segment(path) as segment:
            return make_segment(path, _intact(segment, reached, end))
    except (LogDamaged, LogTooNew) as error:
        reason = "what was written to it cannot be read back"
        raise LogWriteFailed(path, reason, errno.EIO) from error


def check_segment(path: Path, reached: frames.Chain, end: int) -> None:
    """Raise LogWriteFailed if a segment's first `end` bytes are not those with which the log has got to `reached`."""
    try:
        with Segment(path) as segment:
            for _ in _intact(segment, reached, end):
                pass
    except (LogDamaged, LogTooNew, FileNotFoundError) as error:
        raise LogWriteFailed(path, "what was written to it is not there", errno.ESTALE) from error


def _intact(segment: Segment, reached: frames.Chain, end: int) -> Iterator[tuple[bytes, ...]]:
    """A segment's bytes up to there; LogDamaged if they are not those that were written."""
    header = segment.header()
    if header is None:
        raise LogDamaged(segment.path, 0, None, "the segment has no header")
    yield (header.pack(),)
    chain, copied = header.chain(), segment.offset
    chain.enter(header)
    while segment.offset < end and isinstance(segment.read(chain), Frame):
        if segment.offset > copied:
            yield (segment.data(copied, segment.offset - copied),)
            copied = segment.offset
    # Where it has no frame yet, the number before its first one may be lower: those between were lost.
    if segment.offset != end or replace(chain, seq=reached.seq) != reached:
        raise LogDamaged(segment.path, segment.offset, chain.seq, "it is not what was written")


def unfinished_path(path: Path) -> Path:
    """What a segment is called until it has its name."""
    return path.with_name(path.name + UNFINISHED_SUFFIX)
