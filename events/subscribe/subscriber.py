"""Listens to a publisher of KV events in vLLM's wire format, and gets from its replay socket what was missed.

::

    with Subscriber("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558", start=0) as subscriber:
        for report in subscriber:          # Received, Missed, Restated or Restarted (events.subscribe.continuity)
            index.fold(report)             # events.subscribe.index

The order of things is `events.subscribe.continuity`'s business; here are the sockets. A subscriber belongs to one
thread. A publisher that is not there yet is waited for, and one that comes back is connected to again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Self

import zmq

from events.errors import EventDecodeError
from events.formats.vllm import parse_answer, parse_message, replay_request
from events.subscribe.continuity import HELD_MAX, Continuity, Missed, Received, Report, Restarted, Restated
from events.subscribe.endpoints import EndpointError, host_of

__all__ = ["EndpointError", "Missed", "Received", "Report", "Restarted", "Restated", "Subscriber"]

_READ_AT_ONCE = 1000
"""Messages between two reports, so that a flood cannot keep `poll` from returning."""
_HEARTBEAT_MS = 10_000
_MAX_MESSAGE_BYTES = 1 << 30
"""Who sends more in one frame is disconnected."""


class Subscriber:
    """Follows one publisher.

    Args:
        endpoint: where it publishes, as ``tcp://127.0.0.1:5557``.
        replay: where it can be asked for what was missed; None: what is missed is lost.
        topic: only messages whose topic begins with this; answers without any topic pass, too.
        start: the first batch wanted: 0 for all that the publisher can still tell; None begins with whatever comes.
        replay_timeout: seconds that live messages wait while the publisher is asked and says nothing.
        max_queued: messages in the receiving queue of each socket; beyond it the publisher drops live ones.

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
    ) -> None:
        self.malformed = 0
        """Messages that were ignored since they do not even have a number."""
        self._replay = replay
        self._topic = topic.encode()
        self._replay_timeout = replay_timeout
        self._max_queued = max_queued
        self._continuity = Continuity(start, can_ask=replay is not None)
        self._waiting_since: float | None = None
        self._asked_since: float | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._asking: zmq.Socket[bytes] | None = None
        try:
            self._live = self._connect(zmq.SUB, endpoint)
            self._live.subscribe(topic)
            if replay is not None:
                # A wrong endpoint is told now, not at the first gap.
                self._connect(zmq.DEALER, replay).close()
            self._ask()
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
    def unanswered_seconds(self) -> float:
        """For how long the replay endpoint has been asked without a word of answer; 0: it is not, or has answered."""
        return 0.0 if self._asked_since is None else time.monotonic() - self._asked_since

    def poll(self, timeout_ms: int | None = None) -> list[Report]:
        """Wait until there is something to report, and return it in order; empty after `timeout_ms`.

        To be called all the time: ZeroMQ renews the subscription at a publisher that came back only inside a call.
        """
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            self._read_answers()
            self._read_live()
            self._ask()
            reports = self._continuity.take()
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports
            self._wait(deadline)

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        host_of(endpoint)  # raises, where ZeroMQ would try for ever
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = self._max_queued
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)  # a machine that vanished is noticed
        # By IPv6 "localhost" is ::1 alone where a machine calls both so, and publishers are at 127.0.0.1.
        socket.setsockopt(zmq.IPV6, int(not endpoint.lower().startswith("tcp://localhost:")))
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise EndpointError(endpoint, error.strerror or "cannot be connected to") from None
        return socket

    def _ask(self) -> None:
        """Ask for a replay, if one is wanted: by a new socket, so that no late answer to an old question mixes in."""
        start = self._continuity.take_request()
        if start is None:
            return
        assert self._replay is not None
        self._stop_asking()
        self._asking = self._connect(zmq.DEALER, self._replay)
        self._asking.send_multipart(replay_request(start))
        self._asked_since = time.monotonic()

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.close()
        self._asking = self._waiting_since = self._asked_since = None

    def _read_answers(self) -> None:
        if self._asking is None:
            return
        for _ in range(_READ_AT_ONCE):
            frames = _receive(self._asking)
            if frames is None:
                break
            self._waiting_since = self._asked_since = None
            try:
                message = parse_answer(frames)
            except EventDecodeError:
                self.malformed += 1
                continue
            if message is None:
                self._end_replay(complete=True)
                return
            # Live messages were filtered by their publisher; it is asked for numbers, not for topics.
            if not message.topic or message.topic.startswith(self._topic):
                self._continuity.answer(message)
        if self._patience() == 0:
            self._end_replay(complete=False)

    def _end_replay(self, *, complete: bool) -> None:
        self._stop_asking()
        self._continuity.end_of_replay(complete=complete)

    def _patience(self) -> float | None:
        """Seconds until waiting for an answer is given up; None: nothing is waiting for it."""
        if self._asking is None or not self._continuity.holding:
            return None
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return max(0.0, self._waiting_since + self._replay_timeout - now)

    def _read_live(self) -> None:
        for _ in range(_READ_AT_ONCE):
            if self._continuity.holding >= HELD_MAX or (frames := _receive(self._live)) is None:
                return
            try:
                message = parse_message(frames)
            except EventDecodeError:
                self.malformed += 1
                continue
            self._continuity.live(message)

    def _wait(self, deadline: float | None) -> None:
        """Until a message comes, the deadline, or the end of patience."""
        poller = zmq.Poller()
        if self._continuity.holding < HELD_MAX:
            poller.register(self._live, zmq.POLLIN)
        if self._asking is not None:
            poller.register(self._asking, zmq.POLLIN)
        waits = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        if (patience := self._patience()) is not None:
            waits.append(patience)
        # Rounded up: a wait that is cut short would turn into a busy loop.
        poller.poll(int(min(waits) * 1000) + 1 if waits else None)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The frames of the next message, if there is one."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
