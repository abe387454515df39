"""Conversion of the actions of vLLM's scheduler and KV cache manager to calls of a `Recorder`.

vLLM names a block when it is scheduled to be filled, and others can hit it from then on. It keeps copies of equal
blocks. Of a model with several groups of layers one is recorded, of layers with full attention; its blocks come from
a pool that all groups share, so that other groups' allocations evict its blocks, too.

Most changes are a token for each running request, so these are collected once a step, and not when vLLM schedules them:
names and tokens are recorded at the step's end, or before something else depends on them.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from kvcache import Recorder
from kvcache.errors import Unsupported
from kvcache.integrations.attachment import request_name
from kvcache.integrations.vllm.groups import HASH_END, FurtherGroup
from kvcache.integrations.vllm.requests import RequestArguments, ending

_LOADING = "WAITING_FOR_REMOTE_KVS"
_NEVER = 1 << 62
_id_of = attrgetter("block_id")


class _RecordedRequest:
    """Recorded part of a running request."""

    def __init__(self, request: Any, prompt: int, table: list[int], computed: int, external: int) -> None:
        self.request, self.id = request, request.request_id
        self.name = request_name(request.request_id)
        """Id of the request in the log."""
        self.prompt = prompt
        """Tokens at its admission."""
        self.table, self.computed = table, computed
        self.stored = len(table)
        """Leading blocks that others can find."""
        self.external, self.loaded_to = external, computed + external
        """Tokens from outside, and their end."""
        self.loads = False
        """True if they are awaited, and nothing is scheduled before they are there."""


class Recording:
    """Recording of vLLM. After any error its recorder must not be used any further."""

    def __init__(self, recorder: Recorder, manager: Any, group: int, *, named: bool) -> None:
        self.recorder = recorder
        self._group = group
        self._manager, blocks = manager, manager.coordinator.single_type_managers[group]
        self._named: dict[str, int] = blocks.num_cached_block
        """Number of blocks that vLLM has named, by request."""
        self._tables: dict[str, list[Any]] = blocks.req_to_blocks
        self._pool = manager.block_pool
        self._size: int = blocks.block_size
        self._hashes_per_block: int = self._size // self._pool.hash_block_size if named else 0
        self._cached = bytearray(self._pool.num_gpu_blocks)
        """Flag for each block id: 1 if it is recorded as cached."""
        self._evicted: list[int] = []
        """Blocks evicted by the allocation in progress."""
        self._evictions: list[tuple[list[int], str]] = []
        """Blocks evicted for a request, not yet recorded."""
        self._running: dict[str, _RecordedRequest] = {}
        self._prefilling: dict[str, _RecordedRequest] = {}
        """Requests that have not computed all tokens of their admission."""
        self._loading: dict[str, _RecordedRequest] = {}
        """Requests with tokens from outside."""
        self._continuing: _RecordedRequest | None = None
        """Session that is getting further input."""
        self._counts = [0, 0]
        """Tokens that vLLM has looked up, and found, except those in its present statistics."""
        self._names: list[str] = []
        self._outputs: list[list[int]] = []
        """VLLM's lists of outputs, in the order of the running requests."""
        self._recorded: list[int] = []
        """Recorded number of outputs of each."""
        self._grown: dict[str, int] = {}
        """Requests with one more block, not yet recorded."""
        self._arguments = RequestArguments(self._size)
        self._begin_groups(manager.coordinator.single_type_managers)

    def _begin_groups(self, managers: Any) -> None:
        """Initialise the records of further groups, if any."""
        others = [each for at, each in enumerate(managers) if at != self._group]
        self._groups = [FurtherGroup(at, each) for at, each in enumerate(others, 1)]
        self._by_hash = {each.hash_end: each for each in self._groups}
        self._naming: str | None = None
        """Request that blocks are being named for."""

        self._current: str | None = None
        """Request of the call in progress."""

    # -- called by vLLM: the result first, then the arguments

    def taken(self, blocks: Any, *_: Any) -> None:
        """`BlockPool.get_new_blocks` has returned: the cached content of these blocks is evicted."""
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
        delay_cache_blocks: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        """`KVCacheManager.allocate_slots` has returned, with a result that is not empty."""
        running = self._running.get(request.request_id)
        if blocks is None:
            if running is None:
                self._refuse(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks)
            return
        if running is None:
            found = self._hit(num_new_computed_tokens, new_computed_blocks)
            running = self._admit(request, found, num_external_computed_tokens)
        if running.loads:
            self._arrive(running)
        if num_external_computed_tokens:
            running.loads = delay_cache_blocks
            new = self._tables[running.id][len(running.table) :]
        else:
            new = blocks.blocks[self._group]
        key, ids = running.id, list(map(_id_of, new))
        if self._evicted:
            self._evictions.append((self._evicted, running.name))
            self._evicted = []
        if len(ids) == 1 and key not in self._prefilling and key not in self._grown:
            self._grown[key] = ids[0]
            return
        self._record_grown()
        if ids:
            self.recorder.allocated(running.name, ids)
            running.table += ids
        if key in self._prefilling and not running.loads:
            computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
            self._compute(running, computed + num_new_tokens)
            self._store(running)

    def allocated_in_groups(self, blocks: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        """As `allocated`, perhaps with an empty result, if there are further groups."""
        key, is_new = request.request_id, request.request_id not in self._running
        if not is_new:
            self._record_left(key)
        hits = kwargs.get("new_computed_blocks", args[2] if len(args) > 2 else None)
        if blocks is None and is_new and (waits := self._waits_for(hits)) is not None:
            self.recorder.deferred(request_name(request.request_id), group=waits)
        elif blocks is None or is_new or any(blocks.blocks):
            self.allocated(blocks, request, *args, **kwargs)
        self._record_unnamed()
        self._current = None
        if blocks is not None:
            self._record_taken(key, hits if is_new else None)
            self._record_names(key)

    def skipped(self, _: Any, request_id: str, *__: Any, **___: Any) -> None:
        """`KVCacheManager.remove_skipped_blocks` has returned."""
        self._record_left(request_id)

    def freed(self, request: Any) -> None:
        """`KVCacheManager.free` or `pop_blocks_for_free` is called."""
        running = self._running.get(request.request_id)
        if running is None:
            return
        # Awaited tokens still may come if it is aborted, and do not if it continues.
        running.loads = running.loads and request.is_finished()
        self._settle_request(running)
        for group in self._groups:
            group.end(running.id)
        self._end(running, *ending(request))
        if not self._running:
            # There may be no further step for long.
            self.recorder.flush()

    def continuing(self, request: Any, *_: Any) -> None:
        """`Scheduler._update_request_as_session` is called: a session gets further input.

        In a log that is a request of its own, which reuses the blocks of the session.
        """
        self._continuing = running = self._running.get(request.request_id)
        if running is not None:
            self._settle_request(running)
            self._end(running, "finished")

    def continued(self, _: Any, request: Any, *__: Any) -> None:
        """`Scheduler._update_request_as_session` has returned: the last sampled token is gone, and the input is part of
        the prompt.
        """
        was, self._continuing = self._continuing, None
        if was is None:
            return
        table, kept = was.table, 0
        while kept < len(table) and self._cached[table[kept]]:
            kept += 1
        computed, prompt = kept * self._size, request.num_prompt_tokens
        running = _RecordedRequest(request, prompt, table[:kept], computed, 0)
        if was.stored == _NEVER:
            running.stored = _NEVER
        # VLLM does no lookup, and does not count it.
        self._counts[0] += prompt
        self._counts[1] += computed
        self._record_admission(running, resumed=False)
        if table[kept:]:
            self.recorder.allocated(running.name, table[kept:])
            running.table = table
        for group in self._groups:
            named = {block for block, _ in group.given}
            had = group.tables.get(running.id, {})
            for again in (True, False):
                rows = {index: block for index, block in had.items() if (block in named) == again}
                self.recorder.taken(
                    running.name, list(rows), list(rows.values()), group=group.number, reused=again
                )

    def reset(self, successful: Any, *_: Any) -> None:
        """`KVCacheManager.reset_prefix_cache` has returned."""
        if successful:
            self.recorder.cleared()
            self._cached = bytearray(len(self._cached))
            for group in self._groups:
                group.given.clear()

    def unnamed(self, _: Any, blocks: Any) -> None:
        """`KVCacheManager.evict_blocks` has returned: these cannot be found any more, but requests may hold them."""
        self._record_grown()
        self._store_all()
        lost = set(self.recorder.invalidated([block for block in sorted(blocks) if self._cached[block]]))
        for block in lost:
            self._cached[block] = 0
        for running in self._running.values():
            if not lost.isdisjoint(running.table[: running.stored]):
                # Blocks that vLLM names from now on continue ones that cannot be found.
                running.stored = _NEVER

    def counted(self, stats: Any, *_: Any) -> None:
        """`KVCacheManager.make_prefix_cache_stats` has returned, and begins new ones."""
        if stats is not None:
            self._counts[0] += stats.queries + stats.preempted_queries
            self._counts[1] += stats.hits + stats.preempted_hits

    def stepped(self, *_: Any) -> None:
        """`KVCacheManager.take_events` has returned, at the end of each step."""
        self._record_grown()
        for running in self._loading.values():
            self._arrive(running)
        for running in list(self._prefilling.values()):
            if not running.loads:
                self._compute(running, running.request.num_computed_tokens)
        recorded, lengths = self._recorded, list(map(len, self._outputs))
        if lengths == [length + 1 for length in recorded] and lengths:
            self.recorder.appended(self._names, [output[-1] for output in self._outputs])
            self._recorded = lengths
        elif lengths != recorded:
            self._append([at for at, length in enumerate(lengths) if length != recorded[at]])
        self._store_all()
        stats = self._manager.prefix_cache_stats
        if stats is not None:
            self.recorder.counted(
                self._counts[0] + stats.queries + stats.preempted_queries,
                self._counts[1] + stats.hits + stats.preempted_hits,
            )
        self.recorder.flush()

    # -- called by vLLM with further groups

    def naming(self, request: Any, *_: Any, **__: Any) -> None:
        """`BlockPool.cache_full_blocks` or `cache_partial_block` is called."""
        self._naming = request.request_id

    def name_given(self, _: Any, key: bytes, block: Any, num_tokens: int | None = None) -> None:
        """`BlockPool._insert_block_hash` has returned."""
        group = self._by_hash.get(key[-HASH_END:])
        if group is None:
            return
        if self._naming is None or num_tokens is None:
            raise Unsupported("naming blocks that no request holds", "there is no workaround yet")
        name = block.block_id, bytes(key[:-HASH_END])
        if name not in group.given:  # vLLM may give it again
            group.given.add(name)
            group.new_names.setdefault(self._naming, {})[name] = num_tokens

    def names_taken(self, removed: list[bytes], block: Any) -> None:
        """`BlockPool._remove_cached_block_hashes` has returned."""
        for key in removed:
            group = self._by_hash.get(key[-HASH_END:])
            if group is None:
                continue
            name = block.block_id, bytes(key[:-HASH_END])
            group.given.discard(name)
            if not any(names.pop(name, None) for names in group.new_names.values()):
                group.unnamed[name] = None

    def allocating(self, request: Any, *_: Any, **__: Any) -> None:
        """`KVCacheManager.allocate_slots` is called."""
        self.settle(request.request_id)
        self._current = request.request_id

    # -- recording

    def _refuse(self, request: Any, num_new_tokens: int, hit: int, hit_blocks: Any) -> None:
        found = self._hit(hit, hit_blocks)
        # Found blocks without a holder count as free until the request has them.
        held = sum(1 for block in found if block.ref_cnt)
        needed = -(-max(hit + num_new_tokens, request.num_tokens) // self._size) - held
        self.recorder.refused(request_name(request.request_id), needed, self._pool.get_num_free_blocks())

    def _hit(self, tokens: int, blocks: Any) -> Any:
        return blocks.blocks[self._group][: tokens // self._size] if blocks is not None else ()

    def _admit(self, request: Any, found: Any, external: int) -> _RecordedRequest:
        # Blocks named in this step can be hit in it.
        self._record_grown()
        self._store_all()
        reused = [block.block_id for block in found]
        # The last token of a fully loaded prompt is recomputed.
        external = min(external, request.num_tokens - 1 - len(reused) * self._size)
        if request.skip_reading_prefix_cache:
            # vLLM does not count it.
            self._counts[0] += request.num_tokens
        running = _RecordedRequest(request, request.num_tokens, reused, len(reused) * self._size, external)
        self._record_admission(running, resumed=request.num_preemptions > 0)
        if external:
            self._loading[running.id] = running
        return running

    def _record_admission(self, running: _RecordedRequest, *, resumed: bool) -> None:
        request = running.request
        self.recorder.admitted(
            running.name,
            request.all_token_ids[: running.prompt],
            running.table,
            **self._arguments.of(request),
            resumed=resumed,
            external=running.external,
        )
        self._running[running.id] = self._prefilling[running.id] = running
        self._look_up_again()

    def _settle_request(self, running: _RecordedRequest) -> None:
        """Record the remaining changes of a request that is about to end."""
        self._record_grown()
        if running.external and not running.loads:
            self._arrive(running)
        if running.id in self._prefilling and not running.loads:
            self._compute(running, running.request.num_computed_tokens)
        self._append([self._names.index(running.name)])
        self._store(running)

    def _end(self, running: _RecordedRequest, why: str, stop: str | None = None) -> None:
        for requests in (self._prefilling, self._loading, self._running):
            requests.pop(running.id, None)
        self._look_up_again()
        self.recorder.ended(running.name, why, stop=stop)  # type: ignore[arg-type]

    def _look_up_again(self) -> None:
        """Reset for other running requests than before."""
        recorded = dict(zip(self._names, self._recorded, strict=True))
        self._names = [each.name for each in self._running.values()]
        self._outputs = [each.request._output_token_ids for each in self._running.values()]
        self._recorded = [
            recorded.get(each.name, each.prompt - each.request.num_prompt_tokens)
            for each in self._running.values()
        ]

    def _arrive(self, running: _RecordedRequest) -> None:
        """Check if the tokens to be loaded are there: vLLM sets a request back to where one is missing."""
        if running.loads and running.request.status.name == _LOADING:
            return
        running.loads = False
        missing = min(running.external, running.loaded_to - running.request.num_computed_tokens)
        if missing > 0:
            running.external -= missing
            running.loaded_to -= missing
            self.recorder.not_loaded(running.name, missing)

    def _compute(self, running: _RecordedRequest, upto: int) -> None:
        """Record that the first `upto` tokens of a prompt are computed after the scheduled step."""
        upto = min(upto, running.prompt)
        if upto > running.computed:
            running.computed = upto
            self.recorder.computed(running.name, upto)
        if upto == running.prompt:
            del self._prefilling[running.id]

    def _record_grown(self) -> None:
        """Record evictions, and single allocated blocks."""
        self._record_evicted()
        if self._grown:
            grown, self._grown = self._grown, {}
            requests = [self._running[each] for each in grown]
            self.recorder.grown([each.name for each in requests], list(grown.values()))
            for running, block in zip(requests, grown.values(), strict=True):
                running.table.append(block)
        self._record_unnamed()

    def _record_evicted(self) -> None:
        for gone, name in self._evictions:
            self.recorder.evicted(gone, name)
        self._evictions.clear()

    def _waits_for(self, hits: Any) -> int | None:
        """Return the group in which the last block of a hit is only computed by this step."""
        for group in self._groups if hits is not None else ():
            found = hits.blocks[group.vllm_group]
            if found and found[-1].block_hash in getattr(group.manager, "cached_blocks_this_step", ()):
                return group.number
        return None

    def _record_left(self, key: str) -> None:
        for group in self._groups:
            if gone := group.left(key):
                self.recorder.left(self._running[key].name, gone, group=group.number)

    def _record_taken(self, key: str, hits: Any) -> None:
        name = self._running[key].name
        for group in self._groups:
            if not (new := group.taken(key)):
                continue
            self._record_evicted()
            found = () if hits is None else hits.blocks[group.vllm_group]
            reused = [at for at in new if at < len(found)]
            fresh = [at for at in new if at >= len(found)]
            for rows, again in ((reused, True), (fresh, False)):
                if rows:
                    blocks = [new[at] for at in rows]
                    self.recorder.taken(name, rows, blocks, group=group.number, reused=again)

    def _record_unnamed(self) -> None:
        """Record removed names; those for a request that is being admitted, once it is."""
        if self._current is not None and self._current not in self._running:
            return
        for group in self._groups:
            if group.unnamed:
                blocks, keys = zip(*group.unnamed, strict=True)
                group.unnamed.clear()
                needed_by = None if self._current is None else self._running[self._current].name
                self.recorder.unnamed(blocks, keys, needed_by, group=group.number)

    def settle(self, key: str, *_: Any, **__: Any) -> None:
        """`KVCacheManager.remove_skipped_blocks` is called: the request may leave blocks that it has named."""
        if key in self._running and any(group.new_names.get(key) for group in self._groups):
            self._append([self._names.index(self._running[key].name)])
            self._record_names(key)

    def _record_names(self, key: str) -> None:
        for group in self._groups:
            if rows := group.new_names.pop(key, None):
                blocks, names = zip(*rows, strict=True)
                name, positions = self._running[key].name, list(rows.values())
                self.recorder.named(name, blocks, names, positions, group=group.number)

    def _append(self, grown: list[int]) -> None:
        """Record the new tokens of these running requests."""
        names, tokens, counts = list[str](), list[int](), list[int]()
        for at in grown:
            new = self._outputs[at][self._recorded[at] :]
            if new:
                names.append(self._names[at])
                tokens += new
                counts.append(len(new))
            self._recorded[at] += len(new)
        if names:
            self.recorder.appended(names, tokens, None if len(tokens) == len(names) else counts)

    def _store_all(self) -> None:
        """Record the blocks that vLLM has named."""
        named = self._named
        due = [each for each in self._running.values() if named.get(each.id, 0) > each.stored]
        row = [each for each in due if named[each.id] == each.stored + 1 and each.id not in self._prefilling]
        if row:
            keys = [self._keys(each, each.stored + 1) for each in row]
            self.recorder.filled([each.name for each in row], keys if self._hashes_per_block else None)
            for each in row:
                self._stored(each, each.stored + 1)
        for each in due:
            self._store(each)
        self._record_unnamed()
        # Those of a request that is being admitted come later.
        for group in self._groups:
            for key in group.new_names.keys() & self._running.keys():
                self._record_names(key)

    def _store(self, running: _RecordedRequest) -> None:
        """Record the blocks that vLLM has named for a request."""
        last = self._named.get(running.id, 0)
        if last > running.stored:
            keys = self._keys(running, last) if self._hashes_per_block else None
            self.recorder.stored(running.name, last, keys)
            self._stored(running, last)
        if self._current is None:  # otherwise its names are not recorded yet
            self._record_names(running.id)

    def _keys(self, running: _RecordedRequest, last: int) -> bytes:
        """Return vLLM's names of the unrecorded blocks; each is that of the last hash of a block."""
        step = self._hashes_per_block
        if not step:
            return b""
        return b"".join(running.request.block_hashes[(running.stored + 1) * step - 1 : last * step : step])

    def _stored(self, running: _RecordedRequest, last: int) -> None:
        for block in running.table[running.stored : last]:
            self._cached[block] = 1
        running.stored = last
