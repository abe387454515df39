"""Queue of requests waiting for an engine, with the check for requests that can never be served.

Requests are read from the trace when there is room for them, and their tokens are made only then, so the
memory of a run does not grow with its trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from kvcache.config import KVCacheConfig
from kvcache.inputs import LONGEST_STOP, Request
from kvcache.layout import Layout
from kvcache.workload.clock import StepClock
from kvcache.workload.tokens import Int32s, output_tokens
from kvcache.workload.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """Limits of a sequence: one with all its blocks at once in each window, as after a restart, must fit."""

    max_sequence_length: int
    num_blocks: int
    """Primary blocks of an idle cache, in the window that has the fewest."""
    tokens_per_block: int
    window: int | None = None
    """That window, in tokens; None if there is only one."""

    @classmethod
    def of(cls, config: KVCacheConfig, layout: Layout) -> Self:
        """Return the limits of a cache."""
        group = min(layout.groups, key=lambda each: each.num_blocks[0])
        window = group.window if len(layout.groups) > 1 else None
        return cls(config.max_sequence_length, group.num_blocks[0], config.tokens_per_block, window)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def obstacle(self, num_tokens: int) -> str | None:
        """Return the reason why a sequence of this length can never be served, or None."""
        if num_tokens > self.max_sequence_length:
            return f"{num_tokens} tokens exceed max_sequence_length {self.max_sequence_length}"
        if (needed := self.blocks_for(num_tokens)) > self.num_blocks:
            window = "" if self.window is None else f" for window {self.window}"
            return f"{num_tokens} tokens need {needed} blocks, primary has {self.num_blocks}{window}"
        return None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request with its tokens, ready to be admitted."""

    request: Request
    outputs: Int32s
    blocks_to_completion: int
    """Blocks that it holds at its end if nothing is shared."""
    arrival_ms: int
    """Arrival time in ms of the trace."""
    stop: str | None = None
    """Stop reason of its output, as in the trace."""

    def after(self, sampled: int) -> Waiting:
        """Return the same request after `sampled` outputs, which become part of its prompt."""
        if not sampled:
            return self
        tokens = np.concatenate([np.asarray(self.request.tokens), self.outputs[:sampled]])
        request = replace(self.request, tokens=tokens)
        return replace(self, request=request, outputs=self.outputs[sampled:])


class RequestQueue(ABC):
    """Queue of requests for one engine, which alone takes from it."""

    @abstractmethod
    def __bool__(self) -> bool:
        """Return True if requests are left, or may still come."""

    @property
    @abstractmethod
    def next_arrival_ms(self) -> int:
        """Arrival time of the next request; 0 if one is there, or none is left. Read only by an engine without work."""

    @abstractmethod
    def first(self, count: int) -> list[Waiting]:
        """Return up to `count` requests that have arrived, without removing them."""

    @abstractmethod
    def take(self, count: int) -> None:
        """Remove the first `count` requests, which were admitted."""

    @abstractmethod
    def put_back(self, waiting: list[Waiting]) -> None:
        """Put requests that have to restart back to the front of the queue."""


class WaitingQueue(RequestQueue):
    """Requests of a trace in its order. The index in the trace, from 0, is the request id.

    Models are played as LoRA adapters: an engine's models differ in these, and those of several engines share as
    little. With `lora_ids` they are numbers, for hashes that know no names of adapters.
    """

    def __init__(
        self,
        trace: Iterable[TraceRequest],
        limits: WaitingLimits,
        clock: StepClock,
        seed: int,
        refuse: Callable[[int, str], None],
        *,
        lora_ids: bool = False,
    ) -> None:
        self._models: dict[str, int] | None = {} if lora_ids else None
        """Numbers of models, from 1 in the order in which they come; None: they are known by name."""
        self._trace = enumerate(trace)
        self._limits = limits
        self._clock = clock
        self._seed = seed
        self._refuse = refuse
        self._ready: deque[Waiting] = deque()
        self._next = next(self._trace, None)

    def __bool__(self) -> bool:
        """Return True if requests are left."""
        return bool(self._ready) or self._next is not None

    @property
    def next_arrival_ms(self) -> int:
        """Arrival time of the next request; 0 if one is there, or none is left."""
        if self._ready or self._next is None:
            return 0
        return self._next[1].timestamp

    def first(self, count: int) -> list[Waiting]:
        """Return up to `count` requests that have arrived, without removing them."""
        while len(self._ready) < count and self._next is not None:
            index, request = self._next
            if not self._clock.has_arrived(request.timestamp):
                break
            self._receive(index, request)
            self._next = next(self._trace, None)
        return [self._ready[place] for place in range(min(count, len(self._ready)))]

    def take(self, count: int) -> None:
        """Remove the first `count` requests, which were admitted."""
        for _ in range(count):
            self._clock.reach(self._ready.popleft().arrival_ms)

    def put_back(self, waiting: list[Waiting]) -> None:
        """Put requests that have to restart back to the front of the queue."""
        self._ready.extendleft(reversed(waiting))

    def _receive(self, index: int, request: TraceRequest) -> None:
        num_tokens = request.input_length + request.output_length
        obstacle = self._limits.obstacle(num_tokens)
        if obstacle is not None:
            # Checked before any token is made: a line of the trace may claim any length.
            self._refuse(index, obstacle)
            return
        prompt = request.prompt(self._seed)
        outputs = output_tokens(index, request.output_length, self._seed)
        blocks = self._limits.blocks_for(num_tokens)
        name, number = request.model, None
        if request.model is not None and self._models is not None:
            name, number = None, self._models.setdefault(request.model, len(self._models) + 1)
        admitted = Request(
            index,
            prompt,
            lora_id=number,
            lora_name=name,
            cache_salt=request.cache_salt,
            session=request.session,
            labels=request.labels,
        )
        stop = None if request.stop is None else request.stop[:LONGEST_STOP]
        self._ready.append(Waiting(admitted, outputs, blocks, request.timestamp, stop))
