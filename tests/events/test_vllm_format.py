"""vLLM's wire format against bytes that other code made, and against a decoder that knows nothing of events.

`tests/golden/vllm_wire.json` holds what batches mean, written down by hand, and their bytes, made by
`tests.oracles.wire_packer`.
"""

from __future__ import annotations

import itertools
import json
import pickle
import random
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.errors import EventDecodeError
from events.feed.changes import Change, Cleared, Removed, Stored
from events.formats.vllm import (
    END_OF_REPLAY,
    BlockStored,
    Unknown,
    decode_batch,
    decode_seq,
    encode_batch,
    encode_seq,
    join_batches,
    parse_answer,
    parse_message,
    replay_request,
    with_salts,
)
from events.types import GroupCreated, Namespace
from tests.oracles.wire_packer import pack_wire
from tests.support.columns import pack_i32
from tests.support.places import ROOT

GOLDEN = json.loads((ROOT / "tests" / "golden" / "vllm_wire.json").read_text(encoding="utf-8"))
READ = {vector["name"]: vector for vector in GOLDEN["read"]}
WRITTEN = {vector["name"]: vector for vector in GOLDEN["written"]}
FRAMES = {vector["name"]: vector for vector in GOLDEN["frames"]}
TS = 1700000000.5
H1, H2, H3 = 0x1122334455667788, 0xF0E1D2C3B4A59687, 0x0000000100000002
CAT, DOG = "ca" * 32, "d0" * 32
PLAIN = Namespace()
ADAPTER = Namespace(7, "adapter", bytes(range(32)))
SALTED = Namespace(None, None, bytes(range(32)))
NUMBERED = Namespace(7, None, None)


def names(*hashes: int) -> bytes:
    return struct.pack(f">{len(hashes)}Q", *hashes)


def stored(
    hashes: Sequence[int],
    tokens: Sequence[int],
    parent: int | None = None,
    group: int = 0,
    level: int = 0,
    namespace: Namespace = PLAIN,
) -> Stored:
    above = b"" if parent is None else names(parent)
    size = len(tokens) // len(hashes)
    return Stored(group, level, names(*hashes), above, pack_i32(tokens), size, namespace)


def group(window: int, kind: str = "full") -> GroupCreated:
    return GroupCreated(window, kind, (0,), (), (1, 1))


WINDOWS = (group(512, "sliding"), group(4096), group(8192, "sliding"))
"""A window slides that is said to, however long others are: none may be full."""

CHANGES: dict[str, tuple[list[Change], int, Sequence[GroupCreated]]] = {
    "root": ([stored([H1], [7, 300, 70000, 5])], 0, WINDOWS[1:2]),
    "child_on_host": ([stored([H2, 1], [1, 2, 3, 4], H1, level=1)], 2, ()),
    "namespace": (
        [
            stored([H1, H2], [1, 2, 3, 4], namespace=ADAPTER),
            stored([H3], [5, 6], H2, namespace=ADAPTER),
            stored([H1], [1, 2], namespace=SALTED),
            stored([H1], [1, 2], namespace=NUMBERED),
        ],
        0,
        (),
    ),
    "windows": ([stored([H1], [1, 2], group=index) for index in range(3)], 300, WINDOWS),
    "removed": ([Removed(0, 0, names(H3, H2)), Removed(1, 1, names(H1))], 0, WINDOWS),
    "cleared": ([Cleared()], 0, WINDOWS),
    "heartbeat": ([], 0, ()),
    "long": ([stored([H1 + i for i in range(20)], range(40))], 0, ()),
    "items": (
        [
            msgspec.structs.replace(
                stored([H1, H2, H3], [1, 7, 7, 8, 2, 3], namespace=ADAPTER),
                extras=(((CAT, 1),), ((CAT, -1), (DOG, 1)), ()),
            ),
            msgspec.structs.replace(stored([H2, H3], [7, 8, 2, 3], H1), extras=(((CAT, -300),), ())),
        ],
        0,
        (),
    ),
    "symbols": ([stored([H1], [2**31 - 1, -1])], 0, ()),
}
"""What the golden batches that we write were made of: changes, rank, groups."""


def plain(value: Any) -> Any:
    """As JSON would have it."""
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def said(event: Any) -> dict[str, Any]:
    """The type and the fields of an event that are not None, but for those that are not known here."""
    fields = {
        name: plain(value)
        for name, value in msgspec.structs.asdict(event).items()
        if value is not None and name != "more"
    }
    return {"type": type(event).__name__, **fields}


