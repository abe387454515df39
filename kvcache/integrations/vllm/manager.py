"""A KV cache manager for vLLM's scheduler: what the scheduler asks for, decided by `kvcache.KVCacheManager`.

It has the interface of `vllm.v1.core.kv_cache_manager.KVCacheManager`, as far as schedulers use it for models with one
group of layers, of full attention. A block's id is its slot plus 1: block 0 is never allocated.

A prompt gets its slots chunk by chunk. Its blocks are found by others from the chunk on that is scheduled to fill
them; those that output fills from the next step on. Tokens are appended at the start of a step, in one call for all
requests, and slots beyond them, of drafts and of tokens that are not known yet, are reserved.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

from events.types import BlocksCopied
from kvcache import KVCacheManager, Request
from kvcache.errors import OutOfBlocks, PromptTooLong, invariant
from kvcache.fold.sequence import Sequence
from kvcache.integrations.attachment import request_name
from kvcache.integrations.vllm.requests import RequestArguments, ending
from kvcache.results import Admission


class _Found(NamedTuple):
    """Result of looking a prompt up."""

    request: Any
    num_tokens: int
    tokens: array[int]
    arguments: dict[str, Any]
    reused: int = 0
    idle: int = 0
    """Found blocks without a holder."""


class _Served:
    """A request with blocks."""

    def __init__(self, request: Any, sequence: Sequence) -> None:
        self.sequence, self.name = sequence, sequence.request_id
        self.output: list[int] = request._output_token_ids
        """VLLM's list of its sampled tokens."""
        self.known = len(self.output)
        """Appended ones."""
        self.prompt = sequence.num_tokens
        """Tokens at its admission."""
        self.waits = True
        """True until all of these are scheduled."""
        self.given: list[int] = []
        """Its block table as the worker has it, which only grows."""
        self.room = 0
        """Tokens that the worker has slots for."""


class _Popped(NamedTuple):
    """Blocks of an ended request that are not free yet."""

    served: _Served
    why: str
    stop: str | None


