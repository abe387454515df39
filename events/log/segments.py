"""Segment files: their names, and reading one of them frame by frame.

A reader takes as much into memory as one window or one frame, and believes no length before its checksum.
What it cannot read it calls broken, with the reason; whether that means an interrupted write or damage
depends on what lies behind (`Segment.is_damaged`); what is done about it is in the table of `events.log.recovery`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from zlib import crc32

from events.errors import LogDamaged, LogTooNew
from events.files.safe import PROBE_PREFIX
from events.ids import MAX_EPOCH
from events.log.durable import is_lock_file
from events.log.frames import (
    BEHIND_SYNC,
    FRAME_HEADER_BYTES,
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
from events.log.stored import COMPRESSED_SUFFIX, NOT_INTACT, open_stored
from events.types import FORMAT_VERSION

LOCK_NAME = "LOCK"
QUARANTINE_NAME = "quarantine"
UNFINISHED_SUFFIX = ".tmp"
SNAPSHOT_SUFFIX = ".kvsnap"
LEASES_NAME = "leases"
KEEPER_NAME = "KEEPER"
"""Locked by who makes snapshots and removes what is not to be kept."""
SHORT_HEADER = "the segment header is cut short"
_WINDOW_BYTES = 1 << 20
_SYNC = re.compile(re.escape(SYNC))
_NAME = re.compile(rf"[0-9]{{20}}(\.kvlog|\{COMPRESSED_SUFFIX})")
_OWN_NAME = re.compile(
    rf"[0-9]{{20}}\.kvlog(\{UNFINISHED_SUFFIX})?|[0-9]{{20}}(\{SNAPSHOT_SUFFIX}|\{COMPRESSED_SUFFIX})(\.new)?"
    rf"|{LOCK_NAME}|{KEEPER_NAME}|{QUARANTINE_NAME}|{LEASES_NAME}"
    # What sinks and sidecars keep here, which may come before the first segment.
    rf"|(feed-.+\.numbers|publish-.+\.json)(\.lock|\.new)?|{re.escape(PROBE_PREFIX)}.+"
)


def segment_name(base_seq: int) -> str:
    """File name of the segment whose first batch is `base_seq`."""
    return f"{base_seq:020d}.kvlog"


def segment_paths(directory: Path) -> list[Path]:
    """The segments of a log, oldest first: of one that is there compressed and as written, as written.

    Other names are not looked at.
    """
    names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    of_number = {first_seq(Path(name)): name for name in sorted(names, reverse=True)}
    return [directory / of_number[number] for number in sorted(of_number)]


def compressed_path(path: Path) -> Path:
    """The name of a segment when it is compressed."""
    return path.with_suffix(COMPRESSED_SUFFIX)


def remove_segment(path: Path) -> None:
    """Remove it, in whichever form it is there, or in both. Raises OSError."""
    compressed_path(path).unlink(missing_ok=True)
    path.with_name(segment_name(first_seq(path))).unlink(missing_ok=True)


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
    """No frame can be read at this place. `certain`: interrupted writing cannot have caused it."""

    offset: int
    reason: str
    certain: bool = False


class Segment:
    """One segment file, open for reading; `offset` is where the next frame begins.

    Opening raises LogDamaged if it is no file or nothing in it is whole, and OSError; reading a compressed one where
    that cannot be done, ZstdMissing.
    """

    def __init__(self, path: Path) -> None:
        self.offset = SEGMENT_HEADER_BYTES
        self._window = memoryview(b"")
        self._window_start = 0
        self._header: SegmentHeader | None = None
        self._seed = 0
        self._stored = open_stored(path)
        self.path = self._stored.path
        """The file's, which may have another form than that asked for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stored.close()

    @property
    def descriptor(self) -> int:
        """Of the file."""
        return self._stored.descriptor

    @property
    def is_compressed(self) -> bool:
        """Whether the file holds its bytes compressed; it was complete then."""
        return self._stored.is_compressed

    def size(self) -> int:
        """Bytes in the segment now."""
        return self._stored.size()

    def data(self, offset: int, count: int) -> bytes:
        """So many bytes from there on; fewer only at the end."""
        return bytes(self._stored.read(offset, count, count)[:count])

    def replaced(self) -> bool:
        """Whether the name now means another file, or none."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._stored.descriptor))
        except FileNotFoundError:
            return True

    def renewed(self) -> bool:
        """Whether the writer has put a copy in the place of the file, of which a sync had failed; go on in that then.

        It holds what was durable, and what was behind that is written there once more: places stay the same.
        """
        if self._header is None or self.is_compressed or not self.replaced():
            return False
        try:
            stored = open_stored(self.path)
        except FileNotFoundError:
            return False  # It is not to be kept any longer, or is compressed.
        data = stored.read(0, SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES)
        short = stored.is_compressed or len(data) < SEGMENT_HEADER_BYTES
        if short or parse_segment_header(data) != self._header:
            stored.close()
            return False
        self._stored.close()
        self._stored, self._window = stored, memoryview(b"")
        return True

    def header(self) -> SegmentHeader | None:
        """The segment's header; None if the file is too short to have one.

        Raises LogDamaged if it is not intact, LogTooNew if it is of a newer version.
        """
        data = self._bytes(0, SEGMENT_HEADER_BYTES)
        if len(data) < SEGMENT_HEADER_BYTES:
            return None
        header = parse_segment_header(data)
        if header is None:
            raise LogDamaged(self.path, 0, None, "the segment header is not intact")
        if header.version > VERSION:
            raise LogTooNew(self.path, header.version)
        if header.event_format > FORMAT_VERSION:
            raise LogTooNew(self.path, header.event_format)
        if header.epoch > MAX_EPOCH:
            raise LogDamaged(self.path, 0, header.base_seq, "no log has so many epochs")
        if header.base_seq != first_seq(self.path):
            raise LogDamaged(self.path, 0, header.base_seq, "the file name is not that of this segment")
        self._header, self._seed = header, seed_of(header.log_id, header.epoch)
        return header

    def read(self, chain: Chain) -> Frame | Broken | None:
        """The frame at `offset`, which must continue `chain`; both then go on. None at the end of the file."""
        start = self.offset
        data = self._bytes(start, FRAME_HEADER_BYTES)
        if len(data) < FRAME_HEADER_BYTES:
            return self._broken("a frame header is cut short") if data else None
        header = parse_frame_header(data, self._seed)
        if header is None:
            return self._broken("a frame header is not intact")
        refusal = chain.refuses_frame(header)
        if refusal is not None:
            return self._broken(refusal, certain=True)
        payload = self._payload(start + FRAME_HEADER_BYTES, header)
        if payload is None:
            return self._broken("a frame's payload is cut short or not intact")
        chain.follow(header)
        self.offset += FRAME_HEADER_BYTES + header.payload_bytes
        return Frame(header, start, payload)

    def _broken(self, reason: str, certain: bool = False) -> Broken:
        # The next look must be at the file: recovery may cut what is broken, a writer may complete it.
        self._window = memoryview(b"")
        if self._stored.is_compressed:
            return Broken(
                self.offset, NOT_INTACT if self._stored.is_lost(self.offset) else reason, certain=True
            )
        return Broken(self.offset, reason, certain)

    def _payload(self, start: int, header: FrameHeader) -> memoryview | None:
        # The size is looked at first so that a cut file does not make us ask for a gigabyte of nothing.
        if header.payload_bytes > _WINDOW_BYTES and start + header.payload_bytes > self._stored.end(start):
            return None
        payload = self._bytes(start, header.payload_bytes)
        if len(payload) != header.payload_bytes or crc32(payload) != header.payload_crc:
            return None
        return payload

    def is_damaged(self, found: Broken, chain: Chain, *, is_last: bool) -> bool:
        """Whether what is broken was whole once; if not, it is where writing was interrupted."""
        return not is_last or found.certain or self.synced_before_a_frame_behind(found.offset, chain.seq)

    def synced_before_a_frame_behind(self, offset: int, seq: int) -> bool:
        """Whether the header of a batch later than `seq` after `offset` says that all before it was on disk."""
        position = offset + 1
        while True:
            chunk = self._stored.read(position, _WINDOW_BYTES, _WINDOW_BYTES)
            for hit in _SYNC.finditer(chunk, 0, max(len(chunk) - FRAME_HEADER_BYTES + len(SYNC), 0)):
                header = parse_frame_header(chunk[hit.start() : hit.start() + FRAME_HEADER_BYTES], self._seed)
                if header is not None and header.seq > seq and header.flags & BEHIND_SYNC:
                    return True
            if len(chunk) < FRAME_HEADER_BYTES:
                return False
            # Chunks overlap, so that a header across their border is seen.
            position += len(chunk) - FRAME_HEADER_BYTES + 1

    def _bytes(self, offset: int, count: int) -> memoryview:
        """Up to `count` bytes at `offset`; fewer only at the end of the file."""
        begin = offset - self._window_start
        if begin < 0 or begin + count > len(self._window):
            self._window = memoryview(self._stored.read(offset, count, _WINDOW_BYTES))
            self._window_start, begin = offset, 0
        return self._window[begin : begin + count]