class TestGolden:
    """Bytes that other code made."""

    @pytest.mark.parametrize(
        "vector", [*GOLDEN["read"], *GOLDEN["written"]], ids=lambda vector: vector["name"]
    )
    def test_bytes_are_those_of_an_independent_packer(self, vector: dict[str, Any]) -> None:
        """The bytes in the file are the msgpack of what the file says, as msgpack's specification has it."""
        assert pack_wire(vector["wire"]).hex() == vector["hex"]

    @pytest.mark.parametrize("name", READ)
    def test_reading(self, name: str) -> None:
        """Every form of every event since vLLM 0.9 means what was written down for it."""
        vector = READ[name]
        batch = decode_batch(bytes.fromhex(vector["hex"]))
        assert (batch.ts, type(batch.ts), batch.rank) == (vector["ts"], float, vector["rank"])
        assert [said(event) for event in batch.events] == vector["events"]

    @pytest.mark.parametrize("name", READ)
    def test_batches_of_known_maps_alone_are_read_as_others_are(self, name: str) -> None:
        """An event of a type that is not known, behind them, changes nothing about the others."""
        payload = bytes.fromhex(READ[name]["hex"])
        ts, events, *rank = msgspec.msgpack.decode(payload)
        alongside = decode_batch(msgspec.msgpack.encode([ts, [*events, {"type": "New"}], *rank]))
        assert alongside.events == (*decode_batch(payload).events, Unknown("New"))

    @pytest.mark.parametrize("kind", ["BlockStored", "BlockRemoved", "AllBlocksCleared"])
    def test_a_field_called_more_is_one_that_is_not_known(self, kind: str) -> None:
        """It is no way to say what the reader has found unknown."""
        known: dict[str, dict[str, Any]] = {
            "BlockStored": {"parent_block_hash": None, "token_ids": [], "block_size": 1, "block_hashes": []},
            "BlockRemoved": {"block_hashes": []},
            "AllBlocksCleared": {},
        }
        forged = {"type": kind, **known[kind], "more": {"salt": 1}}
        [event] = decode_batch(pack_wire([1.0, [forged], 0])).events
        assert getattr(event, "more", {"more": {"salt": 1}}) == {"more": {"salt": 1}}

    def test_every_field_of_every_event_is_read(self) -> None:
        """No field of the structs is missing from the golden batches."""
        unread = {
            (type(event).__name__, field): True
            for vector in READ.values()
            for event in decode_batch(bytes.fromhex(vector["hex"])).events
            for field in event.__struct_fields__
            if field != "more"  # no field of the wire
        }
        for vector in READ.values():
            for event in vector["events"]:
                for field in event:
                    unread.pop((event["type"], field), None)
        assert unread == {}

    @pytest.mark.parametrize("name", WRITTEN)
    def test_writing(self, name: str) -> None:
        """Changes become exactly these bytes: fixed-width hashes and tokens, all keys, media in capitals."""
        changes, rank, groups = CHANGES[name]
        assert encode_batch(changes, TS, rank, groups).hex() == WRITTEN[name]["hex"]

    @pytest.mark.parametrize("name", WRITTEN)
    def test_own_batches_are_read_back(self, name: str) -> None:
        """What we write, we read: events, rank and time."""
        changes, rank, _ = CHANGES[name]
        batch = decode_batch(bytes.fromhex(WRITTEN[name]["hex"]))
        assert (batch.ts, batch.rank, len(batch.events)) == (TS, rank, len(changes))

    @pytest.mark.parametrize("name", FRAMES)
    def test_frames(self, name: str) -> None:
        """Messages and answers, of old and new servers, are taken apart into topic, number and batch."""
        vector = FRAMES[name]
        frames = [bytes.fromhex(frame) for frame in vector["frames"]]
        found = parse_message(frames) if name.startswith("message") else parse_answer(frames)
        if name.startswith("end"):
            assert found is None
        else:
            assert found == (vector["topic"].encode(), vector["seq"], frames[-1])

    def test_request(self) -> None:
        """A replay is asked for with an empty frame and 8 bytes, big-endian."""
        frames = [bytes.fromhex(frame) for frame in GOLDEN["request"]["frames"]]
        assert replay_request(GOLDEN["request"]["start"]) == frames


hashes = st.integers(0, 2**64 - 1)
namespaces = st.sampled_from([PLAIN, ADAPTER, SALTED, NUMBERED])


