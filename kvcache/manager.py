"""The engine's interface: one manager owns the cache of one engine rank.

A step of an engine is: admit (`add_sequence`), `start_transfers`, read block tables, run the forward pass, report the
written K/V (`store_context_blocks`, `add_tokens`), end finished requests (`remove_sequence`), `flush`.

All commands come from one thread. Each either happens whole or raises and changes nothing (except that a refused
admission is recorded by `AdmissionRefused`); an exception in the middle of one (which would be a bug) poisons the
manager, so that no later call works on half a state.

Single numbers at hand are properties; computed or collected values are methods. Queries that only some engines need are
in two parts: `tables`, for attention kernels, and `scheduling`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from events.packed import TOKEN_BYTES
from events.tokens.rich import RichTokens
from events.types import PRIMARY, SECONDARY, CacheCreated, EndReason, Namespace, RequestId, StateExported
from kvcache.calls.guard import exclusive
from kvcache.calls.scheduling import Scheduling
from kvcache.calls.tables import BlockTables
from kvcache.config import KVCacheConfig
from kvcache.decide.block_manager import BlockManager
from kvcache.decide.eviction_order import EvictionOrder, refuse_no_order
from kvcache.decide.lookup import count_blocks, lookup
from kvcache.decide.window_manager import Plan
from kvcache.device.memory import served_layout
from kvcache.device.transfer_checks import TransferChecks
from kvcache.device.transfers import CheckingCopier, engine_for
from kvcache.errors import OutOfBlocks, Unsupported, UsageError, shown
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.sequence import PRIORITY_MAX, Sequence
from kvcache.fold.state import CacheState
from kvcache.inputs import (
    CheckedRequest,
    EncoderInput,
    MultimodalItem,
    Request,
    RequestChecker,
    Retention,
    Tokens,
    checked_choice,
    checked_flag,
    checked_integer,
    checked_natural,
    checked_range,
    checked_request_id,
    checked_stop,
    listed,
    namespace_of,
    pack_counts,
    pack_tokens,
    rich_tokens,
)
from kvcache.layout import warn_of_windows
from kvcache.record.counting import RequestCounter
from kvcache.record.journal import EventSourcedCache, cache_created, checked_wait
from kvcache.record.outputs import LogTarget, Outputs
from kvcache.record.restart import Restored, config_of, reopened
from kvcache.results import Admission, BlockTable, Match, Pinned, PollResult, StoreResult
from kvcache.stats import RequestStats
from sinks import Sink, SinkRunner

if TYPE_CHECKING:
    from cuda_ops.copier import Copier, Ticket
    from kvcache.pools import Pools

_FINISHED = EndReason.FINISHED


class Substitutes(NamedTuple):
    """Replacements for clocks and the eviction order, in simulations and tests."""

    wall_ns: Callable[[], int] = time.time_ns
    """Clock for the time of batches; never used for a decision."""
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    """Clock for the end of a `Retention`. While it raises, time stands still."""
    eviction_order: type[EvictionOrder] | None = None
    """Eviction order, instead of that of `eviction_policy`."""


_NONE = Substitutes()


class KVCacheManager(EventSourcedCache):
    """Manager of the blocks of one engine rank: prefix reuse, eviction, offload to host memory, and an event for all of
    it.

    `pools` are the tensors, which are this manager's until it is closed (without them only the bookkeeping runs);
    `copier` moves their bytes, by default the pools' own. `log` is a directory or a `LogWriter`; `sinks` are URLs or
    sinks. `request_stats` is the number of records of ended requests that are kept for `take_request_stats`; 0: none.
    The cache is empty at first; `open` can also continue that of an earlier process.
    """

    restored: Restored | None
    """Result of recovering secondary in `open`; None: there was nothing to recover."""

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        pools: Pools | None = None,
        copier: Copier | None = None,
        log: LogTarget = None,
        sinks: Items[str | Sink | SinkRunner] = (),
        request_stats: int = 0,
        substitutes: Substitutes = _NONE,
        _first: Restored | StateExported | None = None,
    ) -> None:
        if not isinstance(config, KVCacheConfig):
            raise UsageError(f"config must be a KVCacheConfig, not {type(config).__name__}")
        if isinstance(_first, StateExported) and (pools is not None or copier is not None):
            raise Unsupported(
                "a state together with pools", "the log does not contain the bytes of its blocks"
            )
        if not isinstance(substitutes, Substitutes):
            raise UsageError(f"substitutes must be Substitutes, not {type(substitutes).__name__}")
        if substitutes.eviction_order is not None:
            refuse_no_order(substitutes.eviction_order)
        self.config, self.layout = config, served_layout(config)
        self.restored = _first if isinstance(_first, Restored) else None
        warn_of_windows(self.layout, config)
        requests_kept = checked_natural(request_stats, "request_stats")
        self.transfers = engine_for(pools, copier, self.layout, config)
        self._transfer_checks = TransferChecks(self.transfers, watch=config.debug_check_tables)
        self._pools, self._secondary_file = pools, pools.secondary_file if pools is not None else None
        sinks = listed(sinks, "sinks")
        published = log is not None or bool(sinks) or config.event_buffer_max_size > 0
        created = cache_created(config, self.layout, published=published)
        state = _first.state if isinstance(_first, Restored) else _first
        with self._beginning(created, config, log, sinks, substitutes.wall_ns, state) as outputs:
            self._assemble(outputs, created, substitutes, requests_kept)

    def _assemble(
        self, outputs: Outputs, created: CacheCreated, substitutes: Substitutes, requests_kept: int
    ) -> None:
        """Build the parts that work on the state."""
        state, bus, config, transfers = self.state, self.bus, self.config, self.transfers
        self._transfer_checks.resume(state.sequences.values())
        if transfers is not None:
            bus.subscribe(transfers.on_event, *transfers.events)
        copier = None if transfers is None else transfers.copier
        self._checking = copier if isinstance(copier, CheckingCopier) else None
        if self._checking is not None:
            self._checking.begin(state)
        self._blocks = BlockManager(
            config,
            state,
            self._emit,
            recorded=outputs.log is not None,
            monotonic_ns=substitutes.monotonic_ns,
            order=substitutes.eviction_order,
        )
        self._checker = RequestChecker(state, self.layout, config, log_has_tokens=outputs.records_tokens)
        self._housekeeping, self._running = self._blocks.housekeeping, self._blocks.running
        guard, blocks = self._guard, self._blocks
        self.tables = BlockTables(
            guard, config, self.layout, state, blocks, self._transfer_checks, self._pools
        )
        self.scheduling = Scheduling(guard, state, blocks, self._checker, reuse=config.enable_block_reuse)
        self._requests = RequestCounter(bus, created, requests_kept) if requests_kept else None

    @classmethod
    def resume(cls, state: CacheState, **options: Any) -> Self:
        """Create a manager without pools from a replayed state: it decides as the recorded one would have.

        `state` is that of `kvcache.replay.replay(directory)`; the options are the constructor's. Raises `Unsupported`
        for the state of a log without tokens: matching needs them.
        """
        return cls(config_of(state), _first=state.export(), **options)

    @classmethod
    def open(cls, config: KVCacheConfig, log: LogTarget, pools: Pools | None = None, **options: Any) -> Self:
        """Begin a cache, or continue that of an earlier process: the same call for every start.

        `log` is a directory, new or with the log of that process, or a `LogWriter` that continues one. It lists the
        blocks in the file of `secondary_path`, of which the intact ones are reused at once; `restored` counts them.
        Without such a file nothing is recovered. `options` are the constructor's, and `recompute`, which recomputes
        lost prefixes (`kvcache.fold.survivors.Recompute`). Raises `LogOfOtherCache`, `Unsupported` for a log without
        tokens, and the errors of opening and replaying a log (`events.errors.LogError`, `kvcache.replay.Unreplayable`).
        """
        with reopened(config, log, pools, options.pop("recompute", None)) as (writer, restored):
            return cls(config, pools=pools, log=writer, _first=restored, **options)

    # -- sizes and counts

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that can be held, prompt and output. Not the setting `max_tokens`, a size of
        the cache.
        """
        return self._checker.max_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt that can be admitted: it has all its blocks at once, in each window."""
        return self._checker.longest_prompt.tokens

    @property
    def max_encoder_tokens(self) -> int:
        """Tokens of the longest input of an encoder that can be held; 0: the model has none."""
        longest = self._checker.longest_input
        return 0 if longest is None else longest.tokens

    @property
    @exclusive
    def num_free_blocks(self) -> int:
        """Primary blocks available in every window: blank ones, and cached ones that no sequence holds."""
        return min([window.primary.available for window in self._blocks.windows])

    @property
    @exclusive
    def num_sequences(self) -> int:
        """Number of running sequences."""
        return len(self.state.handles)

    @exclusive
    def num_free_blocks_per_window(self) -> dict[int, int]:
        """Return `num_free_blocks` for each window, by its tokens, and for cross attention, as `CROSS_WINDOW`."""
        groups = zip(self.layout.groups, self.state.groups, strict=True)
        return {layout.window: group.levels[PRIMARY].available for layout, group in groups}

    @exclusive
    def fingerprint(self) -> bytes:
        """SHA-256 of the state; equal to that of the replayed log at this point."""
        return fingerprint(self.state)

    @exclusive
    def check(self) -> None:
        """Prove the invariants from scratch; raises `InvariantViolated`. Slow: for tests and debugging."""
        self._blocks.check()

    # -- calls from any thread, in addition to `stats` and the like

    def take_request_stats(self) -> list[RequestStats]:
        """Return the records of requests that ended since the last call, oldest first; may be called from any thread.

        Raises `Unsupported` if none are kept, since `request_stats` is 0.
        """
        if self._requests is None:
            raise Unsupported(
                "take_request_stats() without request_stats",
                "create the manager with request_stats, the number of records to keep",
            )
        return self._requests.take()

    def get_latest_events(self, timeout_ms: float | None = 0) -> list[dict[str, Any]]:
        """Return the events flushed since the last call, as TensorRT-LLM's dicts; may be called from any thread.

        Waits up to `timeout_ms` (None: for ever) for some. Raises Unsupported if no events are kept, since
        `event_buffer_max_size` is 0.
        """
        timeout = timeout_ms
        if timeout_ms is not None:
            timeout = checked_wait(timeout_ms, "timeout_ms must be a number or None", per_second=1000)
        if self._journal.latest is None:
            raise Unsupported(
                "get_latest_events() without an event buffer",
                "set event_buffer_max_size, the number of events to keep",
            )
        return self._journal.latest.get(timeout)

    # -- admission

    @exclusive
    def can_add(self, requests: Items[Request]) -> int:
        """Number of requests of the batch, from the first on, that could be admitted together now."""
        return self._blocks.count_fitting(self._checker.check(listed(requests, "requests")))

    @exclusive
    def match(
        self,
        tokens: Tokens,
        *,
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Items[MultimodalItem] = (),
        extra_ids: Tokens | None = None,
        encoder_tokens: Tokens | None = None,
    ) -> Match:
        """Look up the blocks that a prompt would reuse now. Changes nothing."""
        own = namespace_of(lora_id, lora_name, cache_salt, extra_ids is not None)
        namespace, prompt, encoder = self._prompt(own, tokens, multimodal, extra_ids, encoder_tokens)
        if not self.config.enable_block_reuse:
            return Match(len(prompt))
        partial = self.config.enable_partial_reuse
        return lookup(self.state, namespace, prompt, partial=partial, encoder=encoder)

    @exclusive
    def count_reusable(
        self,
        tokens: Tokens,
        *,
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Items[MultimodalItem] = (),
        extra_ids: Tokens | None = None,
        encoder_tokens: Tokens | None = None,
    ) -> int:
        """Count the leading full blocks that a prompt would reuse now, without the list that `match` makes for each
        window.
        """
        own = namespace_of(lora_id, lora_name, cache_salt, extra_ids is not None)
        namespace, prompt, _ = self._prompt(own, tokens, multimodal, extra_ids, encoder_tokens)
        return count_blocks(self.state, namespace, prompt) if self.config.enable_block_reuse else 0

    def _prompt(
        self,
        own: Namespace,
        tokens: Tokens,
        multimodal: Items[MultimodalItem],
        extra_ids: Tokens | None,
        encoder_tokens: Tokens | None,
    ) -> tuple[Namespace, RichTokens, EncoderInput | None]:
        namespace, encoder = self._checker.with_encoder(own, encoder_tokens)
        packed = pack_tokens(tokens, self._checker.max_tokens)
        rich = rich_tokens(packed, multimodal, extra_ids)
        return namespace, RichTokens(packed) if rich is None else rich, encoder

    @exclusive
    def add_sequence(
        self,
        request_id: RequestId,
        tokens: Tokens,
        *,
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Items[MultimodalItem] = (),
        extra_ids: Tokens | None = None,
        resumed: bool = False,
        retention: Retention | None = None,
        reserve_tokens: int | None = None,
        encoder_tokens: Tokens | None = None,
        session: str | None = None,
        labels: Mapping[str, str] | None = None,
        lookup: bool = True,
    ) -> Admission:
        """Admit one request: reuse the cached part of its prompt, allocate blocks for the rest.

        `tokens` is the whole prompt, at least one token. Raises `OutOfBlocks` if there is no room now,
        `PromptTooLong` if there never will be, `DuplicateRequest` if the id is running. The other arguments
        are those of a `Request`.
        """
        checked = self._checker.check_one(
            request_id,
            tokens,
            lora_id,
            lora_name,
            cache_salt,
            multimodal,
            extra_ids,
            resumed,
            retention,
            reserve_tokens,
            encoder_tokens,
            session,
            labels,
            lookup,
        )
        return self._admit([checked], [cache_salt])[0]

    @exclusive
    def add_sequences(self, requests: Items[Request]) -> list[Admission]:
        """Admit a batch whole or not at all; its matches are claimed before anything is evicted.

        `OutOfBlocks.index` is the first request that does not fit.
        """
        requests = listed(requests, "requests")
        batch = self._checker.check(requests)
        return self._admit(batch, [request.cache_salt for request in requests]) if batch else []

    def _admit(self, batch: list[CheckedRequest], salts: list[str | None]) -> list[Admission]:
        self._warn_of_no_flush()
        try:
            with self._guard:
                admitted = self._blocks.admit(batch)
        except OutOfBlocks as refusal:
            with self._guard:
                self._housekeeping.note_refusal(batch[refusal.index].request_id, refusal)
            raise
        if self._salts.wanted:
            self._salts.remember(salts)
        return [self._admission(sequence, plan) for sequence, plan in admitted]

    def _admission(self, sequence: Sequence, plan: Plan) -> Admission:
        request_id, handle, tables = sequence.request_id, sequence.handle, self.tables
        return Admission(
            request_id,
            handle,
            sequence.num_tokens,
            *plan.reused,
            lambda: tables.of_admission(request_id, handle),
            *plan.reused_input,
        )

    @exclusive
    def block_table(self, request_id: RequestId, window: int | None = None) -> BlockTable:
        """Return the primary slot of each block of a sequence, int32 [blocks].

        With pools a torch tensor on the host, without them a numpy array. Stale after the next call that stores or
        appends. `window` is one of `num_free_blocks_per_window`, in tokens; for the layers that attend to everything,
        any number from `max_sequence_length` on, too. It may be left out where there is only one. `CROSS_WINDOW`:
        the blocks of the encoder's input, for cross attention.
        """
        return self.tables.one(request_id, window)

    @exclusive
    def block_tables(self, request_ids: Iterable[RequestId], window: int | None = None) -> BlockTable:
        """Return block tables of several sequences, int32 [sequences, most blocks], padded with -1.

        With pools a torch tensor on the host, without them a numpy array. `window` as in `block_table`.
        """
        return self.tables.several(request_ids, window)

    # -- bytes

    @exclusive
    def start_transfers(self) -> Ticket | None:
        """Start the copies requested by admissions; call it before the forward pass.

        On a GPU the compute stream must be torch's current one here, and in `flush` and `close`: the copies wait for
        what was submitted to it. It must wait for the ticket (``ticket.wait_on(stream)``; on a CPU ``ticket.wait()``).
        None: nothing to wait for. ``wait`` raises `cuda_ops.copier.CopyFailed` for a copy that failed; `poll` returns
        the affected requests.
        """
        if self.transfers is None or not self.transfers.pending:
            return None
        with self._guard:
            return self._transfer_checks.watched(self.transfers.start())

    @exclusive
    def poll(self) -> PollResult:
        """Record landed and failed copies, and return all losses, including those that `flush` has noticed before.

        When a copy has failed, nothing cached is kept, and every running sequence must be computed again from the
        start: `PollResult.invalidated` names them. Until that was returned, calls that continue one raise
        `ComputationLost`.
        """
        landed = self._record_copies()
        return self._transfer_checks.report(landed)

    # -- running sequences

    @exclusive
    def store_context_blocks(self, request_id: RequestId, num_computed_tokens: int) -> StoreResult:
        """Make full blocks of the first `num_computed_tokens` tokens reusable, after the engine has written their K/V.

        If another sequence has stored the same blocks meanwhile, this one's table refers to those from now on
        (`StoreResult.replaced`): block tables read before are stale. Raises `TransfersPending` for a sequence with
        copies that have not been started: nothing can have been computed from them.
        """
        num_computed_tokens = checked_integer(num_computed_tokens, "num_computed_tokens")
        sequence = self._running.sequence(request_id)
        if not 0 <= num_computed_tokens <= sequence.num_tokens:
            raise UsageError(
                f"request {request_id!r} has only {sequence.num_tokens} tokens, so {num_computed_tokens} "
                "cannot be computed: append sampled tokens with add_tokens first"
            )
        if num_computed_tokens > self._blocks.slots_of(sequence):
            self._blocks.refuse_without_slots([sequence])
        self._transfer_checks.refuse_uncomputable([sequence])
        with self._guard:
            swaps = self._blocks.compute(sequence, num_computed_tokens)
        return StoreResult(sequence.stored_blocks, swaps)

    @exclusive
    def store_encoder_blocks(self, request_id: RequestId) -> StoreResult:
        """Make the blocks of the encoder's input reusable, after the engine has written all of its K/V.

        As `store_context_blocks`, but for the whole: an encoder's output for each token depends on all of them. Not
        needed for an input that was reused whole (`Admission.reused_encoder_tokens`), or for a branch. Raises
        `UsageError` where the model has no encoder.
        """
        sequence = self._running.sequence(request_id)
        encoder = sequence.encoder
        if encoder is None:
            raise UsageError(
                f"request {shown(sequence.request_id)} has no encoder input: the model has no encoder"
            )
        self._transfer_checks.refuse_uncomputable([sequence])
        with self._guard:
            return self._blocks.store_input(encoder)

    @exclusive
    def add_tokens(
        self,
        request_ids: Items[RequestId],
        tokens: Tokens,
        counts: Items[int] | None = None,
        *,
        draft: bool = False,
    ) -> dict[RequestId, StoreResult]:
        """Append sampled tokens: one call per engine step for all running sequences.

        `tokens` is flat; `counts` is the number for each sequence (None: one each). All tokens of a sequence but its
        last one count as computed from now on, including the prompt and earlier samples, with or without
        `store_context_blocks`, and the blocks that they fill become reusable. With `draft`, tokens that `rewind` may
        take back do not count as computed, and are not stored, before the next call without it. Reserved slots of a
        sequence are used first, and returned if these tokens do not need them, or kept with `keep_reservations`.
        Returns the sequences with changed tables. Raises `OutOfBlocks` (and appends nothing) if the blocks for all of
        them cannot be had; `OutOfBlocks.index` is the first sequence that does not fit. Raises `TransfersPending` as
        `store_context_blocks` does, and `PromptTooLong` if one has reached `max_tokens`.
        """
        ids = request_ids if type(request_ids) is list else listed(request_ids, "request_ids")
        packed = pack_tokens(tokens, self._checker.max_tokens * (len(ids) or 1))
        num_tokens = len(packed) // TOKEN_BYTES
        if counts is None and draft is False:
            batch = self._running.decode_batch(ids, num_tokens, self._checker.longest_sequence)
            self._transfer_checks.refuse_uncomputable(batch.sequences)
            if not batch.is_steady:
                self._blocks.refuse_without_slots(batch.sequences)
            try:
                return self._blocks.step(batch, packed)
            except BaseException as error:
                self._guard.note(error)
                raise
        draft = checked_flag(draft, "draft")
        sizes = pack_counts([1] * len(ids) if counts is None else counts, len(ids), num_tokens)
        running = self._running.sequences(ids)
        self._blocks.refuse_without_slots(running)
        # Drafts do not count as computed, so nothing need be there.
        refuse = self._transfer_checks.refuse_lost if draft else self._transfer_checks.refuse_uncomputable
        refuse(running)
        with self._guard:
            return self._blocks.append(running, packed, sizes, self._checker.longest_sequence, draft=draft)

    @exclusive
    def reserve(self, request_ids: Items[RequestId], counts: Items[int]) -> None:
        """Reserve slots for `counts` tokens to come of each of these sequences, before their values are known.

        So an engine launches a step before it has read the samples of the last one, or writes K/V of tokens that it may
        reject. The slots are in the block tables, after those of the present tokens; the next `add_tokens` that names
        the sequence takes those that its tokens need and returns the others (with `keep_reservations` these stay), and
        another `reserve` replaces this count (0 returns all). `rewind` returns them, and the sequence's end. For a
        prompt that was admitted with `reserve_tokens`, and has not got all its slots, `counts` are of the tokens after
        the computed ones: its next chunk, which stays the sequence's. Raises `OutOfBlocks` (and reserves nothing) as
        `add_tokens` does, and `PromptTooLong` beyond `max_tokens`.
        """
        ids = listed(request_ids, "request_ids")
        sizes = pack_counts(counts, len(ids))
        running = self._running.sequences(ids)
        with self._guard:
            self._blocks.reserve(running, sizes, self._checker.longest_sequence)

    @exclusive
    def set_priority(
        self, request_id: RequestId, priority: int, *, start: int = 0, stop: int | None = None
    ) -> int:
        """Change the priority (0 to 100) of a running sequence's cached blocks that overlap its tokens [start, stop).

        Blocks of a lower priority are evicted first, and those below `secondary_offload_min_priority` are not kept in
        secondary; a block is never evicted before the cached ones after it, regardless of its priority. Only blocks
        that are cached at the time of the call are affected: blocks stored later get the default, 35. The priority is
        the block's, not the sequence's: it stays when the sequence ends, and holds for all that reuse the block. `stop`
        None, or beyond the end: up to the end. Returns the number of changed blocks, in the window with the most; the
        events (`BlocksUpdated`) are of all windows.
        """
        priority = checked_integer(priority, "priority")
        if not 0 <= priority <= PRIORITY_MAX:
            raise UsageError(f"priority must be from 0 to {PRIORITY_MAX}, not {priority}")
        start, stop = checked_range(start, stop, self._checker.max_tokens)
        sequence = self._running.sequence(request_id)
        with self._guard:
            return self._blocks.set_priority(sequence, priority, start, stop)

    @exclusive
    def fork(self, request_id: RequestId, child_id: RequestId) -> StoreResult:
        """Fork a running sequence: `child_id` has the same tokens, and both continue, as for beam search or n-best.

        Computed blocks are stored first, as by `store_context_blocks` (the result has the changes to the parent's
        tables). The child holds the same blocks, and has its own ones for the tokens after them: these are copied
        (`start_transfers`) with all K/V that they hold, so it does not matter if the engine has computed the last
        token, or drafts, before this call. The child does not share slots reserved for the parent. Raises `OutOfBlocks`
        if there are too few for it, `DuplicateRequest`, and as `store_context_blocks` does if the parent's own copies
        have not been started or have failed.
        """
        parent, child = self._running.sequence(request_id), checked_request_id(child_id)
        self._checker.refuse_running(child)
        self._transfer_checks.refuse_uncomputable([parent])
        with self._guard:
            return self._blocks.fork(parent, child)

    @exclusive
    def rewind(self, request_id: RequestId, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` tokens of a running sequence, as after rejected drafts.

        Stored blocks stay cached. If the block of the last remaining token is cached, the sequence gets a copy of it
        (`start_transfers`), so block tables read before are stale. The last token does not count as computed any more;
        its K/V is still there, and may be recomputed. The slots that become blank are the next to be taken, reserved
        ones included. Raises `OutOfBlocks` if there is no block for the copy, and `UsageError` if a sliding window has
        released blocks that the token sees.
        """
        number, sequence = checked_integer(num_tokens, "num_tokens"), self._running.sequence(request_id)
        if not 1 <= number <= sequence.num_tokens:
            raise UsageError(
                f"num_tokens must be from 1 to {sequence.num_tokens}, the length of request "
                f"{shown(sequence.request_id)}, not {number}"
            )
        self._transfer_checks.refuse_uncomputable([sequence])
        if number < sequence.num_tokens:
            self._blocks.refuse_rewind(sequence, number)
            with self._guard:
                self._blocks.rewind(sequence, number)

    @exclusive
    def pin(self, request_id: RequestId, start: int = 0, stop: int | None = None) -> int:
        """Hold a running sequence's cached blocks that overlap its tokens [start, stop), also after it has ended.

        Pinned blocks are reused like all others, and are not evicted before `unpin` of the number that this returns.
        With full attention the blocks before them are pinned as well, because none is reached without those. `clear`
        removes their names, not the blocks. Raises `PinsExceeded` beyond `max_pinned_share`.
        """
        start, stop = checked_range(start, stop, self._checker.max_tokens)
        sequence = self._running.sequence(request_id)
        with self._guard:
            return self._blocks.pin(sequence, start, stop)

    @exclusive
    def unpin(self, pin: int) -> None:
        """Release the blocks of a pin: those without another holder may be evicted from now on. Raises `UsageError` for
        an unknown number.
        """
        number = checked_integer(pin, "a pin")
        if number not in self.state.pins:
            raise UsageError(f"unknown pin {number} (already unpinned?)")
        with self._guard:
            self._blocks.unpin(number)

    @exclusive
    def remove_sequence(
        self, request_id: RequestId, store: bool = True, *, why: str = "finished", stop: str | None = None
    ) -> None:
        """End a request. With `store`, everything it computed stays reusable, its partial last block too.

        `why` is for readers of the events: ``finished``, ``aborted``, or ``preempted`` for one that makes room and will
        be admitted again (`Request.resumed`). `stop` is the reason for which its output ended, in the engine's own
        words, of at most 64 characters, as ``tool_calls`` or ``stop``: it selects the retention of its blocks in
        `stop_retention`, unless the request has stated one (`Request.retention`).
        """
        store = checked_flag(store, "store")
        stop = None if stop is None else checked_stop(stop)
        reason = (
            _FINISHED if type(why) is str and why == "finished" else checked_choice(why, EndReason, "why")
        )
        sequence = self._running.sequence(request_id)
        with self._guard:
            self._blocks.remove(sequence, store=store, why=reason, stop=stop)
            self._transfer_checks.forget(sequence.request_id)

    @exclusive
    def pins(self) -> dict[int, Pinned]:
        """Return the pinned blocks, by number of the pin."""
        windows = [group.window for group in self.layout.groups]
        return {
            number: Pinned(pin.request_id, dict(zip(windows, map(len, pin.slots), strict=True)), pin.named)
            for number, pin in self.state.pins.items()
        }

    @exclusive
    def clear(self) -> None:
        """Drop every unreferenced cached block and un-name the others. Published at once."""
        with self._guard:
            self._housekeeping.clear()
        self._end_step()

    # -- bytes, at the end of a step and of the manager

    def _record_copies(self) -> tuple[int, ...]:
        """Record ended copies; returns those that landed, and notes the losses of those that failed."""
        engine = self.transfers
        if engine is None:
            return super()._record_copies()
        # Outside the guard: an interruption while tickets are polled loses nothing, and the call may be repeated.
        landed, failed = engine.poll() if self.state.transfers else ([], [])
        if not landed and not failed:
            return ()
        checksums = self._checksums(landed)
        with self._guard:
            if landed:
                self._housekeeping.land(landed, b"".join([each for _, _, each in checksums]))
            if self._checking is not None:
                for each in checksums:
                    self._checking.landed(*each)
            if failed:
                self._transfer_checks.lose(failed, self._housekeeping.fail(failed))
                if self._checking is not None:
                    self._checking.begin(self.state)
            engine.recorded()
        return tuple(landed)

    def _checksums(self, landed: Items[int]) -> list[tuple[int, npt.NDArray[np.int32], bytes]]:
        """Read the checksums of blocks that these copies have brought to a secondary level in a file.

        Per copy: the group, the slots and their checksums.
        """
        file = self._secondary_file
        if file is None:
            return []
        copies = [self.state.transfers[transfer] for transfer in landed]
        written = [
            (copy.group, np.frombuffer(copy.slots, np.int32)) for copy in copies if copy.level == SECONDARY
        ]
        return [(group, slots, file.checksums(group, slots)) for group, slots in written]

    def _finish_copies(self) -> None:
        if self.transfers is not None:
            if self.transfers.pending:
                with self._guard:
                    self.transfers.start()
            self.transfers.wait()

    def _acquire(self) -> None:
        if self._pools is not None:
            self._pools.take(self)

    def _release(self) -> None:
        if self._pools is not None and self.transfers is not None:
            # After a failure, started copies may still write.
            self.transfers.wait()
            self._pools.release(self)
