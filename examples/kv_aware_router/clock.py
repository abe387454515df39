"""Simulated time: a step of a worker takes as long as on a GPU, regardless of this machine.

The trace's clock leads. It advances in ticks, and each tick waits until every worker has computed everything before it.
A slow machine takes longer, but measures the same. Only the feed takes real time, so the trace is played at most
`speed` times as fast as real time.
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
    """Costs of a step for a model of 8 billion parameters in 16 bits on one GPU of 3.3 TB/s and 400 TFLOP/s."""

    weights_ms: float = 5.0
    """16 GB are read once a step."""
    prompt_token_ms: float = 0.04
    """16 GFLOP."""
    context_token_ms: float = 0.00004
    """128 KiB of K and V are read for each token before those that are computed."""

    onboarded_token_ms: float = 0.0026
    """128 KiB of K and V come from host memory, at 50 GB/s."""

    def of(self, step: ObservedStep) -> int:
        """Return the cost of a step in whole milliseconds; 0 if it computes nothing."""
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
    """The trace's clock."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._started = time.monotonic()
        self.now_ms = 0

    async def pace(self) -> None:
        """Wait while the trace is ahead of `speed` times real time."""
        await asyncio.sleep(self._started + self.now_ms / 1000 / self._speed - time.monotonic())


class WorkerClock(StepClock):
    """Clock of one worker: it advances by the cost of each step, and waits for the trace's clock.

    While the worker is idle it stands still; the next request sets it to the time of sending.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trace_ms = 0
        self._changed = threading.Condition()

    def begin(self, sent_ms: int) -> None:
        """Advance to the time of a request that arrived at an idle worker."""
        self.now_ms = max(self.now_ms, sent_ms)

    def spend(self, ms: int) -> None:
        """Advance by the cost of a step, and wait until the trace time is there."""
        with self._changed:
            self.now_ms += ms
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._trace_ms >= self.now_ms)

    def follow(self, trace_ms: int, idle: Callable[[], bool]) -> None:
        """Set the trace time, and wait until the worker is in a step that ends later, or is idle."""
        with self._changed:
            self._trace_ms = trace_ms
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.now_ms > trace_ms or idle())

    def look_again(self) -> None:
        """Wake `follow`, because the worker may be idle now."""
        with self._changed:
            self._changed.notify_all()

    def advance(self, stop: threading.Event, until_ms: int = 0) -> None:
        """Do nothing: `spend` and `begin` set the time."""
