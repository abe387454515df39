"""Priorities: which blocks get one, and what they are worth when room is needed."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from events.feed.fold import Feed
from events.ids import GroupIndex
from events.types import PRIMARY, BlocksMoved, BlocksRemoved, BlocksUpdated, EventBatch
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.fold.fingerprint import fingerprint
from kvcache.manager import KVCacheManager
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.inside import blocks_of
from tests.support.engines.strategies import name_of, split_names

PLAIN = (None, None, None)


def cache(**settings: Any) -> KVCacheManager:
    """8 blocks of 2 tokens."""
    return KVCacheManager(strategies.config(**settings))


def start(manager: KVCacheManager, prompt: list[int]) -> str:
    """Admit a request and compute it."""
    manager.add_sequence("run", prompt)
    manager.store_context_blocks("run", len(prompt))
    return "run"


def run(manager: KVCacheManager, prompt: list[int], priority: int = 35, **bounds: int) -> None:
    """Compute and end a request whose full blocks get a priority."""
    start(manager, prompt)
    manager.set_priority("run", priority, **bounds)
    manager.remove_sequence("run")


def name(*tokens: int) -> bytes:
    """The name of the last block of a prompt."""
    return name_of((PLAIN, *(tokens[at : at + 2] for at in range(0, len(tokens), 2))))


def updates(manager: KVCacheManager) -> list[tuple[list[bytes], int, int]]:
    found = [event for event in manager.bus.pending if isinstance(event, BlocksUpdated)]
    return [(split_names(event.names), event.old_priority, event.priority) for event in found]


def gone(manager: KVCacheManager, kind: type[BlocksMoved | BlocksRemoved]) -> list[bytes]:
    return [name for e in manager.bus.pending if isinstance(e, kind) for name in split_names(e.names)]


def priorities(manager: KVCacheManager) -> dict[bytes, int]:
    return {name: block[-1] for name, block in strategies.cached_blocks(manager.state).items()}


def test_lower_priority_goes_first_whenever_it_was_released() -> None:
    """What has the lower priority is evicted before what was released longer ago."""
    manager = cache()
    run(manager, [1, 1, 1, 2], 60)
    run(manager, [2, 2, 2, 1])
    run(manager, [3, 3, 3, 1], 10)
    manager.flush()
    manager.add_sequence("a", [7] * 16)
    expected = [(3, 3, 3, 1), (3, 3), (2, 2, 2, 1), (2, 2), (1, 1, 1, 2), (1, 1)]
    assert gone(manager, BlocksRemoved) == [name(*each) for each in expected]


def test_a_block_waits_for_those_after_it() -> None:
    """A parent of low priority is evicted after its child of a high one, and then before all others."""
    manager = cache()
    run(manager, [1, 1, 1, 2], 5, stop=2)
    run(manager, [2, 2, 2, 1])
    run(manager, [3, 3], 5)
    manager.flush()
    manager.add_sequence("a", [7] * 14)
    expected = [(3, 3), (1, 1, 1, 2), (1, 1), (2, 2, 2, 1)]
    assert gone(manager, BlocksRemoved) == [name(*each) for each in expected]


def test_blocks_that_overlap_the_tokens() -> None:
    """A block counts if one of its tokens does; an empty range has none, and beyond the end there are none."""
    manager = cache()
    prompt = [1, 1, 1, 2, 2, 2, 9]
    start(manager, prompt)
    assert manager.set_priority("run", 50, start=3, stop=5) == 2
    assert updates(manager) == [([name(*prompt[:4]), name(*prompt[:6])], 35, 50)]
    for start_, stop in ((3, 3), (6, None), (6, 100), (20, 30), (20, None)):
        assert manager.set_priority("run", 70, start=start_, stop=stop) == 0
    assert len(updates(manager)) == 1
    manager.check()


def test_one_event_for_each_row_of_one_priority() -> None:
    """Blocks that had different priorities are told apart, those that have it already are left out."""
    manager = cache(primary_blocks=10)
    prompt = [1] * 12
    start(manager, prompt)
    assert manager.set_priority("run", 50, start=2, stop=4) == 1
    assert manager.set_priority("run", 60, start=6, stop=8) == 1
    manager.flush()
    assert manager.set_priority("run", 60) == 5
    assert updates(manager) == [
        ([name(*[1] * 2)], 35, 60),
        ([name(*[1] * 4)], 50, 60),
        ([name(*[1] * 6)], 35, 60),
        ([name(*[1] * 10), name(*[1] * 12)], 35, 60),
    ]
    assert len(manager.state.groups[0].tree.runs) == 1
    assert manager.set_priority("run", 60) == 0


def test_only_what_is_cached_at_the_time() -> None:
    """Blocks that are stored later have the default, and what reuses a block finds the priority that it was given."""
    manager = cache()
    start(manager, [1, 1, 1, 2, 3])
    assert manager.set_priority("run", 80) == 2
    manager.add_tokens(["run"], [3])
    manager.add_tokens(["run"], [4])
    manager.remove_sequence("run")
    manager.add_sequence("again", [1, 1, 1, 2, 3, 3, 0])
    path = [name(1, 1), name(1, 1, 1, 2), name(1, 1, 1, 2, 3, 3)]
    assert priorities(manager) == dict(zip(path, (80, 80, 35), strict=True))
    assert manager.set_priority("again", 35) == 2
    manager.check()


def test_secondary_takes_only_what_is_worth_it() -> None:
    """Blocks below `secondary_offload_min_priority` are dropped, with what lies in secondary behind them."""
    manager = cache(primary_blocks=4, secondary_blocks=4, secondary_offload_min_priority=30)
    run(manager, [1, 1, 1, 2], 29)
    run(manager, [2, 2, 2, 1], 30)
    manager.flush()
    manager.add_sequence("a", [7] * 8)
    assert gone(manager, BlocksRemoved) == [name(1, 1, 1, 2), name(1, 1)]
    assert gone(manager, BlocksMoved) == [name(2, 2, 2, 1), name(2, 2)]
    mixed = cache(primary_blocks=2, secondary_blocks=4, secondary_offload_min_priority=30)
    run(mixed, [1, 1, 1, 2], 29, stop=2)
    mixed.flush()
    mixed.add_sequence("a", [7] * 4)
    assert gone(mixed, BlocksMoved) == [name(1, 1, 1, 2)]
    assert gone(mixed, BlocksRemoved) == [name(1, 1, 1, 2), name(1, 1)]
    mixed.check()


def test_secondary_keeps_the_higher_priority() -> None:
    """A full secondary drops what is lower than what comes, and refuses what is lower than all that it has."""
    manager = cache(primary_blocks=2, secondary_blocks=2)
    run(manager, [1, 1, 1, 2], 60)
    run(manager, [2, 2, 2, 1], 40)
    manager.flush()
    run(manager, [3, 3, 3, 1], 70)
    assert gone(manager, BlocksRemoved) == [name(2, 2, 2, 1), name(2, 2)]
    manager.flush()
    run(manager, [4, 4, 4, 1], 35)
    assert gone(manager, BlocksRemoved) == [name(1, 1, 1, 2), name(1, 1)]
    assert gone(manager, BlocksMoved) == [name(3, 3, 3, 1), name(3, 3)]


def test_a_block_brought_back_keeps_its_priority() -> None:
    """Offload and onboard change where a block is, not what it is worth."""
    manager = cache(primary_blocks=4, secondary_blocks=4)
    run(manager, [1, 1, 1, 2], 60)
    manager.add_sequence("a", [7] * 8)
    manager.remove_sequence("a", store=False)
    manager.add_sequence("again", [1, 1, 1, 2, 0])
    assert [block.level for block in manager.match([1, 1, 1, 2, 0]).blocks] == [0, 0]
    assert set(priorities(manager).values()) == {60}
    assert manager.set_priority("again", 61) == 2  # their copies have not landed
    manager.flush()
    manager.check()


def test_a_released_block_takes_its_new_place() -> None:
    """A fold also takes the event for blocks that nobody holds: they are evicted where they belong."""
    manager = cache()
    run(manager, [1, 1, 1, 2, 1, 1])
    run(manager, [2, 2])
    state = manager.state
    slots = array("i", [block.slot for block in manager.match([1, 1, 1, 2, 1, 1, 0]).blocks])
    for old, new, part in (
        (35, 50, slots[1:]),
        (35, 10, slots[:1]),
        (50, 10, slots[1:2]),
        (50, 5, slots[2:]),
    ):
        state.apply(BlocksUpdated(GroupIndex(0), PRIMARY, part.tobytes(), b"", old, new))
        manager.check()
    assert len(state.groups[0].tree.runs) == 3
    order = blocks_of(manager).windows[0].order
    assert isinstance(order, EvictionOrder)
    victim = order.next(PRIMARY)
    assert victim is not None
    assert victim.priority == 5


def test_replay_knows_the_priorities(tmp_path: Path) -> None:
    """The log folds to the same priorities, and goes on from there with the same evictions."""
    manager = KVCacheManager(strategies.config(), log=tmp_path / "log")
    run(manager, [1, 1, 1, 2, 1, 1], 60, start=2, stop=4)
    run(manager, [2, 2])
    manager.close()
    replayed = replay(tmp_path / "log")
    replayed.check()
    assert replayed.fingerprint == fingerprint(manager.state)
    again = KVCacheManager.resume(replayed.state)
    again.add_sequence("a", [7] * 14)
    assert gone(again, BlocksRemoved) == [name(1, 1, 1, 2, 1, 1), name(2, 2), name(1, 1, 1, 2)]


def test_routers_receive_nothing_of_it() -> None:
    """A priority is no business of the feed."""
    manager, feed = cache(), Feed()
    start(manager, [1, 1, 1, 2])
    stored = manager.flush()
    manager.set_priority("run", 80)
    updated = manager.flush()
    assert manager.state.created is not None
    assert stored is not None
    assert updated is not None
    feed.fold(EventBatch(0, 0, (manager.state.created,)))
    assert feed.fold(stored)
    assert [type(event) for event in updated.events] == [BlocksUpdated]
    assert feed.fold(updated) == []
    assert not feed.lost


def test_programs_that_poll_see_the_difference() -> None:
    """TensorRT-LLM's form has one `updated` per block, with the priority before and after."""
    manager = cache(event_buffer_max_size=100)
    start(manager, [1, 1, 1, 2, 3])
    manager.flush()
    manager.get_latest_events()
    manager.set_priority("run", 80, stop=4)
    manager.flush()
    diff = {"type": "event_diff", "new_value": 80, "old_value": 35}
    assert [event["data"] for event in manager.get_latest_events()] == [
        {
            "type": "updated",
            "block_hash": int.from_bytes(each, "big"),
            "cache_level": None,
            "priority": diff,
        }
        for each in (name(1, 1), name(1, 1, 1, 2))
    ]
    assert manager.stats().blocks_updated == 2


@pytest.mark.parametrize("block_hash", ["none", "v1_block_key", "xxh3_64"])
def test_names_are_those_of_the_blocks(block_hash: str) -> None:
    """Whatever a block's name is made of, or if it has none, the event has it as the store had."""
    manager = cache(block_hash=block_hash)
    start(manager, [1, 1, 1, 2, 3])
    manager.flush()
    manager.set_priority("run", 80)
    [event] = [event for event in manager.bus.pending if isinstance(event, BlocksUpdated)]
    names = "".join(block.name for block in manager.match([1, 1, 1, 2, 3]).blocks)
    assert event.names.hex() == names
