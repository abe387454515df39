"""Opening a log for writing: its owner, and the place where it continues.

Possible states of a log's end, and their consequences (readers: `events.log.reader`):

======================================================  =====================  =========================================
found at the end of the last segment                    readers say            a writer
======================================================  =====================  =========================================
the mark of an orderly end                              clean                  continues; nothing before it is read
the end of a whole frame                                open                   continues, the last epoch counts as
                                                                               unclean
a part of a frame, or no whole one, and no header       torn                   puts it and what follows into
of a later one that was written after a sync                                   quarantine, cuts it off
no frame, after a whole header                          open                   puts the file into quarantine
an empty file, or a part of a header                    torn                   puts the file into quarantine
no whole frame, and the header of one after it that     damaged                refuses
was written when this one was on disk
a whole frame which does not continue the one before    damaged                refuses
a header that is there and not whole                    damaged                refuses
a name that is not the header's (swapped, duplicated)   damaged                refuses
a newer version                                         too new                refuses
------------------------------------------------------  ---------------------  -----------------------------------------
between the last segment that has frames, and others
------------------------------------------------------  ---------------------  -----------------------------------------
the segment before it is another log's, or missing      damaged                refuses
after it one without frames, which it does not reach    damaged                refuses
anything wrong further back                             damaged                continues: it does not read there
the beginning is gone, a snapshot stands for it         begin with that        continues
``*.kvlog.tmp``: a segment, or a copy of one after a    do not look at it      removes it
failed sync, that has not got its name yet
times that went back                                    read on                continues
======================================================  =====================  =========================================

Only the last segment is read, and of one that ends with the mark of an orderly end only that: it is the only one that
an interrupted write can have touched, since each is synced when it ends, and opening must not take longer the longer a
log is.

Refusing changes nothing at all: everything is decided before anything is done. Changes are durable step by step, first
additions and then removals, and each step leaves a state that is in this table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from events.diagnostics import get_logger
from events.errors import LogDamaged, LogExists, LogLocked, LogOutdated, NotALog, NotARegularFile
from events.files.safe import check_directory, refuse_foreign
from events.log import segments
from events.log.durable import Lock, LockHeld, make_directory, sync_directory, sync_file, take_lock
from events.log.frames import SEGMENT_HEADER_BYTES, Chain, SegmentHeader
from events.log.segments import closed_chain

_PRIVATE = 0o700
_log = get_logger(__name__)


def claim(directory: Path, resume: bool) -> Lock:
    """Make `directory` a log directory of ours; return its lock.

    Raises NotALog, LogLocked, LogExists, UnsafeFile, OSError. The directory is made private: its files name requests
    and may hold prompts. One in which others may have put segments is not continued.
    """
    try:
        make_directory(directory)
    except (FileExistsError, NotADirectoryError):
        raise NotALog(directory, to_write=True) from None  # It, or its parent, is something else.
    is_new = not segments.segment_paths(directory)
    if is_new and segments.holds_foreign_files(directory):
        raise NotALog(directory, to_write=True)
    if is_new:
        check_directory(directory, 0)
    else:
        check_directory(directory, may_be_sticky=False)
    lock = _lock(directory)
    try:
        if segments.segment_paths(directory) and not resume:
            raise LogExists(directory)
        _make_private(directory, is_new)
    except BaseException:
        lock.release()
        raise
    return lock


def _make_private(directory: Path, is_new: bool) -> None:
    mode = directory.stat().st_mode & 0o777
    if is_new:
        directory.chmod(_PRIVATE)
    elif mode & ~_PRIVATE:
        with suppress(PermissionError):  # It is root's.
            directory.chmod(_PRIVATE)
            _log.warning("log_made_private", log=str(directory), mode_before=f"{mode:04o}")


def _lock(directory: Path) -> Lock:
    try:
        return take_lock(directory / segments.LOCK_NAME, with_directory=True)
    except NotARegularFile:
        raise NotALog(directory, to_write=True) from None
    except LockHeld as held:
        raise LogLocked(directory, held.holder) from None


@dataclass(frozen=True)
class TailCut:
    """A part of a frame at the end of a segment, to be put into quarantine."""

    path: Path
    offset: int
    bytes: int


@dataclass(frozen=True)
class QuarantinedFile:
    """A segment without a whole frame, to be put into quarantine."""

    path: Path
    epoch: int
    bytes: int


@dataclass(frozen=True)
class Recovery:
    """The place where a log continues, and the steps required before that."""

    chain: Chain
    """The chain at the end of the last segment, with its epoch (no `log_id`: there is none)."""
    quarantined: tuple[QuarantinedFile, ...] = ()
    cut: TailCut | None = None
    unfinished: tuple[Path, ...] = ()
    """Segments, and copies of them, without their names yet: they never held anything that is nowhere else."""

    @property
    def loses(self) -> bool:
        """True if the beginning of something cut off may have been read."""
        return self.cut is not None or bool(self.quarantined)


def recover(directory: Path) -> tuple[Chain, bool]:
    """Return the end of a locked directory's log, and True if something was cut off there.

    Raises LogDamaged, LogTooNew, OSError.
    """
    recovery = plan(directory)
    execute(directory, recovery)
    return recovery.chain, recovery.loses


def plan(directory: Path) -> Recovery:
    """Return the steps required before the log can be written, changing nothing.

    Raises LogDamaged, LogTooNew, UnsafeFile, OSError.
    """
    unfinished = tuple(sorted(directory.glob(f"*{segments.UNFINISHED_SUFFIX}")))
    quarantined: list[QuarantinedFile] = []
    paths = segments.segment_paths(directory)
    while paths:
        path = paths.pop()
        with segments.Segment(path) as segment:
            refuse_foreign(path, os.fstat(segment.descriptor), one_name=False)
            # The log must not continue after data that only the page cache has.
            sync_file(segment.descriptor)
            closed = closed_chain(segment)
            chain, torn = (closed, False) if closed else _scan(segment, is_last=not quarantined)
            if closed or segment.offset > SEGMENT_HEADER_BYTES:
                _refuse_foreign_segments(segment, paths)
                cut = TailCut(path, segment.offset, segment.size() - segment.offset) if torn else None
                return Recovery(chain, tuple(quarantined), cut, unfinished)
            quarantined.append(QuarantinedFile(path, chain.epoch, segment.size()))
    return Recovery(Chain(), tuple(quarantined), None, unfinished)


def execute(directory: Path, recovery: Recovery) -> None:
    """Carry out the steps in a locked directory. Raises OSError."""
    for unfinished in recovery.unfinished:
        unfinished.unlink(missing_ok=True)
    for quarantined in recovery.quarantined:
        _move_to_quarantine(directory, quarantined)
    if recovery.cut is not None:
        _cut_tail(recovery.cut)


def repair(log: Path, *, dry_run: bool = False) -> Recovery:
    """Put the remains of an interrupted write into `quarantine/` and cut them off; return what was, or would be, done.

    With `dry_run` nothing is changed, and no lock is taken: the half-written batch of a running writer then looks like
    an interrupted one. Raises NotALog, LogLocked, LogTooNew, OSError, and, without changing a byte, LogDamaged for
    damage that no interrupted write can have left.
    """
    if not segments.is_log(log):
        raise NotALog(log)
    if dry_run:
        return plan(log)
    lock = claim(log, resume=True)
    try:
        recovery = plan(log)
        execute(log, recovery)
        return recovery
    finally:
        lock.release()


def _scan(segment: segments.Segment, is_last: bool) -> tuple[Chain, bool]:
    """Scan a segment's frames; return where they end, and True if bytes of a torn one follow."""
    header = segment.header()
    if header is None:
        if not is_last:
            raise LogDamaged(segment.path, 0, None, segments.SHORT_HEADER)
        return Chain(), True
    chain = header.chain()
    chain.enter(header)
    while isinstance(found := segment.read(chain), segments.Frame):
        pass
    if found is not None and segment.is_damaged(found, chain, is_last=is_last):
        raise LogDamaged(segment.path, found.offset, chain.seq, found.reason)
    return chain, found is not None


