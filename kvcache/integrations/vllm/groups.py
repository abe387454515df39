"""Tells a recorder also of vLLM's other groups of layers: sliding windows, chunks, states of Mamba layers.

All groups take blocks from one pool, and each evicts what any of them has named. What a request has in a group follows
from its table, looked at after each call; names are heard of as they are given and taken away.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kvcache import LayerGroup, Recorder
from kvcache.errors import Unsupported
from kvcache.integrations.vllm.recording import Recording, name_of
from kvcache.record.mirror import Kind

_HASH_END = 4
"""Bytes at the end of a name that are the number of its group."""


def layer_groups(scheduler: Any, full: int) -> list[LayerGroup]:
    """What the groups are but the one with the number `full`, in vLLM's order. Raises `Unsupported`."""
    manager, groups = scheduler.kv_cache_manager, scheduler.kv_cache_config.kv_cache_groups
    if len(groups) > 1 and getattr(scheduler, "connector", None) is not None:
        raise Unsupported("a KV connector for layers of several kinds", "go without the connector")
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
        raise Unsupported(f"layers as those of {type(each).__name__}", "there is no other way yet")
    return LayerGroup(kind, each.block_size, window, layers)


class _Group:
    """One further group: vLLM's manager of it, and what was told of its tables and names."""

    def __init__(self, number: int, manager: Any) -> None:
        self.number, self.manager = number, manager
        self.hash_end = manager.kv_cache_group_id.to_bytes(_HASH_END, "big")
        kinds = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
        self.leaves_in_order = not isinstance(manager, kinds.RSWAManager | kinds.MambaManager)
        self.tables: dict[str, dict[int, int]] = {}
        """By request and index: a block."""
        self.lengths: dict[str, int] = {}
        """By request: entries of its table that were looked at."""

    def left(self, name: str) -> list[int]:
        """Indices at which a request has not got any more what it had."""
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
        """Blocks that a request has got, by index."""
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
        """A request has none any more."""
        self.tables.pop(name, None)
        self.lengths.pop(name, None)


