"""Subscribes at one endpoint to many publishers that connect there, and follows each separately.

::

    with FanInSubscriber("tcp://127.0.0.1:5557", replay=replay_in_topic) as subscriber:
        for worker, report in subscriber:
            indexes[worker].fold(report)

A publisher is known by the topic of its messages and, if they are encrypted, by its public key: no publisher can
impersonate another with its own key. Two that share a topic, and a key or none, cannot be distinguished.

A replay is requested from the publisher itself, at the address that `replay` finds for it. It must have the same key as
its messages. One that does not answer delays no others: its waiting messages are limited as in
`events.subscribe.continuity`, and the rest is requested again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import zmq

from events.closing import Closing
from events.diagnostics import get_logger
from events.subscribe.continuity import Continuity, Report
from events.subscribe.endpoints import EndpointError, host_of
from events.subscribe.sockets import Curve, Gate
from events.subscribe.subscriber import (
    READ_AT_ONCE,
    Connection,
    Follower,
    Readable,
    poll_until,
    refuse_insecure,
    shortest,
    weight,
)

MAX_WORKERS = 1000
FORGET_SECONDS = 3600.0
_LOOK_SECONDS = 0.2
_log = get_logger(__name__)
_POD = re.compile(r"kv@(?P<address>[^@]+:[0-9]+)@[^@]*")


class Worker(NamedTuple):
    """A publisher's identity."""

    topic: str
    key: str = ""
    """Public key of the worker; empty if nothing is encrypted."""


def replay_in_topic(worker: Worker) -> str | None:
    """Return the address in a topic ``kv@HOST:PORT@MODEL``: the replay's, if a `zmq+pub:` sink connects."""
    found = _POD.fullmatch(worker.topic)
    return None if found is None else f"tcp://{found['address']}"


