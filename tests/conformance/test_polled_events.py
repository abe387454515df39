"""What programs that poll are told: P-1 to P-13."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcache.errors import ConfigError
from tests.support.engines import strategies
from tests.support.engines.rig import Rig, prompt

PLAIN: strategies.Namespace = (None, None, None)


def names(*blocks: list[int]) -> list[int]:
    """Of the blocks of a plain prompt, worked out anew from their definition."""
    path = [tuple(block) for block in blocks]
    found = [strategies.name_of((PLAIN, *path[: number + 1])) for number in range(len(path))]
    return [int.from_bytes(name, "big") for name in found]


def ids(events: list[dict[str, Any]]) -> list[int]:
    return [event["event_id"] for event in events]


def data_of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Of the events of a kind what they say."""
    return [event["data"] for event in events if event["data"]["type"] == kind]


def stored_names(event: dict[str, Any]) -> list[int]:
    return [block["block_hash"] for block in event["blocks"]]


def test_p_1_a_block_comes_and_goes() -> None:
    """Created, stored, removed: every field of the three dicts; then nothing."""
    rig = Rig(2, 3, size=64, event_buffer_max_size=4)
    rig.run("a", [1, 2])
    rig.manager.clear()
    events = rig.polled()
    (name,) = names([1, 2])
    block = {
        "type": "stored_block",
        "block_hash": name,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in (1, 2)],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
        "cache_salt": None,
    }
    adapter = {"lora_id": None, "lora_name": None}
    data = [
        {"type": "created", "num_blocks_per_cache_level": [2, 3]},
        {"type": "stored", "parent_hash": None, "blocks": [block], **adapter},
        {"type": "removed", "block_hashes": [name]},
    ]
    envelope = {"window_size": 128, "hash_algo": "v2_sha256_64"}
    assert events == [{"event_id": number, "data": each, **envelope} for number, each in enumerate(data)]
    assert rig.polled() == []


def test_p_2_who_waits_is_woken_by_the_end_of_a_step() -> None:
    """Without a time limit a reader waits until there is something to read, which a flush makes visible."""
    rig = Rig(4, event_buffer_max_size=8)
    rig.polled()
    found: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: found.extend(rig.manager.get_latest_events(None)), daemon=True)
    reader.start()
    rig.run("a", prompt(0, 4))
    reader.join(0.1)
    assert reader.is_alive()
    rig.manager.flush()
    reader.join(30)
    assert [event["data"]["type"] for event in found] == ["stored"]


def test_p_3_each_window_is_created() -> None:
    """One event for each window; layers of one window are one group, so that no other number is needed."""
    rig = Rig(64, size=64, windows=(128, 4096), max_sequence_length=4096, event_buffer_max_size=8)
    events = rig.polled()
    assert [(event["data"]["type"], event["window_size"]) for event in events] == [
        ("created", 128),
        ("created", 4096),
    ]


def test_p_4_of_a_full_buffer_the_newest_stay_with_their_numbers() -> None:
    """Two removals of a step are one event, so that of three events the last two are read, with numbers 1 and 2."""
    rig = Rig(4, event_buffer_max_size=2)
    rig.run("a", prompt(0, 8))
    rig.add("b", prompt(100, 112))
    rig.add("c", prompt(200, 204))
    events = rig.polled()
    assert ids(events) == [1, 2]
    (stored,), (removed,) = data_of(events, "stored"), data_of(events, "removed")
    assert sorted(removed["block_hashes"]) == sorted(stored_names(stored))


def test_p_5_each_window_stores_both_blocks() -> None:
    """Two blocks of a prompt are one event in each window, behind nothing."""
    rig = Rig(8, windows=(16, 32), event_buffer_max_size=8)
    rig.polled()
    rig.prefill("a", prompt(0, 8))
    events = rig.polled()
    assert [event["window_size"] for event in events] == [16, 32]
    stored = data_of(events, "stored")
    assert [each["parent_hash"] for each in stored] == [None, None]
    assert [stored_names(each) for each in stored] == [names(prompt(0, 4), prompt(4, 8))] * 2


def test_p_6_names_are_not_negative() -> None:
    """Names with the highest bit and without are told as they are, when blocks are stored and when they go."""
    prompts = [[token, 0, 0, 0] for token in range(16)]
    expected = [name for tokens in prompts for name in names(tokens)]
    assert min(expected) < 2**63 <= max(expected) < 2**64
    rig = Rig(16, event_buffer_max_size=64)
    for number, tokens in enumerate(prompts):
        rig.run(number, tokens)
    rig.manager.clear()
    events = rig.polled()
    assert [name for each in data_of(events, "stored") for name in stored_names(each)] == expected
    (removed,) = data_of(events, "removed")
    assert sorted(removed["block_hashes"]) == sorted(expected)


