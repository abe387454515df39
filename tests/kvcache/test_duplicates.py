"""Two running requests that compute the same prefix: one copy stays, whoever stores second is pointed at it."""

from __future__ import annotations

from events.types import BlocksMoved, BlocksReused, ContextComputed, Event, MoveReason
from kvcache.fold.full_group import FullGroup
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from kvcache.results import Replacement
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of

PROMPT = [1, 2, 3, 4, 5]


def two_of_the_same(manager: KVCacheManager) -> None:
    manager.add_sequences([Request("a", PROMPT), Request("b", PROMPT)])


def test_second_store_swaps_to_the_first_ones_blocks() -> None:
    """The later store lists (index, old slot, new slot), gives the old slots back, and both share the blocks."""
    manager = KVCacheManager(strategies.config())
    two_of_the_same(manager)
    old = manager.block_table("b").tolist()
    assert manager.store_context_blocks("a", 4).replaced == []
    first = manager.block_table("a").tolist()
    result = manager.store_context_blocks("b", 4)
    (group,) = manager.layout.groups
    expected = [Replacement(block, old[block], first[block], group.window) for block in (0, 1)]
    assert result.replaced == expected
    assert result.stored_blocks == 2
    assert manager.block_table("b").tolist() == [*first[:2], old[2]]
    assert manager.num_free_blocks == 4
    assert set(strategies.cached_blocks(manager.state).values()) == {(0, 2, 0, 2, 35)}
    (event,) = [event for event in manager.bus.pending if isinstance(event, BlocksReused)]
    assert len(event.replaced) == 8
    manager.check()


def test_only_what_is_stored_already_is_swapped() -> None:
    """A store that goes further than the other one swaps the common part and stores the rest."""
    manager = KVCacheManager(strategies.config())
    two_of_the_same(manager)
    manager.store_context_blocks("a", 2)
    result = manager.store_context_blocks("b", 4)
    assert [each.block for each in result.replaced] == [0]
    assert result.stored_blocks == 2
    assert [each.block for each in manager.store_context_blocks("a", 4).replaced] == [1]


def test_only_what_was_given_back_counts_as_duplicate() -> None:
    """Copies that were given back are counted, and blocks that a later prompt reuses are not."""
    manager = KVCacheManager(strategies.config())
    two_of_the_same(manager)
    for request_id in ("a", "b"):
        manager.store_context_blocks(request_id, 4)
    manager.add_sequence("c", PROMPT)
    manager.flush()
    assert (manager.stats().blocks_deduplicated, manager.stats().reused_tokens) == (2, 4)


def test_decoding_reports_the_tables_that_changed() -> None:
    """Sequences that decode the same tokens are swapped when a step completes the block, and only they are told."""
    manager = KVCacheManager(strategies.config())
    manager.add_sequences([Request("a", [1]), Request("b", [1]), Request("c", [7])])
    assert manager.add_tokens(["a", "b", "c"], [2, 2, 2]) == {}
    changed = manager.add_tokens(["a", "b", "c"], [3, 3, 3])
    assert list(changed) == ["b"]
    (place,) = changed["b"].replaced
    assert (place.block, place.new_slot) == (0, manager.block_table("a")[0])
    manager.check()


def test_block_that_lies_in_secondary_moves_to_the_one_who_computed_it() -> None:
    """A sequence that computed what lies in secondary keeps its slot, which becomes the cached block without a copy."""
    manager = KVCacheManager(strategies.config(primary_blocks=6, secondary_blocks=4))
    manager.add_sequence("b", PROMPT)
    manager.add_sequence("a", PROMPT)
    manager.store_context_blocks("a", 4)
    manager.remove_sequence("a")
    manager.add_sequence("filler", [9] * 6)
    assert [block.level for block in manager.match(PROMPT).blocks] == [1, 1]
    table = manager.block_table("b").tolist()
    manager.flush()
    result = manager.store_context_blocks("b", 4)
    assert (result.replaced, result.stored_blocks) == ([], 2)
    assert manager.block_table("b").tolist() == table
    assert [(block.level, block.slot) for block in manager.match(PROMPT).blocks] == [
        (0, table[0]),
        (0, table[1]),
    ]
    (event,) = [event for event in manager.bus.pending if isinstance(event, BlocksMoved)]
    assert (event.why, event.transfer) == (MoveReason.RECOMPUTED, 0)
    assert len(manager.state.groups[0].levels[1].blank) == 4
    manager.check()


def duplicates_of(prompt: list[int], *, split: bool) -> tuple[list[Event], bytes]:
    """A sequence stores what another one had stored before: half of that in primary, half in secondary.

    Returns what this made happen, and the fingerprint. With `split`, each run of the tree was cut into blocks before.
    """
    manager = KVCacheManager(strategies.config(primary_blocks=12, secondary_blocks=8))
    manager.add_sequences([Request("b", prompt), Request("a", prompt)])
    manager.store_context_blocks("a", 8)
    manager.remove_sequence("a")
    manager.add_sequence("filler", [9] * 10)
    assert [block.level for block in manager.match(prompt).blocks] == [0, 0, 1, 1]
    manager.flush()
    group = manager.state.groups[0]
    assert isinstance(group, FullGroup)
    for run in list(group.tree.runs.values()) if split else ():
        while len(run.slots) > 1:
            group.split(run, 1)
    assert len(group.tree.runs) == (4 if split else 2)
    assert manager.store_context_blocks("b", 8).stored_blocks == 4
    return list(manager.bus.pending), manager.fingerprint()


def test_where_runs_begin_does_not_matter() -> None:
    """The same blocks are found at once, and told by the same events, be they in one run per level or in many."""
    prompt = list(range(9))
    events, end = duplicates_of(prompt, split=False)
    kinds = [ContextComputed, BlocksReused, BlocksMoved]
    assert [type(event) for event in events] == kinds
    assert duplicates_of(prompt, split=True) == (events, end)


def test_namespaces_are_never_merged() -> None:
    """Equal prompts under different salts keep blocks of their own."""
    manager = KVCacheManager(strategies.config())
    manager.add_sequences([Request("a", PROMPT, cache_salt="x"), Request("b", PROMPT, cache_salt="y")])
    manager.store_context_blocks("a", 4)
    assert manager.store_context_blocks("b", 4).replaced == []
    assert len(strategies.cached_blocks(manager.state)) == 4


def test_what_is_stored_is_reported_after_all_windows_have_stored() -> None:
    """In a decode step with two windows, where one of them finds another sequence's block and the other does not."""
    manager = KVCacheManager(
        strategies.config(
            primary_blocks=11, max_attention_window=(1, 3), num_layers=2, enable_partial_reuse=False
        )
    )
    for request_id, prompt in ((0, [1, 1]), (1, [1, 1, 1, 0, 1, 0]), (2, [1, 0, 1, 0, 0, 0])):
        manager.add_sequence(request_id, prompt)
    for tokens in ([1, 0, 1], [0, 1, 1]):
        manager.add_tokens([0, 1, 2], tokens)
    result = manager.add_tokens([0, 1, 2], [0, 1, 1])
    assert [each.window for each in result[0].replaced] == [1]
    assert result[0].stored_blocks == min(sequence_of(manager, 0).stored) == 2
