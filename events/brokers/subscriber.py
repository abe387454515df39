"""Reads the feeds of all workers of a stream in a broker, or of one of them.

::

    with BrokerSubscriber("nats://127.0.0.1:4222/kvcache") as subscriber:
        for worker, report in subscriber:    # Received, Missed, Restated or Restarted (events.subscribe.continuity)
            indexes[worker].fold(report)     # events.subscribe.index

Whoever joins late reads the stream from its beginning, finds a whole state of each worker there
(`events.brokers.follower`), and goes on. A broker that goes away is connected to again, and read from where that
broke off. A subscriber belongs to one thread, on which no asyncio loop runs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, Protocol, Self

from events.brokers.address import NAME, BrokerAddress, BrokerUnavailable, BrokerURLError, parse
from events.brokers.follower import RecordFollower
from events.brokers.native_follower import NativeRecordFollower
from events.brokers.readers import open_reader
from events.brokers.records import Reader, Record, StreamRewound
from events.subscribe.continuity import Report
from events.subscribe.follower import AnyReport
from events.subscribe.gathering import Worker
from events.subscribe.native_continuity import NativeReport

_TURN_SECONDS = 0.2
"""A wait for records, after which it is looked whether to go on waiting."""
_PAUSE_SECONDS = 0.2
"""Before a broker that was not there is tried again."""


class Follows(Protocol[AnyReport]):
    """Makes reports of one worker's records."""

    @property
    def waiting(self) -> bool:
        """Whether it has no state yet, or none that what it hears fits to."""

    @property
    def malformed(self) -> int:
        """States that could not be read."""

    def take(self, record: Record) -> list[AnyReport]:
        """What is to be reported once this record is known."""


class StreamSubscriber(ABC, Generic[AnyReport]):
    """Follows the workers of one stream.

    Args:
        url: the broker and its stream, as `events.brokers.address` has it; ``worker=NAME`` follows that one only.

    Raises BrokerURLError; BrokerError where the client's package is missing. `poll` raises BrokerError where the broker
    refuses us; one that is not there is waited for.
    """

    def __init__(self, url: str) -> None:
        address, worker = parse(url)
        if worker is not None and not NAME.fullmatch(worker):
            raise BrokerURLError(str(address), "a worker's name has letters, digits, _ and - only")
        self._address = address
        self._reader: Reader | None = open_reader(address, worker)
        self._followers: dict[Worker, Follows[AnyReport]] = {}
        self._retry_at = 0.0
        self._malformed = 0
        """Of followers that were replaced."""
        self.unavailable: str | None = None
        """Why the broker cannot be read at present; None: it can."""

    @abstractmethod
    def _follower(self, worker: str) -> Follows[AnyReport]:
        """A new one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; may be called twice."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __iter__(self) -> Iterator[tuple[Worker, AnyReport]]:
        """Reports as they come, until it is closed."""
        while self._reader is not None:
            yield from self.poll()

    @property
    def endpoint(self) -> BrokerAddress:
        """The broker and its stream; its text has neither user nor password."""
        return self._address

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that were heard."""
        return tuple(self._followers)

    @property
    def waiting(self) -> tuple[Worker, ...]:
        """Those that were heard, but of which there was no whole state yet."""
        return tuple(worker for worker, follower in self._followers.items() if follower.waiting)

    @property
    def malformed(self) -> int:
        """States in the stream that could not be read: not what a feed writes."""
        return self._malformed + sum(follower.malformed for follower in self._followers.values())

    def poll(self, timeout_ms: int | None = None) -> list[tuple[Worker, AnyReport]]:
        """Wait until there is something to report, and return it, of each worker in order; empty after `timeout_ms`."""
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            left = _TURN_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            reports = self._read(min(left, _TURN_SECONDS))
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports

    def _read(self, seconds: float) -> list[tuple[Worker, AnyReport]]:
        assert self._reader is not None, "it is closed"
        pause = self._retry_at - time.monotonic()
        if pause > 0:
            time.sleep(min(pause, seconds))
            if pause > seconds:
                return []
        reports: list[tuple[Worker, AnyReport]] = []
        try:
            for name, record in self._reader.read(seconds):
                worker = Worker(name)
                if worker not in self._followers:
                    self._followers[worker] = self._follower(name)
                follower = self._followers[worker]
                reports += ((worker, report) for report in follower.take(record))
            self.unavailable = None
        except BrokerUnavailable as error:
            self.unavailable = error.reason
            self._retry_at = time.monotonic() + _PAUSE_SECONDS
        except StreamRewound as rewound:
            # What is read again is old, and does not fit to what was heard: a state has to come first.
            for worker, follower in self._followers.items():
                if rewound.workers is None or worker.topic in rewound.workers:
                    self._malformed += follower.malformed
                    self._followers[worker] = self._follower(worker.topic)
        return reports


class BrokerSubscriber(StreamSubscriber[Report]):
    """Follows workers that feed routers, in any format that these read; made with the same arguments."""

    def _follower(self, worker: str) -> RecordFollower:
        return RecordFollower(worker)


class NativeBrokerSubscriber(StreamSubscriber[NativeReport]):
    """Follows workers that tell all events of their caches (``format=native``, ``encoding=msgpack``)."""

    def _follower(self, worker: str) -> NativeRecordFollower:
        return NativeRecordFollower(worker)