def test_p_7_names_are_those_of_v1_block_key() -> None:
    """Two blocks have the names that others have worked out, also when the first was removed in between."""
    rig = Rig(2, windows=(4,), max_sequence_length=8, event_buffer_max_size=8, block_hash="v1_block_key")
    rig.polled()
    for _ in range(2):
        rig.run("a", [1, 2, 3, 4, 5, 6])
        stored = data_of(rig.polled(), "stored")
        assert [name for each in stored for name in stored_names(each)] == [
            924206229973855,
            6875034662206558884,
        ]
        rig.manager.clear()
        rig.polled()


def test_p_8_an_unknown_algorithm_is_refused() -> None:
    """The error is a ValueError, too, and says which there are."""
    with pytest.raises(ConfigError, match=r"block_hash.*v2_sha256_64") as refusal:
        Rig(4, block_hash="md5")
    assert isinstance(refusal.value, ValueError)


def test_p_9_each_rank_reports_its_own() -> None:
    """There rank 0 gathers what all tell. Here each is polled, keeps its newest, and says in each dict who it is."""
    rigs = [Rig(4, event_buffer_max_size=1, attention_dp_rank=rank) for rank in (0, 1)]
    for rank, rig in enumerate(rigs):
        rig.run("a", prompt(0, 5 + 4 * rank))
    polled = [rig.polled() for rig in rigs]
    assert [[event["attention_dp_rank"] for event in events] for events in polled] == [[0], [1]]
    assert [[event["data"]["type"] for event in events] for events in polled] == [["stored"], ["stored"]]
    assert [len(event["data"]["blocks"]) for events in polled for event in events] == [1, 1]
    assert ids(polled[0]) != [0]  # what is older is gone


def test_p_10_an_update_says_what_was_and_what_is() -> None:
    """A block gets another priority, then goes to secondary: of each `updated` one difference is given."""
    rig = Rig(1, 1, event_buffer_max_size=8)
    rig.prefill("a", prompt(0, 4))
    rig.manager.set_priority("a", 80)
    rig.end("a")
    rig.add("b", prompt(100, 104))
    (name,) = names(prompt(0, 4))
    head = {"type": "updated", "block_hash": name}
    assert data_of(rig.polled(), "updated") == [
        {**head, "cache_level": None, "priority": {"type": "event_diff", "new_value": 80, "old_value": 35}},
        {**head, "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0}, "priority": None},
    ]


def test_p_11_a_block_is_removed_once_in_each_window() -> None:
    """In a sliding window it goes first, then in the other one; it is stored anew after that, in both."""
    rig = Rig((2, 4), windows=(4, 16), max_sequence_length=16, event_buffer_max_size=64)
    rig.run("a", prompt(0, 4))
    rig.polled()
    rig.add("b", prompt(100, 108))
    (name,) = names(prompt(0, 4))
    removed = [(event["window_size"], event["data"]["block_hashes"]) for event in rig.polled()]
    assert removed == [(4, [name])]
    rig.end("b", store=False)
    rig.manager.clear()
    rig.manager.clear()
    removed = [(event["window_size"], event["data"]["block_hashes"]) for event in rig.polled()]
    assert removed == [(16, [name])]
    rig.run("a", prompt(0, 4))
    assert [(event["window_size"], event["data"]["type"]) for event in rig.polled()] == [
        (4, "stored"),
        (16, "stored"),
    ]


def test_p_12_a_removal_is_reported_before_a_later_update() -> None:
    """In one step a block goes, then another one gets a priority: in that order."""
    rig = Rig(2, event_buffer_max_size=8)
    rig.run("a", prompt(0, 4))
    rig.prefill("b", prompt(100, 104))
    rig.polled()
    rig.add("c", prompt(200, 204))
    rig.manager.set_priority("b", 80)
    events = rig.polled()
    assert [event["data"]["type"] for event in events] == ["removed", "updated"]
    assert ids(events) == sorted(ids(events))


def test_p_13_a_reused_prefix_is_not_sent_again() -> None:
    """Of a prompt whose first block is cached, only the second is stored, behind the first."""
    rig = Rig(8, event_buffer_max_size=8)
    rig.run("a", prompt(0, 4))
    rig.polled()
    rig.run("b", prompt(0, 8))
    (stored,) = data_of(rig.polled(), "stored")
    first, second = names(prompt(0, 4), prompt(4, 8))
    assert (stored["parent_hash"], stored_names(stored)) == (first, [second])
