"""An engine without a model that serves requests as they arrive, on its own thread.

It is the engine that plays traces (`kvcache.workload.driver`), with a queue that grows while it runs and steps that
take simulated time. The manager has no pools: blocks are stored, reused, evicted and published; no bytes move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from events.types import PRIMARY, SECONDARY
from examples.kv_aware_router.clock import StepCosts, WorkerClock
from examples.kv_aware_router.inbox import Inbox
from kvcache import KVCacheConfig, KVCacheManager, Request
from kvcache.fold.state import resident_names
from kvcache.workload.driver import DriveOptions, Engine, ObservedStep
from kvcache.workload.tokens import output_tokens
from kvcache.workload.waiting_queue import Waiting, WaitingLimits
from sinks.router.zmq import ZMQTransport

OPTIONS = DriveOptions(concurrency=64, prefill_tokens=2048)


class JobProgress(NamedTuple):
    """Progress of a request."""

    first_token: bool
    """True if its first token was sampled; False if it has ended."""
    at_ms: int
    cached_tokens: int


@dataclass(slots=True)
class _Job:
    on_progress: Callable[[JobProgress], None]
    cached_tokens: int = 0
    begun: bool = False


class Serving:
    """One worker's engine. Any thread may call it."""

    def __init__(self, config: KVCacheConfig, sink: str) -> None:
        self._config, self._sink = config, sink
        self._clock = WorkerClock()
        self._costs = StepCosts()
        self._inbox = Inbox(self._clock)
        self._jobs: dict[int, _Job] = {}
        self._ready = threading.Event()
        self._numbers = 0
        self._busy_ms = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._ready.wait()

    def put(
        self, tokens: list[int], max_tokens: int, sent_ms: int, on_progress: Callable[[JobProgress], None]
    ) -> str | None:
        """Queue a request; returns None, or the reason why it can never be served. `on_progress` is called on the
        engine's thread.
        """
        total = len(tokens) + max_tokens
        obstacle = self._limits.obstacle(total)
        if obstacle is not None:
            return obstacle
        self._numbers = number = self._numbers + 1
        self._jobs[number] = _Job(on_progress)
        request = Request(number, np.asarray(tokens, np.int32))
        outputs = output_tokens(number, max_tokens)
        self._inbox.put(Waiting(request, outputs, self._limits.blocks_for(total), sent_ms))
        return None

    def follow(self, trace_ms: int) -> None:
        """Wait until everything up to that trace time is computed."""
        self._clock.follow(trace_ms, lambda: self.idle)

    def stats(self) -> dict[str, float]:
        """Return gauges for display."""
        stats = self._manager.stats()
        return {
            "running": len(self._jobs) - len(self._inbox),
            "waiting": len(self._inbox),
            "cached_blocks": sum(stats.blocks_total) - sum(stats.blocks_blank),
            "total_blocks": sum(stats.blocks_total),
            "busy_ms": self._busy_ms,
        }

    def resident(self) -> list[list[int]]:
        """Return the names of all published blocks per level. Call it only while nothing runs."""
        return [sorted(resident_names(self._manager.state, level)) for level in (PRIMARY, SECONDARY)]

    @property
    def idle(self) -> bool:
        """True if no request is left."""
        return not self._jobs

    @property
    def topic(self) -> str:
        """Topic of its feed."""
        transport = self._manager.feeds[0].transport
        assert isinstance(transport, ZMQTransport)
        return transport.topic.decode()

    def close(self) -> None:
        """Drop running requests and close the feed."""
        self._inbox.close()
        self._thread.join(10)

    def _run(self) -> None:
        with KVCacheManager(self._config, sinks=[self._sink]) as self._manager:
            self._limits = WaitingLimits.of(self._config, self._manager.layout)
            engine = Engine(self._manager, self._inbox, OPTIONS, clock=self._clock, watch=self._stepped)
            self._ready.set()
            engine.run()

    def _stepped(self, step: ObservedStep) -> None:
        """Account for a step's time, then report the progress of its requests."""
        cost = self._costs.of(step)
        self._busy_ms += cost
        self._clock.spend(cost)
        for number, admission in step.admitted.items():
            self._jobs[number].cached_tokens = admission.reused_tokens
        now = self._clock.now_ms
        for number in step.sampled:
            job = self._jobs[number]
            if not job.begun:
                job.begun = True
                job.on_progress(JobProgress(first_token=True, at_ms=now, cached_tokens=job.cached_tokens))
        for number in step.ended:
            job = self._jobs[number]
            job.on_progress(JobProgress(first_token=False, at_ms=now, cached_tokens=job.cached_tokens))
            del self._jobs[number]
        self._clock.look_again()
