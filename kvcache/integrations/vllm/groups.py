"""VLLM's other groups of layers than the recorded one: sliding windows, chunks, states of Mamba layers.

All groups take blocks from one pool, and each evicts blocks that any of them has named. The blocks of a request in a
group follow from its table, read after each call.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvcache import LayerGroup
from kvcache.errors import Unsupported
from kvcache.record.mirror import Kind

HASH_END = 4
"""Bytes at the end of a name with the number of its group."""


def layer_groups(scheduler: Any, full: int) -> list[LayerGroup]:
    """Return the groups other than number `full`, in vLLM's order. Raises `Unsupported`."""
    manager, groups = scheduler.kv_cache_manager, scheduler.kv_cache_config.kv_cache_groups
    if len(groups) > 1 and getattr(scheduler, "connector", None) is not None:
        raise Unsupported("a KV connector for layers of several kinds", "disable the connector")
    return [
        _layer_group(each, manager.block_pool, len(groups[at].layer_names))
        for at, each in enumerate(manager.coordinator.single_type_managers)
        if at != full
    ]


def _layer_group(each: Any, pool: Any, layers: int) -> LayerGroup:
    kinds = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    kind: Kind | None = None
    window = 0
    if not each.kv_cache_spec.prefix_cacheable:
        kind = "uncached"
    elif isinstance(each, kinds.SlidingWindowManager):
        kind, window = "sliding", each.sliding_window
    elif isinstance(each, kinds.ChunkedLocalAttentionManager):
        kind, window = "chunked", each.attention_chunk_size
    elif isinstance(each, kinds.MambaManager):
        kind = "state"
    elif isinstance(each, kinds.FullAttentionManager):
        kind = "full"
    if kind is None or each.block_pool is not pool:
        raise Unsupported(f"layers such as those of {type(each).__name__}", "there is no workaround yet")
    return LayerGroup(kind, each.block_size, window, layers)


class FurtherGroup:
    """One further group: vLLM's manager of it, and the recorded tables and names."""

    def __init__(self, number: int, manager: Any) -> None:
        self.number, self.manager = number, manager
        self.vllm_group: int = manager.kv_cache_group_id
        self.hash_end = self.vllm_group.to_bytes(HASH_END, "big")
        kinds = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
        self.leaves_in_order = not isinstance(manager, kinds.RSWAManager | kinds.MambaManager)
        self.tables: dict[str, dict[int, int]] = {}
        """Block by request and index."""
        self.lengths: dict[str, int] = {}
        """Number of table entries already read, by request."""
        self.given: set[tuple[int, bytes]] = set()
        """Present names: block and name."""
        self.new_names: dict[str, dict[tuple[int, bytes], int]] = {}
        """New names by request: positions by block and name, not yet recorded."""
        self.unnamed: dict[tuple[int, bytes], None] = {}
        """Removed names, not yet recorded."""

    def left(self, name: str) -> list[int]:
        """Return the indices of blocks that a request has no longer."""
        known = self.tables.get(name)
        if not known:
            return []
        table, gone = self.manager.req_to_blocks.get(name, ()), list[int]()
        for index, block in known.items():
            if table[index].block_id != block:
                gone.append(index)
            elif self.leaves_in_order:
                break
        for index in gone:
            del known[index]
        return gone

    def taken(self, name: str) -> dict[int, int]:
        """Return the new blocks of a request, by index."""
        table, known = self.manager.req_to_blocks.get(name, ()), self.tables.setdefault(name, {})
        first = self.lengths.get(name, 0)
        new = {
            index: block.block_id
            for index, block in enumerate(table[first:], first)
            if not block.is_null and index not in known
        }
        self.lengths[name] = len(table)
        known |= new
        return new

    def end(self, name: str) -> None:
        """Forget an ended request."""
        self.tables.pop(name, None)
        self.lengths.pop(name, None)
