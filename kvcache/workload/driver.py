"""Engine over a manager, like a PyTorch engine without the model.

A step admits what fits, starts the copies, computes a chunk of the prompts and one token of every running output,
reports both, ends what is finished, and flushes. Everything follows from the trace and the options, nothing
from time: equal inputs make equal sequences of calls.

A request is admitted only if it and all running ones can be completed without giving up any of them, even if
nothing they hold is shared. That is stricter than `can_add`, which checks prompts only, so an admission that passes
always fits, and decoding never runs out of blocks.

With pools, every computed token's rows are filled with a pattern, and reused blocks are compared with it (see
`kvcache.workload.pattern`) when their request is admitted and again when it ends. This stub for a forward pass catches
errors that a model would only answer with worse text.

When copies fail, everything is computed again. That is impossible for a request that has released blocks by then: it is
ended, and is first in the queue with its output as a part of its prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from events.errors import LogWriteFailed
from events.types import PRIMARY
from kvcache.errors import UsageError, invariant
from kvcache.manager import KVCacheManager
from kvcache.results import Admission, BlockTable
from kvcache.workload.clock import StepClock
from kvcache.workload.copies import TimedCopier
from kvcache.workload.pattern import PatternSpan, PoolPattern, prefix_digests
from kvcache.workload.summary import RunResult, StepTimes, WindowBlocks
from kvcache.workload.tokens import Uint64s
from kvcache.workload.traces import TraceRequest
from kvcache.workload.waiting_queue import RequestQueue, Waiting, WaitingLimits, WaitingQueue

if TYPE_CHECKING:
    from kvcache.pools import Pools

Progress = Callable[[int, int], None]
"""Callback after each step with (step, requests done or refused)."""


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """Options of the engine."""

    concurrency: int = 32
    """Maximum number of requests running at once."""
    prefill_tokens: int = 8192
    """Maximum number of prompt tokens computed in one step, over all requests, in the order of admission."""
    seed: int = 0
    """Seed of the token ids."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.prefill_tokens < 1:
            raise UsageError("concurrency and prefill_tokens must be at least 1")


@dataclass(slots=True)
class ObservedStep:
    """One step; requests by id."""

    admitted: dict[int, Admission]
    """Lookup result of each admitted request."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    decoding: int = 0
    """Sequences with their last output computed."""
    context_tokens: int = 0
    """Tokens before the computed ones, over all sequences: their K and V were read."""
    sampled: list[int] = field(default_factory=list)
    """Requests that got a token."""
    ended: list[int] = field(default_factory=list)
    """Requests that have reached their end."""

    def note(self, begin: int, end: int, *, decoding: bool) -> None:
        """Count the tokens from `begin` to `end` of a sequence."""
        self.context_tokens += begin
        self.decoding += decoding
        self.prefill_tokens += 0 if decoding else end - begin


StepCallback = Callable[[ObservedStep], None]
"""Callback at the end of each step."""


@dataclass(slots=True)
class _Running:
    """An admitted request."""

    waiting: Waiting
    """The request as it was queued."""
    admission: Admission
    outputs: list[int]
    computed: int
    """Number of leading tokens with K and V."""
    sampled: int = 0
    digests: Uint64s | None = None
    """Digest of each token of prompt and output; only with pools."""

    @property
    def request_id(self) -> int:
        return int(self.waiting.request.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        return self.admission.num_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.sampled

    @property
    def outputs_left(self) -> int:
        return len(self.outputs) - self.sampled

    @property
    def finished(self) -> bool:
        """True if the last output was sampled; without outputs, if the prompt is computed."""
        return not self.outputs_left and self.computed >= self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens from `begin` to `end` of one request that a step computes."""

    running: _Running
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        """True if nothing has to be computed after it: the K and V of the last output have no use."""
        return self.end == self.running.num_tokens and self.running.outputs_left <= 1


