"""Replay of recorded commands against a manager with other settings.

Commands that fit run in the batch in which they were recorded. A request that does not fit waits: at the end of each
batch the first waiting requests are admitted if they fit, and all later commands of such a request are delayed by the
same number of batches. Other requests are not delayed. If there is no block for a sampled token, or for a chunk of a
prompt, the running request that was admitted last is preempted: it is removed, which stores its computed blocks, and
waits with its tokens so far as its prompt; no waiting request is then admitted until a running request has ended.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from events.packed import SLOT_BYTES
from events.types import (
    PRIMARY,
    AdmissionRefused,
    AnyEvent,
    BlocksMoved,
    BlocksRemoved,
    EndReason,
    Event,
    MoveReason,
    RemoveReason,
    RequestId,
    SequenceAdded,
    SequenceRemoved,
)
from kvcache.config import KVCacheConfig
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.errors import OutOfBlocks, PromptTooLong, UsageError
from kvcache.fold.sequence import Sequence
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.whatif.commands import (
    Admit,
    Append,
    Clear,
    Command,
    Compute,
    Create,
    Fork,
    OfOne,
    OfSeveral,
    Poll,
    Prioritize,
    RecordedBatch,
    RecordedPrompt,
    Remove,
    Reserve,
    Rewind,
)


@dataclass(slots=True)
class Tally:
    """Counts of a replay. Blocks are counted over all attention windows."""

    requests: int = 0
    """Requests admitted, not counting resumptions after a preemption."""
    prompt_tokens: int = 0
    """Prompt tokens of all these requests."""
    reused_tokens_primary: int = 0
    """Prompt tokens in full blocks that were in primary in all windows."""
    reused_tokens_secondary: int = 0
    """Prompt tokens in full blocks that some window had to onboard from secondary."""
    reused_tokens_partial: int = 0
    """Tokens copied from a block that matched only at its start."""
    waited: int = 0
    """Requests that did not fit when they were admitted in the log; for the recording, its refusals."""
    waited_batches: int = 0
    """Batches by which their admission was delayed, summed over all of them."""
    preempted: int = 0
    """Preemptions of running requests."""
    recomputed_tokens: int = 0
    """Tokens that preempted requests had to compute again."""
    cut_short: int = 0
    """Requests ended early because each alone was larger than the cache."""
    too_long: int = 0
    """Requests with a prompt larger than the cache."""
    unserved: int = 0
    """Requests still waiting when no running request was left."""
    unserved_tokens: int = 0
    """Prompt tokens of requests that were never admitted, too long or unserved."""
    blocks_offloaded: int = 0
    """Blocks evicted from primary and kept in secondary."""
    blocks_onboarded: int = 0
    """Blocks onboarded from secondary."""
    blocks_removed_primary: int = 0
    """Blocks evicted from primary for good."""
    blocks_removed_secondary: int = 0
    """Blocks evicted from secondary."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Prompt tokens and reused tokens of each request, alternating."""
    lengths_again: array[int] = field(default_factory=lambda: array("q"))
    """Prompt tokens and reused tokens of each resumption after a preemption, alternating."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.reused_tokens_primary + self.reused_tokens_secondary + self.reused_tokens_partial

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed, and tokens computed again."""
        return self.prompt_tokens - self.reused_tokens + self.recomputed_tokens

    @property
    def hit_rate(self) -> float:
        """Reused part of the prompt tokens of all requests, from 0 to 1, including requests that are never admitted."""
        asked = self.prompt_tokens + self.unserved_tokens
        return self.reused_tokens / asked if asked else 0.0

    def count(self, event: AnyEvent | Event) -> None:
        """Count any event of a log."""
        if isinstance(event, AdmissionRefused):
            self.waited += 1
        else:
            self.follow(event)

    def follow(self, event: AnyEvent | Event) -> None:
        """Count events of requests and blocks, except refusals, because one request may be refused many times."""
        match event:
            case SequenceAdded(resumed=True):
                self.recomputed_tokens += event.num_tokens - event.reused
                self.lengths_again.extend((event.num_tokens, event.reused))
            case SequenceAdded():
                secondary = max(event.reused_secondary)
                self.requests += 1
                self.prompt_tokens += event.num_tokens
                self.reused_tokens_primary += event.reused - event.reused_partial - secondary
                self.reused_tokens_secondary += secondary
                self.reused_tokens_partial += event.reused_partial
                self.lengths.extend((event.num_tokens, event.reused))
            case SequenceRemoved():
                self.preempted += event.why == EndReason.PREEMPTED
            case BlocksMoved(why=MoveReason.OFFLOAD):
                self.blocks_offloaded += len(event.from_slots) // SLOT_BYTES
            case BlocksMoved(why=MoveReason.ONBOARD):
                self.blocks_onboarded += len(event.from_slots) // SLOT_BYTES
            case BlocksRemoved(why=RemoveReason.SUPERSEDED | RemoveReason.CLEARED):
                pass
            case BlocksRemoved() if event.level == PRIMARY:
                self.blocks_removed_primary += len(event.slots) // SLOT_BYTES
            case BlocksRemoved():
                self.blocks_removed_secondary += len(event.slots) // SLOT_BYTES


