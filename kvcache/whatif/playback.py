"""Playing recorded commands against a manager of other settings.

What fits is done when the log has it done. A request that does not fit waits: at the end of each batch the first ones
in line are admitted as far as they fit, and all that the log says of such a request comes as much later as it was
admitted later. Others are not held up by it. Where there is no block for a sampled token, or for a chunk of a prompt,
the running request that was admitted last is removed, which stores what it has computed, and waits with its tokens so
far for its prompt; then nobody is admitted from the line before a running request has ended.
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
    """Blocks are counted over all attention windows."""

    requests: int = 0
    """Admitted; one that comes again after it was preempted is none."""
    prompt_tokens: int = 0
    """Of all of these."""
    reused_tokens_primary: int = 0
    """Prompt tokens in full blocks that lay in primary in all windows."""
    reused_tokens_secondary: int = 0
    """Those that some window had to bring back from secondary."""
    reused_tokens_partial: int = 0
    """Tokens copied from a block of which only the start matched."""
    waited: int = 0
    """Requests that did not fit when the log had them admitted; as recorded, refusals that the log notes."""
    waited_batches: int = 0
    """How many batches later they were admitted, over all of them."""
    preempted: int = 0
    """How often a running request was removed to make room, to be admitted again."""
    recomputed_tokens: int = 0
    """Tokens that preempted requests had to compute again."""
    cut_short: int = 0
    """Requests that were ended before their end, since they alone were larger than the cache."""
    too_long: int = 0
    """Requests whose prompt is larger than the cache."""
    unserved: int = 0
    """Requests that still waited when nothing was left that would end."""
    unserved_tokens: int = 0
    """Prompt tokens of requests that were never admitted, too long or unserved."""
    blocks_offloaded: int = 0
    """Evicted from primary, kept in secondary."""
    blocks_onboarded: int = 0
    """Brought back from secondary."""
    blocks_removed_primary: int = 0
    """Blocks evicted from primary for good."""
    blocks_removed_secondary: int = 0
    """Blocks evicted from secondary."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Of each request its prompt tokens and those that it reused, by turns."""
    lengths_again: array[int] = field(default_factory=lambda: array("q"))
    """The same each time that a preempted one came again."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that needed no computing."""
        return self.reused_tokens_primary + self.reused_tokens_secondary + self.reused_tokens_partial

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed, and what was computed again."""
        return self.prompt_tokens - self.reused_tokens + self.recomputed_tokens

    @property
    def hit_rate(self) -> float:
        """The reused part of the prompt tokens of all requests, from 0 to 1; who is never admitted reuses nothing."""
        asked = self.prompt_tokens + self.unserved_tokens
        return self.reused_tokens / asked if asked else 0.0

    def count(self, event: AnyEvent | Event) -> None:
        """Follow any event of a log."""
        if isinstance(event, AdmissionRefused):
            self.waited += 1
        else:
            self.follow(event)

    def follow(self, event: AnyEvent | Event) -> None:
        """Follow what happens to requests and blocks, but for refusals: who is refused may be tried again and again."""
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


class Played:
    """One request, its recorded steps that are still to be done, and how far it is behind."""

    __slots__ = ("delay", "prompt", "steps", "stopped_at")

    def __init__(self, prompt: RecordedPrompt) -> None:
        self.prompt = prompt
        """Of one that was removed to be admitted again, with the tokens that it had then."""
        self.steps: deque[tuple[int, Step]] = deque()
        """With the batch in which each was recorded."""
        self.delay = 0
        """Batches by which its steps come later than recorded."""
        self.stopped_at = 0
        """The batch in which it began to wait last."""

    @property
    def handle(self) -> int:
        """Its number in the log, and its id in the manager."""
        return self.prompt.handle

    def go_on(self, now: int) -> int:
        """Go on in the next batch, as it is admitted at the end of this one; returns for how many it has waited."""
        waited = now + 1 - self.stopped_at
        self.delay += waited
        return waited

    def is_due(self, now: int) -> bool:
        """Whether its next step is to be done in this batch."""
        return bool(self.steps) and self.steps[0][0] + self.delay <= now


Settings = Callable[[KVCacheConfig], KVCacheConfig]
"""What a cache is made with instead of the recorded settings."""


def unchanged(config: KVCacheConfig) -> KVCacheConfig:
    """The recorded settings."""
    return config


class Playback:
    """One combination of settings and order of eviction (None: that of the settings). `hear` is told all events of its
    managers.
    """

    def __init__(
        self,
        settings: Settings = unchanged,
        order: type[EvictionOrder] | None = None,
        *,
        named: bool = False,
        foresee: Callable[[int, bool], None] = lambda handle, admitted: None,
        hear: Callable[[Event], None] | None = None,
    ) -> None:
        self._settings, self._order, self._named, self._hear = settings, order, named, hear
        self._foresee = foresee
        self.tally = Tally()
        self._manager: KVCacheManager | None = None
        self._now = 0
        """Batches so far."""
        self._clock = 0
        self._running: dict[int, Played] = {}
        """By handle, in the order of admission."""
        self._waiting: dict[int, Played] = {}
        self._never_came: set[RequestId] = set()
        """Requests that the log has preempted before they were admitted here."""
        self._cut_off: set[RequestId] = set()
        """Requests that ended before their end, or were never admitted, and so do not come back either."""
        self._line: list[int] = []
        """The handles of those that wait, ascending: in the order in which the log has them admitted."""
        self._may_admit = True
        """False from a preemption on until a running request ends: who waits would only take its room again."""
        self._late: dict[int, Played] = {}
        """Those of the running ones that are behind what was recorded."""

    @property
    def manager(self) -> KVCacheManager:
        """The cache as it is."""
        assert self._manager is not None, "a log begins with a cache"
        return self._manager

    def play(self, batch: RecordedBatch) -> None:
        """Do what a batch of the log says."""
        self._clock = batch.clock
        for command in batch.commands:
            self._do(command)
        self._end_batch()

    def finish(self) -> Tally:
        """Let those that are late come to their end; returns the counts."""
        while self._manager is not None and (self._line or self._has_steps()):
            before = len(self._line)
            self._end_batch()
            if len(self._line) == before and not self._has_steps():
                break  # nothing will end any more that they could wait for
        self.tally.unserved += len(self._line)
        never = (each for each in self._waiting.values() if not each.prompt.resumed)
        self.tally.unserved_tokens += sum(each.prompt.num_tokens for each in never)
        self._running.clear()
        self._waiting.clear()
        self._late.clear()
        self._never_came.clear()
        self._cut_off.clear()
        self._line, self._may_admit = [], True
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
                self._admit([Played(prompt) for prompt in command.prompts])
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
        # Names are for orders that tell contents apart; the log is not ours to write.
        config = self._settings(command.config)
        block_hash = "v2_sha256_64" if self._named or config.eviction_policy == "levels" else "none"
        quiet = {"block_hash": block_hash, "event_buffer_max_size": 0}
        if command.engine:
            quiet["evict_ahead"] = 0  # as engines do that decide themselves
        self._manager = manager = KVCacheManager(
            config.model_copy(update=quiet),
            substitutes=Substitutes(eviction_order=self._order, monotonic_ns=lambda: self._clock),
        )
        manager.bus.subscribe(self.tally.follow, SequenceAdded, SequenceRemoved, BlocksMoved, BlocksRemoved)
        if self._hear is not None:
            manager.bus.subscribe(self._hear)

    def _put_off(self, handle: int, step: Step) -> None:
        """A request that is late, or waits, does this later; one that is gone for good does not."""
        request = self._running.get(handle) or self._waiting.get(handle)
        if request is not None:
            request.steps.append((self._now, step))

    def _step(self, request: Played, step: Step) -> None:
        """Do one step of a running request."""
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

    def _end(self, request: Played, end: Remove) -> None:
        self.manager.remove_sequence(request.handle, end.store, why=end.why, stop=end.stop)
        del self._running[request.handle]
        self._late.pop(request.handle, None)

    def _give_way(self, command: Remove) -> None:
        """End a request that the log has preempted. It comes back there with all its tokens, so that nothing is left to
        be done, however late it is here.
        """
        handle = command.handle
        request = self._running.get(handle) or self._waiting.pop(handle, None)
        if handle in self._running:
            self._step(self._running[handle], command)
        elif request is not None:
            self._line.remove(handle)
            if not request.prompt.resumed:
                self._never_came.add(request.prompt.request_id)

    def _rewind(self, request: Played, num_tokens: int) -> None:
        """Take tokens back; where this cache cannot, the request is admitted again with what is left."""
        try:
            self.manager.rewind(request.handle, num_tokens)
        except (
            UsageError,
            OutOfBlocks,
        ):  # a narrower window has let go of what is needed, or there is no block
            late = request.handle in self._late
            self._may_admit = True
            if not self._take_out(request, num_tokens):
                return
            if self._try([request]) is not None:
                self._wait(request)
            elif late:
                self._late[request.handle] = request

    def _take_out(self, request: Played, num_tokens: int | None = None) -> bool:
        """Remove a request that is to be admitted again with its first tokens (None: all); False: they are more than a
        prompt may have, so it is cut short.
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

    def _cut_short(self, request: Played) -> None:
        """End a request for good before its end."""
        self.tally.cut_short += 1
        self._cut_off.add(request.prompt.request_id)
        self._end(request, Remove(request.handle, store=True))
        self._may_admit = True

    def _sequence(self, handle: int) -> Sequence:
        state = self.manager.state
        return state.sequences[state.handles[handle]]

    def _slots_of(self, sequence: Sequence) -> int:
        """For how many tokens a sequence has slots."""
        return len(sequence.tables[0]) * self.manager.config.tokens_per_block

    def _lacks_slots(self, handle: int) -> bool:
        """Whether some of a sequence's tokens have no slots yet."""
        sequence = self._sequence(handle)
        return self._slots_of(sequence) < sequence.num_tokens

    # -- admission

    def _admit(self, requests: list[Played]) -> None:
        """Admit a recorded batch, but for those that do not fit, which wait."""
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

    def _comes(self, request: Played) -> bool:
        """Whether a request that the log has admitted is to be admitted here, now or later."""
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
        """Whether a prompt can be admitted at all; one that gets its slots chunk by chunk need not have all at once."""
        manager = self.manager
        return prompt.num_tokens <= (
            manager.max_prompt_tokens if prompt.slots is None else manager.max_tokens
        )

    def _fork(self, command: Fork) -> None:
        """Branch a request that is on time; a branch of one that is not, or without room, is a request like others."""
        child = Played(command.child)
        if command.handle in self._running and command.handle not in self._late:
            try:
                self.manager.fork(command.handle, child.handle)
            except OutOfBlocks:
                pass
            else:
                self._running[child.handle] = child
                return
        self._admit([child])

    def _try(self, requests: list[Played]) -> int | None:
        """Admit all of these, or none; returns the index of the first that does not fit."""
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
        """Admit prompts, or none of them; returns the index of the first that does not fit.

        One that gets its slots chunk by chunk must have room for all of it, as it had: else many would begin, and
        preempt each other.
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
        """A prompt as it is admitted: with slots as far as it had them, whatever it finds here."""
        request = prompt.request()
        if prompt.slots is None:
            return request
        found = self.manager.scheduling.demand(replace(request, reserve_tokens=1)).reused_tokens
        return replace(request, reserve_tokens=max(1, prompt.slots - found))

    def _wait(self, request: Played) -> None:
        prompt = request.prompt
        if prompt.had_room and prompt.num_tokens <= self.manager.max_prompt_tokens:
            request.prompt = replace(prompt, slots=None)
        self._waiting[request.handle] = request
        request.stopped_at = self._now
        insort(self._line, request.handle)

    # -- slots and tokens

    def _grow(self, command: OfSeveral) -> None:
        """Give slots, and perhaps tokens, to those that are on time; the others get them later."""
        if self._late or self._waiting or not self._running.keys() >= set(command.handles):
            on_time = {each for each in command.handles if each in self._running and each not in self._late}
            for handle, part in command.of_each():
                if handle not in on_time:
                    self._put_off(handle, part)
            command = command.only(on_time)
        self._give(command)

    def _give(self, command: OfSeveral) -> None:
        """Give running requests slots and tokens, after removing as many of them as are in the way."""
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
                    return  # the tokens that they are for take theirs when they come
                command = self._preempt(command)
            except PromptTooLong:
                assert isinstance(command, Append), "no more is reserved than a sequence may have"
                command = self._cut(command)
            else:
                return

    def _reserved(self, handle: int, slots: int) -> int:
        """What `reserve` takes for a sequence to have slots for so many tokens."""
        sequence = self._sequence(handle)
        begin = sequence.computed if self._lacks_slots(handle) else sequence.num_tokens
        return max(0, min(slots, self.manager.max_tokens) - begin)

    def _preempt(self, command: OfSeveral) -> OfSeveral:
        """Remove the request that was admitted last; returns what is left to be given."""
        request = self._running[next(reversed(self._running))]
        rest = command.only({*command.handles} - {request.handle})
        if len(self._running) == 1:
            self._cut_short(request)
            return rest
        if request.handle in command.handles:
            # Recorded as much earlier as it is late.
            part = command.only((request.handle,))
            request.steps.appendleft((self._now - request.delay, part))
        again = self._take_out(request)
        self._may_admit = not again
        if again:
            self._wait(request)
        return rest

    def _cut(self, command: Append) -> Append:
        """End the requests that would get longer than the cache can hold."""
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
        while self._may_admit and self._line and self._try([self._waiting[self._line[0]]]) is None:
            handle = self._line.pop(0)
            request = self._late[handle] = self._waiting.pop(handle)
            self.tally.waited_batches += request.go_on(self._now)
        self.manager.flush()
        self._now += 1
