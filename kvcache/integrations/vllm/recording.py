"""What vLLM's scheduler and KV cache manager do becomes calls of a `Recorder`.

vLLM names a block when it is scheduled to be filled, and others can hit it from then on. It keeps copies of equal
blocks. Of a model with several groups of layers one is recorded, of layers with full attention; its blocks come from
a pool that all groups share, so that other groups' allocations evict its blocks, too.
"""

from __future__ import annotations

import hashlib
from typing import Any

from kvcache import MultimodalItem, Recorder
from kvcache.errors import Unsupported

_FINISHED, _PREEMPTED, _ABORTED = "finished", "preempted", "aborted"
_BAD_ENDS = frozenset({"FINISHED_ABORTED", "FINISHED_ERROR"})


class _Running:
    """What was told of a running request."""

    __slots__ = ("computed", "named", "prompt", "request", "stored", "table", "tokens")

    def __init__(self, request: Any, table: list[int], computed: int) -> None:
        self.request = request
        self.prompt = self.tokens = request.num_tokens
        """Tokens when it was admitted, and so far."""
        self.table, self.computed = table, computed
        self.stored = self.named = len(table)
        """Leading blocks that others can find, as was told, and as vLLM has it."""


class Recording:
    """Tells a recorder what vLLM has just done. Whatever it raises, the recorder must not be used any further."""

    def __init__(self, recorder: Recorder, manager: Any, group: int, *, named: bool) -> None:
        self.recorder = recorder
        self._group = group
        self._blocks = manager.coordinator.single_type_managers[group]
        self._pool = manager.block_pool
        self._size: int = self._blocks.block_size
        self._hashes_per_block: int = self._size // self._pool.hash_block_size if named else 0
        self._cached = bytearray(self._pool.num_gpu_blocks)
        """By block id, whether it was told that something is cached there."""
        self._evicted: list[int] = []
        """What the allocation in progress has evicted."""
        self._running: dict[str, _Running] = {}
        self._due: dict[str, _Running] = {}
        """Requests of which blocks were named, and not yet told."""
        self._adapters: dict[str, str] = {}
        """Of each LoRA adapter, the path under which its name was seen first."""

    # -- what is wrapped: the result first, then the arguments

    def taken(self, blocks: Any, *_: Any) -> None:
        """`BlockPool.get_new_blocks`: what was cached in these blocks is evicted."""
        cached = self._cached
        gone = [block.block_id for block in blocks if cached[block.block_id]]
        for block in gone:
            cached[block] = 0
        self._evicted += gone

    def allocated(
        self,
        blocks: Any,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        *_: Any,
        **__: Any,
    ) -> None:
        """`KVCacheManager.allocate_slots`."""
        if num_external_computed_tokens:
            raise Unsupported("blocks that a connector loads", "go without one")
        running = self._running.get(request.request_id)
        if blocks is None:
            if running is None:
                self._refuse(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks)
            return
        if running is None:
            running = self._admit(request, num_new_computed_tokens, new_computed_blocks)
        name, new = request.request_id, blocks.blocks[self._group]
        if self._evicted:
            gone, self._evicted = self._evicted, []
            self.recorder.evicted(gone, name)
        if new:
            ids = [block.block_id for block in new]
            self.recorder.allocated(name, ids)
            running.table += ids
        self._note(running, request.num_computed_tokens + num_new_computed_tokens + num_new_tokens)

    def cached(self, _: Any, request: Any, num_computed_tokens: int) -> None:
        """`KVCacheManager.cache_blocks`."""
        running = self._running.get(request.request_id)
        if running is not None:
            self._note(running, num_computed_tokens)

    def freed(self, _: Any, request: Any) -> None:
        """`KVCacheManager.free`, or `pop_blocks_for_free`, which is followed by it."""
        name = request.request_id
        running = self._running.pop(name, None)
        if running is None:
            return
        self._append([running])
        if self._due.pop(name, None) is not None:
            self._store(running)
        status = request.status.name
        # It is preempted before its status says so.
        why = _PREEMPTED if not request.is_finished() else _ABORTED if status in _BAD_ENDS else _FINISHED
        self.recorder.ended(name, why)  # type: ignore[arg-type]
        if not self._running:
            # There may be no further step for long.
            self.recorder.flush()

    def reset(self, successful: Any, *_: Any) -> None:
        """`KVCacheManager.reset_prefix_cache`."""
        if successful:
            self.recorder.cleared()
            self._cached = bytearray(len(self._cached))

    def unnamed(self, *_: Any) -> None:
        """`KVCacheManager.evict_blocks`."""
        raise Unsupported("blocks that lose their names while requests hold them", "go without a connector")

    def stepped(self, *_: Any) -> None:
        """`KVCacheManager.take_events`, at the end of each step."""
        self._append([each for each in self._running.values() if each.request.num_tokens != each.tokens])
        self._settle()
        self.recorder.flush()

    # -- how it is told

    def _refuse(self, request: Any, num_new_tokens: int, hit: int, hit_blocks: Any) -> None:
        found = self._hit(hit, hit_blocks)
        # What is found and held by nobody counts as free as long as the request has not got it.
        held = sum(1 for block in found if block.ref_cnt)
        needed = -(-max(hit + num_new_tokens, request.num_tokens) // self._size) - held
        self.recorder.refused(request.request_id, needed, self._pool.get_num_free_blocks())

    def _hit(self, tokens: int, blocks: Any) -> Any:
        return blocks.blocks[self._group][: tokens // self._size] if blocks is not None else ()

    def _admit(self, request: Any, hit: int, hit_blocks: Any) -> _Running:
        if request.resumable:
            raise Unsupported("streaming input", "record an engine whose prompts are complete when they come")
        if request.prompt_embeds is not None:
            raise Unsupported("prompts given as embeddings", "record an engine that gets tokens")
        # What was named in this step can be hit in it.
        self._settle()
        reused = [block.block_id for block in self._hit(hit, hit_blocks)]
        self.recorder.admitted(
            request.request_id,
            request.all_token_ids[:],
            reused,
            lora_name=self._adapter(request.lora_request),
            cache_salt=request.cache_salt or None,
            multimodal=[_item(feature) for feature in request.mm_features],
            resumed=request.num_preemptions > 0,
        )
        running = self._running[request.request_id] = _Running(request, reused, len(reused) * self._size)
        return running

    def _adapter(self, lora: Any) -> str | None:
        if lora is None:
            return None
        name, path = lora.lora_name, lora.lora_path
        # vLLM shares blocks of adapters with equal names only if their paths are equal.
        return str(name if self._adapters.setdefault(name, path) == path else f"{name} ({path})")

    def _note(self, running: _Running, upto: int) -> None:
        """So many tokens of a request are computed when what is scheduled has run; vLLM may have named blocks."""
        request = running.request
        if running.computed < running.prompt:
            running.computed = min(upto, running.prompt)
            self.recorder.computed(request.request_id, running.computed)
        running.named = self._blocks.num_cached_block.get(request.request_id, 0)
        if running.named > running.stored:
            if request.num_tokens == running.prompt:
                self._store(running)
            else:
                self._due[request.request_id] = running

    def _append(self, grown: list[_Running]) -> None:
        """Tell the tokens that these requests have got."""
        names, tokens, counts = list[str](), list[int](), list[int]()
        for each in grown:
            count = each.request.num_tokens - each.tokens
            if count < 0:
                raise Unsupported("requests that lose tokens", "record an engine without streaming input")
            if count:
                names.append(each.request.request_id)
                tokens += each.request.all_token_ids[each.tokens :]
                counts.append(count)
                each.tokens += count
        if names:
            self.recorder.appended(names, tokens, None if len(tokens) == len(names) else counts)

    def _settle(self) -> None:
        """Tell what vLLM has named."""
        if not self._due:
            return
        due, self._due = list(self._due.values()), {}
        row = [each for each in due if each.named == each.stored + 1]
        for each in due:
            if each.named > each.stored + 1:
                self._store(each)
        if row:
            ids = [each.request.request_id for each in row]
            names = [self._names(each) for each in row]
            self.recorder.filled(ids, names if self._hashes_per_block else None)
            for each in row:
                self._stored(each)

    def _store(self, running: _Running) -> None:
        names = self._names(running) if self._hashes_per_block else None
        self.recorder.stored(running.request.request_id, running.named, names)
        self._stored(running)

    def _names(self, running: _Running) -> bytes:
        """VLLM's names of the blocks that were not told yet."""
        step = self._hashes_per_block
        if not step:
            return b""
        return b"".join(
            running.request.block_hashes[(running.stored + 1) * step - 1 : running.named * step : step]
        )

    def _stored(self, running: _Running) -> None:
        for block in running.table[running.stored : running.named]:
            self._cached[block] = 1
        running.stored = running.named


def _item(feature: Any) -> MultimodalItem:
    """An image or the like, which vLLM knows by a text."""
    place = feature.mm_position
    return MultimodalItem(hashlib.sha256(feature.identifier.encode()).digest(), place.offset, place.length)
