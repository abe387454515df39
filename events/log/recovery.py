"""Opening a log for writing: whose it is, and where it goes on.

What may be found where a log is to go on, and what is done about it (readers: `events.log.reader`):

======================================================  =====================  =========================================
found at the end of the last segment                    readers say            a writer
======================================================  =====================  =========================================
the mark of an orderly end                              clean                  goes on; nothing before it is read
the end of a whole frame                                open                   goes on, in an epoch that calls the last
                                                                               one unclean
a part of a frame, or no whole one, and no header       torn                   puts it and what follows into
of a later one that was written behind a sync                                  quarantine, cuts it off
no frame, behind a whole header                         open                   puts the file into quarantine
an empty file, or a part of a header                    torn                   puts the file into quarantine
no whole frame, and the header of one behind it that    damaged                refuses
was written when this one was on disk
a whole frame which does not continue the one before    damaged                refuses
a header that is there and not whole                    damaged                refuses
a name that is not the header's (swapped, duplicated)   damaged                refuses
a newer version                                         too new                refuses
------------------------------------------------------  ---------------------  -----------------------------------------
between the last segment that has frames, and others
------------------------------------------------------  ---------------------  -----------------------------------------
the segment before it is another log's, or missing      damaged                refuses
behind it one without frames, which it does not reach   damaged                refuses
anything wrong further back                             damaged                goes on: it does not look there
the beginning is gone, a snapshot stands for it         begin with that        goes on
``*.kvlog.tmp``: a segment, or a copy of one after a    do not look at it      removes it
failed sync, that has not got its name yet
times that went back                                    read on                goes on
======================================================  =====================  =========================================

Only the last segment is read, and of one that ends with the mark of an orderly end only that: it is the only one that
an interrupted write can have touched, since each is synced when it ends, and opening must not take longer the longer a
log is.

Refusing changes nothing at all: everything is decided before anything is done. What is done is durable step by step,
first what adds and then what takes away, and each step leaves something of which this table says the rest.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from events.diagnostics import get_logger
from events.errors import LogDamaged, LogExists, LogLocked, LogOutdated, NoRegularFile, NotALog
from events.files.safe import check_directory, create_file, refuse_foreign
from events.log import segments
from events.log.durable import (
    Lock,
    LockHeld,
    make_directory,
    sync_directory,
    sync_file,
    take_lock,
)
from events.log.frames import (
    SEGMENT_HEADER_BYTES,
    Chain,
    SegmentHeader,
)
from events.log.segments import closed_chain

_PRIVATE = 0o700
_log = get_logger(__name__)


def claim(directory: Path, resume: bool) -> Lock:
    """Make `directory` a log directory of ours; returns its lock.

    Raises NotALog, LogLocked, LogExists, UnsafeFile, OSError. The directory is made private: its files name requests
    and may hold prompts. One in which others may have put segments is not continued.
    """
    try:
        make_directory(directory)
    except (FileExistsError, NotADirectoryError):
        raise NotALog(directory, to_write=True) from None  # It, or what it should lie in, is something else.
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
        lock.give_back()
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
    except NoRegularFile:
        raise NotALog(directory, to_write=True) from None
    except LockHeld as held:
        raise LogLocked(directory, held.holder) from None


@dataclass(frozen=True)
class Cut:
    """A part of a frame at the end of a segment, which goes into quarantine."""

    path: Path
    offset: int
    bytes: int


@dataclass(frozen=True)
class Aside:
    """A segment without a whole frame, which goes into quarantine."""

    path: Path
    epoch: int
    bytes: int


@dataclass(frozen=True)
class Recovery:
    """Where a log goes on, and what is to be done before that."""

    chain: Chain
    """Its epoch is that of the last segment (no `log_id`: there is none)."""
    aside: tuple[Aside, ...] = ()
    cut: Cut | None = None
    unfinished: tuple[Path, ...] = ()
    """Segments, and copies of them, that did not get their names: nothing was ever in them that is nowhere else."""

    @property
    def loses(self) -> bool:
        """Whether something is cut off that a reader may have seen the beginning of."""
        return self.cut is not None or bool(self.aside)


def recover(directory: Path) -> tuple[Chain, bool]:
    """Where the log of a locked directory goes on, and whether something was cut off there.

    Raises LogDamaged, LogTooNew, OSError.
    """
    recovery = plan(directory)
    carry_out(directory, recovery)
    return recovery.chain, recovery.loses


def plan(directory: Path) -> Recovery:
    """What is to be done before the log can be written, which changes nothing.

    Raises LogDamaged, LogTooNew, UnsafeFile, OSError.
    """
    unfinished = tuple(sorted(directory.glob(f"*{segments.UNFINISHED_SUFFIX}")))
    aside: list[Aside] = []
    paths = segments.segment_paths(directory)
    while paths:
        path = paths.pop()
        with segments.Segment(path) as segment:
            refuse_foreign(path, os.fstat(segment.descriptor), one_name=False)
            # What we are about to build on must not be something that only the page cache remembers.
            sync_file(segment.descriptor)
            closed = closed_chain(segment)
            chain, torn = (closed, False) if closed else _scan(segment, is_last=not aside)
            if closed or segment.offset > SEGMENT_HEADER_BYTES:
                _refuse_strangers(segment, paths)
                cut = Cut(path, segment.offset, segment.size() - segment.offset) if torn else None
                return Recovery(chain, tuple(aside), cut, unfinished)
            aside.append(Aside(path, chain.epoch, segment.size()))
    return Recovery(Chain(), tuple(aside), None, unfinished)


def carry_out(directory: Path, recovery: Recovery) -> None:
    """Do it, in a locked directory. Raises OSError."""
    for unfinished in recovery.unfinished:
        unfinished.unlink(missing_ok=True)
    for aside in recovery.aside:
        _put_aside(directory, aside)
    if recovery.cut is not None:
        _cut_tail(recovery.cut)


def repair(log: Path, *, dry_run: bool = False) -> Recovery:
    """Put what an interrupted write has left into `quarantine/` and cut it off; says what was, or would be, done.

    With `dry_run` nothing is changed, and nobody is asked whether a writer is at work, whose half-written batch then
    looks like an interrupted one. Raises NotALog, LogLocked, LogTooNew, OSError, and LogDamaged for what no interrupted
    write can have left, which no byte is changed for.
    """
    if not segments.is_log(log):
        raise NotALog(log)
    if dry_run:
        return plan(log)
    lock = claim(log, resume=True)
    try:
        recovery = plan(log)
        carry_out(log, recovery)
        return recovery
    finally:
        lock.give_back()


def _scan(segment: segments.Segment, is_last: bool) -> tuple[Chain, bool]:
    """Go over a segment's frames; returns where they end, and whether bytes of a torn one follow."""
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


