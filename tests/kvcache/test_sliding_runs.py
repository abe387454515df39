"""What sliding windows keep: runs that do not decay into blocks, and a queue that does not grow with time."""

from __future__ import annotations

from array import array

import pytest

from events.types import PRIMARY, BlocksFilled, BlocksStored, RemoveReason
from kvcache.decide.sliding_window import SlidingWindowManager
from kvcache.errors import InvariantViolated
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.inside import blocks_of

BLOCKS = 8192


def slide(primary_blocks: int, together: int) -> KVCacheManager:
    """A sequence of BLOCKS blocks, whose window of 32 tokens has left nearly all of them behind."""
    manager = KVCacheManager(
        strategies.config(
            max_sequence_length=2 * BLOCKS + 2,
            tokens_per_block=2,
            primary_blocks=primary_blocks,
            max_attention_window=32,
        )
    )
    manager.add_sequence("a", [7, 8])
    manager.store_context_blocks("a", 2)
    for start in range(0, 2 * (BLOCKS - 1), together):
        tokens = [start % 5 + n for n in range(min(together, 2 * (BLOCKS - 1) - start))]
        manager.add_tokens(["a"], tokens, None if together == 1 else [len(tokens)])
    return manager


@pytest.mark.parametrize("together", [1, 16])
@pytest.mark.parametrize("primary_blocks", [64, 2 * BLOCKS])
def test_sliding_leaves_a_handful_of_runs(primary_blocks: int, together: int) -> None:
    """Though blocks were let go of one by one, and most of them evicted where there is no room for them."""
    manager = slide(primary_blocks, together)
    (group,) = manager.state.groups
    (window,) = blocks_of(manager).windows
    (sequence,) = manager.state.sequences.values()
    assert isinstance(group, SlidingGroup)
    assert isinstance(window, SlidingWindowManager)
    assert sequence.detached == [BLOCKS - 16]
    assert len(group.tree.runs) <= 4
    assert window.order.queued <= 5 * primary_blocks + 16
    manager.check()


def test_what_is_held_again_and_again_is_queued_a_bounded_number_of_times() -> None:
    """Each release queues the blocks anew; what is stale is dropped before it outgrows the window."""
    manager = KVCacheManager(
        strategies.config(
            max_sequence_length=64, tokens_per_block=2, primary_blocks=64, max_attention_window=32
        )
    )
    (window,) = blocks_of(manager).windows
    assert isinstance(window, SlidingWindowManager)
    for number in range(1000):
        manager.add_sequence(number, [1] * 32)
        manager.store_context_blocks(number, 32)
        manager.remove_sequence(number)
        assert window.order.queued <= 5 * 64 + 16
    manager.check()


def test_spared_blocks_are_passed_over() -> None:
    """Those behind them in the same release go before what was released later."""
    manager = KVCacheManager(
        strategies.config(
            max_sequence_length=64, tokens_per_block=2, primary_blocks=16, max_attention_window=32
        )
    )
    for name, tokens in (("a", [1] * 6), ("b", [2] * 4)):
        manager.add_sequence(name, tokens)
        manager.store_context_blocks(name, len(tokens))
        manager.remove_sequence(name)
    (window,) = blocks_of(manager).windows
    assert isinstance(window, SlidingWindowManager)
    order, evict = window.order, window.remove
    by_key = sorted((*order.key(slot), slot) for slot in range(5))
    first, second, third, *later = [slot for *_, slot in by_key]
    for spares, wanted, expected in (
        ({first, later[0]}, 1, [second]),
        ({first}, 1, [third]),
        ({first}, 9, later),
        (set[int](), 9, [first]),
    ):
        assert order.next(PRIMARY, spares) == expected[0]
        assert list(order.lowest(PRIMARY, wanted, spares=spares)) == expected
        evict(array("i", expected), RemoveReason.CAPACITY, None)
        order.check()
    assert order.next(PRIMARY) is None
    assert not order.lowest(PRIMARY, 9)


def test_blocks_filled_in_one_step_are_stored_by_one_event() -> None:
    """Whatever the slot of the block before: slot 0 is one like all others."""
    manager = KVCacheManager(strategies.config(primary_blocks=8, max_attention_window=4, num_layers=1))
    for number in range(2):
        manager.add_sequence(number, [number, 7])
        manager.store_context_blocks(number, 2)
    assert manager.block_table(0, 4)[0] == 0
    events: list[BlocksFilled | BlocksStored] = []
    manager.bus.subscribe(events.append, BlocksFilled, BlocksStored)
    for token in range(3):
        manager.add_tokens([0, 1], [token, token])
    [event] = events
    assert isinstance(event, BlocksFilled)
    assert event.handles == array("q", [manager.state.handles[number] for number in range(2)]).tobytes()
    assert event.blocks == array("I", [1, 1]).tobytes()


def test_slots_that_a_level_has_not_are_refused() -> None:
    """A slot of the other level, or none at all, would be taken for some place."""
    manager = KVCacheManager(
        strategies.config(primary_blocks=8, secondary_blocks=4, max_attention_window=4, num_layers=1)
    )
    (group,) = manager.state.groups
    assert isinstance(group, SlidingGroup)
    for level, slot in ((0, -1), (0, 8), (1, -2), (1, 4)):
        for more in (0, 20):
            with pytest.raises(InvariantViolated, match="out of range"):
                group.places(level, array("i", [*[0] * more, slot]))
    assert list(group.places(1, array("i", [3]))) == [11]
