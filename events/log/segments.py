"""Segment files: their names, and reading one of them frame by frame.

A reader holds one window or one frame in memory, and trusts no length before its checksum. Unreadable frames are
reported as broken, with the reason; the bytes after one show if writing was interrupted or the file is damaged
(`Segment.is_damaged`); the table of `events.log.recovery` has the consequences.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from zlib import crc32

from events.closing import Closing
from events.errors import LogDamaged, LogOutdated, LogTooNew, LogWriteFailed
from events.files.safe import PROBE_PREFIX, create_file
from events.ids import MAX_EPOCH
from events.log import frames
from events.log.durable import is_lock_file, sync_directory, sync_file, write_all
from events.log.frames import (
    AFTER_SYNC,
    BEGINS_STREAM,
    CLOSED,
    COMPRESSED,
    FRAME_HEADER_BYTES,
    MAGIC,
    SEGMENT_HEADER_BYTES,
    SYNC,
    VERSION,
    Chain,
    FrameHeader,
    SegmentHeader,
    parse_frame_header,
    parse_segment_header,
    seed_of,
)
from events.log.zstd import MAX_WINDOW_LOG, Expander
from events.types import FORMAT_VERSION

LOCK_NAME = "LOCK"
QUARANTINE_NAME = "quarantine"
UNFINISHED_SUFFIX = ".tmp"
SNAPSHOT_SUFFIX = ".kvsnap"
LEASES_NAME = "leases"
MAINTENANCE_LOCK_NAME = "KEEPER"
"""Locked by the process that makes snapshots and removes old segments."""
SEGMENT_SUFFIX = ".kvlog"
OUTDATED_SUFFIX = ".kvlogz"
"""Suffix of segments compressed by an earlier version: `kvcache log compress` converts them."""
NOT_EXPANDED = "the content of a compressed frame is not intact"
SHORT_HEADER = "the segment header is cut short"
UNREADABLE = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
"""Error numbers by which the system reports that the disk does not have a file's content."""
_WINDOW_BYTES = 1 << 20
_TIMES_LOOKED_AT = 16
"""Limit on the payloads checked after damage, as a multiple of their segment's bytes."""
_SYNC = re.compile(re.escape(SYNC))
_NAME = re.compile(rf"[0-9]{{20}}(\.kvlog|\{OUTDATED_SUFFIX})")
_OWN_NAME = re.compile(
    rf"[0-9]{{20}}\.kvlog(\{UNFINISHED_SUFFIX})?|[0-9]{{20}}(\{SNAPSHOT_SUFFIX}|\{OUTDATED_SUFFIX})(\.new)?"
    rf"|{LOCK_NAME}|{MAINTENANCE_LOCK_NAME}|{QUARANTINE_NAME}|{LEASES_NAME}"
    # Files that sinks and sidecars keep here, possibly before the first segment.
    rf"|(feed-.+\.numbers|publish-.+\.json)(\.lock|\.new)?|{re.escape(PROBE_PREFIX)}.+"
)


def segment_name(base_seq: int) -> str:
    """Return the file name of the segment with the first batch `base_seq`."""
    return f"{base_seq:020d}.kvlog"


def segment_paths(directory: Path) -> list[Path]:
    """Return the segments of a log, oldest first; other names are ignored.

    Of a segment that exists in format 1 and in this one, as after an interrupted conversion, the new one counts.
    """
    names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    of_number = {first_seq(Path(name)): name for name in sorted(names, reverse=True)}
    return [directory / of_number[number] for number in sorted(of_number)]


def remove_segment(path: Path) -> None:
    """Remove a segment in any of its forms. Raises OSError."""
    for suffix in (OUTDATED_SUFFIX, SEGMENT_SUFFIX):
        path.with_suffix(suffix).unlink(missing_ok=True)


def first_seq(path: Path) -> int:
    """Return the number in a segment's name: that of its first batch."""
    return int(path.stem)


def is_log(directory: Path) -> bool:
    """Return True if a writer has used the directory."""
    # pathlib's is_dir raises for a name that is too long.
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return any(name == LOCK_NAME or _NAME.fullmatch(name) for name in names)


def holds_foreign_files(directory: Path) -> bool:
    """Return True if a directory without segments has files that no log writer or sink left."""
    names = os.listdir(directory)
    # A writer was here before the sinks were opened, which may keep any files here.
    return not all(map(_OWN_NAME.fullmatch, names)) and not is_lock_file(directory / LOCK_NAME)


@dataclass(frozen=True)
class Frame:
    """A frame with correct checksums."""

    header: FrameHeader
    offset: int
    payload: memoryview


