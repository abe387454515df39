r"""The byte format of a log: segment headers and frames. No files here.

A segment file is a header of 64 bytes and consecutive frames, without padding. One frame is one batch: it is there as a
whole or not at all. All numbers are little-endian, all checksums CRC-32 (zlib).

Segment header::

    magic "KVEVLOG\0" | version u16 | event format u16 | window u32 | log id 16 bytes | epoch u64 |
    segment number u64 | first seq u64 | payload CRC of the frame before u32 | header CRC u32

`window` is how far compressed frames refer back, as a power of two (0: none is compressed).

The header and its CRC keep their places in every version, so that a newer log is distinguished from a damaged one.

Frame::

    sync word | payload bytes u32 | seq u64 | events u32 | flags u32 |
    payload CRC of the frame before u32 | payload CRC u32 | header CRC u32 | payload (msgpack)

The reasons:

- the header has its own CRC, so a length is trusted only after that (nothing is allocated for a wrong one);
- the CRC of the frame before, and `seq`, chain the frames: one that is missing, moved or repeated shows;
- header CRCs start from a checksum of log id and epoch: frames of another log, or of an earlier life of
  the same disk blocks, cannot pass, and neither can bytes that a user smuggled in as his prompt;
- the sync word lets a reader look for frames after a broken one: finding one proves damage, finding none means that
  writing was interrupted there. Its first byte never begins a msgpack value.
- frames that one sync makes durable together may reach the disk in any order. So the first of them states that all
  before it was on disk by then (`AFTER_SYNC`): a broken frame before such a one is damage, any other is an interrupted
  write;
- no clock, and but for that flag nothing that depends on timing: unsynced, equal batches give equal files.

Frames that are written together may be compressed together. Then they are in a frame with `COMPRESSED`, and its payload
is the next block of a zstd stream (`events.log.zstd`); seq, flags and the CRC before are those of the first frame in
it, and in the place of the number of events is the size of the frames. So the above holds for such a frame as for any,
and finding a torn end needs no expansion. Its content is frames as they would be written otherwise, except for
`AFTER_SYNC`. One with `BEGINS_STREAM`, as the first one of a segment is, is expanded without those before it. A reader
expands no more than `MAX_EXPANDED` at a time, and keeps no more than the segment's window.

A last frame with `CLOSED`, no payload, and the seq after the last batch marks an orderly end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

MAGIC = b"KVEVLOG\0"
VERSION = 2
"""Version of segments and frames; in 1, nothing is compressed. A reader refuses a newer one. (That of the events:
`events.types.FORMAT_VERSION`.)"""
SYNC = b"\xc1KVF"
MAX_PAYLOAD = 1 << 30
MAX_EXPANDED = 64 << 20
"""Limit of the frames' bytes in a compressed one."""

CLOSED = 1
"""Flag: the end of an epoch, not a batch."""
AFTER_LOSS = 2
"""Flag: the batches before this one, back to the frame before, were dropped by a full queue."""
AFTER_SYNC = 4
"""Flag: all frames before this one were on disk when it was written."""
COMPRESSED = 8
"""Flag: the payload is a block of a zstd stream, and `events` is the size of the frames in it."""
BEGINS_STREAM = 16
"""Flag: the block is the first one of a stream."""

_SEGMENT = struct.Struct("<8sHHI16sQQQI")
_FRAME = struct.Struct("<4sIQIIII")
_CRC = struct.Struct("<I")
SEGMENT_HEADER_BYTES = _SEGMENT.size + _CRC.size
FRAME_HEADER_BYTES = _FRAME.size + _CRC.size


class SegmentHeader(NamedTuple):
    """The header of a segment."""

    version: int
    event_format: int
    window_log: int
    """Reach of compressed frames; 0: there are none."""
    log_id: bytes
    epoch: int
    number: int
    """Counts the segments of a log, from 0."""
    base_seq: int
    previous_crc: int

    def pack(self, magic: bytes = MAGIC) -> bytes:
        """Pack the 64 bytes."""
        packed = _SEGMENT.pack(magic, *self)
        return packed + _CRC.pack(crc32(packed))

    def chain(self) -> Chain:
        """Return the chain that it continues, if nothing before it is known."""
        return Chain(self.log_id, self.epoch, self.number, self.base_seq, self.previous_crc)