Step = OfOne | OfSeveral
"""A command about one sequence."""


@dataclass(slots=True, eq=False)
class PlayedRequest:
    """One request with its remaining recorded steps, and its delay."""

    prompt: RecordedPrompt
    """Prompt of the request; after a preemption, with its tokens by then."""
    steps: deque[tuple[int, Step]] = field(default_factory=deque)
    """Remaining steps, with the batch in which each was recorded."""
    delay: int = 0
    """Delay of its steps, in batches."""
    stopped_at: int = 0
    """Batch in which it last began to wait."""

    @property
    def handle(self) -> int:
        """Handle in the log, and id in the manager."""
        return self.prompt.handle

    def go_on(self, now: int) -> int:
        """Continue in the next batch, because it is admitted at the end of this one; return the batches it waited."""
        waited = now + 1 - self.stopped_at
        self.delay += waited
        return waited

    def is_due(self, now: int) -> bool:
        """Return True if its next step is due in this batch."""
        return bool(self.steps) and self.steps[0][0] + self.delay <= now


Settings = Callable[[KVCacheConfig], KVCacheConfig]
"""Function from the recorded settings to those of the replay's cache."""


def unchanged(config: KVCacheConfig) -> KVCacheConfig:
    """Return the recorded settings."""
    return config


class Playback:
    """Replay with one combination of settings and eviction order (None: the settings').

    `on_event` is called with every event.
    """

    def __init__(
        self,
        settings: Settings = unchanged,
        order: type[EvictionOrder] | None = None,
        *,
        named: bool = False,
        foresee: Callable[[int, bool], None] = lambda handle, admitted: None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._settings, self._order, self._named, self._on_event = settings, order, named, on_event
        self._foresee = foresee
        self.tally = Tally()
        self._manager: KVCacheManager | None = None
        self._now = 0
        """Number of batches so far."""
        self._clock = 0
        self._begin()

    def _begin(self) -> None:
        """Begin without requests."""
        self._running: dict[int, PlayedRequest] = {}
        """Running requests by handle, in the order of admission."""
        self._waiting: dict[int, PlayedRequest] = {}
        self._never_came: set[RequestId] = set()
        """Requests that were preempted in the log before they were admitted here."""
        self._cut_off: set[RequestId] = set()
        """Requests ended early, or never admitted, which do not resume either."""
        self._queue: list[int] = []
        """Handles of waiting requests in ascending order: the order of admission in the log."""
        self._may_admit = True
        """False from a preemption until a running request ends: a waiting request would only take its room again."""
        self._late: dict[int, PlayedRequest] = {}
        """Running requests that are delayed."""

    @property
    def manager(self) -> KVCacheManager:
        """The current cache."""
        assert self._manager is not None, "a log begins with a cache"
        return self._manager

    def play(self, batch: RecordedBatch) -> None:
        """Execute a batch of the log."""
        self._clock = batch.clock
        for command in batch.commands:
            self._do(command)
        self._end_batch()

    def finish(self) -> Tally:
        """Finish all delayed requests; return the counts."""
        while self._manager is not None and (self._queue or self._has_steps()):
            before = len(self._queue)
            self._end_batch()
            if len(self._queue) == before and not self._has_steps():
                break  # no running request is left to wait for
        self.tally.unserved += len(self._queue)
        never = (each for each in self._waiting.values() if not each.prompt.resumed)
        self.tally.unserved_tokens += sum(each.prompt.num_tokens for each in never)
        self._begin()
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        return self.tally

    def _has_steps(self) -> bool:
        return any(request.steps for request in self._late.values())

    # -- commands

    def _do(self, command: Command) -> None:
        match command:
            case Create():
                self._create(command)
            case Admit():
                self._admit([PlayedRequest(prompt) for prompt in command.prompts])
            case Fork():
                self._fork(command)
            case Append() | Reserve():
                self._grow(command)
            case Clear():
                self.manager.clear()
            case Poll():
                self.manager.poll()
            case Remove(why=EndReason.PREEMPTED):
                self._give_way(command)
            case _:
                request = self._running.get(command.handle)
                if request is not None and request.handle not in self._late:
                    self._step(request, command)
                else:
                    self._put_off(command.handle, command)

    def _create(self, command: Create) -> None:
        self.finish()
        # Names are for orders that depend on contents; the log itself is not written.
        config = self._settings(command.config)
        block_hash = "v2_sha256_64" if self._named or config.eviction_policy == "levels" else "none"
        quiet = {"block_hash": block_hash, "event_buffer_max_size": 0}
        if command.engine:
            quiet["evict_ahead"] = 0  # as engines that decide themselves do
        self._manager = manager = KVCacheManager(
            config.model_copy(update=quiet),
            substitutes=Substitutes(eviction_order=self._order, monotonic_ns=lambda: self._clock),
        )
        manager.bus.subscribe(self.tally.follow, SequenceAdded, SequenceRemoved, BlocksMoved, BlocksRemoved)
        if self._on_event is not None:
            manager.bus.subscribe(self._on_event)

    def _put_off(self, handle: int, step: Step) -> None:
        """Defer a step of a request that is delayed or waits; drop it if the request is gone for good."""
        request = self._running.get(handle) or self._waiting.get(handle)
        if request is not None:
            request.steps.append((self._now, step))

    def _step(self, request: PlayedRequest, step: Step) -> None:
        """Execute one step of a running request."""
        handle, manager = request.handle, self.manager
        match step:
            case Append() | Reserve():
                self._give(step)
            case Compute():
                manager.store_context_blocks(handle, step.num_tokens)
            case Rewind():
                self._rewind(request, step.num_tokens)
            case Prioritize():
                manager.set_priority(handle, step.priority, start=step.start, stop=step.stop)
            case _:
                self._end(request, step)
                self._may_admit = True

    def _end(self, request: PlayedRequest, end: Remove) -> None:
        self.manager.remove_sequence(request.handle, end.store, why=end.why, stop=end.stop)
        del self._running[request.handle]
        self._late.pop(request.handle, None)

    def _give_way(self, command: Remove) -> None:
        """End a request that was preempted in the log. It resumes there with all its tokens, so no steps are left, even
        if it is delayed here.
        """
        handle = command.handle
        if handle in self._running:
            self._step(self._running[handle], command)
        elif (request := self._waiting.pop(handle, None)) is not None:
            self._queue.remove(handle)
            if not request.prompt.resumed:
                self._never_came.add(request.prompt.request_id)

    def _rewind(self, request: PlayedRequest, num_tokens: int) -> None:
        """Roll tokens back; if this cache cannot, admit the request again with the rest."""
        try:
            self.manager.rewind(request.handle, num_tokens)
        except (UsageError, OutOfBlocks):
            # A narrower window has released what is needed, or there is no block.
            late = request.handle in self._late
            self._may_admit = True
            if not self._take_out(request, num_tokens):
                return
            if self._try([request]) is not None:
                self._wait(request)
            elif late:
                self._late[request.handle] = request

    def _take_out(self, request: PlayedRequest, num_tokens: int | None = None) -> bool:
        """Remove a request so that it is admitted again with its first tokens (None: all). Returns False if they exceed
        the longest prompt, so that it is cut short.
        """
        sequence, state = self._sequence(request.handle), self.manager.state
        tokens, slots = sequence.tokens[:num_tokens], self._slots_of(sequence)
        request.prompt = replace(
            request.prompt,
            content=state.symbols.spell(tokens.tobytes()),
            resumed=True,
            slots=slots if slots < len(tokens) else None,
        )
        if not self._is_short_enough(request.prompt):
            self._cut_short(request)
            return False
        self._end(request, Remove(request.handle, store=True, why=EndReason.PREEMPTED))
        return True

    def _cut_short(self, request: PlayedRequest) -> None:
        """End a request early, for good."""
        self.tally.cut_short += 1
        self._cut_off.add(request.prompt.request_id)
        self._end(request, Remove(request.handle, store=True))
        self._may_admit = True

    def _sequence(self, handle: int) -> Sequence:
        state = self.manager.state
        return state.sequences[state.handles[handle]]

    def _slots_of(self, sequence: Sequence) -> int:
        """Return the number of tokens of a sequence that have slots."""
        return len(sequence.tables[0]) * self.manager.config.tokens_per_block

    def _lacks_slots(self, handle: int) -> bool:
        """Return True if some of a sequence's tokens have no slots yet."""
        sequence = self._sequence(handle)
        return self._slots_of(sequence) < sequence.num_tokens

    # -- admission

    def _admit(self, requests: list[PlayedRequest]) -> None:
        """Admit a recorded batch; requests that do not fit wait."""
        left = [request for request in requests if self._comes(request)]
        while left:
            misfit = self._try(left)
            if misfit is None:
                return
            if misfit:
                self._try(left[:misfit])
            self._wait(left[misfit])
            self.tally.waited += 1
            left = left[misfit + 1 :]

    def _comes(self, request: PlayedRequest) -> bool:
        """Return True if a request admitted in the log is to be admitted here, now or later."""
        prompt = request.prompt
        if prompt.resumed and prompt.request_id in self._cut_off:
            return False
        if prompt.resumed and prompt.request_id in self._never_came:
            self._never_came.remove(prompt.request_id)
            request.prompt = prompt = replace(prompt, resumed=False)
        if self._is_short_enough(prompt):
            return True
        self._cut_off.add(prompt.request_id)
        if prompt.resumed:
            self.tally.cut_short += 1
        else:
            self.tally.too_long += 1
            self.tally.unserved_tokens += prompt.num_tokens
        return False

    def _is_short_enough(self, prompt: RecordedPrompt) -> bool:
        """Return True if a prompt can be admitted at all; one with slots by chunks need not have all at once."""
        manager = self.manager
        return prompt.num_tokens <= (
            manager.max_prompt_tokens if prompt.slots is None else manager.max_tokens
        )

    def _fork(self, command: Fork) -> None:
        """Fork a request that is on time; if it is not, or has no room, the child is a request like others."""
        child = PlayedRequest(command.child)
        if command.handle in self._running and command.handle not in self._late:
            try:
                self.manager.fork(command.handle, child.handle)
            except OutOfBlocks:
                pass
            else:
                self._running[child.handle] = child
                return
        self._admit([child])

    def _try(self, requests: list[PlayedRequest]) -> int | None:
        """Admit all of these, or none; return the index of the first that does not fit."""
        for request in requests:
            self._foresee(request.handle, True)
        misfit = self._admit_all([request.prompt for request in requests])
        if misfit is None:
            self._running.update((request.handle, request) for request in requests)
            return None
        for request in requests:
            self._foresee(request.handle, False)
        return misfit

    def _admit_all(self, prompts: list[RecordedPrompt]) -> int | None:
        """Admit prompts, or none of them; return the index of the first that does not fit.

        If it had room for all of it, a prompt that gets its slots by chunks must have that here: else many would begin,
        and preempt each other.
        """
        asked = [self._request(prompt) for prompt in prompts]
        if any(prompt.slots is not None for prompt in prompts):
            longest = self.manager.max_prompt_tokens
            whole = [
                replace(request, reserve_tokens=None)
                if prompt.had_room and prompt.num_tokens <= longest
                else request
                for request, prompt in zip(asked, prompts, strict=True)
            ]
            fitting = self.manager.can_add(whole)
            if fitting < len(whole):
                return fitting
        try:
            self.manager.add_sequences(asked)
        except OutOfBlocks as refusal:
            return refusal.index
        return None

    def _request(self, prompt: RecordedPrompt) -> Request:
        """Return the request of a prompt, with as many slots as in the log, independent of what it reuses here."""
        request = prompt.request()
        if prompt.slots is None:
            return request
        found = self.manager.scheduling.estimate_demand(replace(request, reserve_tokens=1)).reused_tokens
        return replace(request, reserve_tokens=max(1, prompt.slots - found))

    def _wait(self, request: PlayedRequest) -> None:
        prompt = request.prompt
        if prompt.had_room and prompt.num_tokens <= self.manager.max_prompt_tokens:
            request.prompt = replace(prompt, slots=None)
        self._waiting[request.handle] = request
        request.stopped_at = self._now
        insort(self._queue, request.handle)

    # -- slots and tokens

    def _grow(self, command: OfSeveral) -> None:
        """Give slots, and perhaps tokens, to requests that are on time; defer those of the others."""
        if self._late or self._waiting or not self._running.keys() >= set(command.handles):
            on_time = {each for each in command.handles if each in self._running and each not in self._late}
            for handle, part in command.of_each():
                if handle not in on_time:
                    self._put_off(handle, part)
            command = command.only(on_time)
        self._give(command)

    def _give(self, command: OfSeveral) -> None:
        """Give running requests slots and tokens, after preempting as many of them as necessary."""
        manager = self.manager
        while command.handles:
            try:
                if isinstance(command, Append):
                    manager.add_tokens(
                        list(command.handles), command.tokens, command.counts, draft=command.draft
                    )
                else:
                    manager.reserve(
                        command.handles,
                        [self._reserved(*each) for each in zip(command.handles, command.slots, strict=True)],
                    )
            except OutOfBlocks:
                if isinstance(command, Reserve) and not any(map(self._lacks_slots, command.handles)):
                    return  # their tokens claim slots when they arrive
                command = self._preempt(command)
            except PromptTooLong:
                assert isinstance(command, Append), "no more is reserved than a sequence may have"
                command = self._cut(command)
            else:
                return

    def _reserved(self, handle: int, slots: int) -> int:
        """Return the argument with which `reserve` gives a sequence slots for `slots` tokens."""
        sequence = self._sequence(handle)
        begin = sequence.computed if self._lacks_slots(handle) else sequence.num_tokens
        return max(0, min(slots, self.manager.max_tokens) - begin)

    def _preempt(self, command: OfSeveral) -> OfSeveral:
        """Preempt the request that was admitted last; return the remaining command."""
        request = self._running[next(reversed(self._running))]
        rest = command.only({*command.handles} - {request.handle})
        if len(self._running) == 1:
            self._cut_short(request)
            return rest
        if request.handle in command.handles:
            # Recorded earlier, by the request's delay.
            part = command.only((request.handle,))
            request.steps.appendleft((self._now - request.delay, part))
        again = self._take_out(request)
        self._may_admit = not again
        if again:
            self._wait(request)
        return rest

    def _cut(self, command: Append) -> Append:
        """End the requests that would outgrow the cache."""
        gone = {
            handle
            for handle, part in command.parts()
            if self._sequence(handle).num_tokens + len(part) > self.manager.max_tokens
        }
        for handle in gone:
            self._cut_short(self._running[handle])
        return command.only({*command.handles} - gone)

    # -- the end of a batch

    def _end_batch(self) -> None:
        for request in list(self._late.values()):
            while request.handle in self._late and request.is_due(self._now):
                self._step(request, request.steps.popleft()[1])
        while self._may_admit and self._queue and self._try([self._waiting[self._queue[0]]]) is None:
            handle = self._queue.pop(0)
            request = self._late[handle] = self._waiting.pop(handle)
            self.tally.waited_batches += request.go_on(self._now)
        self.manager.flush()
        self._now += 1
