"""Which events a cache tells, in which order: V-1, V-2, V-4 to V-6, V-8, V-9."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import pytest
import structlog

from events.types import BlocksRemoved, BlocksStored
from kvcache.errors import Unsupported
from kvcache.inputs import MultimodalItem, Request
from tests.support.engines.rig import Rig, prompt

UP, DOWN = (1, 0), (0, 1)
"""From secondary to primary, and from primary to secondary."""


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["data"]["type"] for event in events]


def blocks_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks that a `stored` is about."""
    assert event["data"]["type"] == "stored"
    found: list[dict[str, Any]] = event["data"]["blocks"]
    return found


def names_of(event: dict[str, Any]) -> list[int]:
    """Of the blocks that an event is about."""
    data = event["data"]
    if data["type"] == "stored":
        return [block["block_hash"] for block in data["blocks"]]
    return [data["block_hash"]] if data["type"] == "updated" else list(data["block_hashes"])


def moves(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The levels that blocks leave and reach."""
    diffs = [event["data"]["cache_level"] for event in events if event["data"]["type"] == "updated"]
    return [(diff["old_value"], diff["new_value"]) for diff in diffs]


def test_v_1_the_life_of_a_cache_in_events() -> None:
    """Created, stored with an adapter, extended, reused without a word, moved down, dropped, and brought back."""
    rig = Rig(8, 2, max_sequence_length=16, event_buffer_max_size=1024)
    (created,) = rig.polled()
    assert created["data"] == {"type": "created", "num_blocks_per_cache_level": [8, 2]}
    assert rig.polled() == []

    rig.prefill(0, prompt(0, 10), lora_id=42)
    (first,) = rig.polled()
    assert (first["data"]["parent_hash"], first["data"]["lora_id"]) == (None, 42)
    assert [block["cache_level"] for block in blocks_of(first)] == [0, 0]
    rig.generate(0, 0)
    rig.end(0)
    (second,) = rig.polled()
    assert second["event_id"] == first["event_id"] + 1
    assert second["data"]["parent_hash"] == names_of(first)[-1]
    assert len(blocks_of(second)) == 1
    rig.run(1, prompt(0, 9), lora_id=42)
    assert rig.polled() == []

    two = [Request(number, [number, 1, *prompt(2, 13)]) for number in (1, 2)]
    rig.manager.add_sequences(two)
    events = rig.polled()
    # Theirs tells the removal last. Here it stands where it happens: before what takes the block's place in secondary.
    assert kinds(events) == ["updated", "removed", "updated", "updated"]
    assert moves(events) == [DOWN] * 3
    assert names_of(events[1]) == names_of(events[0]) == names_of(second)
    for request in two:
        rig.manager.store_context_blocks(request.request_id, 13)
    rig.end(1, 2)
    # Theirs stores three blocks each. Here the prompt's last token, whose K/V is there, is in one more.
    stored = rig.polled()
    assert [event["data"]["parent_hash"] for event in stored[:2]] == [None, None]
    assert [len(blocks_of(event)) for event in stored] == [3, 3, 1, 1]

    assert rig.add(3, [*prompt(0, 4), 1, 1, 1, 1, 0], lora_id=42) == 4
    events = rig.polled()
    up = [event for event in events if moves([event]) == [UP]]
    assert [names_of(event) for event in up] == [names_of(first)[:1]]
    assert set(moves(events)) == {UP, DOWN}
    # Theirs moves two blocks down and drops one: it brings the block back first, which makes a place in secondary free.
    # Here that place is free when all have gone, so that three go by way of the other one, and one of them stays.
    dropped = [name for event in events if event["data"]["type"] == "removed" for name in names_of(event)]
    assert (len(dropped), moves(events).count(DOWN)) == (3, 3)
    rig.manager.store_context_blocks(3, 9)
    assert kinds(rig.polled()) == ["stored"]


def test_v_2_of_a_full_buffer_the_newest_stay() -> None:
    """With room for one event, `created` is gone, and each later one is read."""
    rig = Rig(8, 2, event_buffer_max_size=1)
    rig.prefill(0, prompt(0, 10))
    (stored,) = rig.polled()
    assert (stored["data"]["type"], stored["data"]["parent_hash"]) == ("stored", None)
    rig.generate(0, 0)
    assert rig.polled() == []
    rig.end(0)
    (stored,) = rig.polled()
    assert stored["data"]["parent_hash"] is not None


def test_v_4_events_are_there_if_they_were_asked_for() -> None:
    """With a buffer, `created` is read at once, and a prompt when it is stored and the step has ended."""
    # Theirs returns none without a buffer, for ever. Here the call says which setting is missing.
    with pytest.raises(Unsupported, match="event_buffer_max_size"):
        Rig(8, 2).manager.get_latest_events(0)
    rig = Rig(8, 2, event_buffer_max_size=1024)
    assert kinds(rig.manager.get_latest_events(1000)) == ["created"]
    rig.prefill("a", prompt(0, 8))
    assert rig.manager.get_latest_events(0) == []
    rig.manager.flush()
    assert kinds(rig.manager.get_latest_events(1000)) == ["stored"]


def stored_and_removed(rig: Rig) -> list[tuple[str, int, int]]:
    """Of the events since the last flush: (kind, group, blocks)."""
    batch = rig.manager.flush()
    assert batch is not None
    return [
        (type(event).__name__, event.group, len(array("i", event.slots)))
        for event in batch.events
        if isinstance(event, BlocksStored | BlocksRemoved)
    ]


def test_v_5_windows_ascend_and_store_each_for_itself() -> None:
    """The smaller window is group 0, whatever the order of the layers; a prompt is stored once in each."""
    rig = Rig(8, windows=(16, 12), secondary_blocks=2)
    created = rig.manager.state.created
    assert created is not None
    assert [group.window for group in created.groups] == [12, 16]
    assert [group.layers for group in created.groups] == [(1,), (0,)]
    rig.prefill("0", range(8))
    # Theirs stores in the larger window first. Here all is told in the order in which the windows were created.
    assert stored_and_removed(rig) == [("BlocksStored", 0, 2), ("BlocksStored", 1, 2)]


def test_v_6_removals_of_a_step_are_one_event() -> None:
    """A prompt takes the place of all that two others have left."""
    rig = Rig(4, max_sequence_length=16, event_buffer_max_size=64)
    rig.run(0, prompt(0, 5))
    rig.run(1, prompt(10, 15))
    names = {name for event in rig.polled()[1:] for name in names_of(event)}
    rig.add(2, prompt(100, 115))
    (removed,) = rig.polled()
    assert removed["data"]["type"] == "removed"
    # Theirs removes two blocks. Here the last token of each prompt, whose K/V is there, is in one more.
    assert len(names_of(removed)) == 4
    assert {*names_of(removed)} == names


def test_v_8_what_is_removed_is_reported_before_what_takes_its_place() -> None:
    """A prompt that displaces another one: in each window the removals come first, then what is stored."""
    rig = Rig(4, windows=(8, 16), max_sequence_length=16)
    rig.prefill("0", range(9))
    rig.end("0")
    rig.manager.flush()
    rig.prefill("1", range(100, 109))
    reported = stored_and_removed(rig)
    for group in range(2):
        of_group = [(kind, blocks) for kind, each, blocks in reported if each == group]
        *removed, stored = of_group
        assert stored == ("BlocksStored", 2)
        assert {kind for kind, _ in removed} == {"BlocksRemoved"}
        assert sum(blocks for _, blocks in removed) == 2


def test_v_9_dicts_have_the_form_that_readers_know() -> None:
    """The window is cut to what primary holds; a short prompt is one block; items and salts stand in it."""
    with structlog.testing.capture_logs() as warnings:
        rig = Rig(16, size=64, max_sequence_length=1024, max_tokens=256, event_buffer_max_size=64)
    assert [(each["event"], each["given"], each["window"]) for each in warnings] == [
        ("window_cut", 1024, 256)
    ]
    assert rig.manager.max_tokens == 256
    (created,) = rig.polled()
    assert (created["event_id"], created["window_size"]) == (0, 256)
    assert created["data"] == {"type": "created", "num_blocks_per_cache_level": [4, 0]}
    rig.run("a", prompt(1, 6))
    (stored,) = rig.polled()
    (block,) = blocks_of(stored)
    assert stored["data"]["parent_hash"] is None
    # Theirs has 4 tokens. The K/V of the prompt's last token is there.
    assert [token["token_id"] for token in block["tokens"]] == prompt(1, 6)
    assert (block["mm_keys"], block["cache_salt"]) == ([], None)

    items = [MultimodalItem(b"1" * 32, 0, 50), MultimodalItem(b"2" * 32, 50, 4, "dog.png")]
    rig.run("b", prompt(0, 80), multimodal=items, cache_salt="tenant-A")
    (full, rest) = (block for event in rig.polled() for block in blocks_of(event))
    assert full["mm_keys"] == [
        {"type": "mm_key", "hash": (b"1" * 32).hex(), "start_offset": 0},
        {"type": "mm_key", "hash": "dog.png", "start_offset": 0},
    ]
    assert rest["mm_keys"] == []
    # Theirs has the salt itself, which is a secret between tenants. Here it is its digest.
    digest = hashlib.sha256(b"tenant-A").hexdigest()
    assert [block["cache_salt"] for block in (full, rest)] == [digest, digest]
