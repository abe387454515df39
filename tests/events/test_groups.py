"""The bytes of compressed segments: what a group is made of, and that it expands to."""

from __future__ import annotations

import hashlib
import random
import struct
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from events.log import groups, zstd
from events.log.groups import GROUP_HEADER_BYTES, Piece, expand, group_of, parse_group_header
from events.log.segments import Frame, Segment, segment_paths
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.keep.columns import Columns
from kvcache.keep.raw_groups import Groups


def chained(key: bytes, tokens: bytes, block: int, count: int) -> bytes:
    keys = list[bytes]()
    for at in range(count):
        key = sha256(key + tokens[at * block : (at + 1) * block]).digest()
        keys.append(key)
    return b"".join(keys)


def layout(rng: random.Random) -> tuple[bytes, list[Piece]]:
    """Bytes with columns and keys in them, and where these are."""
    parts, pieces, end = list[bytes](), list[Piece](), 0
    for _ in range(rng.randrange(6)):
        gap = rng.randbytes(rng.randrange(50))
        column = struct.pack("<20I", *(rng.randrange(1 << rng.choice((8, 17, 32))) for _ in range(20)))
        key, block = rng.randbytes(32), rng.choice((4, 8, 16))
        keys = chained(key, column, block, rng.randrange(1, 5))
        pieces.append(Piece(end + len(gap), len(column)))
        pieces.append(
            Piece(end + len(gap) + len(column) + 32, len(keys), end + len(gap), block),
        )
        parts += [gap, column, key, keys]
        end += len(gap) + len(column) + 32 + len(keys)
    parts.append(rng.randbytes(rng.randrange(1, 30)))
    return b"".join(parts), pieces


@given(st.randoms(use_true_random=False), st.booleans())
def test_groups_expand_to_what_they_were_made_of(rng: random.Random, as_they_are: bool) -> None:
    """Whatever bytes and pieces: both readers make the same bytes of a group."""
    data, pieces = layout(rng)
    group = group_of(data, 64, 1 << 40, None if as_they_are else pieces)
    header = parse_group_header(group[:GROUP_HEADER_BYTES])
    assert header is not None
    assert expand(header, group[GROUP_HEADER_BYTES:]) == data
    other = raw_groups_of(group_of(data, 0, len(data), None if as_they_are else pieces))
    assert other.read(0, len(data) + 1) == data


def raw_groups_of(content: bytes) -> Any:
    return Groups(Path("segment"), lambda offset, count: content[offset : offset + count])


@given(st.binary(max_size=200), st.integers(0, 300))
@example(struct.pack("<II", 1 << 31, 1 << 31), 100)
@example(struct.pack("<II", 1, 16) + bytes([0, 32, 0, 4] + [0] * 12) + bytes(40), 72)
def test_nonsense_in_a_group_is_lost_and_no_more(data: bytes, size: int) -> None:
    """Bytes that were never made by compressing raise one error, or make bytes of the right size."""
    body = zstd.compressed(data, 1)
    group = group_of(b"", 0, size, None)
    header = parse_group_header(group)
    assert header is not None
    header = header._replace(method=1, stored=len(body), size=size, crc=crc32(body))
    with suppress(ValueError):
        assert len(expand(header, body)) == size
    if size:
        assert len(raw_groups_of(header.pack() + body).read(0, size)) == size


def crafted(pieces: list[tuple[int, int, int, int]], rest: int, size: int) -> bytes:
    """A group that says it has these pieces (bytes before, its own, where tokens begin, of a block)."""
    numbers = [number for piece in pieces for number in piece]
    planes = b"".join(bytes(number >> shift & 255 for number in numbers) for shift in (0, 8, 16, 24))
    body = zstd.compressed(struct.pack("<II", len(pieces), 4 * len(numbers)) + planes + bytes(rest), 1)
    header = parse_group_header(group_of(b"", 0, size, None))
    assert header is not None
    return header._replace(method=1, stored=len(body), size=size, crc=crc32(body)).pack() + body


