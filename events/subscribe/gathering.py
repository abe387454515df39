"""Listens at one endpoint to many publishers that connect there, each followed by itself.

::

    with Gathering("tcp://127.0.0.1:5557", replay=replay_in_topic) as gathering:
        for worker, report in gathering:
            indexes[worker].fold(report)

A publisher is known by the topic of its messages and, where they are encrypted, by its public key: with the key of one
nobody can speak for another. Two that share a topic, and a key or none, cannot be told apart.

A replay is asked for at the publisher itself, at the address that `replay` finds for it. It has to have the very key
that its messages came with. One that does not answer holds up nobody else: of its messages at most so many wait as
`events.subscribe.continuity` holds, and it is asked again for the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import zmq

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
    """A publisher, as far as it can be told from others."""

    topic: str
    key: str = ""
    """Its public key; empty where nothing is encrypted."""


def replay_in_topic(worker: Worker) -> str | None:
    """The address in a topic ``kv@HOST:PORT@MODEL``, which is that of the replay if a `zmq+pub:` sink connects."""
    found = _POD.fullmatch(worker.topic)
    return None if found is None else f"tcp://{found['address']}"


class Gathering:
    """Follows all publishers that connect to an endpoint.

    Args:
        endpoint: what is bound, as ``tcp://*:5557``; port 0 is any free one.
        replay: finds where a worker can be asked for what was missed (None: nowhere). SECURITY: what it makes of a
            topic is an address that the publisher chose.
        topic: only messages whose topic begins with this.
        replay_timeout: as of `events.subscribe.subscriber.Subscriber`.
        max_workers: how many are followed. If one comes in addition, the one that was silent longest is forgotten,
            which is reported as a loss; unless all were heard within `forget_seconds`: then it is not followed, which
            is logged, and its messages are counted (`ignored`).
        curve: our keys and the directory with those of the workers; required beyond loopback, unless `insecure`.
        insecure: lets anybody who reaches the endpoint be a worker.
        first: the first batch wanted of a worker that can be asked, when it is heard first.
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
        """When it was looked for one to be forgotten."""
        self._last_words: list[tuple[Worker, Report]] = []
        """What is to be reported of those that were forgotten."""
        self.ignored = 0
        """Messages of workers that were too many."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of everything; may be called twice."""
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=0)

    def __iter__(self) -> Iterator[tuple[Worker, Report]]:
        """Reports as they come, until it is closed."""
        while not self._context.closed:
            yield from self.poll()

    @property
    def endpoint(self) -> str:
        """Where workers connect."""
        return self._live.endpoint

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that were heard."""
        return tuple(self._followers)

    @property
    def malformed(self) -> int:
        """Messages that were ignored since they do not even have a number."""
        return sum(follower.malformed for follower in self._followers.values())

    @property
    def refused(self) -> int:
        """Connections that came to nothing because of a key that is missing, wrong or not allowed."""
        return self._live.refused + sum(follower.refused for follower in self._followers.values())

    def forget(self, worker: Worker) -> None:
        """Let go of a worker that has gone; if it comes again it is a new one."""
        follower = self._followers.pop(worker, None)
        if follower is not None:
            follower.close()

    def poll(self, timeout_ms: int | None = None) -> list[tuple[Worker, Report]]:
        """Wait until there is something to report, and return it, of each worker in order; empty after `timeout_ms`."""
        return poll_until(self._take, self.wait, timeout_ms)

    def _take(self) -> list[tuple[Worker, Report]]:
        self._read_live()
        reports, self._last_words = self._last_words, []
        for worker, follower in self._followers.items():
            follower.read_answers()
            follower.ask()
            reports += ((worker, report) for report in follower.take())
        return reports

    def wait(self, poller: Readable) -> float | None:
        """Have it end a wait for several readers when it is to be polled again.

        Returns after how many seconds that must be anyway; None: it need not.
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
            found = self._followers[worker] = Follower(
                None if endpoint is None else lambda: self._line_to(worker, endpoint),
                Continuity(None if endpoint is None else self._first(worker), can_ask=endpoint is not None),
                topic=self._topic,
                replay_timeout=self._replay_timeout,
                clock=self._clock,
            )
        return found

    def _make_room(self) -> bool:
        """Forget the worker that was silent longest, if it was so for long; not at each message."""
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        oldest = min(self._followers, key=lambda worker: self._followers[worker].heard_at)
        if now - self._followers[oldest].heard_at < self._forget_seconds:
            return False
        # It may come again: then what it holds must not be taken for what it held.
        lost = self._followers.pop(oldest).give_up("it was silent for long, and others came in its place")
        self._last_words += ((oldest, report) for report in lost)
        return True

    def _endpoint_of(self, worker: Worker) -> str | None:
        endpoint = None if self._replay is None else self._replay(worker)
        try:
            if endpoint is not None:
                host_of(endpoint)
        except EndpointError:
            return None  # what a publisher calls itself ends nobody's work
        return endpoint

    def _line_to(self, worker: Worker, endpoint: str) -> Connection:
        return Connection(
            self._context,
            zmq.DEALER,
            endpoint,
            curve=self._curve,
            server=worker.key.encode() or None,
            clock=self._clock,
        )
