"""Simulated time: a step of a worker takes as long as a GPU would, whatever this machine needs for it.

One clock leads: that of the trace. It goes on in ticks, and each tick waits until every worker has computed all that
happens before it. So a slow machine takes longer, and measures the same. What really takes its time is the feed; that
is why the trace is played no more than `speed` times as fast as real time.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcache.workload.clock import StepClock
from kvcache.workload.driver import ObservedStep


@dataclass(frozen=True, slots=True)
class StepCosts:
    """About a model of 8 billion parameters in 16 bits on one GPU of 3.3 TB/s and 400 TFLOP/s."""

    weights_ms: float = 5.0
    """16 GB are read once a step."""
    prompt_token_ms: float = 0.04
    """16 GFLOP."""
    context_token_ms: float = 0.00004
    """128 KiB of K and V are read for each token before those that are computed."""

    onboarded_token_ms: float = 0.0026
    """128 KiB of K and V come from host memory, at 50 GB/s."""

    def of(self, step: ObservedStep) -> int:
        """Whole milliseconds; 0 for a step that computes nothing."""
        if not (step.prefill_tokens or step.decoding):
            return 0
        onboarded = sum(each.reused_secondary for each in step.admitted.values())
        return math.ceil(
            self.weights_ms
            + self.prompt_token_ms * step.prefill_tokens
            + self.context_token_ms * step.context_tokens
            + self.onboarded_token_ms * onboarded
        )


class TraceTime:
    """The time of the trace, which leads."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._started = time.monotonic()
        self.now_ms = 0

    async def pace(self) -> None:
        """Wait while the trace is ahead of `speed` times real time."""
        await asyncio.sleep(self._started + self.now_ms / 1000 / self._speed - time.monotonic())


class WorkerClock(StepClock):
    """The time of one worker: its steps take what they cost, and end no sooner than the trace has come there.

    A worker without requests stands still; with the next one it goes on at the time at which that was sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trace_ms = 0
        self._changed = threading.Condition()

    def begin(self, sent_ms: int) -> None:
        """A request has come to an idle worker."""
        self.now_ms = max(self.now_ms, sent_ms)

    def spend(self, ms: int) -> None:
        """A step takes so long: wait until the trace is there, too."""
        with self._changed:
            self.now_ms += ms
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._trace_ms >= self.now_ms)

    def follow(self, trace_ms: int, idle: Callable[[], bool]) -> None:
        """The trace has come so far: wait until the worker is in a step that ends later, or is idle."""
        with self._changed:
            self._trace_ms = trace_ms
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.now_ms > trace_ms or idle())

    def look_again(self) -> None:
        """The worker may be idle now."""
        with self._changed:
            self._changed.notify_all()

    def advance(self, stop: threading.Event, until_ms: int = 0) -> None:
        """Nothing is left to do: `spend` and `begin` say what time it is."""
