"""Positional arrays and SGLang's maps: what older readers and SGLang's get."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from events.feed.changes import Change, Cleared, Removed, Stored
from events.formats.vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    encode_arrays,
    encode_batch,
    encode_sglang,
    with_salts,
)
from events.types import FULL, SLIDING, GroupCreated, Namespace
from tests.support.columns import pack_i32

TS = 1_700_000_000.5
VLLM_0_10_2 = bytes.fromhex(
    "93cb41d954fc402000009397ab426c6f636b53746f7265649101c0940102030404c0a347505593ac426c6f636b52656d6f7665649101"
    "a347505591b0416c6c426c6f636b73436c656172656400"
)
"""What vLLM 0.10.2 to 0.13 encodes: a stored block 1 of tokens 1 to 4, its removal, and everything cleared."""
GROUPS = (GroupCreated(4096, FULL, (0,), (), (8, 8)), GroupCreated(64, SLIDING, (1,), (), (8, 8)))
DIGEST = bytes(range(32))


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)


def stored(**fields: Any) -> Stored:
    defaults: dict[str, Any] = {
        "group": 0,
        "level": 0,
        "names": names(1),
        "parent": b"",
        "tokens": pack_i32([1, 2, 3, 4]),
        "tokens_per_block": 4,
        "namespace": Namespace(),
    }
    return Stored(**(defaults | fields))


def plain(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)


def test_arrays_are_those_of_vllm_0_10_2() -> None:
    """Byte by byte, where nothing needs the fields that came later."""
    changes: list[Change] = [stored(), Removed(0, 0, names(1)), Cleared()]
    assert encode_arrays(changes, TS, 0, GROUPS) == VLLM_0_10_2


def test_each_block_is_an_array_of_its_own() -> None:
    """Behind its own parent, with its own tokens and what its hash covers."""
    change = stored(
        level=1,
        names=names(2**63, 8, 9),
        parent=names(5),
        tokens=pack_i32(range(12)),
        namespace=Namespace(3, "style", DIGEST),
        extras=((("ab", 1),), (), ()),
    )
    ts, events, rank = plain(encode_arrays([change], TS, 7, GROUPS))
    assert (ts, rank) == (TS, 7)
    assert events == [
        ["BlockStored", [2**63], 5, [0, 1, 2, 3], 4, 3, "CPU", "style", [["style", ["ab", 1]]]],
        ["BlockStored", [8], 2**63, [4, 5, 6, 7], 4, 3, "CPU", "style", [["style"]]],
        ["BlockStored", [9], 8, [8, 9, 10, 11], 4, 3, "CPU", "style", [["style"]]],
    ]


def test_salts_are_reported_at_the_root() -> None:
    """By digest, or themselves where somebody knows them."""
    change = stored(names=names(1, 2), tokens=pack_i32(range(8)), namespace=Namespace(None, None, DIGEST))
    _, (first, second), _ = plain(encode_arrays([change], TS, 0, GROUPS))
    assert first[8] == [[DIGEST.hex()]]
    assert len(second) == 7
    _, (first, _), _ = plain(encode_arrays(with_salts([change], {DIGEST: "tenant"}.get), TS, 0, GROUPS))
    assert first[8] == [["tenant"]]


def test_groups_alongside_the_first_say_what_they_are() -> None:
    """Their number, kind and window; removals their number."""
    changes: list[Change] = [stored(group=1), Removed(1, 1, names(1))]
    _, events, _ = plain(encode_arrays(changes, TS, 0, GROUPS))
    assert events == [
        ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU", None, None, 1, "sliding_window", 64],
        ["BlockRemoved", [1], "CPU", 1],
    ]


def test_sglang_has_maps_of_its_own() -> None:
    """Signed hashes, its own name of host memory, the salt beside the tokens, and nothing that is None at the end."""
    space = Namespace(3, "style", DIGEST)
    changes: list[Change] = [
        stored(level=1, names=names(2**64 - 1, 8), tokens=pack_i32(range(8)), namespace=space),
        stored(parent=names(2**63)),
        Removed(0, 1, names(2**64 - 1, 8)),
        Cleared(),
    ]
    ts, events, rank = plain(encode_sglang(changes, TS, 2))
    assert (ts, rank) == (TS, 2)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [-1, 8],
            "parent_block_hash": None,
            "token_ids": list(range(8)),
            "block_size": 4,
            "lora_id": None,
            "medium": "CPU_PINNED",
            "lora_name": "style",
            "cache_salt": DIGEST.hex(),
        },
        {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": -(2**63),
            "token_ids": [1, 2, 3, 4],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
        },
        {"type": "BlockRemoved", "block_hashes": [-1, 8], "medium": "CPU_PINNED"},
        {"type": "AllBlocksCleared"},
    ]


@pytest.mark.parametrize("encode", [encode_arrays, encode_sglang])
def test_our_reader_understands_them_as_it_does_maps(encode: Any) -> None:
    """The same blocks, tokens and media, block by block."""
    changes: list[Change] = [
        stored(names=names(11, 12), tokens=pack_i32(range(8))),
        stored(level=1, names=names(13), parent=names(12)),
        Removed(0, 1, names(13)),
        Cleared(),
    ]
    reported, expected = (decode_batch(each(changes, TS, 0, GROUPS)) for each in (encode, encode_batch))
    assert _blocks(reported.events) == _blocks(expected.events)


def _blocks(events: Any) -> list[Any]:
    rows: list[Any] = []
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for at, name in enumerate(event.block_hashes):
                tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                rows.append((name, parent, tokens, event.medium[:3] if event.medium else None))
                parent = name
        elif isinstance(event, BlockRemoved):
            rows.append((event.block_hashes, event.medium[:3] if event.medium else None))
        else:
            assert isinstance(event, AllBlocksCleared)
            rows.append("cleared")
    return rows
