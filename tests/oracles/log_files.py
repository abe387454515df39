"""A log's files, read as docs/reference/log.md describes them, by code that shares nothing with readers and writers.

What the log's own reader and its writer both get wrong, this does not. It knows bytes only: what follows from what is
found is told by `tests.oracles.log_scan`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self
from zlib import crc32

import msgspec

from events.errors import LogDamaged, LogOutdated, LogTooNew, ZstdMissing
from events.types import FORMAT_VERSION, EventBatch

SEGMENT_MAGIC = b"KVEVLOG\0"
SNAPSHOT_MAGIC = b"KVEVSNP\0"
OUTDATED = ".kvlogz"
VERSION = 2
ENDS_EPOCH, AFTER_LOSS, AFTER_SYNC, COMPRESSED, BEGINS_STREAM = 1, 2, 4, 8, 16
HEADER_BYTES, FRAME_HEADER_BYTES = 64, 36
MAX_PAYLOAD, MAX_EXPANDED = 1 << 30, 64 << 20
MAX_WINDOW, _MIN_WINDOW = 27, 10
UNREADABLE = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
"""How the system says that the disk does not have what a file holds."""
MAX_EPOCH = (1 << 23) - 2
"""Numbers of sequences have 23 bits for it, and one value is left out."""
_HEADER = struct.Struct("<8s2HI16s3Q2I")
_FRAME = struct.Struct("<4sIQ5I")
_SYNC = b"\xc1\x4b\x56\x46"
_CHUNK = 1 << 20


class Header(NamedTuple):
    """What a segment or a snapshot says of itself."""

    log_id: bytes
    epoch: int
    number: int
    first: int
    """The number of the first batch; of a snapshot, of its only one."""
    before: int
    """Checksum of the payload before."""
    window: int = 0
    """How far compressed frames refer back, as a power of two."""

    @property
    def seed(self) -> int:
        """What the checksums of frames' headers begin with."""
        return crc32(self.log_id + struct.pack("<Q", self.epoch))


