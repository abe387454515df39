"""Segment files: their names, and reading one of them frame by frame.

A reader takes as much into memory as one window or one frame, and believes no length before its checksum.
What it cannot read it calls broken, with the reason; whether that means an interrupted write or damage
depends on what lies behind (`Segment.is_damaged`); what is done about it is in the table of `events.log.recovery`.
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
from typing import Literal, Self
from zlib import crc32

from events.errors import LogDamaged, LogOutdated, LogTooNew, LogWriteFailed
from events.files.safe import PROBE_PREFIX, create_file
from events.ids import MAX_EPOCH
from events.log import frames
from events.log.durable import is_lock_file, sync_directory, sync_file, write_all
from events.log.frames import (
    BEGINS_STREAM,
    BEHIND_SYNC,
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
KEEPER_NAME = "KEEPER"
"""Locked by who makes snapshots and removes what is not to be kept."""
SEGMENT_SUFFIX = ".kvlog"
OUTDATED_SUFFIX = ".kvlogz"
"""Of segments that an earlier version has compressed: `kvcache log compress` converts them."""
NOT_EXPANDED = "a compressed frame does not hold what was written"
SHORT_HEADER = "the segment header is cut short"
UNREADABLE = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
"""How the system says that the disk does not have what a file holds."""
_WINDOW_BYTES = 1 << 20
_TIMES_LOOKED_AT = 16
"""Behind damage, payloads are looked at that together have so many times the bytes of their segment, and no more."""
_SYNC = re.compile(re.escape(SYNC))
_NAME = re.compile(rf"[0-9]{{20}}(\.kvlog|\{OUTDATED_SUFFIX})")
_OWN_NAME = re.compile(
    rf"[0-9]{{20}}\.kvlog(\{UNFINISHED_SUFFIX})?|[0-9]{{20}}(\{SNAPSHOT_SUFFIX}|\{OUTDATED_SUFFIX})(\.new)?"
    rf"|{LOCK_NAME}|{KEEPER_NAME}|{QUARANTINE_NAME}|{LEASES_NAME}"
    # What sinks and sidecars keep here, which may come before the first segment.
    rf"|(feed-.+\.numbers|publish-.+\.json)(\.lock|\.new)?|{re.escape(PROBE_PREFIX)}.+"
)


def segment_name(base_seq: int) -> str:
    """File name of the segment whose first batch is `base_seq`."""
    return f"{base_seq:020d}.kvlog"


def segment_paths(directory: Path) -> list[Path]:
    """The segments of a log, oldest first; other names are not looked at.

    Of one that is there in the form of format 1 and of this one, as when converting was interrupted, it is the new one.
    """
    names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    of_number = {first_seq(Path(name)): name for name in sorted(names, reverse=True)}
    return [directory / of_number[number] for number in sorted(of_number)]


def remove_segment(path: Path) -> None:
    """Remove it, in whichever form it is there. Raises OSError."""
    for suffix in (OUTDATED_SUFFIX, SEGMENT_SUFFIX):
        path.with_suffix(suffix).unlink(missing_ok=True)


def first_seq(path: Path) -> int:
    """The number in a segment's name: that of its first batch."""
    return int(path.stem)


def is_log(directory: Path) -> bool:
    """Whether a writer has been here."""
    # pathlib's is_dir raises for a name that is too long.
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return any(name == LOCK_NAME or _NAME.fullmatch(name) for name in names)


def holds_foreign_files(directory: Path) -> bool:
    """Whether anything is here, in a directory without segments, that no log writer or sink left."""
    names = os.listdir(directory)
    # A writer has been here before the sinks were opened, which may keep whatever they like here.
    return not all(map(_OWN_NAME.fullmatch, names)) and not is_lock_file(directory / LOCK_NAME)


@dataclass(frozen=True)
class Frame:
    """A frame whose checksums are right."""

    header: FrameHeader
    offset: int
    payload: memoryview


@dataclass(frozen=True)
class Broken:
    """No frame can be read at this place."""

    offset: int
    reason: str
    what: Literal["cut", "misplaced", "nonsense"] = "cut"
    """Not whole, which interrupted writing may have caused; or another frame; or whole, and holds no frames."""


