"""Requests that read nothing from the cache: they compute all of their prompts, and store and share that as usual."""

from __future__ import annotations

from typing import Any

import pytest

from events.types import SequenceAdded
from kvcache.errors import OutOfBlocks, UsageError
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def cache(**settings: Any) -> KVCacheManager:
    """A cache with three blocks of the prompt and one that begins as its last one."""
    settings = {"primary_blocks": 12, "max_sequence_length": 24} | settings
    manager = KVCacheManager(strategies.config(**settings))
    encoder: dict[str, Any] = {"encoder_tokens": [5, 5, 5]} if "cross_kv_cache_fraction" in settings else {}
    manager.add_sequence("before", PROMPT, **encoder)
    manager.store_context_blocks("before", 7)
    if encoder:
        manager.store_encoder_blocks("before")
    manager.remove_sequence("before")
    return manager


def test_nothing_is_reused_and_what_is_computed_replaces_nothing() -> None:
    """No block, and no copy of the start of one; its blocks give way to those that are cached."""
    manager = cache()
    assert manager.match(PROMPT).reused_tokens == 6
    added: list[SequenceAdded] = []
    manager.bus.subscribe(added.append, SequenceAdded)
    admission = manager.add_sequence("a", PROMPT, lookup=False)
    assert (admission.reused_tokens, added[0].reused, added[0].lookup) == (0, 0, False)
    assert manager.start_transfers() is None
    assert not manager.state.transfers
    assert [each.block for each in manager.store_context_blocks("a", 7).replaced] == [0, 1, 2]
    assert manager.add_sequence("b", PROMPT).reused_tokens == 6
    assert added[1].lookup is None
    manager.check()


def test_what_it_computes_first_is_found_by_others() -> None:
    """Stored as usual."""
    manager = cache()
    manager.add_sequence("a", [9] * 5, lookup=False)
    manager.store_context_blocks("a", 5)
    assert manager.add_sequence("b", [9] * 5).reused_tokens == 4


def test_it_needs_room_for_all_of_its_prompt() -> None:
    """Nothing cached counts as held for it, so it may take the place of what it would have found."""
    manager = cache(primary_blocks=8)
    manager.add_sequence("other", [8] * 8)
    ask = Request("a", PROMPT)
    assert manager.scheduling.estimate_demand(ask).reused_tokens == 6
    blind = Request("a", PROMPT, lookup=False)
    demand = manager.scheduling.estimate_demand(blind)
    assert (demand.reused_tokens, set(demand.needed.values())) == (0, {4})
    assert manager.can_add([blind]) == 1
    manager.add_sequences([blind])
    with pytest.raises(OutOfBlocks):
        manager.add_sequence("b", [7])
    assert manager.match(PROMPT).reused_tokens == 0
    manager.check()


def test_waiting_for_another_one_is_of_no_use() -> None:
    """A request without lookup has nothing to wait for: what another one computes is not reused."""
    manager = cache()
    manager.add_sequence("a", [9] * 7)
    assert manager.scheduling.find_in_flight(Request("b", [9] * 7)) is not None
    assert manager.scheduling.find_in_flight(Request("b", [9] * 7, lookup=False)) is None


def test_the_encoders_input_is_computed_too() -> None:
    """The encoder runs for it, though its output for these tokens is cached."""
    manager = cache(primary_blocks=16, cross_kv_cache_fraction=0.5)
    given = [5, 5, 5]
    assert manager.add_sequence("a", PROMPT, encoder_tokens=given, lookup=False).reused_encoder_tokens == 0
    assert [each.block for each in manager.store_encoder_blocks("a").replaced] == [0, 1]
    assert manager.add_sequence("b", PROMPT, encoder_tokens=given).reused_encoder_tokens == 3
    manager.check()


def test_lookup_is_a_flag() -> None:
    """Anything but a bool is refused."""
    manager = cache()
    with pytest.raises(UsageError, match="lookup must be True or False, not int"):
        manager.add_sequence("a", PROMPT, lookup=0)  # type: ignore[arg-type]
