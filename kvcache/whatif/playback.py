"""Playing recorded commands against a manager of other settings.

What fits is done when the log has it done. A request that does not fit waits: at the end of each batch the first ones
in line are admitted as far as they fit, and all that the log says of such a request comes as much later as it was
admitted later. Others are not held up by it. Where there is no block for a sampled token, the running request that was
admitted last is removed, which stores what it has computed, and waits with its tokens so far for its prompt; then
nobody is admitted from the line before a running request has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from events.types import BlocksMoved, BlocksRemoved, Event, RequestId, SequenceAdded
from kvcache.config import KVCacheConfig
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.errors import OutOfBlocks, PromptTooLong, UsageError
from kvcache.manager import KVCacheManager
from kvcache.whatif.commands import (
    Admit,
    Append,
    Clear,
    Command,
    Compute,
    Create,
    Fork,
    Poll,
    Prioritize,
    RecordedBatch,
    Rewind,
)
from kvcache.whatif.requests import Line, Played, Step
from kvcache.whatif.tally import Tally

Settings = Callable[[KVCacheConfig], KVCacheConfig]
"""What a cache is made with instead of the recorded settings."""


class Foresight:
    """Hears who is admitted. This one has no use for it."""

    def admitting(self, handle: int) -> None:
        """The request is about to be admitted: what it reuses now it does not reuse later."""

    def refused(self, handle: int) -> None:
        """It was not admitted."""


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
        foresight: Foresight | None = None,
        hear: Callable[[Event], None] | None = None,
    ) -> None:
        self._settings, self._order, self._named, self._hear = settings, order, named, hear
        self._foresight = foresight or Foresight()
        self.tally = Tally()
        self._manager: KVCacheManager | None = None
        self._longest = 0
        """Tokens of the longest prompt that can be held."""
        self._now = 0
        """Batches so far."""
        self._clock = 0
        self._running: dict[int, Played] = {}
        """By handle, in the order of admission."""
        self._waiting: dict[int, Played] = {}
        self._again: set[RequestId] = set()
        """Handles of those that were admitted before: they were removed, to be admitted again."""
        self._line = Line()
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
        never = (each for each in self._waiting.values() if each.handle not in self._again)
        self.tally.unserved_tokens += sum(each.prompt.num_tokens for each in never)
        self._running.clear()
        self._waiting.clear()
        self._again.clear()
        self._late.clear()
        self._line, self._may_admit = Line(), True
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
                self._create(command.config)
            case Admit():
                self._admit([Played(prompt) for prompt in command.prompts])
            case Fork():
                self._fork(command)
            case Append():
                self._append(command)
            case Clear():
                self.manager.clear()
            case Poll():
                self.manager.poll()
            case _:
                request = self._running.get(command.handle)
                if request is not None and request.handle not in self._late:
                    self._step(request, command)
                else:
                    self._put_off(command.handle, command)

    def _create(self, config: KVCacheConfig) -> None:
        self.finish()
        # Names are for orders that tell contents apart; the log is not ours to write.
        config = self._settings(config)
        block_hash = "v2_sha256_64" if self._named or config.eviction_policy == "levels" else "none"
        quiet = config.model_copy(update={"block_hash": block_hash, "event_buffer_max_size": 0})
        self._manager = manager = KVCacheManager(
            quiet, eviction_order=self._order, monotonic_ns=lambda: self._clock
        )
        self._longest = manager.layout.longest_prompt(quiet).tokens
        manager.bus.subscribe(self._count, SequenceAdded, BlocksMoved, BlocksRemoved)
        if self._hear is not None:
            manager.bus.subscribe(self._hear)

    def _count(self, event: Event) -> None:
        if type(event) is SequenceAdded:
            if event.request_id in self._again:
                self.tally.admitted_again(event)
            else:
                self.tally.admitted(event)
        else:
            self.tally.follow(event)

    def _put_off(self, handle: int, step: Step) -> None:
        """A request that is late, or waits, does this later; one that is gone for good does not."""
        request = self._running.get(handle) or self._waiting.get(handle)
        if request is not None:
            request.steps.append((self._now, step))

    def _step(self, request: Played, step: Step) -> None:
        """Do one step of a running request."""
        handle, manager = request.handle, self.manager
        match step:
            case Append():
                self._append_tokens(step)
            case Compute():
                manager.store_context_blocks(handle, step.num_tokens)
            case Rewind():
                self._rewind(request, step.num_tokens)
            case Prioritize():
                manager.set_priority(handle, step.priority, start=step.start, stop=step.stop)
            case _:
                self._end(request, store=step.store, why=step.why)
                self._may_admit = True

    def _end(self, request: Played, *, store: bool = True, why: str = "finished") -> None:
        self.manager.remove_sequence(request.handle, store, why=why)
        del self._running[request.handle]
        self._late.pop(request.handle, None)

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
        state = self.manager.state
        tokens = state.sequences[state.handles[request.handle]].tokens[:num_tokens]
        request.prompt = replace(request.prompt, content=state.symbols.spell(tokens.tobytes()))
        fits = request.prompt.num_tokens <= self._longest
        if fits:
            self._again.add(request.handle)
            self.tally.preempted += 1
        else:
            self.tally.cut_short += 1
        self._end(request)
        return fits

    # -- admission

    def _admit(self, requests: list[Played]) -> None:
        """Admit a recorded batch, but for those that do not fit, which wait."""
        left = [request for request in requests if self._can_ever_fit(request)]
        while left:
            misfit = self._try(left)
            if misfit is None:
                return
            if misfit:
                self._try(left[:misfit])
            self._wait(left[misfit])
            self.tally.waited += 1
            left = left[misfit + 1 :]

    def _can_ever_fit(self, request: Played) -> bool:
        fits = request.prompt.num_tokens <= self._longest
        if not fits:
            self.tally.too_long += 1
            self.tally.unserved_tokens += request.prompt.num_tokens
        return fits

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
            self._foresight.admitting(request.handle)
        try:
            self.manager.add_sequences([request.prompt.request() for request in requests])
        except OutOfBlocks as refusal:
            for request in requests:
                self._foresight.refused(request.handle)
            return refusal.index
        self._running.update((request.handle, request) for request in requests)
        return None

    def _wait(self, request: Played) -> None:
        self._waiting[request.handle] = request
        self._line.join(request, self._now)

    # -- tokens

    def _append(self, command: Append) -> None:
        if not self._late and not self._waiting and self._running.keys() >= set(command.handles):
            self._append_tokens(command)
            return
        on_time = []
        for handle, tokens in command.parts():
            if handle in self._running and handle not in self._late:
                on_time.append((handle, tokens))
            else:
                self._put_off(handle, command.of([(handle, tokens)]))
        self._append_tokens(command.of(on_time))

    def _append_tokens(self, command: Append) -> None:
        """Append tokens to running requests, after removing as many of them as are in the way."""
        while command.handles:
            try:
                self.manager.add_tokens(
                    list(command.handles), command.tokens, command.counts, draft=command.draft
                )
            except OutOfBlocks:
                command = self._preempt(command)
            except PromptTooLong:
                command = self._cut(command)
            else:
                return

    def _preempt(self, command: Append) -> Append:
        """Remove the request that was admitted last; returns what is left to append."""
        request = self._running[next(reversed(self._running))]
        if len(self._running) == 1:
            self.tally.cut_short += 1
            self._end(request)
            self._may_admit = True
            return command.without(request.handle)
        for handle, part in command.parts():
            if handle == request.handle:
                # Recorded as much earlier as it is late.
                request.steps.appendleft((self._now - request.delay, command.of([(handle, part)])))
        again = self._take_out(request)
        self._may_admit = not again
        if again:
            self._wait(request)
        return command.without(request.handle)

    def _cut(self, command: Append) -> Append:
        """End the requests that would get longer than the cache can hold."""
        state, limit = self.manager.state, self.manager.max_tokens
        for handle, part in command.parts():
            if state.sequences[state.handles[handle]].num_tokens + len(part) > limit:
                self.tally.cut_short += 1
                self._end(self._running[handle])
                self._may_admit = True
                command = command.without(handle)
        return command

    # -- the end of a batch

    def _end_batch(self) -> None:
        for request in list(self._late.values()):
            while request.handle in self._late and request.is_due(self._now):
                self._step(request, request.steps.popleft()[1])
        while self._may_admit and self._line and self._try([self._line.first]) is None:
            request = self._line.leave(self._now)
            del self._waiting[request.handle]
            self._late[request.handle] = request
            self.tally.waited_batches += self._now + 1 - request.stopped_at
        self.manager.flush()
        self._now += 1
