"""A small busy cache, and every call of its manager with arguments that are right."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies


def cache(**settings: Any) -> KVCacheManager:
    """Runs "a" with 5 tokens and "b" with 4, of which 4 and 2 are stored; 8 blocks of 2 tokens, 3 of them blank."""
    manager = KVCacheManager(strategies.config(**settings))
    manager.add_sequences([Request("a", [1, 2, 3, 4, 5]), Request("b", [6, 7, 8, 9])])
    manager.store_context_blocks("a", 5)
    manager.store_context_blocks("b", 2)
    return manager


COMMANDS: list[tuple[str, tuple[Any, ...] | None]] = [
    ("add_sequence", ("c", [1])),
    ("add_sequences", ([],)),
    ("can_add", ([],)),
    ("match", ([1],)),
    ("count_reusable", ([1],)),
    ("store_context_blocks", ("a", 1)),
    ("store_encoder_blocks", ("a",)),
    ("add_tokens", (["a"], [1])),
    ("reserve", (["a"], [1])),
    ("set_priority", ("a", 50)),
    ("fork", ("a", "c")),
    ("rewind", ("a", 1)),
    ("pin", ("a",)),
    ("pins", ()),
    ("unpin", (1,)),
    ("remove_sequence", ("a",)),
    ("scheduling.remaining_blocks_to_completion", ("a", 1)),
    ("scheduling.remaining_blocks_per_window", ("a", 1)),
    ("scheduling.estimate_demand", (Request("c", [1]),)),
    ("scheduling.next_step_blocks_per_window", ("a",)),
    ("scheduling.simulate", ()),
    ("scheduling.find_in_flight", (Request("c", [1]),)),
    ("block_table", ("a",)),
    ("block_tables", (["a"],)),
    ("tables.padded", (["a"],)),
    ("tables.paged", (["a"],)),
    ("tables.slot_mapping", (["a"],)),
    ("tables.sequence_lengths", (["a"],)),
    ("tables.check", ()),
    ("clear", ()),
    ("flush", ()),
    ("poll", ()),
    ("start_transfers", ()),
    ("check", ()),
    ("fingerprint", ()),
    ("num_free_blocks", None),
    ("num_free_blocks_per_window", ()),
    ("num_sequences", None),
]
"""All that reads or changes the state, with arguments that are right; None: a property."""


def call(manager: KVCacheManager, name: str, arguments: tuple[Any, ...] | None) -> Any:
    found = attrgetter(name)(manager)
    return found if arguments is None else found(*arguments)
