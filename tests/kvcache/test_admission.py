"""Admission: a batch enters whole or not at all, and claims all it reuses before anything is evicted."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from events.types import BlocksMoved, BlocksRemoved
from kvcache.errors import OutOfBlocks, UnknownRequest
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of


def fill(manager: KVCacheManager, *prompts: list[int]) -> None:
    """Run prompts to their end, one after the other."""
    for prompt in prompts:
        manager.add_sequence("filler", prompt)
        manager.store_context_blocks("filler", len(prompt))
        manager.remove_sequence("filler")


def cache(**settings: Any) -> KVCacheManager:
    return KVCacheManager(strategies.config(**settings))


def test_prompt_takes_the_blocks_it_needs() -> None:
    """A new prompt gets one block per started tokens_per_block, and none is reused."""
    manager = cache()
    admitted = manager.add_sequence("a", [1, 2, 3])
    assert (admitted.num_tokens, admitted.reused_tokens) == (3, 0)
    assert admitted.block_tables[0].tolist() == [0, 1]
    assert manager.num_free_blocks == 6


def test_block_tables_belong_to_their_admission() -> None:
    """What an admission shows ends with its sequence, also if the same id runs again."""
    manager = cache()
    old = manager.add_sequence("a", [1, 2, 3])
    manager.remove_sequence("a")
    with pytest.raises(UnknownRequest):
        _ = old.block_tables
    new = manager.add_sequence("a", [7] * 5)
    with pytest.raises(UnknownRequest):
        _ = old.block_tables
    assert new.block_tables[0].tolist() == manager.block_table("a").tolist()


def test_reused_tokens_are_reported_by_where_they_were() -> None:
    """Full blocks in primary, full blocks in secondary and the start of a copied block are counted apart."""
    manager = cache(primary_blocks=6, secondary_blocks=4)
    fill(manager, [1, 2, 3, 4, 5, 6], [9] * 8)
    # The first prompt's deepest block went to secondary.
    assert [block.level for block in manager.match([1, 2, 3, 4, 5, 6, 7]).blocks] == [0, 0, 1]
    admitted = manager.add_sequence("a", [1, 2, 3, 4, 5, 6, 7])
    assert (admitted.reused_primary, admitted.reused_secondary, admitted.reused_partial) == (4, 2, 0)
    assert manager.add_sequence("b", [1, 8, 8]).reused_partial == 1
    assert sequence_of(manager, "b").computed == 1


def test_last_token_of_a_prompt_is_never_reused() -> None:
    """Even a prompt that is cached whole leaves its last token to compute."""
    manager = cache()
    fill(manager, [1, 2, 3, 4])
    admitted = manager.add_sequence("a", [1, 2, 3, 4])
    assert (admitted.reused_primary, admitted.reused_partial) == (2, 1)


def test_batch_that_does_not_fit_leaves_no_trace() -> None:
    """One request too many refuses all, and names the first that does not fit with what was needed and there."""
    manager = cache()
    batch = [Request(number, [number] * 5) for number in range(3)]
    assert manager.can_add(batch) == 2
    before = manager.fingerprint()
    with pytest.raises(OutOfBlocks) as raised:
        manager.add_sequences(batch)
    assert (raised.value.index, raised.value.needed, raised.value.available) == (2, (9,), (8,))
    assert manager.fingerprint() == before
    manager.add_sequences(batch[:2])
    assert manager.can_add(batch[2:]) == 0
    assert manager.num_free_blocks == 2


def test_claimed_blocks_cannot_be_evicted_for_the_same_batch() -> None:
    """What one request of a batch reuses is not what another one's blocks are taken from: the batch does not fit."""
    manager = cache(primary_blocks=4)
    fill(manager, [1, 2, 3, 4])
    reuser, other = Request("a", [1, 2, 3, 4, 5]), Request("b", [7] * 4)
    assert manager.num_free_blocks == 4
    assert manager.can_add([other, reuser]) == 1
    assert manager.can_add([other]) == 1
    with pytest.raises(OutOfBlocks):
        manager.add_sequences([other, reuser])
    assert manager.count_reusable([1, 2, 3, 4, 5]) == 2
    manager.add_sequences([reuser])
    assert not any(isinstance(event, BlocksRemoved) for event in manager.bus.pending)


def test_shared_prefix_of_a_batch_counts_once() -> None:
    """Blocks that several requests reuse take room once; without that the batch would not fit."""
    manager = cache(primary_blocks=5)
    fill(manager, [1, 2, 3, 4])
    batch = [Request(number, [1, 2, 3, 4, 5 + number]) for number in range(3)]
    assert manager.can_add(batch) == 3
    admitted = manager.add_sequences(batch)
    assert [each.reused_primary for each in admitted] == [4, 4, 4]
    assert manager.num_free_blocks == 0
    assert set(strategies.cached_blocks(manager.state).values()) == {(0, 3, 0, 2, 35)}


def test_secondary_prefix_shared_by_a_batch_is_onboarded_once() -> None:
    """Two requests that reuse the same blocks in secondary cause one onboarding, and both tables name its slots."""
    manager = cache(primary_blocks=4, secondary_blocks=4)
    fill(manager, [1, 2, 3, 4], [9] * 8)
    manager.flush()
    batch = [Request("a", [1, 2, 3, 4, 5]), Request("b", [1, 2, 3, 4, 6])]
    admitted = manager.add_sequences(batch)
    assert [each.reused_secondary for each in admitted] == [4, 4]
    moves = [event for event in manager.bus.pending if isinstance(event, BlocksMoved) and event.to_level == 0]
    assert sum(len(event.to_slots) // 4 for event in moves) == 2
    tables = manager.block_tables(["a", "b"])
    assert tables[0, :2].tolist() == tables[1, :2].tolist()
    manager.check()


class Unread(array):
    """A block table that nobody may search."""

    def __contains__(self, value: object) -> bool:
        raise AssertionError("the table of a sequence that onboards nothing was searched")


def test_onboarding_does_not_search_the_tables_of_others() -> None:
    """What an admission that onboards costs does not grow with what other sequences hold."""
    manager = cache(primary_blocks=6, secondary_blocks=4)
    fill(manager, [1, 2, 3, 4, 5, 6], [9] * 8)
    manager.add_sequence("other", [7])
    other = sequence_of(manager, "other")
    other.tables[0] = Unread("i", other.tables[0])
    assert manager.add_sequence("a", [1, 2, 3, 4, 5, 6, 7]).reused_secondary == 4
    manager.check()


def test_each_request_of_a_batch_gets_what_it_onboarded_itself() -> None:
    """Two prompts that share their start in secondary and part there: no table names the other one's blocks."""
    manager = cache(primary_blocks=8, secondary_blocks=8)
    prompts = {"a": [1, 2, 3, 4, 9], "b": [1, 2, 5, 6, 9]}
    fill(manager, *prompts.values(), [7] * 16)
    manager.flush()
    admitted = manager.add_sequences([Request(name, prompt) for name, prompt in prompts.items()])
    assert [each.reused_secondary for each in admitted] == [4, 4]
    manager.check()
    one, other = manager.block_tables(["a", "b"]).tolist()
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_requests_of_a_batch_do_not_reuse_each_other() -> None:
    """Nothing of a batch is computed yet, so equal prompts in one batch each get blocks of their own."""
    manager = cache()
    admitted = manager.add_sequences([Request("a", [1, 2, 3]), Request("b", [1, 2, 3])])
    assert [each.reused_tokens for each in admitted] == [0, 0]
    assert len({*manager.block_table("a"), *manager.block_table("b")}) == 4
