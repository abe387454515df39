"""One publisher that is connected to: its sockets, and what it has told, without waiting.

How to wait for it is the business of `events.subscribe.subscriber`, with asyncio of `events.subscribe.asynchronous`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic

import zmq

from events.sockets.curve import Curve
from events.sockets.keepalive import KEEPALIVE_SECONDS
from events.subscribe.follower import READ_AT_ONCE, AnyReport, Follower, Order, weight
from events.subscribe.lines import Line, LineOptions, Readable, shortest


class Publication(ABC, Generic[AnyReport]):
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
        context: ZeroMQ's, for who follows many publishers and need not have threads for each; None: one of its own.
        clock: the seconds by which all waits for the publisher count; the timeout of a `poll` is in real ones.

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
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replay = replay
        self._options = LineOptions(max_queued, max_message_bytes, keepalive, curve, clock)
        self._ready: deque[AnyReport] = deque()
        self._lines = ExitStack()
        self.closed = False
        """Whether it was told to `close`."""
        try:
            if context is None:
                context = zmq.Context()
                self._lines.callback(context.destroy, linger=0)
            self._context = context
            self._live = Line(context, zmq.SUB, endpoint, self._options)
            self._lines.callback(self._live.close)
            self._live.socket.subscribe(topic)
            if replay is not None:
                # A wrong endpoint is told now, not at the first gap.
                self._line_to_replay().close()
            ask = None if replay is None else self._line_to_replay
            order = self._order(start, can_ask=ask is not None)
            self._follower = Follower(
                ask, order, topic=topic.encode(), replay_timeout=replay_timeout, clock=clock
            )
            self._lines.callback(self._follower.close)
            self._follower.ask()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _order(self, start: int | None, *, can_ask: bool) -> Order[AnyReport]:
        """What puts its messages in order."""

    def close(self) -> None:
        """Disconnect; may be called twice."""
        self.closed = True
        self._lines.close()

    @property
    def connected(self) -> bool:
        """Whether the publisher was there when it was last listened to."""
        return self._live.connected

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

    def wait(self, poller: Readable) -> float | None:
        """Have it end a wait for several readers when it is to be polled again.

        Returns after how many seconds that must be anyway; None: it need not.
        """
        waits = [self._follower.wait(poller)]
        if self._follower.has_room:
            waits.append(self._live.wait(poller))
        return shortest(waits, None)

    def _take(self) -> list[AnyReport]:
        """What there is to report now, in order, with what an iteration that was left has not handed out."""
        self._follower.read_answers()
        self._read_live()
        self._follower.ask()
        reports = [*self._ready, *self._follower.take()]
        self._ready.clear()
        return reports

    def _read_live(self) -> None:
        self._live.look()
        read = 0
        while (
            read < READ_AT_ONCE and self._follower.has_room and (frames := self._live.receive()) is not None
        ):
            read += weight(frames)
            self._follower.live(frames)

    def _line_to_replay(self) -> Line:
        assert self._replay is not None
        return Line(self._context, zmq.DEALER, self._replay, self._options)
