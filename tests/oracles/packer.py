"""msgpack and log frames once more, written down from their specifications: what the real ones are compared with.

Nothing here may import the code under test.
"""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32


def pack(value: Any) -> bytes:
    """The shortest msgpack encoding of the types that events use."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return _pack_int(value)
    if isinstance(value, bytes):
        return _sized(len(value), ((8, 0xC4), (16, 0xC5), (32, 0xC6))) + value
    if isinstance(value, str):
        data = value.encode()
        head = bytes([0xA0 | len(data)]) if len(data) < 32 else _sized(len(data), ((8, 0xD9), (16, 0xDA)))
        return head + data
    assert isinstance(value, (list, tuple))
    head = bytes([0x90 | len(value)]) if len(value) < 16 else _sized(len(value), ((16, 0xDC), (32, 0xDD)))
    return head + b"".join(map(pack, value))


def _pack_int(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return struct.pack(">b", value)
    if value > 0:
        for bits, tag, code in ((8, 0xCC, "B"), (16, 0xCD, "H"), (32, 0xCE, "I"), (64, 0xCF, "Q")):
            if value < 1 << bits:
                return bytes([tag]) + struct.pack(">" + code, value)
    for bits, tag, code in ((8, 0xD0, "b"), (16, 0xD1, "h"), (32, 0xD2, "i"), (64, 0xD3, "q")):
        if value >= -(1 << (bits - 1)):
            return bytes([tag]) + struct.pack(">" + code, value)
    raise OverflowError


def _sized(size: int, forms: tuple[tuple[int, int], ...]) -> bytes:
    for bits, tag in forms:
        if size < 1 << bits:
            return bytes([tag]) + size.to_bytes(bits // 8, "big")
    raise OverflowError


def with_bytes(value: Any) -> Any:
    """Golden files write bytes as strings that begin with 0x."""
    if isinstance(value, list):
        return [with_bytes(item) for item in value]
    if isinstance(value, str) and value.startswith("0x"):
        return bytes.fromhex(value[2:])
    return value


def segment_header(
    log_id: bytes,
    epoch: int,
    number: int,
    base_seq: int,
    previous_crc: int = 0,
    version: int = 1,
    event_format: int = 1,
    window: int = 0,
) -> bytes:
    """The 64 bytes at the start of a segment."""
    data = b"KVEVLOG\0" + struct.pack("<HHI", version, event_format, window) + log_id
    data += struct.pack("<QQQI", epoch, number, base_seq, previous_crc)
    return data + struct.pack("<I", crc32(data))


def frame(
    log_id: bytes, epoch: int, seq: int, payload: bytes, events: int, previous_crc: int = 0, flags: int = 0
) -> bytes:
    """One frame."""
    data = b"\xc1KVF" + struct.pack("<IQII", len(payload), seq, events, flags)
    data += struct.pack("<II", previous_crc, crc32(payload))
    seed = crc32(log_id + struct.pack("<Q", epoch))
    return data + struct.pack("<I", crc32(data, seed)) + payload
