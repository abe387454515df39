"""The written form of frames: each by itself, or together in compressed ones (`events.log.frames`)."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from zlib import crc32

from events.errors import ZstdMissing
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

BLOCK_BYTES = 64 << 10
"""Bytes of frames that fill a compressed one."""
_CRC_PIECE = 5120
"""Size up to which zlib keeps the GIL."""


class Portion(NamedTuple):
    """Bytes that are on disk as a whole or not at all."""

    parts: tuple[bytes, ...]
    last: FrameHeader
    """The last frame in it."""
    frames: int = 1

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(map(len, self.parts))


class Block:
    """Frames to be compressed together; one stream after the other, with a window of `2**window_log` bytes."""

    def __init__(self, seed: int, window_log: int) -> None:
        self._seed, self._window_log = seed, window_log
        self._compressor: Compressor | None = None
        self._headers: list[FrameHeader] = []
        self._parts: list[bytes | memoryview] = []
        self.size = 0
        """Bytes of the waiting frames."""
        self.taken = 0
        """Bytes of all frames."""

    @property
    def is_full(self) -> bool:
        """True if it is to be taken before another frame is added."""
        return self.size >= BLOCK_BYTES

    def takes(self, size: int, flags: int) -> bool:
        """Return True if a frame of this size can join the waiting ones. A loss before it ends a stream."""
        is_out = flags & CLOSED or (flags & AFTER_LOSS and self.size)
        return bool(self._window_log) and size <= MAX_EXPANDED - self.size and not is_out

    def add(self, header: FrameHeader, payload: bytes | memoryview) -> None:
        """Add a frame."""
        self._headers.append(header)
        self._parts += (pack_frame_header(header, self._seed), payload)
        size = FRAME_HEADER_BYTES + header.payload_bytes
        self.size, self.taken = self.size + size, self.taken + size

    def take(self, flags: int = 0) -> Portion | None:
        """Take the waiting frames, compressed; None: there are none. Raises zstd's errors, and then changes nothing."""
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
    """Return the CRC without releasing the GIL: two thread switches take longer than the checksum."""
    if len(payload) <= _CRC_PIECE:
        return crc32(payload)
    crc = 0
    for start in range(0, len(payload), _CRC_PIECE):
        crc = crc32(payload[start : start + _CRC_PIECE], crc)
    return crc


MAX_WINDOW_LOG = 27
"""Maximal window of a stream, as a power of two: 128 MiB, the memory that a reader needs."""
MIN_WINDOW_LOG = 10
_LEVEL = 1


def zstd_module() -> ModuleType:
    """Return the standard library's module, or the package that stands in before Python 3.14. Raises ImportError."""
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def window_log(window: int) -> int:
    """Return the power of two for a window in bytes, within the limits of streams."""
    return max(MIN_WINDOW_LOG, min(window.bit_length() - 1, MAX_WINDOW_LOG))


def has_zstd() -> bool:
    """Return True if zstd is available."""
    try:
        zstd_module()
    except ImportError:
        return False
    return True


class Compressor:
    """The compressing end of a stream that refers back to `2**window_log` bytes. Raises ImportError without zstd."""

    def __init__(self, window_log: int) -> None:
        zstd = zstd_module()
        parameter = zstd.CompressionParameter
        self._zstd = zstd.ZstdCompressor(
            options={
                parameter.compression_level: _LEVEL,
                parameter.window_log: window_log,
                parameter.enable_long_distance_matching: 1,
            }
        )

    def compressed(self, data: bytes) -> bytes:
        """Return the next bytes of the stream, expandable without those that follow. Lets other threads run."""
        result: bytes = self._zstd.compress(data, self._zstd.FLUSH_BLOCK)
        return result


class Expander:
    """The expanding end. `path` is the file that needs it; raises ZstdMissing."""

    def __init__(self, path: Path, window_log: int) -> None:
        if not has_zstd():
            raise ZstdMissing(path)
        zstd = zstd_module()
        self._error = zstd.ZstdError
        self._zstd = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: max(window_log, MIN_WINDOW_LOG)}
        )

    def expanded(self, data: bytes | memoryview, size: int) -> bytes:
        """Return the next `size` bytes of the stream. Raises ValueError if `data` does not hold exactly these."""
        try:
            result: bytes = self._zstd.decompress(data, size + 1)
        except (self._error, EOFError):
            raise ValueError("no zstd") from None
        if len(result) != size or self._zstd.eof:
            raise ValueError("another size")
        return result


def expanded_frame(path: Path, data: bytes, most: int) -> bytes:
    """Expand one zstd frame of up to `most` bytes. Raises ValueError if it is none, and ZstdMissing for `path`."""
    if not has_zstd():
        raise ZstdMissing(path)
    zstd = zstd_module()
    try:
        result: bytes = zstd.ZstdDecompressor().decompress(data, most)
    except zstd.ZstdError:
        raise ValueError("no zstd") from None
    return result