@st.composite
def stores(draw: st.DrawFn) -> Stored:
    size = draw(st.sampled_from([1, 2, 16]))
    found = draw(st.lists(hashes, min_size=1, max_size=40))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(found), max_size=len(found)))
    return stored(
        found,
        [token for token in tokens for _ in range(size)],
        draw(st.none() | hashes),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 1)),
        draw(namespaces),
    )


removals = st.builds(
    Removed,
    group=st.integers(0, 3),
    level=st.integers(0, 1),
    names=st.lists(hashes, max_size=40).map(lambda found: names(*found)),
)


def as_maps(change: Change) -> dict[str, Any]:
    """What a router should find in an event."""
    if isinstance(change, Cleared):
        return {"type": "AllBlocksCleared"}
    found = [int.from_bytes(change.names[at : at + 8], "big") for at in range(0, len(change.names), 8)]
    shared = {"block_hashes": found, "medium": ["GPU", "CPU"][change.level], "group_idx": change.group}
    if isinstance(change, Removed):
        return {"type": "BlockRemoved", **shared}
    space = change.namespace
    adapter = {PLAIN: None, SALTED: None, ADAPTER: "adapter", NUMBERED: "7"}[space]
    keys: list[list[str] | None] = [[adapter] if adapter else None for _ in found]
    if space.salt_digest is not None and not change.parent:
        keys[0] = [*(keys[0] or []), space.salt_digest.hex()]
    return {
        "type": "BlockStored",
        **shared,
        "parent_block_hash": int.from_bytes(change.parent, "big") if change.parent else None,
        "token_ids": list(struct.unpack(f"<{len(change.tokens) // 4}i", change.tokens)),
        "block_size": change.tokens_per_block,
        "lora_id": space.lora_id,
        "lora_name": adapter,
        "extra_keys": keys,
        "kv_cache_spec_kind": "full_attention",
        **({"cache_salt": space.salt_digest.hex()} if space.salt_digest is not None else {}),
    }


class TestEncoding:
    """What we write, seen by a decoder that knows nothing of it."""

    @given(
        st.lists(stores() | removals | st.just(Cleared()), max_size=8),
        st.floats(0, 2e9),
        st.integers(0, 1 << 20),
    )
    def test_any_batch_is_valid_msgpack(self, changes: list[Change], ts: float, rank: int) -> None:
        """A generic decoder finds the maps, with full widths, that the changes stand for."""
        decoded = msgspec.msgpack.decode(encode_batch(changes, ts, rank))
        assert decoded == [ts, [as_maps(change) for change in changes], rank]

    def test_array_headers_of_all_sizes(self) -> None:
        """Arrays of up to 15, up to 65535, and more items get the header that fits."""
        for blocks in (15, 16, 65_535, 65_536):
            tokens = np.arange(blocks, dtype="<i4")
            store = Stored(0, 0, bytes(8 * blocks), b"", tokens.tobytes(), 1, PLAIN)
            [_, [event], _] = msgspec.msgpack.decode(encode_batch([store], TS))
            assert event["token_ids"] == tokens.tolist()
            assert [len(event[key]) for key in ("block_hashes", "extra_keys")] == [blocks, blocks]
        [_, events, _] = msgspec.msgpack.decode(encode_batch([Cleared()] * 70_000, TS))
        assert events == [{"type": "AllBlocksCleared"}] * 70_000

    def test_store_of_nothing(self) -> None:
        """A store without blocks is a valid event, too."""
        [_, [event], _] = msgspec.msgpack.decode(encode_batch([Stored(0, 0, b"", b"", b"", 1, SALTED)], TS))
        assert (event["block_hashes"], event["token_ids"], event["extra_keys"]) == ([], [], [])

    def test_adapter_without_a_name_goes_by_its_number(self) -> None:
        """Blocks of an adapter known by number only are not announced as the base model's."""
        [_, [event], _] = msgspec.msgpack.decode(encode_batch([stored([H1], [1], namespace=NUMBERED)], TS))
        assert (event["lora_id"], event["lora_name"], event["extra_keys"]) == (7, "7", [["7"]])

    @pytest.mark.parametrize("level", [0, 1])
    def test_a_block_after_another_says_the_same_of_its_window(self, level: int) -> None:
        """The short way for single blocks of running prompts tells group, attention, window and medium as all do."""
        changes = [
            stored([H2] * blocks, [1, 2] * blocks, parent, index, level)
            for index in range(3)
            for blocks, parent in ((1, H1), (1, None), (2, H1))
        ]
        [_, events, _] = msgspec.msgpack.decode(encode_batch(changes, TS, 0, WINDOWS))
        about_blocks = ("block_hashes", "parent_block_hash", "token_ids", "extra_keys")
        for at in range(0, 9, 3):
            inner, *others = [
                {key: value for key, value in event.items() if key not in about_blocks}
                for event in events[at : at + 3]
            ]
            assert others == [inner, inner]
        assert events[0]["kv_cache_spec_sliding_window"] == 512

    def test_salt_is_on_the_first_block_of_a_prompt_only(self) -> None:
        """The salt's digest is a key of the block without a parent, and of no other."""
        digest = SALTED.salt_digest
        assert digest is not None
        changes = [
            stored([H1, H2], [1, 2], namespace=SALTED),
            stored([H3], [3], H2, namespace=SALTED),
        ]
        [_, [root, child], _] = msgspec.msgpack.decode(encode_batch(changes, TS))
        assert (root["extra_keys"], child["extra_keys"]) == ([[digest.hex()], None], [None])

    @given(st.lists(stores() | removals | st.just(Cleared()), max_size=8), st.booleans())
    def test_salts_are_reported_as_they_are_where_they_are_known(
        self, changes: list[Change], known: bool
    ) -> None:
        """A salt that can be found takes the digest's place in both fields; all else is the same."""
        digest = SALTED.salt_digest
        assert digest is not None
        salts = {digest: "tenant\u03c6"} if known else {}
        [_, reported, _] = msgspec.msgpack.decode(encode_batch(with_salts(changes, salts.get), TS))
        [_, usual, _] = msgspec.msgpack.decode(encode_batch(changes, TS))
        as_text = msgspec.json.encode(usual).decode().replace(digest.hex(), salts.get(digest, digest.hex()))
        assert reported == msgspec.json.decode(as_text)

    def test_salted_blocks_after_others(self) -> None:
        """One block that decoding filled has its salt in the field, by digest and as it is, one after the other."""
        digest = SALTED.salt_digest
        assert digest is not None
        change = stored([H2], [1, 2], H1, namespace=SALTED)
        for salts, reported in (({}, digest.hex()), ({digest: "t"}, "t"), ({}, digest.hex())):
            [_, [event], _] = msgspec.msgpack.decode(encode_batch(with_salts([change], salts.get), TS))
            assert (event["cache_salt"], event["extra_keys"]) == (reported, [None])


