"""Listens to a publisher of KV events in vLLM's wire format, and gets from its replay socket what was missed.

::

    with Subscriber("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558", start=0) as subscriber:
        for report in subscriber:          # Received, Missed, Restated or Restarted (events.subscribe.continuity)
            index.fold(report)             # events.subscribe.index

It connects to one publisher; where many connect to one reader, see `events.subscribe.gathering`. A subscriber belongs
to one thread. A publisher that is not there yet is waited for, and one that comes back is connected to again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Self

import zmq

from events.sockets.curve import Curve
from events.sockets.keepalive import KEEPALIVE_SECONDS
from events.subscribe.continuity import Missed, Received, Report, Restarted, Restated
from events.subscribe.endpoints import EndpointError
from events.subscribe.follower import READ_AT_ONCE, Follower
from events.subscribe.lines import Line, LineOptions, wait_for

__all__ = ["EndpointError", "Missed", "Received", "Report", "Restarted", "Restated", "Subscriber"]


class Subscriber:
    """Follows one publisher.

    Args:
        endpoint: where it publishes, as ``tcp://127.0.0.1:5557``.
        replay: where it can be asked for what was missed; None: what is missed is lost.
        topic: only messages whose topic begins with this; answers without any topic pass, too.
        start: the first batch wanted: 0 for all that the publisher can still tell; None begins with whatever comes.
        replay_timeout: seconds that live messages wait while the publisher is asked and says nothing.
        max_queued: messages in the receiving queue of each socket; beyond it the publisher drops live ones.
        max_message_bytes: who sends more in one frame is disconnected.
        keepalive: seconds of silence after which TCP looks whether the publisher is still there; 0: never.
        curve: our keys and the publisher's public one, if it encrypts.

    Raises EndpointError if an endpoint is malformed. The name of a host is looked up again and again, in the
    background: it may come to be known only later.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        start: int | None = None,
        replay_timeout: float = 5.0,
        max_queued: int = 100_000,
        max_message_bytes: int = 1 << 30,
        keepalive: float = KEEPALIVE_SECONDS,
        curve: Curve | None = None,
    ) -> None:
        self._replay = replay
        self._options = LineOptions(max_queued, max_message_bytes, keepalive, curve)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ask = None if replay is None else self._line_to_replay
        self._follower = Follower(ask, topic=topic.encode(), start=start, replay_timeout=replay_timeout)
        try:
            self._live = Line(self._context, zmq.SUB, endpoint, self._options)
            self._live.socket.subscribe(topic)
            if replay is not None:
                # A wrong endpoint is told now, not at the first gap.
                self._line_to_replay().close()
            self._follower.ask()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; may be called twice."""
        self._context.destroy(linger=0)

    def __iter__(self) -> Iterator[Report]:
        """Reports as they come, until the subscriber is closed."""
        while not self._context.closed:
            yield from self.poll()

    @property
    def malformed(self) -> int:
        """Messages that were ignored since they do not even have a number."""
        return self._follower.malformed

    @property
    def refused(self) -> int:
        """How often the publisher has turned us away because of a key that is missing, wrong or not allowed."""
        return self._live.refused + self._follower.refused

    @property
    def unanswered_seconds(self) -> float:
        """For how long the replay endpoint has been asked without a word of answer; 0: it is not, or has answered."""
        return self._follower.unanswered_seconds

    def poll(self, timeout_ms: int | None = None) -> list[Report]:
        """Wait until there is something to report, and return it in order; empty after `timeout_ms`.

        To be called all the time: ZeroMQ renews the subscription at a publisher that came back only inside a call.
        """
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        follower = self._follower
        while True:
            follower.read_answers()
            self._read_live()
            follower.ask()
            reports = follower.take()
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports
            self._wait(deadline)

    def _line_to_replay(self) -> Line:
        assert self._replay is not None
        return Line(self._context, zmq.DEALER, self._replay, self._options)

    def _read_live(self) -> None:
        self._live.look()
        for _ in range(READ_AT_ONCE):
            if not self._follower.has_room or (frames := self._live.receive()) is None:
                return
            self._follower.live(frames)

    def _wait(self, deadline: float | None) -> None:
        """Until a message comes, the deadline, or the end of patience."""
        poller = zmq.Poller()
        waits = [self._follower.wait(poller)]
        if self._follower.has_room:
            waits.append(self._live.wait(poller))
        wait_for(poller, waits, deadline)
