"""The engine of the byte tests notices what it is there to notice."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from events.types import FULL, PRIMARY, SECONDARY, GroupCreated
from kvcache.fold.full_group import FullGroup
from kvcache.fold.prefix_tree import PrefixTree, Root
from kvcache.inputs import Request, namespace_of
from tests.support.engines.fake_engine import DETACHED, WRONG, FakeEngine, places

PROMPT = [0, 1, 0, 1, 1, 0, 1]
TWO: dict[str, Any] = {
    "num_layers": 4,
    "num_kv_heads": (1, 1, 2, 2),
    "max_attention_window": (3, 24),
    "primary_blocks": 12,
    "secondary_blocks": 4,
}


def computed(**settings: Any) -> FakeEngine:
    """An engine whose request "a" has computed its prompt, 7 tokens in 4 blocks."""
    engine = FakeEngine(**(TWO | settings))
    engine.admit(Request("a", PROMPT))
    engine.forward("a")
    return engine


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("pool", [0, 1])
def test_wrong_bytes_are_found_where_they_are_seen(group: int, pool: int) -> None:
    """Token 7 sees tokens 5 and 6 in the small window, all in the large one; one element of one pool is enough."""
    for token in range(7):
        engine = computed()
        slot = int(engine.manager.block_table("a", window=engine.windows[group])[token // 2])
        if slot == DETACHED:
            continue
        engine.pools.groups[group][pool].primary[slot, -1, -1, token % 2, -1] += 1
        seen = group == 1 or token >= 5
        assert engine.finds("a", 7) != seen
        if seen:
            with pytest.raises(AssertionError, match="reads the K/V of something else"):
                engine.verify_running()
        if token < 6:  # the block of the last one is not full, hence not cached
            with pytest.raises(AssertionError, match="a cached block holds"):
                engine.verify()


def test_what_comes_after_wrong_bytes_is_wrong() -> None:
    """A token that sees something wrong in one window becomes wrong in all."""
    engine = computed()
    engine.decode(["a"], [1])
    slot = int(engine.manager.block_table("a", window=24)[0])
    engine.pools.groups[1][0].primary[slot] = WRONG
    engine.decode(["a"], [0])
    for group in range(2):
        assert engine.read("a", group, 7, 8) == [WRONG]


@pytest.mark.parametrize("gone", [1, 2, 3, 4])
def test_a_block_that_a_window_has_let_go_of_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    """Two blocks may be gone in the small window; reading or writing a third one is an error."""
    engine = computed()
    true_table = engine.manager.block_table

    def table(request_id: str | int, window: int | None = None) -> Any:
        found = np.asarray(true_table(request_id, window))
        found[: gone if window == 3 else 0] = DETACHED
        return found

    monkeypatch.setattr(engine.manager, "block_table", table)
    if gone <= 2:
        engine.verify_running()
        engine.decode(["a"], [0])
    else:
        with pytest.raises(AssertionError, match="let go of a block that it sees"):
            engine.verify_running()
        monkeypatch.setattr(engine, "finds", lambda *_: True)
        if gone == 4:
            engine.manager.add_tokens(["a"], [0])
            engine.manager._blocks.running.sequence("a").computed = 6
            with pytest.raises(AssertionError, match="let go of a block that is to be written"):
                engine.write("a", 7)


def test_what_is_blank_is_wrong_in_all_pools() -> None:
    """Slots that were given back hold nothing that looks like K/V, in primary and in secondary, of any window."""
    engine = computed()
    engine.end("a", store=False)
    engine.admit(Request("b", [1] * 24))  # offloads what "a" had stored
    engine.settle()
    engine.manager.clear()
    engine.end("b", store=False)
    for group in engine.pools.groups:
        for pool in group:
            assert all((level == WRONG).all() for level in pool.levels)


def test_what_a_copy_is_to_read_is_kept() -> None:
    """A slot whose bytes are on their way to secondary is overwritten after they have been read."""
    engine = computed(primary_blocks=4)
    engine.end("a", store=False)
    engine.admit(Request("b", [1] * 8))
    engine.end("b", store=False)
    engine.start_transfers()
    engine.settle()
    assert len(engine.manager.match(PROMPT).blocks)
    engine.verify()
    for pool in engine.pools.groups[1]:
        assert (pool.primary == WRONG).all()


def test_places_of_runs() -> None:
    """Full windows have runs in one level; in sliding ones each block has a level of its own, or lies nowhere."""
    group = FullGroup(0, GroupCreated(8, FULL, (0,), (), (4, 4)), 2, 8, 0, tokens_recorded=True)
    root = Root(namespace_of(None, None, None), b"")
    run = PrefixTree(8, 0).new_run(root, bytearray(32), array("i", [3, 0, 2, 1]), bytearray())
    run.level = SECONDARY
    assert list(places(group, run, sliding=False)) == [
        (0, SECONDARY, 3),
        (1, SECONDARY, 0),
        (2, SECONDARY, 2),
        (3, SECONDARY, 1),
    ]
    run.slots = array("i", [-1, 3, 4, 7])
    assert list(places(group, run, sliding=True)) == [(1, PRIMARY, 3), (2, SECONDARY, 0), (3, SECONDARY, 3)]
