"""msgpack of vLLM's events, written down from the specification of msgpack: what the real code is compared with.

JSON cannot say all that msgpack can, so these stand for themselves in the golden file: ``"0x…"`` bytes,
``{"$u64": n}`` and ``{"$u32": n}`` numbers of a fixed width, ``{"$map16": {…}}`` a map with a 16-bit length.
"""

from __future__ import annotations

import struct
from typing import Any

from tests.oracles.packer import pack

_WIDTHS = {"$u64": (b"\xcf", ">Q"), "$u32": (b"\xce", ">I")}


def pack_wire(value: Any) -> bytes:
    """The bytes of a value of the golden file."""
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str) and value.startswith("0x"):
        return pack(bytes.fromhex(value[2:]))
    if isinstance(value, list):
        head = bytes([0x90 | len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))
        return head + b"".join(map(pack_wire, value))
    if not isinstance(value, dict):
        return pack(value)
    if "$map16" in value:
        return b"\xde" + struct.pack(">H", len(value["$map16"])) + _items(value["$map16"])
    for name, (head, form) in _WIDTHS.items():
        if name in value:
            return head + struct.pack(form, value[name])
    assert len(value) < 16
    return bytes([0x80 | len(value)]) + _items(value)


def _items(value: dict[str, Any]) -> bytes:
    return b"".join(pack(key) + pack_wire(item) for key, item in value.items())
