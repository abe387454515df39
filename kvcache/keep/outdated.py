"""Segments that format 1 kept compressed (`*.kvlogz`), which are converted and not read otherwise.

Such a file is groups behind each other, each with a header::

    sync word | version u16 | method u16 | bytes in the file u32 | bytes of the segment u32 |
    where these begin u64 | size of the whole segment u64 | CRC of the bytes in the file u32 | header CRC u32

Method 0: the segment's bytes. Method 1: zstd of `pieces u32 | bytes in planes u32 | planes | all the rest`. The planes
are the first bytes of 32-bit numbers, then the second, third and fourth ones: four numbers for each piece (bytes of the
rest before it, its own bytes, where its tokens begin, bytes of a block's tokens), then columns. A piece whose last two
numbers are 0 is a column; any other is keys, each the SHA-256 of the key before it and of the next block's tokens.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path
from zlib import crc32

from events.log.zstd import expanded_frame

_SYNC = b"\xc1KVG"
_HEADER = struct.Struct("<4sHHIIQQII")
_KEY = 32
_MOST_TIMES, _MOST_HASHED = 1024, 16
"""A group has no more bytes than so many times those in the file, and hashes no more tokens than so many times that."""


def expanded(path: Path, data: bytes) -> bytes:
    """The segment as it was written. Raises ValueError or struct.error where it is not whole, and ZstdMissing."""
    parts, at, begin, whole = list[bytes](), 0, 0, 1
    while begin < whole:
        sync, _, method, stored, size, begins, whole, crc, own = _HEADER.unpack(data[at : at + _HEADER.size])
        body = data[at + _HEADER.size : at + _HEADER.size + stored]
        if (sync, begins, crc, own) != (_SYNC, begin, crc32(body), crc32(data[at : at + _HEADER.size - 4])):
            raise ValueError("a group is not intact")
        if size > _MOST_TIMES * stored:
            raise ValueError("a group claims to be more than could be of use")
        parts.append(_in_order(expanded_frame(path, body, 2 * size + 8), size) if method else body)
        at, begin = at + _HEADER.size + stored, begin + len(parts[-1])
    if begin != whole or at != len(data):
        raise ValueError("it has another size")
    return b"".join(parts)


def _in_order(data: bytes, size: int) -> bytes:
    """A group's bytes as they stand in the segment."""
    count, numbers = struct.unpack_from("<2I", data)
    rest, quarter = 8 + numbers, numbers // 4
    if rest > len(data) or 16 * count > numbers or numbers % 4 or count * _KEY > size:
        raise ValueError("its pieces are not intact")
    column = bytearray(4 * quarter)
    for plane in range(4):
        column[plane::4] = data[8 + plane * quarter : 8 + (plane + 1) * quarter]
    out, at, keys = bytearray(), 16 * count, list[tuple[int, int, int, int]]()
    for gap, length, tokens, block in struct.iter_unpack("<4I", column[: 16 * count]):
        if len(out) + gap + length > size:
            raise ValueError("its pieces are too long")
        out += data[rest : rest + gap]
        rest += gap
        if block:
            keys.append((len(out), length, tokens, block))
            out += bytes(length)
        else:
            out += column[at : at + length]
            at += length
    out += data[rest:]
    if sum(length // _KEY * block for _, length, _, block in keys) > _MOST_HASHED * size:
        raise ValueError("its keys are made of too many tokens")
    for begin, length, tokens, block in keys:
        key, whole = bytes(out[begin - _KEY : begin]), bytes(out[tokens : tokens + length // _KEY * block])
        for number in range(length // _KEY):
            key = sha256(key + whole[number * block : (number + 1) * block]).digest()
            out[begin + number * _KEY : begin + (number + 1) * _KEY] = key
    if len(out) != size:
        raise ValueError("it has another size")
    return bytes(out)
