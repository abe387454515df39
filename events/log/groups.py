r"""The bytes of a compressed segment: groups, each of which holds a part of the segment's bytes. No files here.

A segment that is complete may be kept compressed. What is said of segments (`events.log.frames`) is said of its bytes
once they are expanded, which are those of the segment as it was written, to the last one. A compressed segment is
groups behind each other; no frame is in two of them, and each is expanded without the others. A group's header::

    sync word | version u16 | method u16 | bytes in the file u32 | bytes of the segment u32 |
    where these begin u64 | size of the whole segment u64 | CRC of the bytes in the file u32 | header CRC u32

Each header tells where its bytes belong and how long the segment is: what of a segment is missing is known, whichever
group is gone, and is read as zeros, which are no frame.

Method 0: the segment's bytes. Method 1: zstd of the segment's bytes in another order, without what follows from the
others::

    pieces u32 | bytes in planes u32 | planes | all the rest

The planes are the first bytes of 32-bit numbers, then the second ones, the third and the fourth, since small numbers
have the same third and fourth. The numbers are four for each piece, and then columns of events. A piece is::

    bytes of the rest before it | its bytes | where its tokens begin | bytes of a block's tokens

With 0 for the last two it is a column. Otherwise it is keys: each is the SHA-256 of the key before it (that of the
first one stands before the piece) and the next block's tokens, which begin so many bytes from the group's beginning.
What is a piece was for the writer to choose. Who expands a group needs to know nothing of events.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple
from zlib import crc32

import numpy as np

from events.log.zstd import compressed, decompressed

SYNC = b"\xc1KVG"
VERSION = 1
"""A reader refuses a newer one; sync word, version and CRC keep their places."""
PLAIN, ZSTD = 0, 1
KEY_BYTES = 32
_LEVEL = 1
_GROUP = struct.Struct("<4sHHIIQQI")
_CRC = struct.Struct("<I")
_COUNTS = struct.Struct("<II")
_PIECE_BYTES = 16
_LEAST_BYTES = KEY_BYTES
"""Of a piece, on average."""
_MOST_TIMES = 1024
"""A group has no more bytes than so many times those in the file."""
_MOST_HASHED = 16
"""Keys are made of no more tokens than so many times the bytes of their group; events of several windows share them."""
GROUP_HEADER_BYTES = _GROUP.size + _CRC.size


class GroupHeader(NamedTuple):
    """What the start of a group says."""

    version: int
    method: int
    stored: int
    """Bytes behind the header."""
    size: int
    """Bytes of the segment that it stands for."""
    begin: int
    """Where in the segment these begin."""
    whole: int
    """Bytes of the whole segment."""
    crc: int
    """Of what is behind the header."""

    def pack(self) -> bytes:
        """The 40 bytes."""
        packed = _GROUP.pack(SYNC, *self)
        return packed + _CRC.pack(crc32(packed))


def parse_group_header(data: bytes) -> GroupHeader | None:
    """Read 40 bytes; None if they are no intact header."""
    if len(data) < GROUP_HEADER_BYTES:
        return None
    sync, *fields = _GROUP.unpack_from(data)
    if sync != SYNC or _CRC.unpack_from(data, _GROUP.size)[0] != crc32(data[: _GROUP.size]):
        return None
    return GroupHeader(*fields)


class Piece(NamedTuple):
    """A part of a group's bytes that is stored in another way."""

    begin: int
    size: int
    tokens: int = 0
    """Of keys: where the tokens of the first one's block begin."""
    block: int = 0
    """Of keys: bytes of a block's tokens. 0: it is a column of 32-bit numbers."""


def group_of(data: bytes, begin: int, whole: int, pieces: Sequence[Piece] | None) -> bytes:
    """The group for the bytes from `begin` on of a segment of `whole` bytes. `pieces`: None leaves them as they are."""
    method, body = PLAIN, data
    if pieces is not None and _is_modest(len(data), pieces):
        arranged = compressed(_arranged(data, pieces), _LEVEL)
        if len(data) <= _MOST_TIMES * len(arranged):
            method, body = ZSTD, arranged
    return GroupHeader(VERSION, method, len(body), len(data), begin, whole, crc32(body)).pack() + body


