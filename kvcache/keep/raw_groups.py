"""A compressed segment once more, as docs/log.md describes it: see `kvcache.keep.raw`."""

from __future__ import annotations

import hashlib
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from zlib import crc32

from events.errors import LogDamaged, LogTooNew, ZstdMissing

VERSION = 1
_SYNC = b"\xc1KVG"
_HEADER = struct.Struct("<4s2H2I2Q2I")
_CHUNK = 1 << 16
_KEY = 32
_MOST_TIMES, _MOST_HASHED = 1024, 16
"""A group holds no more than so many times its bytes in the file, and hashes no more than so many times that."""


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
        self._begins = [place.begin for place in self._places]
        self._last: tuple[_Place, bytes | None] | None = None

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return self._places[0].whole

    @property
    def held(self) -> int:
        """Bytes of it that there are groups for."""
        return sum(place.end - place.begin for place in self._places)

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from there; fewer only at the end of the segment."""
        end = min(offset + count, self.size)
        data = bytearray(max(end - offset, 0))
        for place in islice(self._places, max(bisect_right(self._begins, offset) - 1, 0), None):
            if place.begin >= end:
                break
            first, last = max(offset, place.begin), min(end, place.end)
            if first < last and (held := self._expanded(place)) is not None:
                data[first - offset : last - offset] = held[first - place.begin : last - place.begin]
        return bytes(data)

    def _around(self, offset: int) -> _Place | None:
        at = bisect_right(self._begins, offset) - 1
        return self._places[at] if at >= 0 and offset < self._places[at].end else None

    def end(self, offset: int) -> int:
        """Where the group ends in which this stands: no frame is in two of them."""
        around = self._around(offset)
        return offset if around is None else around.end

    def behind_hole(self, offset: int) -> int:
        """The first place from there on that a group holds; the end of the segment if there is none."""
        at = bisect_right(self._begins, offset)
        if self._around(offset) is not None:
            return offset
        return self._begins[at] if at < len(self._begins) else self.size

    def is_lost(self, offset: int) -> bool:
        """Whether what stood there cannot be expanded."""
        around = self._around(offset)
        return offset < self.size and (around is None or self._expanded(around) is None)

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
        if (place := self._header(at)) is not None:
            return place
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

    def _expanded(self, place: _Place) -> bytes | None:
        """What a group holds; None: it is lost."""
        if self._last is None or self._last[0] != place:
            self._last = place, self._expand(place)
        return self._last[1]

    def _expand(self, place: _Place) -> bytes | None:
        zstd = _zstd(self._path) if place.method else None
        data, size = self._disk(place.at, place.stored), place.end - place.begin
        if size > _MOST_TIMES * place.stored:
            return None
        try:
            if len(data) == place.stored and crc32(data) == place.crc and place.method < 2:
                if zstd is not None:
                    # Whatever it says of itself, it is not more than this.
                    data = _put_in_order(zstd.ZstdDecompressor().decompress(data, 2 * size + 8), size)
                return data if len(data) == size else None
        except (ValueError, struct.error):
            pass
        except Exception as error:
            if zstd is None or not isinstance(error, zstd.ZstdError):
                raise
        return None


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
    if count * _KEY > size:
        raise ValueError("too many pieces")
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
    if sum(length // _KEY * block for _, length, _, block in keys) > _MOST_HASHED * size:
        raise ValueError("too many tokens")
    for begin, length, tokens, block in keys:
        key, whole = bytes(out[begin - _KEY : begin]), bytes(out[tokens : tokens + length // _KEY * block])
        for number in range(length // _KEY):
            key = hashlib.sha256(key + whole[number * block : (number + 1) * block]).digest()
            out[begin + number * _KEY : begin + (number + 1) * _KEY] = key
    return bytes(out)
