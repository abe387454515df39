"""Opening a log for writing: whose it is, and where it goes on.

Only the last segment is read, and of one that ends with the mark of an orderly end only that: it is the only one that
an interrupted write can have touched, and opening must not take longer the longer a log is. Bytes of an interrupted
write are put into `quarantine/` before they are cut off; anything that looks like damage is refused, and then nothing
is changed at all.
"""

from __future__ import annotations

import os
from pathlib import Path

from events.errors import LogDamaged, LogExists, LogLocked, NotALog
from events.log import segments
from events.log.closing import closed_chain
from events.log.durable import Lock, LockHeld, NoRegularFile, sync_directory, sync_file, take_lock
from events.log.frames import SEGMENT_HEADER_BYTES, Chain


def claim(directory: Path, resume: bool) -> Lock:
    """Make `directory` a log directory of ours; returns its lock.

    Raises NotALog, LogLocked, LogExists, OSError. A new log's directory is made private: its files name requests and
    may hold prompts.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotALog(directory, to_write=True) from None  # It, or what it should lie in, is something else.
    is_new = not segments.segment_paths(directory)
    if is_new and segments.holds_foreign_files(directory):
        raise NotALog(directory, to_write=True)
    lock = _lock(directory)
    try:
        if segments.segment_paths(directory) and not resume:
            raise LogExists(directory)
        if is_new:
            directory.chmod(0o700)
    except BaseException:
        lock.give_back()
        raise
    return lock


def _lock(directory: Path) -> Lock:
    try:
        return take_lock(directory / segments.LOCK_NAME, with_directory=True)
    except NoRegularFile:
        raise NotALog(directory, to_write=True) from None
    except LockHeld as held:
        raise LogLocked(directory, held.holder) from None


def recover(directory: Path) -> tuple[Chain, bool]:
    """Where the log of a locked directory goes on, and whether something was cut off there.

    The chain's epoch is that of the last segment (no `log_id`: there is none). Raises LogDamaged, LogTooNew.
    """
    frameless: list[tuple[Path, int]] = []
    for path in reversed(segments.segment_paths(directory)):
        with segments.Segment(path) as segment:
            # What we are about to build on must not be something that only the page cache remembers.
            sync_file(segment.descriptor)
            closed = closed_chain(segment)
            chain, torn = (closed, False) if closed else _scan(segment, is_last=not frameless)
            if closed or segment.offset > SEGMENT_HEADER_BYTES:
                _put_aside(directory, frameless)
                if torn:
                    _cut_tail(segment)
                return chain, torn or bool(frameless)
        frameless.append((path, chain.epoch))
    _put_aside(directory, frameless)
    return Chain(), bool(frameless)


def _scan(segment: segments.Segment, is_last: bool) -> tuple[Chain, bool]:
    """Go over a segment's frames; returns where they end, and whether bytes of a torn one follow."""
    header = segment.header()
    if header is None:
        if not is_last:
            raise LogDamaged(segment.path, 0, None, "the segment header is cut short")
        return Chain(), True
    chain = Chain(header.log_id, header.epoch, header.number, header.base_seq, header.previous_crc)
    chain.enter(header)
    while isinstance(found := segment.read(chain), segments.Frame):
        pass
    if isinstance(found, segments.Broken) and (
        not is_last or found.certain or segment.intact_frame_behind(found.offset, chain.seq)
    ):
        raise LogDamaged(segment.path, found.offset, chain.seq, found.reason)
    return chain, found is not None


def _cut_tail(segment: segments.Segment) -> None:
    """Copy what follows the last whole frame to the quarantine, then cut it off; each step durable."""
    directory = _quarantine(segment.path.parent)
    copy = directory / f"{segment.path.name}.{segment.offset}"
    unfinished = copy.with_name(copy.name + segments.UNFINISHED_SUFFIX)
    source = os.open(segment.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(unfinished, flags, 0o600)
        with os.fdopen(target, "wb") as file:
            offset = segment.offset
            while data := os.pread(source, 1 << 20, offset):
                file.write(data)
                offset += len(data)
            file.flush()
            sync_file(target)
        unfinished.rename(copy)
        sync_directory(directory)
        os.ftruncate(source, segment.offset)
        sync_file(source)
    finally:
        os.close(source)


def _put_aside(directory: Path, frameless: list[tuple[Path, int]]) -> None:
    """Make room for the next segment: what begins without a whole frame has its name and nothing to keep."""
    for unfinished in directory.glob(f"*{segments.UNFINISHED_SUFFIX}"):
        unfinished.unlink()  # A segment gets its name when its header is on disk; this one held nothing more.
    for path, epoch in frameless:
        path.rename(_quarantine(directory) / f"{path.name}.epoch{epoch}")
        sync_directory(directory)


def _quarantine(directory: Path) -> Path:
    quarantine = directory / segments.QUARANTINE_NAME
    quarantine.mkdir(mode=0o700, exist_ok=True)
    return quarantine
