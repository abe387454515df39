"""What happens to sliding windows behind a log: a resumed manager decides alike, a log without tokens is consistent."""

from __future__ import annotations

from typing import Any

from events.codec import without_tokens
from events.feed import Feed
from events.types import PRIMARY, BlocksMoved, BlocksRemoved, BlocksStored, Event, EventBatch, MoveReason
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.state import CacheState, resident_names
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.feeds.strict import resident_in


def cache(*windows: int, **settings: Any) -> KVCacheManager:
    defaults = {"max_sequence_length": 64, "num_layers": len(windows), "max_attention_window": windows}
    return KVCacheManager(strategies.config(**(defaults | settings)))


def run(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    manager.add_sequence(name, tokens)
    manager.store_context_blocks(name, len(tokens))
    manager.remove_sequence(name)


def test_a_resumed_manager_evicts_alike() -> None:
    """Blocks of one release that came to secondary one by one leave it as those do that a state lists together."""
    manager = cache(10, tokens_per_block=2, primary_blocks=8, secondary_blocks=4)
    run(manager, "a", [1] * 8)
    for name, count in (("b", 10), ("c", 2)):
        manager.add_sequence(name, [ord(name)] * count)  # moves one block of the first prompt each
    manager.flush()
    assert manager.state.created is not None
    again = strategies.continue_from(manager.config, manager.state.created, manager.state.export())
    events: list[list[Event]] = [[], []]
    for each, received in zip((manager, again), events, strict=True):
        each.bus.subscribe(received.append, BlocksMoved, BlocksRemoved)
        each.store_context_blocks("b", 10)
        each.remove_sequence("b")
        each.add_sequence("d", [4] * 12)
        each.check()
    assert any(isinstance(event, BlocksRemoved) for event in events[0])
    assert events[0] == events[1]
    assert manager.fingerprint() == again.fingerprint()


def test_recomputed_blocks_have_names_in_a_log_without_tokens() -> None:
    """A sequence that takes over blocks from secondary knows them by the names that the event gives."""
    manager = cache(4, primary_blocks=8, secondary_blocks=8)
    mirror = CacheState(tokens_recorded=False)
    assert manager.state.created is not None
    mirror.apply(manager.state.created)
    manager.bus.subscribe(lambda event: mirror.apply(without_tokens(event)))
    moved: list[BlocksMoved] = []
    manager.bus.subscribe(moved.append, BlocksMoved)
    manager.add_sequence("slow", [1] * 6)
    run(manager, "quick", [1] * 6)
    run(manager, "other", [2] * 10)
    manager.store_context_blocks("slow", 6)
    assert moved[-1].why == MoveReason.RECOMPUTED
    mirror.check()
    assert fingerprint(mirror) == manager.fingerprint()


def test_names_of_blocks_that_were_never_stored_are_given_before_they_are_used() -> None:
    """What one window skipped, and another stores later, has the name that routers are told."""
    manager = cache(4, 64, primary_blocks=20, secondary_blocks=(12, 0))
    feed, prompt = Feed(), list(range(16))
    assert manager.state.created is not None
    events: list[Event] = [manager.state.created]
    manager.bus.subscribe(events.append)
    manager.add_sequence("a", prompt)
    manager.store_context_blocks("a", 4)
    manager.add_sequence("sharing", prompt[:6])
    manager.clear()  # now both hold the first two blocks without a name, and store none behind these
    run(manager, "c", prompt)
    manager.add_sequence("pressing", [99] * 22)
    manager.remove_sequence("pressing", store=False)
    manager.store_context_blocks("a", 9)
    manager.store_context_blocks(
        "a", 12
    )  # the narrow window has left them behind, and takes what "c" has cached
    manager.remove_sequence("sharing", store=False)
    manager.store_context_blocks("a", 14)
    manager.flush()
    kinds = [event.why for event in events if isinstance(event, BlocksMoved)]
    assert MoveReason.RECOMPUTED in kinds
    assert [event.first_block for event in events if isinstance(event, BlocksStored) and event.group == 1][
        -1
    ] == 0
    feed.fold(EventBatch(0, 0, tuple(events)))  # type: ignore[arg-type]
    reported = {int.from_bytes(name, "big") for name in resident_in(feed, 1, PRIMARY)}
    assert reported == resident_names(manager.state, PRIMARY, 1)
