"""Lookups say what would be reused, block by block, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.decide.lookup import lookup
from kvcache.inputs import namespace_of, pack_tokens
from kvcache.manager import KVCacheManager
from kvcache.replay import replay
from tests.support.engines import strategies


def cache(**settings: object) -> KVCacheManager:
    """Holds [1, 2, 3, 4, 5]: two blocks of two tokens, and one with a single token."""
    manager = KVCacheManager(strategies.config(**settings))
    manager.add_sequence(0, [1, 2, 3, 4, 5])
    manager.store_context_blocks(0, 5)
    manager.remove_sequence(0)
    return manager


@pytest.mark.parametrize(
    ("tokens", "blocks", "partial"),
    [
        ([], 0, 0),
        ([1], 0, 0),
        ([1, 2], 0, 1),
        ([1, 2, 3], 1, 0),
        ([1, 2, 3, 4], 1, 1),
        ([1, 2, 3, 4, 5], 2, 0),
        ([1, 2, 3, 4, 5, 6], 2, 1),
        ([1, 2, 3, 9, 9], 1, 1),
        ([1, 9, 3, 4], 0, 1),
        ([9, 2, 3, 4], 0, 0),
    ],
)
def test_longest_prefix_but_for_the_last_token(tokens: list[int], blocks: int, partial: int) -> None:
    """A prompt reuses full blocks along its path and the start of one more, never its own last token."""
    manager = cache()
    before = manager.fingerprint()
    found = manager.match(tokens)
    assert (len(found.blocks), found.partial.num_tokens if found.partial else 0) == (blocks, partial)
    assert found.reused_tokens == 2 * blocks + partial
    assert found.num_tokens == len(tokens)
    assert manager.count_reusable(tokens) == blocks
    assert [block.index for block in found.blocks] == list(range(blocks))
    assert manager.fingerprint() == before


def test_counting_blocks_makes_no_object_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler asks `count_reusable` for each prompt that waits, so it must not describe what it counts."""
    manager = cache()
    monkeypatch.delattr("kvcache.decide.lookup.MatchedBlock")
    assert manager.count_reusable([1, 2, 3, 4, 5]) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"lora_id": 1},
        {"lora_id": 0},
        {"lora_name": "a"},
        {"lora_name": ""},
        {"cache_salt": "a"},
        {"cache_salt": ""},
    ],
)
def test_namespaces_share_nothing(other: dict[str, Any]) -> None:
    """A prompt under another LoRA id, LoRA name or salt reuses nothing, not even where the other value is empty."""
    manager = cache()
    assert manager.count_reusable([1, 2, 3], **other) == 0
    manager.add_sequence(1, [1, 2, 3], **other)
    manager.store_context_blocks(1, 3)
    assert manager.count_reusable([1, 2, 3], **other) == 1


def test_partial_reuse_can_be_off() -> None:
    """Without partial reuse only full blocks match, and an unfinished block is not kept."""
    manager = cache(enable_partial_reuse=False)
    assert manager.match([1, 2, 3, 9]).partial is None
    assert manager.match([1, 2, 3, 4, 5, 6]).partial is None
    assert len(strategies.cached_blocks(manager.state)) == 2


def test_reuse_can_be_off() -> None:
    """Without reuse nothing is stored, matched or kept."""
    manager = cache(enable_block_reuse=False)
    assert manager.match([1, 2, 3, 4, 5]).reused_tokens == 0
    assert manager.add_sequence(1, [1, 2, 3]).reused_tokens == 0
    assert strategies.cached_blocks(manager.state) == {}
    manager.check()


def test_longest_of_many_siblings_is_found() -> None:
    """Among siblings with common beginnings the one with the most common tokens is copied from."""
    manager = KVCacheManager(strategies.config(tokens_per_block=4, primary_blocks=64, max_sequence_length=16))
    prompts = [[a, b, c, 7, 0] for a in range(3) for b in range(3) for c in range(3)]
    for number, prompt in enumerate(prompts):
        manager.add_sequence(number, prompt)
        manager.store_context_blocks(number, 5)
        manager.remove_sequence(number)
    for prompt in prompts:
        found = manager.match([*prompt[:3], 8, 0]).partial
        assert found is not None
        assert found.num_tokens == 3
        shorter = manager.match([*prompt[:2], 9, 0, 0]).partial
        assert shorter is not None
        assert shorter.num_tokens == 2


def test_log_without_tokens_is_matched_by_its_keys(tmp_path: object) -> None:
    """The replayed state of a log without token ids still finds full blocks, by name."""
    config = strategies.config(log={"record_tokens": False, "fsync": "never"})
    with KVCacheManager(config, log=f"{tmp_path}/log") as manager:
        manager.add_sequence(0, [1, 2, 3, 4, 5])
        manager.store_context_blocks(0, 5)
        live = manager.match([1, 2, 3, 4, 5])
    state = replay(f"{tmp_path}/log", verify=True).state
    found = lookup(state, namespace_of(None, None, None), pack_tokens([1, 2, 3, 4, 5]))
    assert [block.slot for block in found.blocks] == [block.slot for block in live.blocks]
    assert found.partial is None
    assert not lookup(state, namespace_of(None, None, None), pack_tokens([1, 9, 3])).blocks
