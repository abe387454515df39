"""Listens to a publisher with asyncio, exactly as `events.subscribe.subscriber` does without.

::

    async with AsyncSubscriber("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558", start=0) as subscriber:
        async for report in subscriber:
            index.fold(report)

Nothing is lost when whoever waits is cancelled: reports are taken between waits only, and those that were not handed
out yet come first the next time. A subscriber belongs to one task at a time, of a loop that can watch file descriptors
(every one on Linux and macOS).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Self

import zmq

from events.subscribe.continuity import Continuity, Report
from events.subscribe.lines import shortest
from events.subscribe.publication import Publication


class AsyncSubscriber(Publication[Report]):
    """A `Publication` to wait for with asyncio; made with the same arguments, where the loop runs or before."""

    def _order(self, start: int | None, *, can_ask: bool) -> Continuity:
        return Continuity(start, can_ask=can_ask)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        """Reports as they come, until the subscriber is closed."""
        return self

    async def __anext__(self) -> Report:
        while not self._ready:
            if self.closed:
                raise StopAsyncIteration
            self._ready += await self.poll()
        return self._ready.popleft()

    async def poll(self, timeout_ms: int | None = None) -> list[Report]:
        """Wait until there is something to report, and return it in order; empty after `timeout_ms`, and once closed.

        To be awaited all the time: ZeroMQ renews the subscription at a publisher that came back only inside a call.
        """
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        # A publisher that is faster than its reader must not keep all other tasks from running.
        await asyncio.sleep(0)
        while not self.closed:
            reports = self._take()
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports
            self._watch = _Watch()
            seconds = shortest([self.wait(self._watch)], deadline)
            await self._watch.wait(seconds)
        return []

    def close(self) -> None:
        """Disconnect, and end a wait that is going on; may be called twice, by any task of the loop."""
        if self._watch is not None:
            self._watch.end()
        super().close()

    _watch: _Watch | None = None


class _Watch:
    """One wait for ZeroMQ's sockets, by the file descriptors with which they say that something has happened.

    Not `zmq.asyncio.Poller`: where a wait is cancelled it lets go of descriptors a moment later, and takes them away
    from the next wait.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = self._loop.create_future()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._descriptors: list[int] = []

    def register(self, socket: zmq.Socket[bytes], flags: int) -> None:
        """As of a `zmq.Poller`; whatever `flags` ask for, it is to be read."""
        descriptor = int(socket.get(zmq.FD))
        self._loop.add_reader(descriptor, self._wake)
        self._descriptors.append(descriptor)
        self._sockets.append(socket)

    async def wait(self, seconds: float | None) -> None:
        """Until something may have come, for so long at most."""
        try:
            # A descriptor tells of changes only, so that what is there already has to be asked for.
            if not any(int(socket.get(zmq.EVENTS)) & int(zmq.POLLIN) for socket in self._sockets):
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._woken
        finally:
            self.end()

    def end(self) -> None:
        """Watch no more; at once, since a descriptor's number may soon be another's."""
        while self._descriptors:
            self._loop.remove_reader(self._descriptors.pop())
        self._wake()

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)
