"""Where engines are listened to, each endpoint on a thread of its own, and whether they are those that were known.

Who continues a log knows of each publisher the last batch that it was heard to say. It is asked for just that batch: if
it says the same, at the same time by its own clock, nothing is missing but what comes behind it, and it goes on
(`Continued`). If it says something else under that number, another life of the engine has got there, and it is asked
for everything. If it does not say it any more, what was missed is a loss like any other. Whoever cannot be asked
cannot prove anything.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from events.sockets.curve import Curve
from events.subscribe.continuity import Missed, Received, Report
from events.subscribe.gathering import Gathering, Worker, replay_in_topic
from events.subscribe.subscriber import Subscriber

_POLL_MS = 50
_LAST_SECOND = 1e9 * 9
"""In the year 2255: in nanoseconds, later times do not fit into 64 bits."""
_MOST_QUEUED = 2000
"""Reports between a thread and who records them; beyond that the sockets keep what comes, and then the engine."""


class Continued(msgspec.Struct, frozen=True):
    """The publisher is the one that was heard before, and goes on behind the batch that it said last."""


class Last(msgspec.Struct, frozen=True):
    """The last batch that a publisher was heard to say."""

    number: int
    published_ts: int


def nanoseconds(seconds: float) -> int:
    """A publisher's time in nanoseconds; 0 for what cannot be one."""
    return int(seconds * 1e9) if 0 <= seconds < _LAST_SECOND else 0


Heard = Report | Continued


@dataclass(frozen=True)
class Endpoint:
    """Where to listen.

    `replay` is where what was missed is asked for; of a bound endpoint (`binds`) True: at the addresses in the topics.
    """

    address: str
    replay: str | bool | None = None
    binds: bool = False
    topic: str = ""
    curve: Curve | None = None
    insecure: bool = False


class Listener:
    """Listens at one endpoint. `before` has what publishers were heard to say last, by their sources.

    A source is what tells publishers apart: the address of an endpoint or, where it is bound, their topic and key.
    Raises EndpointError, InsecureEndpoint, KeyFileError.
    """

    def __init__(self, endpoint: Endpoint, before: Mapping[str, Last]) -> None:
        self._endpoint = endpoint
        self._unproven = dict(before)
        self._one: Subscriber | None = None
        self._many: Gathering | None = None
        if endpoint.binds:
            self._many = Gathering(
                endpoint.address,
                replay=replay_in_topic if endpoint.replay else None,
                topic=endpoint.topic,
                curve=endpoint.curve,
                insecure=endpoint.insecure,
                first=lambda worker: self._first(_source(worker)),
            )
        else:
            self._connect()

    @property
    def address(self) -> str:
        """As it was given; where any free port was asked for, with the port that was found."""
        return self._many.endpoint if self._many is not None else self._endpoint.address

    @property
    def ignored(self) -> int:
        """Messages of engines that were too many to be followed."""
        return 0 if self._many is None else self._many.ignored

    def poll(self, timeout_ms: int = _POLL_MS) -> list[tuple[str, Heard]]:
        """What was heard, after at most so long."""
        heard: list[tuple[str, Heard]] = []
        begun_anew: set[str] = set()
        for source, report in self._reports(timeout_ms):
            if source in begun_anew:
                continue  # it is told again, from the beginning
            proven = self._prove(source, report)
            if proven is None:
                begun_anew.add(source)
                self._begin_anew(source)
            else:
                heard.append((source, proven))
        return heard

    def close(self) -> None:
        """Disconnect."""
        for each in (self._one, self._many):
            if each is not None:
                each.close()

    def _prove(self, source: str, report: Report) -> Heard | None:
        """What to make of the first that is heard; None: it has to be asked for everything."""
        last = self._unproven.get(source)
        if last is None or (isinstance(report, Missed) and report.recovered):
            return report
        del self._unproven[source]
        if not isinstance(report, Received) or report.seq != last.number or not report.replayed:
            return report
        return Continued() if nanoseconds(report.batch.ts) == last.published_ts else None

    def _reports(self, timeout_ms: int) -> Iterator[tuple[str, Report]]:
        if self._many is not None:
            yield from ((_source(worker), report) for worker, report in self._many.poll(timeout_ms))
        else:
            assert self._one is not None
            yield from ((self._endpoint.address, report) for report in self._one.poll(timeout_ms))

    def _connect(self) -> None:
        endpoint = self._endpoint
        replay = endpoint.replay if isinstance(endpoint.replay, str) else None
        start = None if replay is None else self._first(endpoint.address)
        self._one = Subscriber(
            endpoint.address, replay=replay, topic=endpoint.topic, start=start, curve=endpoint.curve
        )

    def _first(self, source: str) -> int:
        last = self._unproven.get(source)
        return 0 if last is None else last.number

    def _begin_anew(self, source: str) -> None:
        if self._one is not None:
            self._one.close()
            self._connect()
        elif self._many is not None:
            for worker in self._many.workers:
                if _source(worker) == source:
                    self._many.forget(worker)


def _source(worker: Worker) -> str:
    return f"{worker.topic} {worker.key}" if worker.key else worker.topic


class Hears(Protocol):
    """What listens at one endpoint."""

    @property
    def address(self) -> str:
        """Where."""

    @property
    def ignored(self) -> int:
        """Messages that nobody records."""

    def poll(self) -> Sequence[tuple[str, Heard]]:
        """What was heard, after a moment."""

    def close(self) -> None:
        """Disconnect."""


class Sources:
    """All endpoints, each on its thread; what they hear is taken by one other."""

    def __init__(self, listeners: Sequence[Hears]) -> None:
        self._listeners = listeners
        self.silent = {listener.address for listener in listeners}
        """Where nothing was heard yet. For any thread to read."""
        self._queue: queue.Queue[tuple[str, Heard] | BaseException] = queue.Queue(_MOST_QUEUED)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"kvcache-tap-{each.address}", daemon=True)
            for each in listeners
        ]

    @property
    def ignored(self) -> int:
        """Messages of engines that were too many to be followed."""
        return sum(listener.ignored for listener in self._listeners)

    def start(self) -> None:
        """Begin to listen."""
        for thread in self._threads:
            thread.start()

    def take(self, timeout: float) -> tuple[str, Heard] | None:
        """The next that was heard; None after `timeout` seconds. Raises what has ended a listener."""
        try:
            heard = self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(heard, BaseException):
            raise heard
        return heard

    def close(self) -> None:
        """Listen no more."""
        self._stopping.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, listener: Hears) -> None:
        try:
            while not self._stopping.is_set():
                for heard in listener.poll():
                    self.silent.discard(listener.address)
                    self._put(heard)
        except BaseException as error:  # noqa: BLE001  whoever takes is to hear of it
            self._put(error)
        finally:
            listener.close()

    def _put(self, heard: tuple[str, Heard] | BaseException) -> None:
        while not self._stopping.is_set():
            try:
                self._queue.put(heard, timeout=_POLL_MS / 1000)
            except queue.Full:
                continue
            return


Listen = Callable[[Endpoint, Mapping[str, Last]], Listener]
