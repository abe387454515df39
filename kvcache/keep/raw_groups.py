"""A compressed segment once more, as docs/log.md describes it: see `kvcache.keep.raw`."""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from zlib import crc32

from events.errors import LogDamaged, LogTooNew, ZstdMissing

VERSION = 1
_SYNC = b"\xc1KVG"
_HEADER = struct.Struct("<4s2H2I2Q2I")
_CHUNK = 1 << 20
_KEY = 32


class _Place(NamedTuple):
    """A group whose header is whole."""

    begin: int
    end: int
    """Of what it holds, in the segment."""
    at: int
    stored: int
    """In the file."""
    method: int
    crc: int
    whole: int


class Groups:
    """The bytes of a segment that is compressed; `disk` reads its file. What is not intact is zeros."""

    def __init__(self, path: Path, disk: Callable[[int, int], bytes]) -> None:
        self._path, self._disk = path, disk
        self._places = self._find()
        if not self._places:
            raise LogDamaged(path, 0, None, "nothing of the compressed segment is intact")
        self._last: tuple[_Place, bytes] | None = None

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return self._places[0].whole

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from there; fewer only at the end of the segment."""
        end = min(offset + count, self.size)
        data = bytearray(max(end - offset, 0))
        for place in self._places:
            first, last = max(offset, place.begin), min(end, place.end)
            if first < last:
                held = self._expanded(place)
                data[first - offset : last - offset] = held[first - place.begin : last - place.begin]
        return bytes(data)

    def is_lost(self, offset: int) -> bool:
        """Whether what stood there cannot be expanded."""
        around = [place for place in self._places if place.begin <= offset < place.end]
        return offset < self.size and not (around and any(self._expanded(around[0])))

    def _find(self) -> list[_Place]:
        """All groups, each behind the one before."""
        places, at = list[_Place](), 0
        while (place := self._next(at)) is not None:
            before = places[-1] if places else None
            if place.begin < place.end <= place.whole and (
                before is None or (before.end <= place.begin and before.whole == place.whole)
            ):
                places.append(place)
            # The next one stands right behind it, or else anywhere.
            behind = self._header(place.at + place.stored)
            at = place.at if behind is None else place.at + place.stored
        return places

    def _next(self, at: int) -> _Place | None:
        """The first whole header from there on."""
        while len(chunk := self._disk(at, _CHUNK)) >= _HEADER.size:
            found = chunk.find(_SYNC)
            while found >= 0:
                place = self._header(at + found)
                if place is not None:
                    return place
                found = chunk.find(_SYNC, found + 1)
            at += len(chunk) - len(_SYNC) + 1
        return None

    def _header(self, at: int) -> _Place | None:
        data = self._disk(at, _HEADER.size)
        if len(data) < _HEADER.size:
            return None
        sync, version, method, stored, size, begin, whole, crc, own = _HEADER.unpack(data)
        if sync != _SYNC or own != crc32(data[:-4]):
            return None
        if version > VERSION:
            raise LogTooNew(self._path, version)
        return _Place(begin, begin + size, at + _HEADER.size, stored, method, crc, whole)

    def _expanded(self, place: _Place) -> bytes:
        if self._last is None or self._last[0] != place:
            self._last = place, self._expand(place)
        return self._last[1]

    def _expand(self, place: _Place) -> bytes:
        zstd = _zstd(self._path) if place.method else None
        data, size = self._disk(place.at, place.stored), place.end - place.begin
        try:
            if len(data) == place.stored and crc32(data) == place.crc and place.method < 2:
                if zstd is not None:
                    # Whatever it says of itself, it is not more than this.
                    data = _put_in_order(zstd.ZstdDecompressor().decompress(data, 2 * size + 8), size)
                return data if len(data) == size else bytes(size)
        except (ValueError, struct.error):
            pass
        except Exception as error:
            if zstd is None or not isinstance(error, zstd.ZstdError):
                raise
        return bytes(size)


def _zstd(path: Path) -> ModuleType:
    try:
        return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        raise ZstdMissing(path) from None


def _put_in_order(data: bytes, size: int) -> bytes:
    """A group's bytes as they stand in the segment. Raises ValueError, struct.error."""
    count, numbers = struct.unpack_from("<2I", data)
    rest, quarter = 8 + numbers, numbers // 4
    if rest > len(data) or 16 * count > numbers or numbers % 4:
        raise ValueError("too short")
    column = bytearray(4 * quarter)
    for plane in range(4):
        column[plane::4] = data[8 + plane * quarter : 8 + (plane + 1) * quarter]
    out, at, keys = bytearray(), 16 * count, list[tuple[int, int, int, int]]()
    for gap, length, tokens, block in struct.iter_unpack("<4I", column[: 16 * count]):
        if len(out) + gap + length > size:
            raise ValueError("too long")
        out += data[rest : rest + gap]
        rest += gap
        if block:
            if len(out) < _KEY or length % _KEY or tokens + length // _KEY * block > size:
                raise ValueError("keys that follow from nothing")
            keys.append((len(out), length, tokens, block))
            out += bytes(length)
        else:
            out += column[at : at + length]
            at += length
    out += data[rest:]
    for begin, length, tokens, block in keys:
        key, whole = bytes(out[begin - _KEY : begin]), bytes(out[tokens : tokens + length // _KEY * block])
        for number in range(length // _KEY):
            key = hashlib.sha256(key + whole[number * block : (number + 1) * block]).digest()
            out[begin + number * _KEY : begin + (number + 1) * _KEY] = key
    return bytes(out)