class Frame(NamedTuple):
    """The header of a frame, which is whole."""

    bytes: int
    """Of the payload."""
    seq: int
    events: int
    flags: int
    before: int
    crc: int
    """Checksums of the payload before, and of the payload."""

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the mark of an orderly end, and no batch."""
        return bool(self.flags & ENDS_EPOCH)

    @property
    def refusal(self) -> str | None:
        """Why no writer makes such a one; None: one may."""
        too_large = self.bytes > MAX_PAYLOAD or (self.flags & COMPRESSED and self.events > MAX_EXPANDED)
        return "the frame exceeds the maximum size" if too_large else None


def parse_frame(data: bytes | memoryview, seed: int) -> Frame | None:
    """The header of the frame that these bytes begin with; None if that is not whole."""
    if len(data) < FRAME_HEADER_BYTES:
        return None
    sync, *fields, crc = _FRAME.unpack_from(data)
    return Frame(*fields) if sync == _SYNC and crc == crc32(data[: _FRAME.size - 4], seed) else None


def segments(directory: Path) -> list[Path]:
    """The segments, by number: names are 20 digits and a suffix. One that is there twice was just converted."""
    converted = {int(path.stem): path for path in _names(directory, ".kvlog")}
    outdated = {int(path.stem): path for path in _names(directory, OUTDATED)}
    return [path for _, path in sorted((outdated | converted).items())]


def snapshots(directory: Path) -> list[Path]:
    """The snapshots, by number."""
    return _names(directory, ".kvsnap")


def is_there(path: Path) -> bool:
    """Whether a segment is there."""
    return os.path.lexists(path)


def _names(directory: Path, suffix: str) -> list[Path]:
    pattern = re.compile(rf"\d{{20}}\{suffix}", re.ASCII)
    return sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))


class File:
    """A segment or a snapshot, open for reading. Raises LogDamaged if it is no file, LogOutdated, OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: Any = None
        """Expands the next compressed frame; None: only one that begins a stream can be expanded."""
        # SECURITY: neither a link to some other file nor a pipe that never ends.
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if not path.is_symlink():
                raise
            advice = f"{path.name} is a symbolic link, which is not followed: replace it by the file itself"
            raise OSError(error.errno, advice, str(path)) from None
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode) and path.suffix != OUTDATED:
            return
        os.close(self._descriptor)
        raise (
            LogOutdated(path)
            if path.suffix == OUTDATED
            else LogDamaged(path, 0, None, "it is not a regular file")
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def renewed(self) -> bool:
        """Whether a copy with the same header has its name by now, as after a failed sync; that is read from now on."""
        try:
            there = self.path.lstat()
            if os.path.samestat(there, os.fstat(self._descriptor)):
                return False
            with File(self.path) as copy:
                same = copy.read(0, HEADER_BYTES) == self.read(0, HEADER_BYTES)
                if same:
                    copy._descriptor, self._descriptor = self._descriptor, copy._descriptor
                return same
        except (FileNotFoundError, LogDamaged):
            return False

    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from there; fewer only at the end."""
        try:
            data = os.pread(self._descriptor, count, offset)
            while (
                data and len(data) < count and (more := os.pread(self._descriptor, count, offset + len(data)))
            ):
                data += more[: count - len(data)]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        return data

    def header(self, magic: bytes) -> Header | None:
        """The first 64 bytes; None if they are no whole header. Raises LogTooNew."""
        data = self.read(0, HEADER_BYTES)
        if len(data) < HEADER_BYTES:
            return None
        found, version, event_format, window, *fields, crc = _HEADER.unpack(data)
        if found != magic or crc != crc32(data[:-4]):
            return None
        for given, known in ((version, VERSION), (event_format, FORMAT_VERSION)):
            if given > known:
                raise LogTooNew(self.path, given)
        return Header(*fields)._replace(window=window)

    def frame(self, offset: int, seed: int) -> Frame | None:
        """The header of the frame that begins there; None if that is not whole."""
        return parse_frame(self.read(offset, FRAME_HEADER_BYTES), seed)

    def payload(self, offset: int, frame: Frame) -> bytes | None:
        """The payload of the frame that begins there; None if it is not whole."""
        begin = offset + FRAME_HEADER_BYTES
        if frame.bytes > self.size() - begin:
            return None
        data = self.read(begin, frame.bytes)
        return data if crc32(data) == frame.crc else None

    def expanded(self, header: Header, frame: Frame, payload: bytes) -> bytes | None:
        """The frames in a compressed one; None: it does not hold any. They are expanded in the order of the file."""
        try:
            zstd = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
        except ImportError:
            raise ZstdMissing(self.path) from None
        if frame.flags & BEGINS_STREAM:
            limit = {zstd.DecompressionParameter.window_log_max: max(header.window, _MIN_WINDOW)}
            self._stream = zstd.ZstdDecompressor(options=limit)
        stream, self._stream = self._stream, None
        if stream is None:
            return None
        try:
            data: bytes = stream.decompress(payload, frame.events + 1)
        except (zstd.ZstdError, EOFError):
            return None
        if len(data) != frame.events or stream.eof:
            return None
        self._stream = stream
        return data

    def frames_from(self, offset: int, seed: int) -> Iterator[tuple[int, Frame]]:
        """All places from there on where a whole header of a frame stands."""
        while len(chunk := self.read(offset, _CHUNK)) >= FRAME_HEADER_BYTES:
            at = chunk.find(_SYNC)
            while at >= 0:
                frame = self.frame(offset + at, seed)
                if frame is not None:
                    yield offset + at, frame
                at = chunk.find(_SYNC, at + 1)
            offset += len(chunk) - len(_SYNC) + 1


_Count = Annotated[int, msgspec.Meta(ge=0)]


class Alongside(msgspec.Struct, array_like=True, frozen=True):
    """What is known beside the state."""

    next_seq: _Count
    closed: bool
    first_ts: int
    latest_ts: int
    fingerprint: bytes


@dataclass(frozen=True)
class RawSnapshot:
    """A snapshot that is whole."""

    path: Path
    header: Header
    alongside: Alongside
    batch: EventBatch

    @property
    def seq(self) -> int:
        """Of the last batch before it."""
        return self.header.first

    def continued_by(self, header: Header) -> bool:
        """Whether this is the header of the segment behind it."""
        mine, closed = self.header, self.alongside.closed
        return (
            (header.log_id, header.number, header.before) == (mine.log_id, mine.number, mine.before)
            and header.first >= self.alongside.next_seq
            and (header.epoch > mine.epoch or (header.epoch == mine.epoch and not closed))
        )

    def is_in_use(self) -> bool:
        """Whether the segment behind it continues it, or the log ends with it. Raises LogError, OSError."""
        paths = segments(self.path.parent)
        later = [path for path in paths if int(path.stem) > self.seq]
        if not paths:
            return False
        with File(later[0] if later else paths[-1]) as file:
            header = file.header(SEGMENT_MAGIC)
        if header is None or int(file.path.stem) != header.first:
            return False
        if later:
            return self.continued_by(header)
        mine = self.header
        return self.alongside.closed and header[:3] == (mine.log_id, mine.epoch, mine.number - 1)


def read_snapshot(path: Path) -> RawSnapshot:
    """Read all of it. Raises LogDamaged, LogTooNew, OSError."""
    with File(path) as file:
        header = file.header(SNAPSHOT_MAGIC)
        if header is None or f"{header.first:020d}.kvsnap" != path.name:
            raise LogDamaged(path, 0, None, "its header is not whole, or not that of this file")
        offset, crc, payloads = HEADER_BYTES, header.before, list[bytes]()
        for _ in range(2):
            frame = file.frame(offset, header.seed)
            payload = None if frame is None else file.payload(offset, frame)
            if frame is None or payload is None or (frame.before, frame.seq) != (crc, header.first):
                raise LogDamaged(
                    path, offset, header.first, "a frame is not whole, or not the one that belongs there"
                )
            payloads.append(payload)
            offset, crc = offset + FRAME_HEADER_BYTES + frame.bytes, frame.crc
        if offset != file.size():
            raise LogDamaged(path, offset, header.first, "data follows the state")
    try:
        alongside = msgspec.msgpack.decode(payloads[0], type=Alongside)
        batch = msgspec.msgpack.decode(payloads[1], type=EventBatch)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise LogDamaged(path, HEADER_BYTES, header.first, "it holds no state") from None
    if batch.seq != header.first:
        raise LogDamaged(path, HEADER_BYTES, header.first, "header and payload disagree")
    return RawSnapshot(path, header, alongside, batch)


def usable_snapshots(directory: Path) -> Iterator[RawSnapshot]:
    """Those with which reading can begin, oldest first. All others are passed over."""
    for path in snapshots(directory):
        with suppress(LogDamaged, LogTooNew, OSError):
            snapshot = read_snapshot(path)
            if snapshot.is_in_use():
                yield snapshot