def parse_segment_header(data: bytes | memoryview, magic: bytes = MAGIC) -> SegmentHeader | None:
    """Parse 64 bytes; None if they are no intact header."""
    found, *fields = _SEGMENT.unpack_from(data)
    if found != magic or _CRC.unpack_from(data, _SEGMENT.size)[0] != crc32(data[: _SEGMENT.size]):
        return None
    return SegmentHeader(*fields)


class FrameHeader(NamedTuple):
    """The header of a frame."""

    payload_bytes: int
    seq: int
    events: int
    flags: int
    previous_crc: int
    payload_crc: int


def seed_of(log_id: bytes, epoch: int) -> int:
    """Return the initial value of the header CRCs of one epoch."""
    return crc32(log_id + epoch.to_bytes(8, "little"))


def pack_frame_header(header: FrameHeader, seed: int) -> bytes:
    """Pack the header's 36 bytes."""
    packed = _FRAME.pack(SYNC, *header)
    return packed + _CRC.pack(crc32(packed, seed))


def parse_frame_header(data: bytes | memoryview, seed: int) -> FrameHeader | None:
    """Parse 36 bytes; None if they are no intact header of this log and epoch."""
    sync, *fields = _FRAME.unpack_from(data)
    if sync != SYNC or _CRC.unpack_from(data, _FRAME.size)[0] != crc32(data[: _FRAME.size], seed):
        return None
    return FrameHeader(*fields)


@dataclass
class Chain:
    """A position in a log: the values that the next segment and the next frame must continue.

    Readers check against it, recovery returns it, writers begin with it.
    """

    log_id: bytes | None = None
    """Id of the log; None before the first segment."""
    epoch: int = 0
    number: int = 0
    """Number of the next segment."""
    seq: int = 0
    """Number of the next frame."""
    crc: int = 0
    """Payload CRC of the last frame."""
    closed: bool = False
    """True if the last frame ended its epoch."""
    after_damage: bool = False
    """True if the last frame is unknown, because of damage."""

    def refuses_segment(self, header: SegmentHeader) -> str | None:
        """Return the reason why this segment cannot be the next one; None if it can."""
        if header.number != self.number:
            return f"segment {self.number} is missing"
        if self.log_id is not None and header.log_id != self.log_id:
            return "the segment belongs to another log"
        if header.epoch < self.epoch or (self.closed and header.epoch == self.epoch):
            return "the segment belongs to an epoch that has ended"
        broken = header.previous_crc != self.crc and not self.after_damage
        if broken or header.base_seq < self.seq:
            return "frames are missing before this segment"
        return None

    def enter(self, header: SegmentHeader) -> None:
        """Advance into a segment."""
        if self.after_damage:
            self.crc, self.seq = header.previous_crc, max(self.seq, header.base_seq)
        self.log_id, self.epoch, self.number = header.log_id, header.epoch, header.number + 1
        self.closed = self.after_damage = False

    def refuses_frame(self, header: FrameHeader) -> str | None:
        """Return the reason why this frame cannot be the next one; None if it can."""
        if self.closed:
            return "a frame follows the end of its epoch"
        if header.previous_crc != self.crc and not self.after_damage:
            return "the frame does not continue the previous one"
        if header.seq != self.seq and not (header.flags & AFTER_LOSS and header.seq > self.seq):
            return f"the frame is of batch {header.seq}"
        if header.payload_bytes > MAX_PAYLOAD or (header.flags & COMPRESSED and header.events > MAX_EXPANDED):
            return "the frame exceeds the maximum size"
        return None

    def follow(self, header: FrameHeader) -> None:
        """Advance over a frame that was not refused."""
        self.closed = bool(header.flags & CLOSED)
        self.seq = header.seq + (not self.closed)
        self.crc, self.after_damage = header.payload_crc, False
