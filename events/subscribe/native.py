"""Follows a feed in the native format over ZeroMQ: all events of a cache, from a whole state on.

::

    with NativeSubscriber("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558") as subscriber:
        for report in subscriber:
            if isinstance(report, ReceivedBatch):
                replayed.fold(report.batch, verify=True)      # kvcache.replay.Replayed

A publisher tells each newcomer its state. So who has missed something that cannot be asked for subscribes anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from events.sockets.curve import Curve
from events.sockets.keepalive import KEEPALIVE_SECONDS
from events.subscribe.native_continuity import NativeContinuity, NativeReport
from events.subscribe.subscriber import Waiting

_ASK_AGAIN_SECONDS = 1.0
"""Between two subscriptions anew: a large state takes a while to tell."""


class NativeSubscriber(Waiting[NativeReport]):
    """Listens to one publisher, whose messages are msgpack (``format=native``, ``encoding=msgpack``).

    The arguments are those of `events.subscribe.publication.Publication`, but that it always begins with the state.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        replay_timeout: float = 5.0,
        max_queued: int = 100_000,
        max_message_bytes: int = 1 << 30,
        keepalive: float = KEEPALIVE_SECONDS,
        curve: Curve | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix, self._clock, self._asked_at = topic, clock, clock()
        super().__init__(
            endpoint,
            replay=replay,
            topic=topic,
            replay_timeout=replay_timeout,
            max_queued=max_queued,
            max_message_bytes=max_message_bytes,
            keepalive=keepalive,
            curve=curve,
            context=context,
            clock=clock,
        )

    @property
    def waiting(self) -> bool:
        """Whether it has no state yet, or none that what it hears fits to."""
        return self._continuity.waiting

    def _order(self, start: int | None, *, can_ask: bool) -> NativeContinuity:
        self._continuity = NativeContinuity(can_ask=can_ask)
        return self._continuity

    def _take(self) -> list[NativeReport]:
        reports = super()._take()
        now = self._clock()
        hears_in_vain = self._continuity.waiting and self._continuity.next is not None
        if hears_in_vain and now - self._asked_at >= _ASK_AGAIN_SECONDS:
            # To the publisher that is a newcomer, who is told the state.
            self._asked_at = now
            self._live.socket.unsubscribe(self._prefix)
            self._live.socket.subscribe(self._prefix)
        return reports
