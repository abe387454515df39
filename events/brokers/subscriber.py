"""A subscriber to the feeds of all workers in a broker's stream, or of one of them.

::

    with BrokerSubscriber("nats://127.0.0.1:4222/kvcache") as subscriber:
        for worker, report in subscriber:    # Received, Missed, Restated or Restarted (events.subscribe.continuity)
            indexes[worker].fold(report)     # events.subscribe.index

A reader that begins anywhere, or has missed records (old ones are trimmed), needs a whole state. The stream itself has
it, again and again, in pieces (`events.brokers.records`), and begins with it after every failure. A follower without a
state ignores batches until a state begins; from its first piece on it holds them, since the state may not include them,
and reports them after its last piece. So the place where it began, or trimming, makes it late, never wrong.

After a lost connection it reconnects, and reads from where it broke off. A subscriber belongs to one thread, on which
no asyncio loop runs.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Generic, Protocol

from events.brokers.address import NAME, BrokerUnavailable, BrokerURLError, parse
from events.brokers.records import Reader, StreamRecord, StreamRewound
from events.closing import Closing
from events.errors import EventDecodeError
from events.formats.vllm import Message, decode_batch, join_batches
from events.subscribe.continuity import (
    HELD_MAX,
    AnyReport,
    Continuity,
    NativeContinuity,
    NativeReport,
    Report,
    Restarted,
    begins_with_clear,
)
from events.subscribe.fan_in import Worker

_READERS = {
    "kafka": ("events.brokers.kafka", "KafkaReader"),
    "nats": ("events.brokers.nats", "NATSReader"),
    "redis": ("events.brokers.redis", "RedisReader"),
}


class Pieces:
    """Payloads in pieces, at most `at_once` at a time: older ones were never completed.

    `held` are the batches since the first piece of the oldest of them.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._pieces: dict[tuple[int, int], list[bytes]] = {}
        """Received pieces by the numbers of batch and state, oldest payload first."""
        self.held: list[Message] = []

    def add(self, record: StreamRecord) -> list[bytes] | None:
        """Return all pieces, if this is the last one; None: others are missing."""
        of = record.seq, record.attempt
        if record.piece == 0:
            self._pieces[of] = []
            if len(self._pieces) > self._at_once:
                del self._pieces[next(iter(self._pieces))]
            if len(self._pieces) == 1:
                self.held.clear()
        pieces = self._pieces.get(of)
        if pieces is None or record.piece != len(pieces):
            self._pieces.pop(of, None)
            return None
        pieces.append(record.payload)
        return self._pieces.pop(of) if record.last else None

    def hold(self, message: Message) -> None:
        """Hold a batch, while pieces are missing that it may follow."""
        if self._pieces and len(self.held) < HELD_MAX:
            self.held.append(message)
        else:
            self.clear()  # A payload begun so long ago is never completed.

    def clear(self) -> None:
        """Drop incomplete payloads."""
        self._pieces.clear()
        self.held.clear()


