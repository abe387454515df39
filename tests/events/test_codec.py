"""Events as bytes and JSON: nothing lost, nothing leaked, one error for everything else."""

from __future__ import annotations

import contextlib
import json
import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from events import (
    AnyEvent,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheCreated,
    EventBatch,
    EventDecodeError,
    Gap,
    Namespace,
    SequenceAdded,
    StateExported,
    SymbolsInterned,
    TokensAppended,
    TransferFailed,
)
from events.codec import (
    batch_without_tokens,
    decode_batch,
    encode_batch,
    to_dict,
    to_json,
    without_tokens,
)
from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex
from events.structs import Spelled
from events.types import PRIMARY, SECONDARY, GroupExported, MoveReason, RemoveReason
from tests.oracles.json_reader import from_json
from tests.support.columns import pack_i32, pack_i64, pack_u32
from tests.support.logs.logs import batch
from tests.support.logs.sample_events import EVENTS, KEY_BYTES

GOLDEN: dict[str, AnyEvent] = {
    name: decode_batch(bytes.fromhex(golden["msgpack"])).events[0] for name, golden in EVENTS.items()
}


def columns(size: int) -> st.SearchStrategy[bytes]:
    return st.integers(0, 5).flatmap(lambda n: st.binary(min_size=n * size, max_size=n * size))


