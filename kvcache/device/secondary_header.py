"""The beginning of a secondary file: of which cache its blocks are, so that no other one ever serves them.

A prefix of fixed size, then JSON, then zeros up to `DATA_ALIGNMENT`. Whatever else is there, blocks of another
`content_id` or shape are refused; which of ours are still right the checksums in the log tell.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self
from zlib import crc32

from events.types import SECONDARY
from kvcache.device.secondary_errors import (
    NotASecondaryFile,
    SecondaryFileDamaged,
    SecondaryFileOfOther,
    SecondaryFileTooNew,
)
from kvcache.layout import Layout

VERSION = 1
DATA_ALIGNMENT = 4096
"""Header and pools begin at multiples of this, in bytes: a page, which a GPU can be given."""
DEPENDS_ON = (
    "what else K and V depend on (model_variant, dtype, layers, heads, windows, max_sequence_length, layout)"
)
"""What `content_id` is made of, for people."""
_MAGIC = b"KVCACHE2"
_PREFIX = struct.Struct("<8sIII")
"""Magic, version, bytes of JSON, CRC-32 of the JSON."""


def aligned(size: int) -> int:
    """The next multiple of `DATA_ALIGNMENT`."""
    return -(-size // DATA_ALIGNMENT) * DATA_ALIGNMENT


@dataclass(frozen=True, slots=True)
class SecondaryHeader:
    """Whose blocks lie in a file, and where."""

    content_id: str
    """What the bytes of a block mean (`Layout.content_id`)."""
    blocks: list[int]
    """Per group."""
    bytes_per_block: list[list[int]]
    """Per group and pool."""

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Of the file for a cache of this layout."""
        groups = layout.groups
        return cls(
            layout.content_id,
            [group.num_blocks[SECONDARY] for group in groups],
            [[pool.bytes_per_block for pool in group.pools] for group in groups],
        )

    def pack(self) -> bytes:
        """As it stands in the file."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        packed = _PREFIX.pack(_MAGIC, VERSION, len(text), crc32(text)) + text
        return packed.ljust(aligned(len(packed)), b"\0")

    def places(self) -> tuple[list[list[int]], int]:
        """Where each pool of each group begins, and where all ends, in bytes from the start of the file."""
        offset, places = len(self.pack()), list[list[int]]()
        for blocks, pools in zip(self.blocks, self.bytes_per_block, strict=True):
            places.append([])
            for size in pools:
                places[-1].append(offset)
                offset = aligned(offset + blocks * size)
        return places, offset

    def refuse_other(self, path: Path, found: bytes, size: int) -> None:
        """Raise a `SecondaryFileError` unless a file that begins with `found` and has so many bytes is ours."""
        text = _text_of(path, found)
        try:
            there = json.loads(text)
            content_id, shape = there["content_id"], (there["blocks"], there["bytes_per_block"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise SecondaryFileDamaged(path, "its header cannot be read") from None
        if content_id != self.content_id:
            raise SecondaryFileOfOther(path, f"another model, or {DEPENDS_ON}")
        if shape != (self.blocks, self.bytes_per_block):
            what = f"{shape[0]} secondary blocks per window where the settings give {self.blocks}"
            raise SecondaryFileOfOther(path, what)
        if size != self.places()[1]:
            raise SecondaryFileDamaged(path, f"it has {size:,} bytes, {self.places()[1]:,} belong to it")


def _text_of(path: Path, found: bytes) -> bytes:
    if len(found) < _PREFIX.size or not found.startswith(_MAGIC):
        raise NotASecondaryFile(path)
    _, version, length, checksum = _PREFIX.unpack_from(found)
    if version > VERSION:
        raise SecondaryFileTooNew(path, version)
    text = found[_PREFIX.size : _PREFIX.size + length]
    if version != VERSION or len(text) != length or crc32(text) != checksum:
        raise SecondaryFileDamaged(path, "its header is not what was written")
    return text