@dataclass(frozen=True)
class Broken:
    """The reason why no frame can be read at this place."""

    offset: int
    reason: str
    what: Literal["cut", "misplaced", "nonsense"] = "cut"
    """Cut: incomplete, possibly by an interrupted write. Misplaced: another frame. Nonsense: whole, but holds no
    frames."""


class Segment(Closing):
    """One segment file, open for reading; `offset` is where the next frame begins, or the compressed one that holds it.

    `magic`: its first bytes. `is_named`: True if its name must match its header.

    Opening raises LogDamaged if it is no file, LogOutdated, and OSError; reading a compressed one without zstd raises
    ZstdMissing.
    """

    def __init__(self, path: Path, magic: bytes = MAGIC, *, is_named: bool = True) -> None:
        self.path, self._magic, self._is_named = path, magic, is_named
        self.offset = SEGMENT_HEADER_BYTES
        self._window = memoryview(b"")
        self._window_start = 0
        self._header: SegmentHeader | None = None
        self._seed = 0
        self._stream: Expander | None = None
        self._block = memoryview(b"")
        """Expanded frames not read yet."""
        self._block_end = 0
        self._patience: int | None = None
        """Remaining bytes of payloads to be checked after damage; None: there was none yet."""
        self.descriptor = open_file(path)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def size(self) -> int:
        """Current size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def data(self, offset: int, count: int) -> bytes:
        """Read `count` bytes from `offset` on; fewer only at the end (the system stops at 2 GiB)."""
        try:
            data = os.pread(self.descriptor, count, offset)
            while len(data) < count and (
                more := os.pread(self.descriptor, count - len(data), offset + len(data))
            ):
                data += more
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        return data

    def replaced(self) -> bool:
        """Return True if the name now means another file, or none."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return True

    def renewed(self) -> bool:
        """Continue in the writer's copy that replaced the file after a failed sync; True if there is one.

        It holds the durable part, and the rest is written there once more: offsets stay the same.
        """
        if self._header is None or not self.replaced():
            return False
        try:
            copy = Segment(self.path)
        except (FileNotFoundError, LogDamaged):
            return False  # Retention has removed it, or its name is another file's.
        data = copy.data(0, SEGMENT_HEADER_BYTES)
        if len(data) < SEGMENT_HEADER_BYTES or parse_segment_header(data) != self._header:
            os.close(copy.descriptor)
            return False
        os.close(self.descriptor)
        self.descriptor, self._window = copy.descriptor, memoryview(b"")
        return True

    def header(self) -> SegmentHeader | None:
        """The segment's header; None if the file is too short to have one.

        Raises LogDamaged if it is not intact, LogTooNew if it is of a newer version.
        """
        data = self._bytes(0, SEGMENT_HEADER_BYTES)
        if len(data) < SEGMENT_HEADER_BYTES:
            return None
        header = parse_segment_header(data, self._magic)
        if header is None:
            raise LogDamaged(self.path, 0, None, "the header is not intact")
        if header.version > VERSION:
            raise LogTooNew(self.path, header.version)
        if header.event_format > FORMAT_VERSION:
            raise LogTooNew(self.path, header.event_format)
        if header.epoch > MAX_EPOCH:
            raise LogDamaged(self.path, 0, header.base_seq, "its epoch number is out of range")
        if header.window_log > MAX_WINDOW_LOG:
            raise LogDamaged(self.path, 0, header.base_seq, "it refers back too far")
        if self._is_named and header.base_seq != first_seq(self.path):
            raise LogDamaged(self.path, 0, header.base_seq, "the file name does not match the segment")
        self._assume(header)
        return header

    def is_headed(self) -> bool:
        """Return True if it has a whole header, whatever its content."""
        data = self._bytes(0, SEGMENT_HEADER_BYTES)
        return len(data) == SEGMENT_HEADER_BYTES and parse_segment_header(data, self._magic) is not None

    def _assume(self, header: SegmentHeader) -> None:
        self._header, self._seed = header, seed_of(header.log_id, header.epoch)

    def guess(self, log_id: bytes, chain: Chain) -> SegmentHeader | None:
        """Return the likely header of one that is damaged: the next after `chain` in that epoch or the next one."""
        for epoch in (chain.epoch, chain.epoch + 1):
            header = SegmentHeader(
                VERSION, FORMAT_VERSION, MAX_WINDOW_LOG, log_id, epoch, chain.number, chain.seq, chain.crc
            )
            self._assume(header)
            first = self._bytes(SEGMENT_HEADER_BYTES, FRAME_HEADER_BYTES)
            if len(first) == FRAME_HEADER_BYTES and parse_frame_header(first, self._seed) is not None:
                return header
        return None

    def read(self, chain: Chain) -> Frame | Broken | None:
        """Return the frame at `offset`, which must continue `chain`, and advance both. None at the end of the file."""
        if self._block:
            return self._in_block(chain)
        start = self.offset
        data = self._bytes(start, FRAME_HEADER_BYTES)
        if len(data) < FRAME_HEADER_BYTES:
            return self._broken("a frame header is cut short") if data else None
        header = parse_frame_header(data, self._seed)
        if header is None:
            return self._broken("a frame header is not intact")
        refusal = chain.refuses_frame(header)
        if refusal is not None:
            return self._broken(refusal, "misplaced")
        payload = self._payload(start + FRAME_HEADER_BYTES, header)
        if payload is None:
            return self._broken("a frame's payload is cut short or not intact")
        if header.flags & COMPRESSED:
            expanded = self._expand(header, payload)
            return self._in_block(chain) if expanded else self._broken(NOT_EXPANDED, "nonsense")
        chain.follow(header)
        self.offset += FRAME_HEADER_BYTES + header.payload_bytes
        return Frame(header, start, payload)

    def _expand(self, header: FrameHeader, payload: memoryview) -> bool:
        """Expand a compressed frame. False: its content is no frame, though its checksums are right."""
        assert self._header is not None
        stream, self._stream = self._stream, None
        if header.flags & BEGINS_STREAM:
            stream = Expander(self.path, self._header.window_log)
        if stream is None:
            return False
        try:
            self._block = memoryview(stream.expanded(payload, header.events))
        except ValueError:
            return False
        self._stream = stream
        self._block_end = self.offset + FRAME_HEADER_BYTES + header.payload_bytes
        return bool(self._block)

    def _in_block(self, chain: Chain) -> Frame | Broken:
        """Return the next frame of the expanded ones. Errors there were written so."""
        block = self._block
        header = parse_frame_header(block, self._seed) if len(block) >= FRAME_HEADER_BYTES else None
        if header is None or header.flags & (COMPRESSED | CLOSED):
            return self._broken(NOT_EXPANDED, "nonsense")
        refusal = chain.refuses_frame(header)
        if refusal is not None:
            return self._broken(refusal, "nonsense")
        end = FRAME_HEADER_BYTES + header.payload_bytes
        payload = block[FRAME_HEADER_BYTES:end]
        if len(block) < end or crc32(payload) != header.payload_crc:
            return self._broken(NOT_EXPANDED, "nonsense")
        chain.follow(header)
        frame = Frame(header, self.offset, payload)
        self._block = block[end:]
        if not self._block:
            self.offset = self._block_end
        return frame

    def _broken(self, reason: str, what: Literal["cut", "misplaced", "nonsense"] = "cut") -> Broken:
        # The next read must be of the file: recovery may cut the broken part, a writer may complete it.
        self._window = memoryview(b"")
        return Broken(self.offset, reason, what)

    def _payload(self, start: int, header: FrameHeader) -> memoryview | None:
        # The size is checked first so that a cut file does not make us request a gigabyte of nothing.
        if header.payload_bytes > _WINDOW_BYTES and start + header.payload_bytes > self.size():
            return None
        payload = self._bytes(start, header.payload_bytes)
        if len(payload) != header.payload_bytes or crc32(payload) != header.payload_crc:
            return None
        return payload

    def is_damaged(self, found: Broken, chain: Chain, *, is_last: bool) -> bool:
        """Return True if the broken frame was whole once; if not, writing was interrupted there.

        It was if the header of a later batch after it states that all before that was on disk.
        """
        return (
            not is_last
            or found.what != "cut"
            or any(
                header.seq > chain.seq and header.flags & AFTER_SYNC
                for _, header in self._headers_from(found.offset + 1)
            )
        )

    def resume_after(self, found: Broken, chain: Chain) -> bool:
        """Continue with the next whole frame after the damage, which `chain` then expects; False: there is none.

        A stream with a lost part has no whole frame.
        """
        self._block, self._stream = memoryview(b""), None
        chain.after_damage, chain.closed = True, False
        if self._patience is None:
            self._patience = _TIMES_LOOKED_AT * self.size()
        for offset, header in self._headers_from(found.offset + (found.what != "misplaced")):
            begins = header.flags & BEGINS_STREAM or not header.flags & COMPRESSED
            if header.seq < chain.seq or not begins or replace(chain, seq=header.seq).refuses_frame(header):
                continue
            # Headers by the thousand, each for the whole segment, are no accident.
            self._patience -= header.payload_bytes
            if self._patience < 0:
                return False
            if self._payload(offset + FRAME_HEADER_BYTES, header) is not None:
                self.offset, chain.seq = offset, header.seq
                return True
        return False

    def _headers_from(self, position: int) -> Iterator[tuple[int, FrameHeader]]:
        """Yield all offsets from `position` on with a whole header of a frame."""
        while len(chunk := self.data(position, _WINDOW_BYTES)) >= FRAME_HEADER_BYTES:
            for hit in _SYNC.finditer(chunk, 0, len(chunk) - FRAME_HEADER_BYTES + len(SYNC)):
                header = parse_frame_header(chunk[hit.start() : hit.start() + FRAME_HEADER_BYTES], self._seed)
                if header is not None:
                    yield position + hit.start(), header
            # Chunks overlap, so that a header across their border is seen.
            position += len(chunk) - FRAME_HEADER_BYTES + 1

    def _bytes(self, offset: int, count: int) -> memoryview:
        """Read up to `count` bytes at `offset`; fewer only at the end of the file."""
        begin = offset - self._window_start
        if begin < 0 or begin + count > len(self._window):
            try:
                window = self.data(offset, max(count, _WINDOW_BYTES))
            except OSError:
                window = self.data(offset, count)  # For a disk that cannot read the bytes after that.
            self._window, self._window_start, begin = memoryview(window), offset, 0
        return self._window[begin : begin + count]