def expand(header: GroupHeader, body: bytes) -> bytes:
    """The segment's bytes that a group holds. Raises ValueError where there is no making sense of it."""
    if len(body) != header.stored or crc32(body) != header.crc:
        raise ValueError("it is not intact")
    if header.size > _MOST_TIMES * header.stored:
        raise ValueError("it claims to be more than could be of use")
    if header.method == ZSTD:
        # Pieces are told in fewer bytes than they have.
        body = _restored(decompressed(body, 2 * header.size + _COUNTS.size), header.size)
    elif header.method != PLAIN:
        raise ValueError("an unknown method")
    if len(body) != header.size:
        raise ValueError("it has another size")
    return body


def keys_behind(key: bytes, tokens: bytes | memoryview, block: int) -> bytes:
    """The keys that continue this one, each of them with so many bytes of the tokens."""
    copy_empty, keys = sha256().copy, list[bytes]()  # cheaper than to construct
    for some in np.frombuffer(tokens, f"V{block}").tolist():
        digest = copy_empty()
        digest.update(key + some)
        key = digest.digest()
        keys.append(key)
    return b"".join(keys)


def _is_modest(size: int, pieces: Sequence[Piece]) -> bool:
    """Whether the pieces of a group of this size take no longer to put together than is of use."""
    hashed = sum(piece.size // KEY_BYTES * piece.block for piece in pieces)
    return len(pieces) * _LEAST_BYTES <= size and hashed <= _MOST_HASHED * size


def _arranged(data: bytes, pieces: Sequence[Piece]) -> bytes:
    """The bytes in the order in which they are compressed. Pieces stand one behind the other."""
    table, columns, rest, end = list[int](), list[bytes](), list[bytes](), 0
    for begin, size, tokens, block in pieces:
        table += (begin - end, size, tokens, block)
        rest.append(data[end:begin])
        end = begin + size
        if not block:
            columns.append(data[begin:end])
    rest.append(data[end:])
    numbers = np.frombuffer(np.array(table, "<u4").tobytes() + b"".join(columns), "<u4")
    planes = [(numbers >> shift).astype(np.uint8).tobytes() for shift in (0, 8, 16, 24)]
    return b"".join([_COUNTS.pack(len(pieces), numbers.nbytes), *planes, *rest])


def _restored(data: bytes, size: int) -> bytes:
    """The reverse of `_arranged`, for any bytes; raises ValueError."""
    if len(data) < _COUNTS.size:
        raise ValueError("it is cut short")
    count, numbers = _COUNTS.unpack_from(data)
    rest, column = _COUNTS.size + numbers, count * _PIECE_BYTES
    if rest > len(data) or column > numbers or numbers % 4:
        raise ValueError("it is cut short")
    if count * _LEAST_BYTES > size:
        raise ValueError("it has more pieces than bytes")
    planes = np.frombuffer(data, np.uint8, numbers, _COUNTS.size).reshape(4, -1)
    merged = np.empty((numbers // 4, 4), np.uint8)
    for at in range(4):
        merged[:, at] = planes[at]
    columns, parts, keys, left, end = merged.tobytes(), list[bytes](), list[Piece](), size, 0
    for gap, length, tokens, block in np.frombuffer(columns, "<u4", 4 * count).reshape(-1, 4).tolist():
        left -= gap + length
        if left < 0:
            raise ValueError("it has another size")
        parts.append(data[rest : rest + gap])
        parts.append(bytes(length) if block else columns[column : column + length])
        if block:
            keys.append(Piece(end + gap, length, tokens, block))
        else:
            column += length
        rest, end = rest + gap, end + gap + length
    parts.append(data[rest:])
    return _with_keys(b"".join(parts), keys)


def _with_keys(data: bytes, pieces: Sequence[Piece]) -> bytes:
    """The bytes with keys where their places are."""
    if not pieces:
        return data
    if not _is_modest(len(data), pieces):
        raise ValueError("its keys are made of more tokens than there are")
    parts, end = list[bytes | memoryview](), 0
    view = memoryview(data)
    for begin, size, tokens, block in pieces:
        until = tokens + size // KEY_BYTES * block
        if begin - KEY_BYTES < end or size % KEY_BYTES or until > len(data):
            raise ValueError("keys follow from nothing")
        parts.append(view[end:begin])
        parts.append(keys_behind(data[begin - KEY_BYTES : begin], view[tokens:until], block))
        end = begin + size
    parts.append(view[end:])
    return b"".join(parts)