class Engine:
    """Engine that plays one trace over a manager, which must have no other users; raises UsageError if it does.

    `pools` are those of the manager; without them no bytes are written or compared. `copies` is its copier, if that
    measures its time, which then does not count as the manager's. For equal logs the manager must use the `wall_ns` of
    `clock`. `trace` may also be a queue that other threads fill while it plays. `watch` is called at the end of each
    step, before the clock advances.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        trace: Iterable[TraceRequest] | RequestQueue,
        options: DriveOptions | None = None,
        *,
        pools: Pools | None = None,
        copies: TimedCopier | None = None,
        clock: StepClock | None = None,
        watch: StepCallback | None = None,
    ) -> None:
        if manager.num_sequences:
            raise UsageError("the manager is serving requests: a trace needs one of its own")
        self._manager = manager
        self._options = options = options or DriveOptions()
        self._clock = clock = clock or StepClock()
        self._pattern = PoolPattern(pools) if pools is not None else None
        self._times = StepTimes(copies)
        windows = {group.window: WindowBlocks() for group in manager.layout.groups}
        self._result = RunResult(self._times, windows)
        self._watch = watch
        self._queue = trace if isinstance(trace, RequestQueue) else self._queue_of(trace)
        self._running: dict[int, _Running] = {}
        """Running requests in the order of admission."""
        self._may_admit = True
        """False while the first queued request waits for a running one to end."""

    def _queue_of(self, trace: Iterable[TraceRequest]) -> WaitingQueue:
        limits = WaitingLimits.of(self._manager.config, self._manager.layout)
        only_numbers = self._manager.config.block_hash == "v1_block_key"
        seed, refuse = self._options.seed, self._result.refuse
        return WaitingQueue(trace, limits, self._clock, seed, refuse, lora_ids=only_numbers)

    def run(self, stop: threading.Event | None = None, progress: Progress | None = None) -> RunResult:
        """Step until all requests are done, or `stop` is set; then no request of the trace is running any more.

        A log failure (`LogWriteFailed`) ends the run after its step, and is in the result. Raises PatternMismatch if a
        block holds wrong bytes; running requests then stay as they are.
        """
        stop, result = stop or threading.Event(), self._result
        while (self._queue or self._running) and not stop.is_set() and result.log_failure is None:
            self._step()
            if progress is not None:
                progress(len(self._times), result.requests + result.refused)
            self._clock.advance(stop, until_ms=0 if self._running else self._queue.next_arrival_ms)
        result.interrupted = bool(self._queue or self._running)
        self._end()
        return result

    def _step(self) -> None:
        admitted = self._admit()
        self._check_reused(admitted)
        self._note_held()
        chunks = self._plan()
        step = ObservedStep({running.request_id: running.admission for running in admitted})
        for chunk in chunks:
            step.note(chunk.begin, chunk.end, decoding=bool(chunk.running.sampled))
        self._compute(chunks)
        self._store(chunks)
        step.sampled = self._sample(chunks)
        self._note_held()
        ended = [running for running in self._running.values() if running.finished]
        step.ended = [running.request_id for running in ended]
        self._remove(ended)
        self._flush()
        self._times.end_step()
        if self._watch is not None:
            self._watch(step)

    def _end(self) -> None:
        """Leave the manager without sequences and without pending copies."""
        self._remove(list(self._running.values()))
        self._transfer()
        self._flush()
        self._note_cached()

    def _note_held(self) -> None:
        """Record the primary blocks that sequences hold in each window."""
        free = self._manager.num_free_blocks_per_window()
        for group in self._manager.layout.groups:
            blocks = self._result.windows[group.window]
            blocks.most_held = max(blocks.most_held, group.num_blocks[PRIMARY] - free[group.window])

    def _note_cached(self) -> None:
        """Record the blocks left in each window, which no sequence holds any more."""
        for layout, group in zip(self._manager.layout.groups, self._manager.state.groups, strict=True):
            primary, secondary = (level.unreferenced for level in group.levels)
            self._result.windows[layout.window].cached = (primary, secondary)

    def _flush(self) -> None:
        """End a step. A failure of the log does not undo it: the step is done."""
        with self._times.timed():
            try:
                self._manager.flush()
            except LogWriteFailed as error:
                self._result.log_failure = error

    # -- admission

    def _admit(self) -> list[_Running]:
        """Admit requests that fit, start their copies, and return them."""
        chosen = self._choose()
        admitted = []
        if chosen:
            with self._times.timed():
                admissions = self._manager.add_sequences([waiting.request for waiting in chosen])
            self._queue.take(len(chosen))
            admitted = [self._start(*pair) for pair in zip(chosen, admissions, strict=True)]
        # Also without admissions: decoding may have offloaded blocks to secondary.
        self._transfer()
        return admitted

    def _choose(self) -> list[Waiting]:
        """Return the first queued requests that can be completed together with the running ones."""
        room = self._options.concurrency - len(self._running) if self._may_admit else 0
        candidates = self._queue.first(room)
        if not candidates:
            return []
        free = self._free_after_completion()
        chosen = []
        for waiting in candidates:
            free -= waiting.blocks_to_completion
            if free < 0:
                # A smaller request after it must not overtake it forever, so the queue waits.
                self._may_admit = False
                break
            chosen.append(waiting)
        # Requests larger than an idle cache were refused, so a queue with nothing running would wait forever.
        invariant(bool(chosen or self._running), "an idle cache has fewer blocks than it had at the start")
        return chosen

    def _free_after_completion(self) -> int:
        """Return the blocks that are left when all running requests have reached their end."""
        manager = self._manager
        with self._times.timed():
            return manager.num_free_blocks - sum(
                manager.scheduling.remaining_blocks_to_completion(running.request_id, running.outputs_left)
                for running in self._running.values()
            )

    def _start(self, waiting: Waiting, admission: Admission) -> _Running:
        running = _Running(waiting, admission, waiting.outputs.tolist(), admission.reused_tokens)
        if self._pattern is not None:
            request = waiting.request
            namespace = (request.lora_id, request.lora_name, request.cache_salt)
            running.digests = prefix_digests(np.concatenate([request.tokens, waiting.outputs]), namespace)
        self._running[running.request_id] = running
        return running

    def _transfer(self) -> None:
        """Start all copies and wait for them, so that the following calls do not depend on their duration."""
        manager = self._manager
        with self._times.timed():
            manager.start_transfers()
        if manager.transfers is not None:
            manager.transfers.wait()
        with self._times.timed():
            cut = manager.poll().invalidated
        self._begin_again(
            [self._running[int(request_id)] for request_id, _ in cut if request_id in self._running]
        )

    def _begin_again(self, cut: list[_Running]) -> None:
        """Handle failed copies: reset computed tokens; requests that cannot compute them again return to the queue."""
        for running in cut:
            self._result.recomputed_tokens += running.computed
            running.computed = 0
        undone = [running for running in cut if self._has_let_go(running)]
        self._remove(undone)
        self._queue.put_back([running.waiting.after(running.sampled) for running in undone])

    def _has_let_go(self, running: _Running) -> bool:
        """Return True if some window has released blocks, so that the request cannot be computed from its start."""
        return any(int(table[0]) < 0 for table in self._tables(running))

    def _tables(self, running: _Running) -> list[BlockTable]:
        """Return the block table of each window."""
        manager = self._manager
        with self._times.timed():
            return [manager.block_table(running.request_id, own.window) for own in manager.layout.groups]

    # -- the forward pass

    def _plan(self) -> list[_Chunk]:
        """Choose the tokens to compute: the last token of each output, and prompts up to the step's budget."""
        budget = self._options.prefill_tokens
        chunks = []
        for running in self._running.values():
            missing = running.num_tokens - running.computed
            if running.sampled and missing == 1:
                chunks.append(_Chunk(running, running.computed, running.num_tokens))
            elif budget:
                take = min(missing, budget)
                budget -= take
                chunks.append(_Chunk(running, running.computed, running.computed + take))
        return chunks

    def _compute(self, chunks: list[_Chunk]) -> None:
        """Write the K and V of the chunks, as a pattern."""
        if self._pattern is not None:
            spans = [self._span(chunk.running, chunk.begin, chunk.end) for chunk in chunks]
            self._pattern.write(spans)
            for chunk, span in zip(chunks, spans, strict=True):
                if chunk.is_last:
                    everything = replace(span, begin=0)
                    checked = self._pattern.check(chunk.running.request_id, everything)
                    self._result.checked_final_blocks += checked
        for chunk in chunks:
            chunk.running.computed = chunk.end

    def _check_reused(self, admitted: list[_Running]) -> None:
        """Compare the blocks that newly admitted requests reuse with the pattern."""
        if self._pattern is None:
            return
        for running in admitted:
            if running.computed:
                span = self._span(running, 0, running.computed)
                self._result.checked_blocks += self._pattern.check(running.request_id, span)

    def _span(self, running: _Running, begin: int, end: int) -> PatternSpan:
        assert running.digests is not None
        return PatternSpan(tuple(map(np.asarray, self._tables(running))), running.digests, begin, end)

    # -- reporting it

    def _store(self, chunks: list[_Chunk]) -> None:
        """Make computed prompt blocks reusable; output blocks become so when the next token arrives."""
        manager = self._manager
        with self._times.timed():
            for chunk in chunks:
                if not chunk.running.sampled:
                    manager.store_context_blocks(chunk.running.request_id, chunk.end)

    def _sample(self, chunks: list[_Chunk]) -> list[int]:
        """Append the next token to every request with all tokens computed, in one call; return these requests."""
        request_ids: list[int] = []
        tokens: list[int] = []
        for chunk in chunks:
            running = chunk.running
            if chunk.end == running.num_tokens and running.outputs_left:
                request_ids.append(running.request_id)
                tokens.append(running.outputs[running.sampled])
                running.sampled += 1
        if request_ids:
            with self._times.timed():
                self._manager.add_tokens(request_ids, tokens)
        return request_ids

    def _remove(self, ended: list[_Running]) -> None:
        """End requests; their computed blocks stay reusable."""
        for running in ended:
            with self._times.timed():
                stop = running.waiting.stop if running.finished else None
                self._manager.remove_sequence(running.request_id, stop=stop)
            del self._running[running.request_id]
            self._result.requests += running.finished
            self._result.output_tokens += running.sampled
            self._may_admit = True
