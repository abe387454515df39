"""Clearing: what nobody holds is dropped, what is held loses its name and stays with its sequences."""

from __future__ import annotations

from events.types import CacheCleared
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of

PROMPT = [1, 2, 3, 4, 5]


def cache() -> KVCacheManager:
    """An ended request in secondary and primary, and two running ones that share two cached blocks."""
    manager = KVCacheManager(strategies.config(secondary_blocks=2))
    manager.add_sequence("ended", [7] * 6)
    manager.store_context_blocks("ended", 6)
    manager.remove_sequence("ended")
    manager.add_sequences([Request("a", PROMPT), Request("b", PROMPT)])
    manager.store_context_blocks("a", 4)
    manager.store_context_blocks("b", 4)
    manager.flush()
    return manager


def test_nothing_can_be_reused_after_clearing() -> None:
    """No prompt matches any more, ended requests' blocks are blank, and the event counts both."""
    manager = cache()
    seen: list[object] = []
    manager.bus.subscribe(seen.append)
    in_secondary = sum(block[0] for block in strategies.cached_blocks(manager.state).values())
    manager.clear()
    assert strategies.cached_blocks(manager.state) == {}
    assert manager.count_reusable(PROMPT) == manager.count_reusable([7] * 6) == 0
    (event,) = [event for event in seen if isinstance(event, CacheCleared)]
    assert event.removed == ((3 - in_secondary, in_secondary),)
    assert event.unnamed == (2,)
    assert manager.num_free_blocks == 8 - 4
    manager.check()


def test_clearing_is_published_at_once() -> None:
    """Clearing does not wait for the next flush: nothing is left to publish after it."""
    manager = cache()
    manager.clear()
    assert not manager.bus.pending
    assert manager.flush() is None


def test_running_sequences_keep_their_tables() -> None:
    """Sequences keep their slots, also the shared ones, and what they have computed."""
    manager = cache()
    before = manager.block_tables(["a", "b"]).tolist()
    manager.clear()
    assert manager.block_tables(["a", "b"]).tolist() == before
    assert [sequence_of(manager, each).computed for each in ("a", "b")] == [4, 4]
    assert [sequence_of(manager, each).stored for each in ("a", "b")] == [(0,), (0,)]


def test_shared_blocks_are_stored_again_only_by_their_last_holder() -> None:
    """While two sequences hold a nameless block neither can store it; when one has ended the other can."""
    manager = cache()
    manager.clear()
    assert manager.store_context_blocks("a", 5).stored_blocks == 0
    manager.remove_sequence("a")
    assert strategies.cached_blocks(manager.state) == {}
    assert manager.store_context_blocks("b", 4).stored_blocks == 2
    assert manager.count_reusable(PROMPT) == 2
    manager.check()


def test_shared_slots_become_blank_with_their_last_holder() -> None:
    """The slots of a nameless block are given back when the last of its holders ends, not before."""
    manager = cache()
    manager.clear()
    manager.remove_sequence("a", store=False)
    assert manager.num_free_blocks == 5
    manager.remove_sequence("b", store=False)
    assert manager.num_free_blocks == 8
    manager.check()


def test_three_holders() -> None:
    """Holders of a nameless block are counted, not just noted."""
    manager = KVCacheManager(strategies.config())
    manager.add_sequence("a", PROMPT)
    manager.store_context_blocks("a", 4)
    manager.add_sequences([Request("b", PROMPT), Request("c", PROMPT)])
    manager.clear()
    for request_id, free in (("a", 4), ("b", 5), ("c", 8)):
        manager.check()
        manager.remove_sequence(request_id, store=False)
        assert manager.num_free_blocks == free


def test_decoding_goes_on_after_clearing() -> None:
    """A sequence of its own blocks stores all of them again with its next full block."""
    manager = KVCacheManager(strategies.config())
    manager.add_sequence("a", [1, 2, 3])
    manager.store_context_blocks("a", 3)
    manager.clear()
    manager.add_tokens(["a"], [4])
    manager.add_tokens(["a"], [5])
    assert manager.count_reusable([1, 2, 3, 4, 0]) == 2
    manager.check()


def test_copies_on_their_way_do_not_name_blocks() -> None:
    """Clearing while blocks are on their way leaves no cached block when they land."""
    manager = KVCacheManager(strategies.config(primary_blocks=4, secondary_blocks=4))
    manager.add_sequence("a", [1, 2, 3, 4])
    manager.store_context_blocks("a", 4)
    manager.remove_sequence("a")
    manager.add_sequence("b", [9] * 8)
    assert manager.state.transfers
    manager.clear()
    assert not manager.state.transfers
    assert strategies.cached_blocks(manager.state) == {}
    manager.check()