class HybridRecording(Recording):
    """Tells a recorder what vLLM has just done in all of its groups."""

    def __init__(self, recorder: Recorder, manager: Any, group: int, *, named: bool) -> None:
        super().__init__(recorder, manager, group, named=named)
        managers = [each for at, each in enumerate(manager.coordinator.single_type_managers) if at != group]
        self._groups = [_Group(at, each) for at, each in enumerate(managers, 1)]
        self._by_hash = {each.hash_end: each for each in self._groups}
        self._vllm_group = {each.number: each.manager.kv_cache_group_id for each in self._groups}
        self._naming: str | None = None
        """The request in which names are being given."""
        self._given: set[tuple[int, int, bytes]] = set()
        """Names that are given, by group and block."""
        self._new_names: dict[str, dict[tuple[int, int, bytes], int]] = {}
        """By request: positions by group, block and name, which are not told yet."""
        self._unnamed: dict[tuple[int, int, bytes], None] = {}
        """Likewise names that were taken away."""
        self._current: str | None = None
        """The request in whose call this happens."""

    def listen(self, follow: Callable[..., None], precede: Callable[..., None], manager: Any) -> None:
        """Have what only this recording needs told, too."""
        pool = manager.block_pool
        precede(pool, "cache_full_blocks", self.naming)
        precede(pool, "cache_partial_block", self.naming)
        follow(pool, "_insert_block_hash", self.name_given)
        follow(pool, "_remove_cached_block_hashes", self.names_taken)
        precede(manager, "allocate_slots", self.allocating)
        precede(manager, "remove_skipped_blocks", self._settle)
        follow(manager, "remove_skipped_blocks", self.skipped)

    # -- what vLLM calls

    def naming(self, request: Any, *_: Any, **__: Any) -> None:
        """`BlockPool.cache_full_blocks` or `cache_partial_block` is called."""
        self._naming = request.request_id

    def name_given(self, _: Any, key: bytes, block: Any, num_tokens: int | None = None) -> None:
        """`BlockPool._insert_block_hash` has returned."""
        group = self._by_hash.get(key[-_HASH_END:])
        if group is None:
            return
        if self._naming is None or num_tokens is None:
            raise Unsupported("names that are given to nobody's blocks", "there is no other way yet")
        name = group.number, block.block_id, bytes(key[:-_HASH_END])
        if name not in self._given:  # vLLM may give it again
            self._given.add(name)
            self._new_names.setdefault(self._naming, {})[name] = num_tokens

    def names_taken(self, removed: list[bytes], block: Any) -> None:
        """`BlockPool._remove_cached_block_hashes` has returned."""
        for key in removed:
            group = self._by_hash.get(key[-_HASH_END:])
            if group is None:
                continue
            name = group.number, block.block_id, bytes(key[:-_HASH_END])
            self._given.discard(name)
            if not any(names.pop(name, None) for names in self._new_names.values()):
                self._unnamed[name] = None

    def allocating(self, request: Any, *_: Any, **__: Any) -> None:
        """`KVCacheManager.allocate_slots` is called."""
        self._settle(request.request_id)
        self._current = request.request_id

    def allocated(self, blocks: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        """`KVCacheManager.allocate_slots` has returned, perhaps an empty result."""
        key, is_new = request.request_id, request.request_id not in self._running
        if not is_new:
            self._tell_left(key)
        hits = kwargs.get("new_computed_blocks", args[2] if len(args) > 2 else None)
        if blocks is None and is_new and (waits := self._waits_for(hits)) is not None:
            self.recorder.deferred(name_of(request), group=waits)
        elif blocks is None or is_new or any(blocks.blocks):
            super().allocated(blocks, request, *args, **kwargs)
        self._tell_unnamed()
        self._current = None
        if blocks is not None:
            self._tell_taken(key, hits if is_new else None)
            self._tell_names(key)

    def skipped(self, _: Any, request_id: str, *__: Any, **___: Any) -> None:
        """`KVCacheManager.remove_skipped_blocks` has returned."""
        self._tell_left(request_id)

    def freed(self, request: Any) -> None:
        """`KVCacheManager.free` or `pop_blocks_for_free` is called."""
        super().freed(request)
        for group in self._groups:
            group.end(request.request_id)

    def reset(self, successful: Any, *args: Any) -> None:
        """`KVCacheManager.reset_prefix_cache` has returned."""
        super().reset(successful, *args)
        if successful:
            self._given.clear()

    # -- how it is told

    def _waits_for(self, hits: Any) -> int | None:
        """The group in which the last block of a hit is only being computed by this step."""
        for group in self._groups if hits is not None else ():
            found = hits.blocks[self._vllm_group[group.number]]
            if found and found[-1].block_hash in getattr(group.manager, "cached_blocks_this_step", ()):
                return group.number
        return None

    def _tell_left(self, key: str) -> None:
        for group in self._groups:
            if gone := group.left(key):
                self.recorder.left(self._running[key].name, gone, group=group.number)

    def _tell_taken(self, key: str, hits: Any) -> None:
        name = self._running[key].name
        for group in self._groups:
            if not (new := group.taken(key)):
                continue
            self._tell_evicted()
            found = () if hits is None else hits.blocks[self._vllm_group[group.number]]
            reused = [at for at in new if at < len(found)]
            fresh = [at for at in new if at >= len(found)]
            for rows, again in ((reused, True), (fresh, False)):
                if rows:
                    blocks = [new[at] for at in rows]
                    self.recorder.taken(name, rows, blocks, group=group.number, reused=again)

    def _tell_grown(self) -> None:
        super()._tell_grown()
        self._tell_unnamed()

    def _tell_unnamed(self) -> None:
        """Tell of names that were taken away; if that was for a request that is being admitted, once it is."""
        if not self._unnamed or (self._current is not None and self._current not in self._running):
            return
        rows, self._unnamed = self._unnamed, {}
        for group in self._groups:
            own = [(block, key) for number, block, key in rows if number == group.number]
            if own:
                blocks, keys = [block for block, _ in own], [key for _, key in own]
                needed_by = None if self._current is None else self._running[self._current].name
                self.recorder.unnamed(blocks, keys, needed_by, group=group.number)

    def _settle(self, key: str, *_: Any, **__: Any) -> None:
        """Tell what a request has named, as it may leave that next."""
        if self._new_names.get(key) and key in self._running:
            self._append([self._names.index(self._running[key].name)])
            self._tell_names(key)

    def _tell_names(self, key: str) -> None:
        rows = self._new_names.pop(key, {})
        for group in self._groups:
            own = [
                (block, key, position)
                for (number, block, key), position in rows.items()
                if number == group.number
            ]
            if own:
                blocks, keys, positions = ([row[at] for row in own] for at in range(3))
                name = self._running[key].name
                self.recorder.named(name, blocks, keys, positions, group=group.number)  # type: ignore[arg-type]

    def _store(self, running: Any) -> None:
        super()._store(running)
        if self._current is None:  # else it has not been told yet what it names
            self._tell_names(running.id)

    def _store_all(self) -> None:
        super()._store_all()
        self._tell_unnamed()
        # That of a request which is being admitted comes later.
        for key in self._new_names.keys() & self._running.keys():
            self._tell_names(key)