class TestDecoding:
    """What no decoder should trip over."""

    @pytest.mark.parametrize(
        "wire",
        [
            [],
            [TS],
            {"ts": TS},
            ["1.5", [], 0],
            [TS, {}, 0],
            [TS, [], "0"],
            [TS, [[]], 0],
            [TS, [7], 0],
            [TS, [{"block_hashes": [1]}], 0],
            [TS, [{"type": 3}], 0],
            [TS, [[3, 4]], 0],
            [TS, [{"type": "BlockStored", "block_hashes": [1]}], 0],
            [TS, [{"type": "BlockRemoved"}], 0],
            [TS, [{"type": "BlockRemoved", "block_hashes": 1}], 0],
            [TS, [{"type": "BlockRemoved", "block_hashes": ["secret"]}], 0],
            [TS, [["BlockStored", [1], None, ["secret"], 4, None]], 0],
            [TS, [["BlockStored", [1.5], None, [1], 1, None]], 0],
            [TS, [["BlockStored", [1], None, [1], 1, None, 99]], 0],
        ],
    )
    def test_wrong_shapes_are_refused(self, wire: Any) -> None:
        """A batch that does not fit is an EventDecodeError, which repeats nothing of it and can be pickled."""
        with pytest.raises(EventDecodeError) as caught:
            decode_batch(pack_wire(wire))
        assert "secret" not in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert caught.value.__cause__ is None

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xc1",
            b"\xdd\xff\xff\xff\xff",
            b"\x92\x00" + b"\x91" * 5000 + b"\xc0",
            b"\x92\x00\x91\x81\xa4type\xa1\xff",
            b"\x92\x00\x91\x81\x80\x00",
            b"\x92\x00\x90\x00",
            b"\x93\x00\x90\xcf" + b"\xff" * 8 + b"\x00",
        ],
        ids=["nothing", "unused", "huge", "deep", "not_utf8", "unhashable", "more", "beyond"],
    )
    def test_bytes_that_are_no_msgpack_are_refused(self, data: bytes) -> None:
        """Nonsense of every kind is an EventDecodeError."""
        with pytest.raises(EventDecodeError):
            decode_batch(data)

    def test_mutations_are_read_or_refused(self) -> None:
        """Whatever bytes change in a batch, it is read or refused with the one error; nothing else comes out."""
        randomness = random.Random(7)
        payloads = [bytes.fromhex(vector["hex"]) for vector in READ.values()]
        outcomes = {True: 0, False: 0}
        for _ in range(5000):
            data = bytearray(randomness.choice(payloads))
            for _ in range(randomness.randint(1, 3)):
                data[randomness.randrange(len(data))] = randomness.randrange(256)
            try:
                decode_batch(bytes(data))
                outcomes[True] += 1
            except EventDecodeError:
                outcomes[False] += 1
        assert min(outcomes.values()) > 100


