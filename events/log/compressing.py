"""Frames as they are written: each by itself, or together in compressed ones (`events.log.frames`)."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from events.log.frames import (
    AFTER_LOSS,
    BEGINS_STREAM,
    CLOSED,
    COMPRESSED,
    FRAME_HEADER_BYTES,
    MAX_EXPANDED,
    FrameHeader,
    pack_frame_header,
)
from events.log.zstd import Compressor

BLOCK_BYTES = 64 << 10
"""Frames of so many bytes fill a compressed one."""
_CRC_PIECE = 5120
"""Up to so many bytes zlib keeps the GIL."""


class Portion(NamedTuple):
    """What is on the disk as a whole or not at all."""

    parts: tuple[bytes, ...]
    last: FrameHeader
    """The last frame in it."""
    frames: int = 1

    @property
    def size(self) -> int:
        """Bytes of it."""
        return sum(map(len, self.parts))


class Block:
    """Frames that are to be compressed together; one stream after the other, with a window of `2**window_log` bytes."""

    def __init__(self, seed: int, window_log: int) -> None:
        self._seed, self._window_log = seed, window_log
        self._compressor: Compressor | None = None
        self._headers: list[FrameHeader] = []
        self._parts: list[bytes | memoryview] = []
        self.size = 0
        """Bytes of the frames that wait."""
        self.taken = 0
        """Bytes of all frames."""

    @property
    def is_full(self) -> bool:
        """Whether it is to be taken before another frame is added."""
        return self.size >= BLOCK_BYTES

    def takes(self, size: int, flags: int) -> bool:
        """Whether a frame of this size can be compressed with those that wait. What is lost before it ends a stream."""
        is_out = flags & CLOSED or (flags & AFTER_LOSS and self.size)
        return bool(self._window_log) and size <= MAX_EXPANDED - self.size and not is_out

    def add(self, header: FrameHeader, payload: bytes | memoryview) -> None:
        """Add a frame."""
        self._headers.append(header)
        self._parts += (pack_frame_header(header, self._seed), payload)
        size = FRAME_HEADER_BYTES + header.payload_bytes
        self.size, self.taken = self.size + size, self.taken + size

    def take(self, flags: int = 0) -> Portion | None:
        """The frames that wait, compressed; None: there are none. Raises what zstd raises, and then changes nothing."""
        if not self._headers:
            return None
        first, last, size = self._headers[0], self._headers[-1], self.size
        compressor, self._compressor = self._compressor, None
        if compressor is None or first.flags & AFTER_LOSS:
            compressor, flags = Compressor(self._window_log), flags | BEGINS_STREAM
        block = compressor.compressed(b"".join(self._parts))
        flags |= COMPRESSED | (first.flags & AFTER_LOSS)
        header = FrameHeader(len(block), first.seq, size, flags, first.previous_crc, checksum(block))
        parts = (pack_frame_header(header, self._seed), block)
        portion = Portion(parts, last, len(self._headers))
        self._headers, self._parts, self.size = [], [], 0
        self._compressor = compressor
        return portion


def checksum(payload: bytes) -> int:
    """The CRC, without letting another thread run meanwhile: two switches take longer than the checksum."""
    if len(payload) <= _CRC_PIECE:
        return crc32(payload)
    crc = 0
    for start in range(0, len(payload), _CRC_PIECE):
        crc = crc32(payload[start : start + _CRC_PIECE], crc)
    return crc
