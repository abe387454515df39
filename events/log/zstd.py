"""zstd: a part of Python from 3.14 on; before that, it comes with the extra `zstd`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from events.errors import ZstdMissing


def _module() -> ModuleType:
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def require_zstd(path: Path) -> None:
    """Raise `ZstdMissing` where it is not installed; `path` is what it would be needed for."""
    try:
        _module()
    except ImportError:
        raise ZstdMissing(path) from None


def compressed(data: bytes, level: int) -> bytes:
    """One frame of zstd, which says how long it is."""
    result: bytes = _module().compress(data, level)
    return result


def decompressed(data: bytes, most: int) -> bytes:
    """What `compressed` was given. Raises ValueError if that is nothing, or more than `most` bytes."""
    zstd = _module()
    decoder = zstd.ZstdDecompressor()
    try:
        result: bytes = decoder.decompress(data, max_length=most)
    except zstd.ZstdError:
        raise ValueError("no zstd") from None
    if not decoder.eof or decoder.unused_data:
        raise ValueError("not one whole frame of zstd")
    return result