class VLLMCacheManager:
    """Adapter of a manager, in place of vLLM's own (`stock`), which is not used any more except for its counts.

    `copy_type` is vLLM's class of a copy. `late`: blocks are found by others only once their step is scheduled, since
    copies are made before it, or because a request may be preempted in the step in which it was scheduled.
    """

    def __init__(self, manager: KVCacheManager, stock: Any, copy_type: Any, *, late: bool) -> None:
        self.recorder, self._manager = manager, manager
        self._stock, self._copy_type, self._late = stock, copy_type, late
        (spec,) = stock.coordinator.single_type_managers
        self._size: int = spec.block_size
        self.kv_cache_config, self.max_model_len = stock.kv_cache_config, stock.max_model_len
        self.enable_caching, self.log_stats = stock.enable_caching, stock.log_stats
        self.empty_kv_cache_blocks = stock.empty_kv_cache_blocks
        self.make_prefix_cache_stats = stock.make_prefix_cache_stats
        self.record_prefix_cache_stats = stock.record_prefix_cache_stats
        self.coordinator = SimpleNamespace(
            single_type_managers=(SimpleNamespace(block_size=self._size, kv_cache_spec=spec.kv_cache_spec),),
            enable_partial_hash_hits=False,
            eagle_group_ids=frozenset[int](),
        )
        self.block_pool = SimpleNamespace(free_blocks=self._free_blocks)
        self._blocks: list[Any] = stock.block_pool.blocks
        """VLLM's objects for blocks, by id."""
        self._watermark: int = stock.watermark_blocks
        self._partial = manager.config.enable_partial_reuse and manager.config.enable_block_reuse
        self._arguments = RequestArguments(self._size)
        self._serving: dict[str, _Served] = {}
        self._popped = 0
        self._found: _Found | None = None
        """Last prompt that was looked up."""
        self._due: dict[_Served, int] = {}
        """Scheduled prompt tokens, not yet stored."""
        self._copied: list[BlocksCopied] = []
        """Copies for the step that is being scheduled."""
        if self._partial:
            manager.bus.subscribe(self._copied.append, BlocksCopied)

    # -- a step

    def new_step_starts(self) -> None:
        """Append the tokens that were sampled since the last step; those without room wait for `allocate_slots`."""
        grown = [each for each in self._serving.values() if len(each.output) > each.known]
        if not grown:
            return
        try:
            self._append(grown)
        except (OutOfBlocks, PromptTooLong):
            self._append([each for each in grown if self._room(each) >= len(each.output) - each.known])

    def _append(self, grown: list[_Served]) -> None:
        names, tokens, counts = list[Any](), list[int](), list[int]()
        for each in grown:
            new = each.output[each.known :]
            names.append(each.name)
            tokens += new
            counts.append(len(new))
        if names:
            self._manager.add_tokens(names, tokens, None if len(tokens) == len(names) else counts)
        for each in grown:
            each.known = len(each.output)

    def _room(self, served: _Served) -> int:
        """Return the number of tokens that can be appended without a new block."""
        sequence = served.sequence
        return len(sequence.tables[0]) * self._size - sequence.num_tokens

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return the copies to be made before the step that has been scheduled.

        Workers read all sources before they write, step after step: none need be retained.
        """
        for served, num_tokens in self._due.items():
            self._manager.store_context_blocks(served.name, num_tokens)
        self._due.clear()
        copies = [
            self._copy_type(src_block_id=each.source + 1, dst_block_id=each.target + 1)
            for each in self._copied
            if each.source != each.target
        ]
        self._copied.clear()
        return copies, []

    def take_events(self) -> list[Any]:
        """End a step; returns no events: the sinks of the manager publish its own."""
        self._manager.flush()
        return []

    def stepped(self, *_: Any) -> None:
        """Publish the rest of a step, before the end."""
        self._manager.flush()

    # -- admission

    def get_computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int]:
        """Look a prompt up; returns no blocks, since they are claimed by tokens, and the number of tokens found."""
        found = self._found
        if found is None or found.request is not request or found.num_tokens != request.num_tokens:
            tokens = array("i", request._all_token_ids)
            found = _Found(request, len(tokens), tokens, self._arguments_of(request))
        reused = idle = 0
        if self._stock.prefix_cache_lookup_enabled(request):
            asked = Request(request_name(request.request_id), found.tokens, **found.arguments)
            with suppress(PromptTooLong):  # `allocate_slots` has no room for it
                demand = self._manager.scheduling.estimate_demand(asked)
                reused = demand.reused_tokens
                ((window, reusable),) = demand.reusable.items()
                idle = reusable - demand.held[window]
        self._found = found._replace(reused=reused, idle=idle)
        return self.empty_kv_cache_blocks, reused, 0

    def _arguments_of(self, request: Any) -> dict[str, Any]:
        """Return the arguments of an admission; a request that is not looked up gets a namespace of its own.

        Its tables only grow, so where its blocks are cached already it would hold both, up to twice what it needs, and
        be preempted again and again for want of room.
        """
        arguments = self._arguments.of(request)
        if not arguments["lookup"]:
            arguments["cache_salt"] = secrets.token_hex(16)
        return arguments

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Any:
        """Return the new blocks of a request, up to the tokens that are scheduled; None: there is no room.

        The parameters are vLLM's. Tokens from a KV connector, and those of an encoder, cannot be had.
        """
        invariant(
            not num_external_computed_tokens + num_encoder_tokens, "blocks are wanted that nobody fills"
        )
        served = self._serving.get(request.request_id)
        computed = request.num_computed_tokens + num_new_computed_tokens
        end = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        try:
            if served is None:
                whole = request.num_tokens if full_sequence_must_fit else 0
                waits = request.status.name in ("WAITING", "PREEMPTED")
                spared = self._watermark if has_scheduled_reqs and waits else 0
                if not self._fits(whole, spared):
                    return self._refuse(request, spared)
                if not self._fits(end, spared + reserved_blocks):
                    return None
                served = self._admit(request, num_new_computed_tokens, end)
            elif len(served.output) > served.known:
                self._append([served])
            self._reserve(served, end)
        except (OutOfBlocks, PromptTooLong):
            return None
        if served.waits:
            self._schedule(served, computed + num_new_tokens)
        return self._give(served)

    def _fits(self, num_tokens: int, spared: int) -> bool:
        """Return whether the prompt that was looked up can have slots for its first tokens, and leave some blocks."""
        found = self._looked_up()
        needed = -(-min(num_tokens, self.max_model_len) // self._size) - found.reused // self._size
        return bool(needed + found.idle + spared <= self._manager.num_free_blocks)

    def _looked_up(self) -> _Found:
        assert self._found is not None, "a prompt is looked up before it is admitted"
        return self._found

    def _refuse(self, request: Any, spared: int) -> None:
        """Let the log have a refusal, unless it is for the sake of `spared` blocks."""
        if not spared:
            self._add(request, None)
            raise AssertionError("a prompt without room was admitted")

    def _add(self, request: Any, reserve: int | None) -> Admission:
        found = self._looked_up()
        invariant(found.request is request, "a request is admitted that was not looked up")
        return self._manager.add_sequence(
            request_name(request.request_id),
            found.tokens,
            **found.arguments,
            resumed=request.num_preemptions > 0,
            reserve_tokens=reserve,
        )

    def _admit(self, request: Any, reused: int, end: int) -> _Served:
        admission = self._add(request, end - reused if end < self._looked_up().num_tokens else None)
        invariant(admission.reused_tokens == reused, "the scheduler reckons with another hit")
        self._found = None
        served = _Served(request, self._manager.state.sequences[admission.handle])
        self._serving[request.request_id] = served
        return served

    def _reserve(self, served: _Served, end: int) -> None:
        """Reserve slots for a request's first `end` tokens."""
        sequence = served.sequence
        slots = len(sequence.tables[0]) * self._size
        if end > slots:
            # Of a prompt without all its slots, after its computed tokens.
            begin = sequence.computed if slots < sequence.num_tokens else sequence.num_tokens
            self._manager.reserve([served.name], [end - begin])

    def _schedule(self, served: _Served, end: int) -> None:
        """Note that the first `end` tokens of a prompt are computed after this step."""
        end = min(end, served.prompt)
        served.waits = end < served.prompt
        if self._late:
            self._due[served] = end
        else:
            self._manager.store_context_blocks(served.name, end)

    def _give(self, served: _Served) -> Any:
        """Return the blocks that a request has got since the last call."""
        table, given = served.sequence.tables[0], served.given
        if len(table) == len(given):
            return self.empty_kv_cache_blocks
        new = [slot + 1 for slot in table[len(given) :]]
        given += new
        served.room = len(given) * self._size
        return self._as_blocks(new)

    def _as_blocks(self, ids: list[int]) -> Any:
        blocks = self._blocks
        return type(self.empty_kv_cache_blocks)(([blocks[each] for each in ids],))

    # -- the end of a request, and of all

    def free(self, request: Any) -> None:
        """End a request, if it has blocks."""
        for blocks in self.pop_blocks_for_free(request):
            self._end(blocks)

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """Forget a request; its blocks are free once the result was passed to `block_pool.free_blocks`."""
        if self._found is not None and self._found.request is request:
            self._found = None
        served = self._serving.pop(request.request_id, None)
        if served is None:
            return []
        self._popped += 1
        # Scheduled in this very step, in which it is preempted: it will not be computed.
        self._due.pop(served, None)
        return [_Popped(served, *ending(request))]

    def _free_blocks(self, blocks: Iterable[_Popped]) -> None:
        for each in blocks:
            self._end(each)

    def _end(self, popped: _Popped) -> None:
        served, why, stop = popped
        self._popped -= 1
        # The last sampled token has no slot if it would be the first of a block.
        count = min(len(served.output) - served.known, self._room(served))
        if count > 0:
            new = served.output[served.known : served.known + count]
            self._manager.add_tokens([served.name], new, [count])
        self._manager.remove_sequence(served.name, self._partial, why=why, stop=stop)
        if not self._serving:
            # There may be no further step for long.
            self._manager.flush()

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; False, and nothing is done, while requests have blocks."""
        if self._serving or self._popped:
            return False
        self._manager.clear()
        if self._stock.prefix_cache_stats is not None:
            self._stock.prefix_cache_stats.reset = True
        return True

    # -- queries, and what there is nothing to do for

    @property
    def usage(self) -> float:
        """Share of the blocks that requests have, from 0 to 1."""
        total = len(self._blocks) - 1
        return 1 - self._manager.num_free_blocks / total if total else 0.0

    def get_blocks(self, request_id: str) -> Any:
        """Return the blocks of a request, as its worker has them."""
        served = self._serving.get(request_id)
        return self.empty_kv_cache_blocks if served is None else self._as_blocks(served.given)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of the blocks of a request."""
        served = self._serving.get(request_id)
        return ([] if served is None else list(served.given),)

    def estimate_cached_tokens(self, request: Any) -> int:
        """Return how many of its tokens others can find."""
        served = self._serving.get(request.request_id)
        return 0 if served is None else served.sequence.stored_blocks * self._size

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Do nothing: sampled tokens are stored as they are appended."""

    def take_new_block_ids(self) -> list[int]:
        """Return no blocks to be zeroed: models that need it are refused."""
        return []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """Return no states: there are no layers with states."""
        return {}