class RecordFollower:
    """Follows one worker."""

    def __init__(self, worker: str) -> None:
        self._topic = worker.encode()
        self._pieces = Pieces(at_once=1)
        """Pieces of a state."""
        self.malformed = 0
        """Unreadable states; the next one is waited for."""
        self._begin()

    @property
    def waiting(self) -> bool:
        """True if it has no state yet, or none that fits the records received."""
        return self._asked is not None

    def take(self, record: StreamRecord) -> list[Report]:
        """Return the reports that follow from this record."""
        reports: list[Report] = []
        if record.piece is not None:
            if self._asked is not None and (pieces := self._pieces.add(record)) is not None:
                self._answer(self._numbered(record.seq, pieces, self._asked))
        elif self._asked is None:
            self._continuity.live(self._message(record.seq, record.payload))
        else:
            reports = self._take_unfitting(self._message(record.seq, record.payload))
        self._look_for_request()
        return reports + self._continuity.take()

    def _begin(self) -> None:
        self._continuity = Continuity(0, can_ask=True)
        self._asked: int | None = None
        """The first batch wanted, while a state is waited for."""
        self._look_for_request()

    def _look_for_request(self) -> None:
        start = self._continuity.take_request()
        if start is not None:
            self._asked = start
            self._pieces.clear()

    def _message(self, seq: int, payload: bytes) -> Message:
        return Message(self._topic, seq, payload)

    def _take_unfitting(self, message: Message) -> list[Report]:
        assert self._asked is not None
        if begins_with_clear(message):
            # It is a whole state itself, or the start of one that continues in the batches after it.
            reports: list[Report] = []
            if message.seq < self._asked:
                reports = [Restarted(self._asked - 1, message.seq)]
                self._begin()
            self._answer([message])
            return reports
        self._pieces.hold(message)
        return []

    def _numbered(self, seq: int, pieces: list[bytes], wanted: int) -> list[Message]:
        """Number the pieces up to the state's number, none of them below the one wanted."""
        room = seq + 1 - wanted
        if room <= 0:
            return []  # a state from before the batches received
        each = -(-len(pieces) // room)
        try:
            payloads = [self._joined(pieces[at : at + each]) for at in range(0, len(pieces), each)]
        except (EventDecodeError, IndexError, struct.error):
            # Not written by a feed: whole batches of this very form. The next state is waited for.
            self.malformed += 1
            return []
        return [self._message(seq + 1 - len(payloads) + at, payload) for at, payload in enumerate(payloads)]

    def _joined(self, pieces: list[bytes]) -> bytes:
        joined = pieces[0] if len(pieces) == 1 else join_batches(pieces, decode_batch(pieces[0]).rank or 0)
        decode_batch(joined)
        return joined

    def _answer(self, messages: list[Message]) -> None:
        held = [*self._pieces.held]
        self._pieces.clear()
        if messages:
            self._asked = None
            for message in messages:
                self._continuity.answer(message)
            self._continuity.end_of_replay()
            for message in held:
                self._continuity.live(message)


class NativeRecordFollower:
    """Follows one worker."""

    malformed = 0
    """Unreadable batches are reported as missed."""

    def __init__(self, worker: str) -> None:
        self._topic = worker.encode()
        self._continuity = NativeContinuity()
        self._pieces = Pieces(at_once=2)
        """Pieces of batches: of a state, and of one that follows it."""

    @property
    def waiting(self) -> bool:
        """True if it has no state yet, or none that fits the records received."""
        return self._continuity.waiting

    def take(self, record: StreamRecord) -> list[NativeReport]:
        """Return the reports that follow from this record."""
        pieces: list[bytes] | None = [record.payload]
        if record.piece is not None:
            # A state known already, that of the last batch, is skipped.
            is_known = not self.waiting and record.seq + 1 == self._continuity.next
            pieces = None if is_known and record.piece == 0 else self._pieces.add(record)
        if pieces is not None:
            message = Message(self._topic, record.seq, b"".join(pieces))
            self._continuity.live(message)
            if record.piece is not None and not self.waiting:
                # Batches known already are skipped.
                for each in self._pieces.held:
                    self._continuity.live(each)
            self._pieces.hold(message)
        return self._continuity.take()


_TURN_SECONDS = 0.2
"""Time of one wait for records, after which stopping is checked."""
_PAUSE_SECONDS = 0.2
"""Pause before an unavailable broker is retried."""


class RecordFollowerProtocol(Protocol[AnyReport]):
    """Turns one worker's records into reports."""

    @property
    def waiting(self) -> bool:
        """True if it has no state yet, or none that fits the records received."""

    @property
    def malformed(self) -> int:
        """Unreadable states."""

    def take(self, record: StreamRecord) -> list[AnyReport]:
        """Return the reports that follow from this record."""


class StreamSubscriber(Closing, Generic[AnyReport]):
    """Follows the workers of one stream.

    Args:
        url: the broker and its stream, as `events.brokers.address` has it; ``worker=NAME`` follows that one only.

    Raises BrokerURLError; BrokerError if the client's package is missing. `poll` raises BrokerError if the broker
    refuses; one that is unavailable is waited for.
    """

    _follower: Callable[[str], RecordFollowerProtocol[AnyReport]]
    """Makes the follower of a worker."""

    def __init__(self, url: str) -> None:
        address = parse(url)
        worker = address.access.worker
        if worker is not None and not NAME.fullmatch(worker):
            raise BrokerURLError(str(address), "a worker's name may contain letters, digits, _ and - only")
        self.endpoint = address
        """The broker and its stream; its text has neither user nor password."""
        module, name = _READERS[address.scheme]
        self._reader: Reader | None = getattr(import_module(module), name)(address, worker)
        self._followers: dict[Worker, RecordFollowerProtocol[AnyReport]] = {}
        self._retry_at = 0.0
        self._malformed = 0
        """Unreadable states of followers that were replaced."""
        self.unavailable: str | None = None
        """The reason why the broker cannot be read at present; None: it can."""

    def close(self) -> None:
        """Disconnect; may be called twice."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __iter__(self) -> Iterator[tuple[Worker, AnyReport]]:
        """Yield reports as they come, until it is closed."""
        while self._reader is not None:
            yield from self.poll()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers with records so far."""
        return tuple(self._followers)

    @property
    def waiting(self) -> tuple[Worker, ...]:
        """Workers with records but without a whole state so far."""
        return tuple(worker for worker, follower in self._followers.items() if follower.waiting)

    @property
    def malformed(self) -> int:
        """Unreadable states in the stream: not written by a feed."""
        return self._malformed + sum(follower.malformed for follower in self._followers.values())

    def poll(self, timeout_ms: int | None = None) -> list[tuple[Worker, AnyReport]]:
        """Wait for reports, and return them, each worker's in order; empty after `timeout_ms`."""
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            left = _TURN_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            reports = self._read(min(left, _TURN_SECONDS))
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports

    def _read(self, seconds: float) -> list[tuple[Worker, AnyReport]]:
        assert self._reader is not None, "the subscriber is closed"
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
            # Records read again are old, and do not fit those received: a state has to come first.
            for worker, follower in self._followers.items():
                if rewound.workers is None or worker.topic in rewound.workers:
                    self._malformed += follower.malformed
                    self._followers[worker] = self._follower(worker.topic)
        return reports


class BrokerSubscriber(StreamSubscriber[Report]):
    """Follows workers that feed routers, in any of their formats; made with the same arguments."""

    _follower = RecordFollower


class NativeBrokerSubscriber(StreamSubscriber[NativeReport]):
    """Follows workers that publish all events of their caches (``format=native``)."""

    _follower = NativeRecordFollower