class Segment:
    """One segment file, open for reading; `offset` is where the next frame begins, or the compressed one that holds it.

    `magic`: what it begins with. `is_named`: whether its name must be that which its header says.

    Opening raises LogDamaged if it is no file, LogOutdated, and OSError; reading a compressed one where that cannot be
    done, ZstdMissing.
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
        """Frames that were expanded and not read yet."""
        self._behind_block = 0
        self._patience: int | None = None
        """Bytes of payloads that are looked at behind damage; None: there was none yet."""
        self.descriptor = open_file(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self.descriptor).st_size

    def data(self, offset: int, count: int) -> bytes:
        """So many bytes from there on; fewer only at the end (the system stops at 2 GiB)."""
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
        """Whether the name now means another file, or none."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return True

    def renewed(self) -> bool:
        """Whether the writer has put a copy in the place of the file, of which a sync had failed; go on in that then.

        It holds what was durable, and what was behind that is written there once more: places stay the same.
        """
        if self._header is None or not self.replaced():
            return False
        try:
            copy = Segment(self.path)
        except (FileNotFoundError, LogDamaged):
            return False  # It is not to be kept any longer, or something else has its name.
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
            raise LogDamaged(self.path, 0, header.base_seq, "no log has so many epochs")
        if header.window_log > MAX_WINDOW_LOG:
            raise LogDamaged(self.path, 0, header.base_seq, "no log refers back so far")
        if self._is_named and header.base_seq != first_seq(self.path):
            raise LogDamaged(self.path, 0, header.base_seq, "the file name is not that of this segment")
        self._assume(header)
        return header

    def is_headed(self) -> bool:
        """Whether it has a whole header, whatever that says."""
        data = self._bytes(0, SEGMENT_HEADER_BYTES)
        return len(data) == SEGMENT_HEADER_BYTES and parse_segment_header(data, self._magic) is not None

    def _assume(self, header: SegmentHeader) -> None:
        self._header, self._seed = header, seed_of(header.log_id, header.epoch)

    def guess(self, log_id: bytes, chain: Chain) -> SegmentHeader | None:
        """What it most likely is if its header is damaged: what follows `chain` in that epoch or the next one."""
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
        """The frame at `offset`, which must continue `chain`; both then go on. None at the end of the file."""
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
            return (
                self._in_block(chain)
                if self._expand(header, payload)
                else self._broken(NOT_EXPANDED, "nonsense")
            )
        chain.follow(header)
        self.offset += FRAME_HEADER_BYTES + header.payload_bytes
        return Frame(header, start, payload)

    def _expand(self, header: FrameHeader, payload: memoryview) -> bool:
        """Expand a compressed frame. False: what it holds is nothing, though its checksums are right."""
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
        self._behind_block = self.offset + FRAME_HEADER_BYTES + header.payload_bytes
        return bool(self._block)

    def _in_block(self, chain: Chain) -> Frame | Broken:
        """The next frame in what was expanded. What is wrong there was written so."""
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
            self.offset = self._behind_block
        return frame

    def _broken(self, reason: str, what: Literal["cut", "misplaced", "nonsense"] = "cut") -> Broken:
        # The next look must be at the file: recovery may cut what is broken, a writer may complete it.
        self._window = memoryview(b"")
        return Broken(self.offset, reason, what)

    def _payload(self, start: int, header: FrameHeader) -> memoryview | None:
        # The size is looked at first so that a cut file does not make us ask for a gigabyte of nothing.
        if header.payload_bytes > _WINDOW_BYTES and start + header.payload_bytes > self.size():
            return None
        payload = self._bytes(start, header.payload_bytes)
        if len(payload) != header.payload_bytes or crc32(payload) != header.payload_crc:
            return None
        return payload

    def is_damaged(self, found: Broken, chain: Chain, *, is_last: bool) -> bool:
        """Whether what is broken was whole once; if not, it is where writing was interrupted.

        So it was if the header of a later batch behind it says that all before that was on disk.
        """
        return (
            not is_last
            or found.what != "cut"
            or any(
                header.seq > chain.seq and header.flags & BEHIND_SYNC
                for _, header in self._headers_from(found.offset + 1)
            )
        )

    def go_on_behind(self, found: Broken, chain: Chain) -> bool:
        """Go on with the next whole frame behind what is damaged, which `chain` then expects; False: there is none.

        Of a stream of which something is lost, nothing is whole.
        """
        self._block, self._stream = memoryview(b""), None
        chain.behind_damage, chain.closed = True, False
        if self._patience is None:
            self._patience = _TIMES_LOOKED_AT * self.size()
        for offset, header in self._headers_from(found.offset + (found.what != "misplaced")):
            begins = header.flags & BEGINS_STREAM or not header.flags & COMPRESSED
            if header.seq < chain.seq or not begins or replace(chain, seq=header.seq).refuses_frame(header):
                continue
            # Headers by the thousand, each for all of the segment, were not left by any accident.
            self._patience -= header.payload_bytes
            if self._patience < 0:
                return False
            if self._payload(offset + FRAME_HEADER_BYTES, header) is not None:
                self.offset, chain.seq = offset, header.seq
                return True
        return False

    def _headers_from(self, position: int) -> Iterator[tuple[int, FrameHeader]]:
        """All places from there on where a whole header of a frame stands."""
        while len(chunk := self.data(position, _WINDOW_BYTES)) >= FRAME_HEADER_BYTES:
            for hit in _SYNC.finditer(chunk, 0, len(chunk) - FRAME_HEADER_BYTES + len(SYNC)):
                header = parse_frame_header(chunk[hit.start() : hit.start() + FRAME_HEADER_BYTES], self._seed)
                if header is not None:
                    yield position + hit.start(), header
            # Chunks overlap, so that a header across their border is seen.
            position += len(chunk) - FRAME_HEADER_BYTES + 1

    def _bytes(self, offset: int, count: int) -> memoryview:
        """Up to `count` bytes at `offset`; fewer only at the end of the file."""
        begin = offset - self._window_start
        if begin < 0 or begin + count > len(self._window):
            try:
                window = self.data(offset, max(count, _WINDOW_BYTES))
            except OSError:
                window = self.data(offset, count)  # Where the disk does not give back what is behind that.
            self._window, self._window_start, begin = memoryview(window), offset, 0
        return self._window[begin : begin + count]


def open_file(path: Path) -> int:
    """Open a file of a log to read it. Raises LogDamaged if it is no file, LogOutdated, OSError."""
    # SECURITY: a link in the directory could make us read, and later cut, some other file; a pipe could make us wait
    # for ever.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if not path.is_symlink():
            raise
        # The system's own words tell nobody what to do.
        advice = f"{path.name} is a symbolic link, which is not followed: put the file itself in its place"
        raise OSError(error.errno, advice, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LogDamaged(path, 0, None, "it is not a regular file")
    if path.suffix == OUTDATED_SUFFIX:
        os.close(descriptor)
        raise LogOutdated(path)
    return descriptor


def closed_chain(segment: Segment) -> Chain | None:
    """Where a log goes on behind a segment that ends with the mark; None if it does not. Raises as `Segment.header`."""
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
    """Whether a segment ends with the mark. Raises LogDamaged, LogTooNew, OSError."""
    with Segment(path) as segment:
        return closed_chain(segment) is not None


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
