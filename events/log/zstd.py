"""Frames of a log as one zstd stream per segment, compressed and expanded block by block.

Level 1 with long-distance matching: agents send whole conversations again, so what a prompt repeats is megabytes back.
zstd is a part of Python from 3.14 on; before that, it comes with the extra `zstd`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from events.errors import ZstdMissing

MAX_WINDOW_LOG = 27
"""What a stream may refer back to, as a power of two: 128 MiB, which is what a reader needs memory for."""
MIN_WINDOW_LOG = 10
_LEVEL = 1


def _module() -> ModuleType:
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def window_log(window: int) -> int:
    """The power of two that stands for so many bytes, or more or less where streams cannot refer back so far."""
    return max(MIN_WINDOW_LOG, min(window.bit_length() - 1, MAX_WINDOW_LOG))


def has_zstd() -> bool:
    """Whether anything can be compressed and expanded here."""
    try:
        _module()
    except ImportError:
        return False
    return True


class Compressor:
    """The writing end of a stream that refers back to `2**window_log` bytes. Raises ImportError without zstd."""

    def __init__(self, window_log: int) -> None:
        zstd = _module()
        parameter = zstd.CompressionParameter
        self._zstd = zstd.ZstdCompressor(
            options={
                parameter.compression_level: _LEVEL,
                parameter.window_log: window_log,
                parameter.enable_long_distance_matching: 1,
            }
        )

    def compressed(self, data: bytes) -> bytes:
        """The next bytes of the stream, which can be expanded without those that follow. Lets other threads run."""
        result: bytes = self._zstd.compress(data, self._zstd.FLUSH_BLOCK)
        return result


class Expander:
    """The reading end. `path` is what it is needed for; raises ZstdMissing."""

    def __init__(self, path: Path, window_log: int) -> None:
        if not has_zstd():
            raise ZstdMissing(path)
        zstd = _module()
        self._error = zstd.ZstdError
        self._zstd = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: max(window_log, MIN_WINDOW_LOG)}
        )

    def expanded(self, data: bytes | memoryview, size: int) -> bytes:
        """The next `size` bytes of the stream. Raises ValueError if these are not what `data` holds."""
        try:
            result: bytes = self._zstd.decompress(data, size + 1)
        except (self._error, EOFError):
            raise ValueError("no zstd") from None
        if len(result) != size or self._zstd.eof:
            raise ValueError("another size")
        return result


def expanded_frame(path: Path, data: bytes, most: int) -> bytes:
    """One whole frame of zstd, up to so many bytes. Raises ValueError if it is none, and ZstdMissing for `path`."""
    if not has_zstd():
        raise ZstdMissing(path)
    zstd = _module()
    try:
        result: bytes = zstd.ZstdDecompressor().decompress(data, most)
    except zstd.ZstdError:
        raise ValueError("no zstd") from None
    return result