class FanInSubscriber(Closing):
    """Follows all publishers that connect to an endpoint.

    Args:
        endpoint: the address to bind, as ``tcp://*:5557``; port 0 is any free one.
        replay: finds the endpoint of a worker's replay (None: it has none). SECURITY: an address made from a topic is
            chosen by the publisher.
        topic: only messages whose topic begins with this.
        replay_timeout: as of `events.subscribe.subscriber.Subscriber`.
        max_workers: limit of followed workers. A further one replaces the one silent longest, which is reported as a
            loss; unless all had messages within `forget_seconds`: then it is not followed, which is logged, and its
            messages are counted (`ignored`).
        curve: our keys and the directory with those of the workers; required beyond loopback, unless `insecure`.
        insecure: accepts any peer that reaches the endpoint as a worker.
        first: the first batch wanted of a new worker that has a replay.
        clock: the seconds by which all waits for workers count; the timeout of a `poll` is in real ones.

    Raises EndpointError, InsecureEndpoint and, if the allow-list cannot be read, KeyFileError.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: Callable[[Worker], str | None] | None = None,
        topic: str = "",
        replay_timeout: float = 5.0,
        max_workers: int = MAX_WORKERS,
        forget_seconds: float = FORGET_SECONDS,
        curve: Curve | None = None,
        insecure: bool = False,
        first: Callable[[Worker], int] = lambda _: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not insecure:
            refuse_insecure(endpoint, curve)
        self._replay, self._topic, self._first = replay, topic.encode(), first
        self._replay_timeout, self._curve, self._clock = replay_timeout, curve, clock
        self._max_workers, self._forget_seconds = max_workers, forget_seconds
        self._followers: dict[Worker, Follower[Report]] = {}
        self._looked_at = float("-inf")
        """Time of the last search for a worker to forget."""
        self._last_words: list[tuple[Worker, Report]] = []
        """Pending reports of forgotten workers."""
        self.ignored = 0
        """Messages of workers above the limit."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = None if curve is None or curve.clients is None else Gate(self._context, curve.clients)
        try:
            if self._gate is not None:
                self._gate.open()
            self._live = Connection(self._context, zmq.SUB, endpoint, bind=True, curve=curve, clock=clock)
            self._live.socket.subscribe(topic)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release everything; may be called twice."""
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=0)

    def __iter__(self) -> Iterator[tuple[Worker, Report]]:
        """Yield reports as they come, until it is closed."""
        while not self._context.closed:
            yield from self.poll()

    @property
    def endpoint(self) -> str:
        """The endpoint to which workers connect."""
        return self._live.endpoint

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers with messages so far."""
        return tuple(self._followers)

    @property
    def malformed(self) -> int:
        """Messages ignored because they do not even have a number."""
        return sum(follower.malformed for follower in self._followers.values())

    @property
    def refused(self) -> int:
        """Connections that failed because of a key that is missing, wrong or not allowed."""
        return self._live.refused + sum(follower.refused for follower in self._followers.values())

    def forget(self, worker: Worker) -> None:
        """Forget a worker that has gone; if it comes again it is a new one."""
        follower = self._followers.pop(worker, None)
        if follower is not None:
            follower.close()

    def poll(self, timeout_ms: int | None = None) -> list[tuple[Worker, Report]]:
        """Wait for reports, and return them, each worker's in order; empty after `timeout_ms`."""
        return poll_until(self._take, self.wait, timeout_ms)

    def _take(self) -> list[tuple[Worker, Report]]:
        self._read_live()
        reports, self._last_words = self._last_words, []
        for worker, follower in self._followers.items():
            follower.read_answers()
            follower.ask()
            reports += ((worker, report) for report in follower.order.take())
        return reports

    def wait(self, poller: Readable) -> float | None:
        """Register it with `poller`, to end a wait for several readers when it is to be polled again.

        Returns the longest allowed wait in seconds; None: unlimited.
        """
        waits = [follower.wait(poller) for follower in self._followers.values()]
        return shortest([*waits, self._live.wait(poller)], None)

    def _read_live(self) -> None:
        self._live.look()
        read = 0
        while read < READ_AT_ONCE and (message := self._live.receive_from()) is not None:
            frames, key = message
            read += weight(frames)
            follower = self._follower(Worker(frames[0].decode(errors="replace"), key))
            if follower is None:
                if not self.ignored:
                    _log.warning("workers_ignored", endpoint=self.endpoint, followed=len(self._followers))
                self.ignored += 1
            else:
                follower.live(frames)

    def _follower(self, worker: Worker) -> Follower[Report] | None:
        found = self._followers.get(worker)
        if found is None and (len(self._followers) < self._max_workers or self._make_room()):
            endpoint = self._endpoint_of(worker)
            key = worker.key.encode() or None
            line = partial(
                Connection, self._context, zmq.DEALER, curve=self._curve, server=key, clock=self._clock
            )
            found = self._followers[worker] = Follower(
                None if endpoint is None else lambda: line(endpoint),
                Continuity(None if endpoint is None else self._first(worker), can_ask=endpoint is not None),
                topic=self._topic,
                replay_timeout=self._replay_timeout,
                clock=self._clock,
            )
        return found

    def _make_room(self) -> bool:
        """Forget the worker silent longest, if for long enough; checked at intervals, not at each message."""
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        oldest = min(self._followers, key=lambda worker: self._followers[worker].last_received_at)
        if now - self._followers[oldest].last_received_at < self._forget_seconds:
            return False
        # It may come again: its blocks then must not be taken for those it has now.
        lost = self._followers.pop(oldest).give_up("it was silent for long, and others came in its place")
        self._last_words += ((oldest, report) for report in lost)
        return True

    def _endpoint_of(self, worker: Worker) -> str | None:
        endpoint = None if self._replay is None else self._replay(worker)
        try:
            if endpoint is not None:
                host_of(endpoint)
        except EndpointError:
            return None  # an invalid name from a publisher must not end the loop
        return endpoint