def open_file(path: Path) -> int:
    """Open a file of a log for reading. Raises LogDamaged if it is no file, LogOutdated, OSError."""
    # SECURITY: a link in the directory could make us read, and later cut, some other file; a pipe could make us wait
    # for ever.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if not path.is_symlink():
            raise
        # The system's own message gives no advice.
        advice = f"{path.name} is a symbolic link, which is not followed: replace it by the file itself"
        raise OSError(error.errno, advice, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LogDamaged(path, 0, None, "it is not a regular file")
    if path.suffix == OUTDATED_SUFFIX:
        os.close(descriptor)
        raise LogOutdated(path)
    return descriptor


def closed_chain(segment: Segment) -> Chain | None:
    """Return the chain after a segment that ends with the mark; None if it does not. Raises as `Segment.header`."""
    header, size = segment.header(), segment.size()
    if header is None or size < SEGMENT_HEADER_BYTES + FRAME_HEADER_BYTES:
        return None
    data = segment.data(size - FRAME_HEADER_BYTES, FRAME_HEADER_BYTES)
    if len(data) < FRAME_HEADER_BYTES:
        return None
    last = parse_frame_header(data, seed_of(header.log_id, header.epoch))
    if last is None or not last.flags & CLOSED or last.payload_bytes or last.seq < header.base_seq:
        return None
    return Chain(header.log_id, header.epoch, header.number + 1, last.seq, last.payload_crc, closed=True)


def is_closed(path: Path) -> bool:
    """Return True if a segment ends with the mark. Raises LogDamaged, LogTooNew, OSError."""
    with Segment(path) as segment:
        return closed_chain(segment) is not None


def make_segment(path: Path, parts: Iterable[Sequence[bytes | memoryview]]) -> int:
    """Make a file of these bytes, which is named `path` once they are on disk; return it, open for appending.

    Raises OSError, and the errors of `parts`; then the file is no longer used, with its name or not.
    """
    unfinished = unfinished_path(path)
    descriptor = create_file(unfinished, os.O_WRONLY | os.O_APPEND)
    try:
        for part in parts:
            write_all(descriptor, part)
        # Under every policy: one sync per segment is cheap, and a header cut short looks like damage.
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
    """Replace a segment by a copy of its first `end` bytes, at which the log has reached `reached`.

    Raises OSError, and LogWriteFailed if these bytes are gone: they are lost then.
    """
    try:
        with Segment(path) as segment:
            return make_segment(path, _intact(segment, reached, end))
    except (LogDamaged, LogTooNew) as error:
        reason = "its data cannot be read back"
        raise LogWriteFailed(path, reason, errno.EIO) from error


def check_segment(path: Path, reached: frames.Chain, end: int) -> None:
    """Raise LogWriteFailed if a segment's first `end` bytes are not those that led the log to `reached`."""
    try:
        with Segment(path) as segment:
            for _ in _intact(segment, reached, end):
                pass
    except (LogDamaged, LogTooNew, FileNotFoundError) as error:
        raise LogWriteFailed(path, "its data is missing", errno.ESTALE) from error


def _intact(segment: Segment, reached: frames.Chain, end: int) -> Iterator[tuple[bytes, ...]]:
    """Yield a segment's bytes up to `end`; raise LogDamaged if they are not those written."""
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
    # Without a frame yet, the number before its first one may be lower: those between were lost.
    if segment.offset != end or replace(chain, seq=reached.seq) != reached:
        raise LogDamaged(segment.path, segment.offset, chain.seq, "its data has changed")


def unfinished_path(path: Path) -> Path:
    """Return a segment's file name until it is complete."""
    return path.with_name(path.name + UNFINISHED_SUFFIX)
