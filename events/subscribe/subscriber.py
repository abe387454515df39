"""Listens to a publisher of KV events in vLLM's wire format, and gets from its replay socket what was missed.

::

    with Subscriber("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558", start=0) as subscriber:
        for report in subscriber:          # Received, Missed, Restated or Restarted (events.subscribe.continuity)
            index.fold(report)             # events.subscribe.index

It connects to one publisher; where many connect to one reader, see `events.subscribe.gathering`, and for asyncio
`events.subscribe.asynchronous`. A subscriber belongs to one thread. A publisher that is not there yet is waited for,
and one that comes back is connected to again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Self

import zmq

from events.subscribe.continuity import Continuity, Missed, Received, Report, Restarted, Restated
from events.subscribe.endpoints import EndpointError
from events.subscribe.follower import AnyReport
from events.subscribe.lines import wait_for
from events.subscribe.publication import Publication

__all__ = ["EndpointError", "Missed", "Received", "Report", "Restarted", "Restated", "Subscriber", "Waiting"]


class Waiting(Publication[AnyReport]):
    """A `Publication` to wait for, or to iterate over."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[AnyReport]:
        """Reports as they come, until the subscriber is closed. Who leaves the loop and comes again misses none."""
        while not self.closed:
            self._ready += self.poll()
            while self._ready:
                yield self._ready.popleft()

    def poll(self, timeout_ms: int | None = None) -> list[AnyReport]:
        """Wait until there is something to report, and return it in order; empty after `timeout_ms`.

        To be called all the time: ZeroMQ renews the subscription at a publisher that came back only inside a call.
        """
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            reports = self._take()
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports
            poller = zmq.Poller()
            wait_for(poller, [self.wait(poller)], deadline)


class Subscriber(Waiting[Report]):
    """A `Publication` to wait for, or to iterate over; made with the same arguments."""

    def _order(self, start: int | None, *, can_ask: bool) -> Continuity:
        return Continuity(start, can_ask=can_ask)