def fields(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that the schema allows for a type hint."""
    if typing.get_origin(hint) is typing.Annotated:
        mark = hint.__metadata__[0]
        if isinstance(mark, Spelled):
            return fields(hint.__origin__)
        if mark.item == "parent":
            return st.just(b"") | st.binary(min_size=8, max_size=8)
        numbers = {"token": 4, "int32": 4, "count": 4, "int64": 8}
        return columns({**numbers, "name": 8, "checksum": 8, "key": KEY_BYTES}[mark.item])
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if arguments[1] is ...:
            return st.lists(fields(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(fields, arguments))
    if typing.get_origin(hint) is dict:
        return st.from_type(hint)
    if arguments:
        return st.one_of(*map(fields, arguments))
    if hasattr(hint, "__struct_fields__"):
        return structs(hint)
    if getattr(hint, "__supertype__", hint) is int:
        return st.integers(-(2**63), 2**64 - 1)
    return st.from_type(hint)


def structs(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(
        kind, **{k: fields(h) for k, h in typing.get_type_hints(kind, include_extras=True).items()}
    )


ANY_BATCH = st.builds(
    EventBatch,
    seq=st.integers(0, 2**63),
    ts=st.integers(0, 2**63),
    events=st.lists(st.one_of(*map(structs, typing.get_args(AnyEvent))), max_size=4).map(tuple),
)


@given(ANY_BATCH)
def test_any_batch_survives_both_encodings(item: EventBatch) -> None:
    """Whatever the schema allows comes back equal from bytes and from JSON."""
    assert decode_batch(encode_batch(item)) == item
    assert from_json(to_json(item, KEY_BYTES)) == item


def test_a_request_without_session_and_labels_is_written_without_them() -> None:
    """Neither its bytes nor its JSON have a place for them; with one of them, bytes have both; as with `lookup`."""
    plain = SequenceAdded(Handle(1), "r", Namespace(), 1, b"", 0, (0,), (0,), 0)
    fields = len(SequenceAdded.__struct_fields__)
    for added, length, there in [
        (plain, fields - 2, set()),
        (msgspec.structs.replace(plain, session="s"), fields, {"session"}),
        (msgspec.structs.replace(plain, labels={"tenant": "t"}), fields, {"labels"}),
        (msgspec.structs.replace(plain, lookup=False), fields + 1, {"lookup"}),
        (msgspec.structs.replace(plain, session="s", lookup=False), fields + 1, {"session", "lookup"}),
    ]:
        batch = EventBatch(0, 0, (added,))
        ((written,),) = msgspec.msgpack.decode(encode_batch(batch))[2:]
        assert len(written) == length  # with the tag
        assert to_dict(added, 0).keys() & {"session", "labels", "lookup"} == there
        assert decode_batch(encode_batch(batch)) == batch == from_json(to_json(batch, 0))


@given(ANY_BATCH)
def test_json_is_plain(item: EventBatch) -> None:
    """The dict has only what JSON has, so that writing and reading it as text changes nothing."""
    spelled = to_dict(item, KEY_BYTES)
    assert json.loads(json.dumps(spelled)) == spelled


def test_columns_are_lists_in_json() -> None:
    """Numbers are numbers, names and keys of any width are hex strings, one per block."""
    key = bytes(range(16))
    event = BlocksStored(
        Handle(1),
        GroupIndex(0),
        BlockIndex(0),
        key[:8],
        key + key[::-1],
        pack_i32([3, -4]),
        LevelIndex(0),
        35,
        2,
    )
    spelled = to_dict(event, key_bytes=16)
    assert spelled["type"] == "BlocksStored"
    assert spelled["slots"] == [3, -4]
    assert spelled["parent"] == "0001020304050607"
    assert spelled["keys"] == [key.hex(), key[::-1].hex()]
    assert spelled["names"] == ["0001020304050607", "0f0e0d0c0b0a0908"]
    assert to_dict(TokensAppended(pack_i64([2**63 - 1]), b"", b""), 16)["handles"] == [2**63 - 1]


def test_blocks_without_names_have_no_names_in_json() -> None:
    """With hashing switched off there are no names, which is something else than names of no blocks."""
    event = BlocksStored(
        Handle(1), GroupIndex(0), BlockIndex(0), b"", b"", pack_i32([3]), LevelIndex(0), 35, 2
    )
    spelled = to_dict(event, key_bytes=0)
    assert (spelled["keys"], spelled["names"], spelled["parent"]) == (None, None, None)
    removed = BlocksRemoved(GroupIndex(0), LevelIndex(0), pack_i32([3]), b"", RemoveReason.CAPACITY)
    assert to_dict(removed, key_bytes=0)["names"] is None
    exported = GroupExported((), b"", b"", b"", b"", (b"", b""), b"")
    spelled = to_dict(StateExported((exported,), (), (), 1, 1, 0, 0), KEY_BYTES)
    assert spelled["groups"][0]["names"] == []


def test_levels_have_names_in_json() -> None:
    """Levels are words, and a pair is an object with one value for each of them; a number that is none stays one."""
    moved = BlocksMoved(GroupIndex(0), b"", PRIMARY, b"", SECONDARY, b"", MoveReason.OFFLOAD, 1)
    spelled = to_dict(moved, KEY_BYTES)
    assert (spelled["from_level"], spelled["to_level"]) == ("primary", "secondary")
    cleared = CacheCleared(((5, 6), (7, 8)), (1, 2))
    assert to_dict(cleared, KEY_BYTES)["removed"] == [
        {"primary": 5, "secondary": 6},
        {"primary": 7, "secondary": 8},
    ]
    assert (
        to_dict(BlocksRemoved(GroupIndex(0), LevelIndex(7), b"", b"", RemoveReason.CAPACITY), KEY_BYTES)[
            "level"
        ]
        == 7
    )


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        (
            '{"model":"caf\u00e9\\u0001","log":{"fsync":"never"}}',
            {"model": "caf\u00e9\1", "log": {"fsync": "never"}},
        ),
        ("[1]", "[1]"),
        ("no JSON", "no JSON"),
        ("[" * 5000, "[" * 5000),
        ('{"a":1' + "0" * 30 + "}", {"a": 10**30}),
    ],
)
def test_configuration_is_an_object_in_json(text: str, spelled: object) -> None:
    """The settings can be read at once; a text that holds no object stays one."""
    event = CacheCreated(text, 4, (), "none", 0, "")
    assert to_dict(event, 0)["config"] == spelled
    assert from_json(to_json(EventBatch(0, 0, (event,)), 0)).events == (event,)


def test_tokens_of_one_each_are_counted_by_no_list() -> None:
    """Columns that say nothing are null, not lists of nothing."""
    assert to_dict(TokensAppended(pack_i64([1, 2]), b"", b""), 0) == {
        "type": "TokensAppended",
        "handles": [1, 2],
        "counts": None,
        "tokens": None,
        "draft": False,
    }


@pytest.mark.parametrize("column", ["slots", "keys", "parent"])
def test_column_of_broken_length_is_a_decode_error(column: str) -> None:
    """A column that is no whole number of entries is refused when spelled out."""
    values: dict[str, Any] = {"parent": b"", "keys": b"", "slots": b"", column: b"\0" * 7}
    event = BlocksStored(
        Handle(1), GroupIndex(0), BlockIndex(0), level=LevelIndex(0), priority=35, last_tokens=2, **values
    )
    with pytest.raises(EventDecodeError, match=f"column {column} of BlocksStored"):
        to_dict(event, KEY_BYTES)


class TestWithoutTokens:
    """Taking token ids out."""

    @pytest.mark.parametrize("name", sorted(GOLDEN))
    def test_only_events_that_hold_tokens_change(self, name: str) -> None:
        """Events without tokens come back as the same object, the others without, and a second time the same."""
        event = GOLDEN[name]
        stripped = without_tokens(event)
        holding = {
            "SequenceAdded",
            "EncoderAdded",
            "TokensAppended",
            "StateExported",
            "SymbolsInterned",
            "FeedStored",
        }
        assert (stripped is not event) == (name in holding)
        assert without_tokens(stripped) is stripped

    def test_tokens_are_gone_and_counts_stay(self) -> None:
        """What is left says how many tokens there were, and nothing of what they were."""
        added = without_tokens(
            SequenceAdded(Handle(1), "r", Namespace(), 2, pack_i32([7, 8]), 0, (0,), (0,), 0)
        )
        assert added == SequenceAdded(Handle(1), "r", Namespace(), 2, b"", 0, (0,), (0,), 0)
        appended = without_tokens(TokensAppended(pack_i64([1, 2]), b"", pack_i32([7, 8])))
        assert appended == TokensAppended(pack_i64([1, 2]), pack_u32([1, 1]), b"")
        several = without_tokens(TokensAppended(pack_i64([1, 2]), pack_u32([2, 0]), pack_i32([7, 8])))
        assert several == TokensAppended(pack_i64([1, 2]), pack_u32([2, 0]), b"")

    def test_exported_state_has_no_tokens(self) -> None:
        """Neither cached runs nor running sequences keep theirs."""
        exported = without_tokens(GOLDEN["StateExported"])
        assert isinstance(exported, StateExported)
        assert [group.symbols for group in exported.groups] == [b"", b""]
        assert [sequence.tokens for sequence in exported.sequences] == [b""]
        assert exported.sequences[0].num_tokens == 6
        assert exported.symbols == ()

    def test_what_symbols_stand_for_is_gone(self) -> None:
        """Neither tokens nor extra ids, digests or names of items are left."""
        assert without_tokens(GOLDEN["SymbolsInterned"]) == SymbolsInterned(())

    def test_json_without_tokens(self) -> None:
        """`tokens=False` spells the event as `without_tokens` leaves it."""
        event = GOLDEN["TokensAppended"]
        assert to_dict(event, KEY_BYTES, tokens=False) == to_dict(without_tokens(event), KEY_BYTES)
        assert to_dict(event, KEY_BYTES, tokens=False)["tokens"] is None
        assert to_dict(GOLDEN["SymbolsInterned"], KEY_BYTES, tokens=False)["pages"] is None

    def test_batches(self) -> None:
        """A batch is stripped event by event, and is the same object if no event can hold tokens."""
        item = batch(3)
        assert batch_without_tokens(item).events == tuple(map(without_tokens, item.events))
        untouched = EventBatch(0, 0, (Gap(1, 2, "x"),))
        assert batch_without_tokens(untouched) is untouched


class TestHostileBytes:
    """Bytes from anywhere."""

    @given(st.binary(max_size=200))
    @example(b"\x91" * 5000)
    @example(b"\xdd\xff\xff\xff\xff")
    @example(b"\x93\x00\x00\xc6\xff\xff\xff\xff")
    @example(b"\x93\x00\x00\x91\x92\xa4Gap\xff\x00")
    def test_any_bytes_decode_or_fail_as_one_error(self, data: bytes) -> None:
        """Nothing but EventDecodeError comes out, however deep, long or ill-formed the input claims to be."""
        with contextlib.suppress(EventDecodeError):
            assert isinstance(decode_batch(data), EventBatch)

    @given(st.sampled_from(sorted(EVENTS)), st.data())
    def test_changed_events_decode_or_fail_as_one_error(self, name: str, data: st.DataObject) -> None:
        """Nearly right bytes decode or are refused; what decodes can be spelled out or is refused then."""
        mutated = bytearray(bytes.fromhex(EVENTS[name]["msgpack"]))
        for _ in range(data.draw(st.integers(1, 3))):
            mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(EventDecodeError):
            to_json(decode_batch(bytes(mutated)), KEY_BYTES)

    def test_messages_do_not_repeat_what_was_decoded(self) -> None:
        """The error says what is wrong and where; neither it nor its cause shows the input's text."""
        secret = "\x1b[31mthe prompt"
        for item in (TransferFailed(b"", secret), CacheCreated("", 1, (), "", 0, "", secret)):  # type: ignore[arg-type]
            data = encode_batch(EventBatch(0, 0, (item,))).replace(b"TransferFailed", secret.encode())
            with pytest.raises(EventDecodeError) as raised:
                decode_batch(data)
            assert "prompt" not in str(raised.value)
            assert raised.value.__suppress_context__
            assert "$[2]" in str(raised.value)


def test_equal_batches_have_equal_bytes_whatever_their_columns_came_from() -> None:
    """Packing from lists, arrays of other types or ranges makes no difference."""
    forms: list[Any] = [[1, 2, 3], np.array([1, 2, 3], dtype=np.int64), range(1, 4)]
    encoded = {encode_batch(EventBatch(0, 0, (TokensAppended(b"", b"", pack_i32(f)),))) for f in forms}
    assert len(encoded) == 1