def _refuse_strangers(segment: segments.Segment, before: list[Path]) -> None:
    """Refuse a segment that cannot be the next one behind that before it, as one copied from another log."""
    header = segment.header()
    assert header is not None
    previous = _header_of(before[-1]) if before else None
    if previous is None:
        return
    chain = previous.chain()
    chain.enter(previous)
    # Of the one before only the header is read, so its last frame is not known.
    chain.crc = header.previous_crc
    refusal = chain.refuses_segment(header)
    if refusal is not None:
        raise LogDamaged(segment.path, 0, header.base_seq, refusal)


def _header_of(path: Path) -> SegmentHeader | None:
    """None: it may just not be kept any longer, or is damaged, which is for who reads it to say."""
    with suppress(FileNotFoundError, LogDamaged, LogOutdated), segments.Segment(path) as segment:
        return segment.header()
    return None


def _cut_tail(cut: Cut) -> None:
    """Copy what follows the last whole frame to the quarantine, then cut it off; each step durable."""
    directory = _quarantine(cut.path.parent)
    copy = directory / f"{cut.path.name}.{cut.offset}"
    unfinished = copy.with_name(copy.name + segments.UNFINISHED_SUFFIX)
    source = os.open(cut.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        target = create_file(unfinished)
        with os.fdopen(target, "wb") as file:
            offset = cut.offset
            while data := os.pread(source, 1 << 20, offset):
                file.write(data)
                offset += len(data)
            file.flush()
            sync_file(target)
        unfinished.rename(copy)
        sync_directory(directory)
        os.ftruncate(source, cut.offset)
        sync_file(source)
    finally:
        os.close(source)


def _put_aside(directory: Path, aside: Aside) -> None:
    """Make room for the next segment: what begins without a whole frame has its name and nothing to keep."""
    quarantine = _quarantine(directory)
    aside.path.rename(quarantine / f"{aside.path.name}.epoch{aside.epoch}")
    # There before it is gone here, where a file system does not do both at once.
    sync_directory(quarantine)
    sync_directory(directory)


def _quarantine(directory: Path) -> Path:
    quarantine = directory / segments.QUARANTINE_NAME
    quarantine.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory)
    return quarantine