class TestNumbers:
    """The frame with the number."""

    @given(st.integers(0, 2**64 - 1))
    def test_round_trip(self, seq: int) -> None:
        """Every number fits into 8 bytes that sort like it."""
        frame = encode_seq(seq)
        assert (len(frame), decode_seq(frame)) == (8, seq)
        assert frame == struct.pack(">Q", seq)

    @pytest.mark.parametrize("frame", [b"", b"\0" * 7, b"\0" * 9])
    def test_other_lengths_are_refused(self, frame: bytes) -> None:
        """A number that has not 8 bytes is none."""
        with pytest.raises(EventDecodeError):
            decode_seq(frame)

    @pytest.mark.parametrize("frames", [[], [b"", bytes(8)], [b"", b"", bytes(8), b"x"]])
    def test_messages_of_other_lengths_are_refused(self, frames: list[bytes]) -> None:
        """A message has three frames."""
        with pytest.raises(EventDecodeError):
            parse_message(frames)

    @pytest.mark.parametrize("frames", [[b""], [b"", b""], [b"x", bytes(8), b"x"], [b""] * 5])
    def test_answers_of_other_shapes_are_refused(self, frames: list[bytes]) -> None:
        """An answer has three or four frames, and an empty one first."""
        with pytest.raises(EventDecodeError):
            parse_answer(frames)

    def test_batch_cannot_have_the_number_of_the_end(self) -> None:
        """A message that is numbered like the end marker and yet holds a batch is refused."""
        payload = pack_wire([TS, [], 0])
        with pytest.raises(EventDecodeError):
            parse_message([b"", END_OF_REPLAY, payload])
        with pytest.raises(EventDecodeError):
            parse_answer([b"", b"", END_OF_REPLAY, payload])


@pytest.mark.parametrize(
    ("counts", "rank"),
    [
        *itertools.product([[1], [0, 0], [3, 0, 12], [15, 1], [16] * 20], [0, 1, 200, 70_000]),
        ([40_000, 25_600], 200),
    ],
)
def test_joined_batches_are_one_with_all_events(counts: list[int], rank: int) -> None:
    """Whatever the form in which each says how many events it has: a generic decoder finds them in order."""
    names = iter(range(1, sum(counts) + 1))
    batches = [
        encode_batch([Removed(0, 0, next(names).to_bytes(8, "big")) for _ in range(count)], float(at), rank)
        for at, count in enumerate(counts)
    ]
    ts, events, joined_rank = msgspec.msgpack.decode(join_batches(batches, rank))
    assert (ts, joined_rank) == (float(len(counts) - 1), rank)
    assert [event["block_hashes"] for event in events] == [[name] for name in range(1, sum(counts) + 1)]


def nested(depth: int) -> Any:
    """A number in so many lists and maps, by turns."""
    value: Any = 1
    for at in range(depth):
        value = [value] if at % 2 else {"in": value}
    return value


@pytest.mark.parametrize(("depth", "is_read"), [(20, True), (60, False), (500, False)])
@pytest.mark.parametrize("field", ["unknown", "extra_keys", "in a key"])
def test_what_is_nested_too_deeply_is_refused(field: str, depth: int, *, is_read: bool) -> None:
    """Each reader packs it again on a stack of its own: what one could just read would end another."""
    store = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1],
        "block_size": 1,
    }
    payload = msgspec.msgpack.encode([1.0, [store | {"HERE": 0}], 0])
    value = msgspec.msgpack.encode([[nested(depth)]] if field == "extra_keys" else nested(depth))
    if field == "in a key":
        value = b"\x81" + b"\x91" * depth + b"\x01\x01"
    name = msgspec.msgpack.encode("extra_keys" if field == "extra_keys" else "unknown")
    payload = payload.replace(msgspec.msgpack.encode("HERE") + b"\0", name + value)
    if is_read:
        (event,) = decode_batch(payload).events
        assert isinstance(event, BlockStored)
        assert event.extra_keys or event.more
    else:
        with pytest.raises(EventDecodeError):
            decode_batch(payload)
