"""Thread-safe queue of an engine that serves: requests are added while it runs."""

from __future__ import annotations

import threading
from collections import deque

from examples.kv_aware_router.clock import WorkerClock
from kvcache.workload.waiting_queue import RequestQueue, Waiting


class Inbox(RequestQueue):
    """Requests in order of arrival. Each is available from the time at which it was sent."""

    def __init__(self, clock: WorkerClock) -> None:
        self._clock = clock
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, waiting: Waiting) -> None:
        """Add a request."""
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify()

    def close(self) -> None:
        """Close the queue; waiting requests are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def __bool__(self) -> bool:
        """True until it is closed."""
        return not self._closed

    @property
    def next_arrival_ms(self) -> int:
        """Time of the next request. Blocks until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._waiting:
                self._clock.begin(self._waiting[0].arrival_ms)
            return self._clock.now_ms

    def first(self, count: int) -> list[Waiting]:
        """Return the first requests that have arrived by the worker's clock, which may lag the sender's."""
        there: list[Waiting] = []
        with self._changed:
            for waiting in self._waiting:
                if len(there) == count or waiting.arrival_ms > self._clock.now_ms:
                    break
                there.append(waiting)
        return there

    def take(self, count: int) -> None:
        """Remove the first requests, which were admitted."""
        with self._changed:
            for _ in range(count):
                self._waiting.popleft()

    def put_back(self, waiting: list[Waiting]) -> None:
        """Put preempted requests back to the front."""
        with self._changed:
            self._waiting.extendleft(reversed(waiting))
