"""The engine's interface: one manager owns the cache of one engine rank.

A step of an engine is: admit (`add_sequence`), `start_transfers`, read block tables, run the forward pass, report what
it wrote (`store_context_blocks`, `add_tokens`), end what is finished (`remove_sequence`), `flush`.

All commands come from one thread. Each either happens whole or raises and changes nothing (but that a refused admission
is noted by `AdmissionRefused`); an exception in the middle of one (which would be a bug) poisons the manager, so that
no later call works on half a state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Self

from events.types import CacheCreated, EventBatch, RequestId
from kvcache.calls.query import Query
from kvcache.calls.running import Running
from kvcache.calls.scheduling import Scheduling
from kvcache.calls.tables import Tables
from kvcache.config import KVCacheConfig
from kvcache.decide.block_manager import BlockManager
from kvcache.decide.eviction_order import EvictionOrder, refuse_no_order
from kvcache.device.engine import engine_for
from kvcache.device.memory import served_layout
from kvcache.device.readiness import Readiness
from kvcache.errors import OutOfBlocks, Unsupported, UsageError
from kvcache.fold.state import CacheState
from kvcache.guard import Guard, closing, exclusive, forwarded_to
from kvcache.inputs.arguments import checked_natural, listed, time_from
from kvcache.inputs.multimodal import MultimodalItem
from kvcache.inputs.requests import CheckedRequest, Request, RequestChecker
from kvcache.inputs.retention import Retention
from kvcache.inputs.tokens import Tokens
from kvcache.layout import warn_of_windows
from kvcache.record.journal import Journal, cache_created
from kvcache.record.monitor import Monitor
from kvcache.record.outputs import LogTarget, Outputs
from kvcache.record.steps import Steps
from kvcache.record.told_state import ToldState
from kvcache.restart.opening import Restored, config_of, reopened
from kvcache.results import Admission, PollResult
from sinks import Sink, SinkContext, SinkRunner

if TYPE_CHECKING:
    from cuda_ops.copier import Copier, Ticket
    from kvcache.pools import Pools
    from sinks.router.feed import RouterFeed


_of_query, _of_monitor = forwarded_to("_query"), forwarded_to("_monitor")
_of_running, _of_scheduling = forwarded_to("_running"), forwarded_to("_scheduling")
_of_tables = forwarded_to("_tables")


class KVCacheManager:
    """Owns the blocks of one engine rank: prefix reuse, eviction, offload to host memory, and an event for all of it.

    `pools` are the tensors, which are this manager's until it is closed (without them only the bookkeeping runs);
    `copier` moves their bytes, by default the pools' own. `log` is a directory or a `LogWriter`; `sinks` are URLs
    or sinks. `wall_ns` stamps batches and is never used for a decision; `monotonic_ns` says when a `Retention` is over
    (while it raises, time stands still). `request_stats` is how many records of ended requests are kept for
    `take_request_stats`; 0: none are made. `eviction_order`, a class (`kvcache.decide.eviction_order`), says which
    blocks go first instead of `eviction_policy`, for simulations. `restored` is what
    `open` has found again, of which the attribute tells; None: there was nothing to be found.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        pools: Pools | None = None,
        copier: Copier | None = None,
        log: LogTarget = None,
        sinks: Items[str | Sink | SinkRunner] = (),
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        state: CacheState | None = None,
        eviction_order: type[EvictionOrder] | None = None,
        request_stats: int = 0,
        restored: Restored | None = None,
    ) -> None:
        if not isinstance(config, KVCacheConfig):
            raise UsageError(f"config must be a KVCacheConfig, not {type(config).__name__}")
        if state is not None and not isinstance(state, CacheState):
            raise UsageError(f"state must be a CacheState, not {type(state).__name__}")
        if state is not None and (pools is not None or copier is not None):
            raise Unsupported("a state together with pools", "the bytes of its blocks are not in the log")
        if eviction_order is not None:
            refuse_no_order(eviction_order)
        self.config, self.restored = config, restored
        self.layout = served_layout(config)
        warn_of_windows(self.layout, config)
        self._guard, self._requests_kept = Guard(), checked_natural(request_stats, "request_stats")
        self.transfers = engine_for(pools, copier, self.layout, config)
        self._readiness = Readiness(self.transfers, watch=config.debug_check_tables)
        self._pools = pools
        sinks, started = listed(sinks, "sinks"), time_from(wall_ns)
        heard = log is not None or bool(sinks) or config.event_buffer_max_size > 0
        first = state.export() if state is not None else None if restored is None else restored.state
        created = cache_created(config, self.layout, heard=heard)
        context = SinkContext(created.key_bytes, config.tokens_per_block, config.model, fold=ToldState)
        self._salts = context.salts
        outputs = Outputs.open(log, sinks, context, config.log)
        try:
            self._journal = Journal(created, outputs, config.event_buffer_max_size, first)
            self._assemble(outputs, created, wall_ns, monotonic_ns, eviction_order)
            self._journal.make_good()
            self._journal.flush(started)
            if pools is not None:
                # Last, so that they are not taken by a manager that could not be made.
                pools.take(self)
        except BaseException:
            outputs.close()
            raise

    def _assemble(
        self,
        outputs: Outputs,
        created: CacheCreated,
        wall_ns: Callable[[], int],
        monotonic_ns: Callable[[], int],
        eviction_order: type[EvictionOrder] | None,
    ) -> None:
        """Make the parts that work on the journal's state."""
        journal, guard, transfers, readiness = self._journal, self._guard, self.transfers, self._readiness
        self.state, self.bus = state, bus = journal.state, journal.bus
        readiness.resume(state.sequences.values())
        if transfers is not None:
            bus.subscribe(transfers.on_event, *transfers.events)
        self._blocks = BlockManager(
            self.config,
            state,
            journal.emit,
            recorded=outputs.log is not None,
            monotonic_ns=monotonic_ns,
            order=eviction_order,
        )
        self._checker = RequestChecker(
            state.handles,
            state.symbols,
            self.layout.longest_sequence(self.config),
            self.layout.longest_prompt(self.config),
            block_hash=created.hash_algorithm,
            log_has_tokens=outputs.records_tokens,
            longest_input=self.layout.longest_input(self.config),
            tokens_per_block=self.config.tokens_per_block,
        )
        self._query = Query(
            guard, self.config, self.layout, state, self._blocks, self._checker, readiness, self._pools
        )
        self._running = Running(guard, self._blocks, self._checker, readiness)
        # Called once per step: without the detour by the class.
        self.add_tokens = self._running.add_tokens  # type: ignore[method-assign]
        self._tables = Tables(
            guard, self.config.tokens_per_block, self._blocks, self._query, readiness, self._pools
        )
        reuse = self.config.enable_block_reuse
        self._scheduling = Scheduling(guard, state, self._blocks, self._checker, reuse=reuse)
        self._monitor = Monitor(journal, self._requests_kept)
        file = getattr(self._pools, "secondary_file", None)
        self._steps = Steps(guard, journal, self._blocks.upkeep, transfers, readiness, wall_ns, file)
        if outputs.offer(self._monitor):
            self._steps.measure(time.perf_counter_ns, self._monitor.measure_steps())

    @classmethod
    def resume(cls, state: CacheState, **options: Any) -> Self:
        """A manager without pools that goes on from a replayed state: it decides as the recorded one would have.

        `state` is that of `kvcache.replay.replay(directory)`; `log`, `sinks` and the clocks are the constructor's.
        Raises `Unsupported` for the state of a log without tokens: matching needs them.
        """
        return cls(config_of(state), state=state, **options)

    @classmethod
    def open(cls, config: KVCacheConfig, log: LogTarget, pools: Pools | None = None, **options: Any) -> Self:
        """Begin a cache, or go on with what an earlier process has left of one: the same call for every start.

        `log` is a directory, new or with the log of that process, or a `LogWriter` that continues one. It says what the
        file of `secondary_path` holds. What of that is right is reused at once; `restored` tells. Without such a file
        nothing is found again. `options` are the constructor's, and `recompute`, which computes lost beginnings again
        (`kvcache.fold.surviving.Recompute`). Raises `LogOfOtherCache`, `Unsupported` for a log without tokens, and what
        opening and replaying a log raise (`events.errors.LogError`, `kvcache.replay.Unreplayable`).
        """
        with reopened(config, log, pools, options.pop("recompute", None)) as kept:
            return cls(config, pools=pools, **kept, **options)

    # -- what changes nothing

    can_add = _of_query(Query.can_add)
    remaining_blocks_to_completion = _of_query(Query.remaining_blocks_to_completion)
    remaining_blocks_per_window = _of_query(Query.remaining_blocks_per_window)
    demand = _of_scheduling(Scheduling.demand)
    next_step_blocks_per_window = _of_scheduling(Scheduling.next_step_blocks_per_window)
    simulate = _of_scheduling(Scheduling.simulate)
    computing = _of_scheduling(Scheduling.computing)
    match = _of_query(Query.match)
    count_reusable = _of_query(Query.count_reusable)
    block_table = _of_query(Query.block_table)
    block_tables = _of_query(Query.block_tables)
    check_tables = _of_query(Query.check_tables)
    padded_tables = _of_tables(Tables.padded_tables)
    paged_tables = _of_tables(Tables.paged_tables)
    slot_mapping = _of_tables(Tables.slot_mapping)
    sequence_lengths = _of_tables(Tables.sequence_lengths)
    pins = _of_query(Query.pins)
    fingerprint = _of_query(Query.fingerprint)
    check = _of_query(Query.check)
    num_free_blocks_per_window = _of_query(Query.num_free_blocks_per_window)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that can be held, prompt and output. Not the setting `max_tokens`, which is a
        size of the cache.
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
    def num_free_blocks(self) -> int:
        """Primary blocks that can be had in every window: blank ones, and cached ones that no sequence holds."""
        return self._query.num_free_blocks()

    @property
    def num_sequences(self) -> int:
        """Running sequences."""
        return self._query.num_sequences()

    # -- what any thread may call

    stats = _of_monitor(Monitor.stats)
    take_request_stats = _of_monitor(Monitor.take_request_stats)
    sink_stats = _of_monitor(Monitor.sink_stats)
    log_stats = _of_monitor(Monitor.log_stats)
    wait_durable = _of_monitor(Monitor.wait_durable)
    reopen_sinks = _of_monitor(Monitor.reopen_sinks)
    wait_subscribers = _of_monitor(Monitor.wait_subscribers)
    get_latest_events = _of_monitor(Monitor.get_latest_events)

    @property
    def feeds(self) -> tuple[RouterFeed, ...]:
        """The sinks that feed routers."""
        return self._monitor.feeds

    # -- housekeeping

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- admission

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
    ) -> Admission:
        """Admit one request: reuse what is cached of its prompt, allocate blocks for the rest.

        `tokens` is the whole prompt, at least one token. Raises `OutOfBlocks` if there is no room now,
        `PromptTooLong` if there never will be, `DuplicateRequest` if the id is running. `Request` tells about the
        other arguments.
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
        self._steps.warn_of_no_flush()
        try:
            with self._guard:
                admitted = self._blocks.admit(batch)
        except OutOfBlocks as refusal:
            with self._guard:
                self._blocks.upkeep.note_refusal(batch[refusal.index].request_id, refusal)
            raise
        if self._salts.wanted:
            self._salts.remember(salts)
        return [self._query.admission(sequence, plan) for sequence, plan in admitted]

    # -- bytes

    @exclusive
    def start_transfers(self) -> Ticket | None:
        """Issue the copies that the admissions asked for; call it before the forward pass.

        The compute stream must wait for the ticket (``ticket.wait_on(stream)``; on a CPU ``ticket.wait()``). None:
        nothing to wait for. ``wait`` raises `cuda_ops.copier.CopyFailed` for a copy that failed; `poll` tells whom
        that concerns.
        """
        if self.transfers is None or not self.transfers.pending:
            return None
        with self._guard:
            return self._readiness.watched(self.transfers.start())

    @exclusive
    def poll(self) -> PollResult:
        """Record which copies have landed or failed, and tell what was lost, also what `flush` has noticed before.

        When a copy has failed, nothing cached is kept, and every running sequence must be computed again from the
        start: `PollResult.cut` names them. Until that was told, what goes on with one raises `ComputationLost`.
        """
        return self._readiness.tell(self._steps.record_copies())

    # -- running sequences

    store_context_blocks = _of_running(Running.store_context_blocks)
    store_encoder_blocks = _of_running(Running.store_encoder_blocks)
    add_tokens = _of_running(Running.add_tokens)
    reserve = _of_running(Running.reserve)
    set_priority = _of_running(Running.set_priority)
    fork = _of_running(Running.fork)
    rewind = _of_running(Running.rewind)
    pin = _of_running(Running.pin)
    unpin = _of_running(Running.unpin)
    remove_sequence = _of_running(Running.remove_sequence)

    # -- the whole cache

    @exclusive
    def clear(self) -> None:
        """Drop every cached block that no sequence holds and un-name those that are held. Published at once."""
        with self._guard:
            self._blocks.upkeep.clear()
        self._steps.end()

    # -- end of a step

    @exclusive
    def flush(self) -> EventBatch | None:
        """End an engine step: publish what happened as one batch. An empty step makes no batch.

        With `log.overflow` "block", raises `events.LogWriteFailed` while the disk refuses the log. The batch is made
        and handed to log and sinks nevertheless: there is nothing to repeat, and the next flush ends the next step.
        """
        return self._steps.end()

    @closing
    def close(self) -> None:
        """Land what is in flight, record a checkpoint, drain the log and the sinks. Closing twice is harmless.

        In the middle of another call, as from a signal handler, it takes effect when that call has ended.
        """
        try:
            if self._guard.failure is None:
                self._steps.end_last()
        finally:
            self._guard.close()
            try:
                self._journal.outputs.close()
            finally:
                if self._pools is not None and self.transfers is not None:
                    # After a failure, what was started may still write.
                    self.transfers.wait()
                    self._pools.give_back(self)