@pytest.mark.parametrize(
    "group",
    [
        crafted([], 1 << 22, 1 << 22),  # zeros, 4 MiB of them in some hundred bytes
        crafted([(32, 32, 0, 4096)] * 64, 4096 - 32 * 64, 4096),  # the same tokens for each of many keys
        crafted([(0, 0, 0, 0)] * 200, 4096, 4096),  # pieces of nothing
    ],
    ids=["zeros", "keys", "pieces"],
)
def test_what_would_take_too_long_is_lost_before_it_is_tried(group: bytes) -> None:
    """Groups that expand to very much, or are put together with very much work, are not intact; no key is made."""
    header = parse_group_header(group)
    assert header is not None
    with (
        patch.object(groups, "keys_behind", side_effect=AssertionError("keys are made")),
        patch.object(hashlib, "sha256", side_effect=AssertionError("keys are made")),
    ):
        with pytest.raises(ValueError, match="more"):
            expand(header, group[GROUP_HEADER_BYTES:])
        assert raw_groups_of(group).is_lost(0)


def test_what_expands_to_very_much_is_left_as_it_is() -> None:
    """So a writer makes no group that readers refuse."""
    data = bytes(1 << 20)
    group = group_of(data, 0, len(data), [])
    assert group[GROUP_HEADER_BYTES:] == data
    shared = [Piece(32 + 64 * at, 32, 0, 4096) for at in range(64)]
    assert group_of(data[:4096], 0, 4096, shared)[GROUP_HEADER_BYTES:] == data[:4096]


def test_groups_are_found_in_one_go() -> None:
    """However many there are, their file is read a few times at most."""
    content = b"".join(group_of(bytes([at]), at, 250, None) for at in range(250))
    read = [0]

    def disk(offset: int, count: int) -> bytes:
        data = content[offset : offset + count]
        read[0] += len(data)
        return data

    assert Groups(Path("segment"), disk).read(0, 250) == bytes(range(250))
    assert read[0] < 10 * len(content)


def test_the_form_is_as_documented() -> None:
    """A group put together by hand from docs/log.md is what is written of these bytes, and expands to them."""
    numbers = [7 * number for number in range(16)]
    column, key = struct.pack("<16I", *numbers), bytes(range(32))
    data = b"begin" + column + b"between" + key + chained(key, column[8:], 16, 3) + b"end"
    told = [5, 64, 0, 0, 7 + 32, 3 * 32, 5 + 8, 16, *numbers]
    planes = bytes(number >> 8 * place & 255 for place in range(4) for number in told)
    body = zstd.compressed(struct.pack("<II", 2, 96) + planes + b"beginbetween" + key + b"end", 1)
    header = struct.pack("<4sHHIIQQI", b"\xc1KVG", 1, 1, len(body), len(data), 0, len(data), crc32(body))
    group = header + struct.pack("<I", crc32(header)) + body
    assert group_of(data, 0, len(data), [Piece(5, 64), Piece(5 + 64 + 7 + 32, 96, 13, 16)]) == group
    parsed = parse_group_header(group)
    assert parsed is not None
    assert expand(parsed, group[GROUP_HEADER_BYTES:]) == raw_groups_of(group).read(0, len(data)) == data


def test_keys_and_columns_are_found_in_a_log(tmp_path: Path) -> None:
    """Of a cache's log the keys behind the first are not stored, and its tokens are columns; so it shrinks."""
    config = KVCacheConfig(max_sequence_length=4096, tokens_per_block=16, primary_blocks=4096)
    manager = KVCacheManager(config, log=tmp_path)
    rng = random.Random(1)
    for number in range(10):
        manager.add_sequence(number, [rng.randrange(1 << 17) for _ in range(3000)])
        manager.store_context_blocks(number, 3000)
        manager.flush()
    manager.close()
    [path] = segment_paths(tmp_path)
    with Segment(path) as segment:
        header = segment.header()
        assert header is not None
        chain, pieces = header.chain(), list[Piece]()
        chain.enter(header)
        while isinstance(found := segment.read(chain), Frame):
            payload = bytes(found.payload)
            pieces += Columns().of(payload, [(0, len(payload))])
    assert sum(piece.size for piece in pieces if piece.block == 64) == 10 * (3000 // 16 - 1) * 32
    assert sum(piece.size for piece in pieces if not piece.block) >= 10 * (3000 * 4 + 187 * 4)