def _refuse_foreign_segments(segment: segments.Segment, before: list[Path]) -> None:
    """Refuse a segment that cannot follow the one before it, as one copied from another log."""
    header = segment.header()
    assert header is not None
    previous = _header_of(before[-1]) if before else None
    if previous is None:
        return
    chain = previous.chain()
    chain.enter(previous)
    # Only the header of the one before is read, so its last frame is not known.
    chain.crc = header.previous_crc
    refusal = chain.refuses_segment(header)
    if refusal is not None:
        raise LogDamaged(segment.path, 0, header.base_seq, refusal)


def _header_of(path: Path) -> SegmentHeader | None:
    """Return the header; None if the file is removed by retention, or damaged, which readers report."""
    with suppress(FileNotFoundError, LogDamaged, LogOutdated), segments.Segment(path) as segment:
        return segment.header()
    return None


def _cut_tail(cut: TailCut) -> None:
    """Copy the bytes after the last whole frame to the quarantine, then cut them off; each step durable."""
    copy = _quarantine(cut.path.parent) / f"{cut.path.name}.{cut.offset}"
    source = os.open(cut.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def rest() -> Iterator[list[bytes]]:
        offset = cut.offset
        while data := os.pread(source, 1 << 20, offset):
            yield [data]
            offset += len(data)

    try:
        os.close(segments.make_segment(copy, rest()))
        os.ftruncate(source, cut.offset)
        sync_file(source)
    finally:
        os.close(source)


def _move_to_quarantine(directory: Path, quarantined: QuarantinedFile) -> None:
    """Move away a segment without a whole frame, which has its name and nothing to keep, for the next one."""
    quarantine = _quarantine(directory)
    quarantined.path.rename(quarantine / f"{quarantined.path.name}.epoch{quarantined.epoch}")
    # Durable there before it is removed here, if a file system does not do both at once.
    sync_directory(quarantine)
    sync_directory(directory)


def _quarantine(directory: Path) -> Path:
    quarantine = directory / segments.QUARANTINE_NAME
    quarantine.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory)
    return quarantine
