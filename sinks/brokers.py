"""``nats:``, ``redis:`` and ``kafka:`` feed routers by way of a broker (docs/how-to/brokers.md).

Each record is acknowledged before the next one goes out. An unavailable broker is retried for a while with the same
record, which it keeps once (`events.brokers.records`). Then `send` fails, and the feed publishes "cleared" and its
whole state next. So it does not matter if the failed record is in the stream after all.

Streams are trimmed, so a state must never be far back. In addition to the start and after failures, the state goes out
in pieces, between live batches: when as much was sent since the last one as that took, and at least every
`restate_seconds`. Records before the last complete state but one are then removed, if the broker lets each worker trim
its own; so a reader that is not far back never misses anything.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

import msgspec

from events.brokers.address import (
    NAME,
    PORTS,
    STREAM,
    AccessOptions,
    BrokerAddress,
    BrokerError,
    BrokerUnavailable,
)
from events.brokers.kafka import KafkaStream
from events.brokers.nats import NATSStream
from events.brokers.records import StreamRecord
from events.brokers.redis import NAMES, RedisStream
from events.types import WorkerSeen
from sinks.base import SinkContext, SinkError, SinkUnavailable, SinkURL
from sinks.router.feed import FeedBatch, FeedSnapshot, RouterFeed, in_batches
from sinks.router.options import FeedOptions, PayloadWriter, make_feed, writer_of

LEAST_RETAIN = 3
"""Minimum multiple of `restate` for which messages must be kept: for the state before, the one in progress, and a
margin."""


class BrokerOptions(FeedOptions, frozen=True, kw_only=True):
    """Options that all brokers have: those of feeds, and of `AccessOptions`."""

    worker: str | None = None
    max_batch: str = "512KiB"
    heartbeat: str = "5s"
    restate: str = "10min"
    timeout: str = "5s"
    password_file: str | None = None
    tls: bool = False
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None


def worker_of(url: SinkURL, options: BrokerOptions) -> str:
    """Return the feed's name for readers: by default this machine's, and the rank."""
    name = options.worker
    if name is None:
        name = socket.gethostname().partition(".")[0] + (f"-{options.rank}" if options.rank else "")
    if not NAME.fullmatch(name):
        raise url.error("a worker's name may contain letters, digits, _ and - only: set worker=")
    return name


def retain_seconds(url: SinkURL, options: RedisOptions | NATSOptions) -> float:
    """Return the time for which messages are kept. Raises SinkURLError if a live worker's state would expire."""
    retain, restate = url.quantity(options, "retain"), url.quantity(options, "restate")
    if retain < LEAST_RETAIN * restate:
        reason = (
            f"retain must be at least {LEAST_RETAIN} times restate, or a state expires before the next one is "
            "published"
        )
        raise url.error(f"bad option: {reason}")
    return retain


HEADER_BYTES = 4096
"""Upper bound of the bytes that brokers and headers add to a payload."""
MIN_BYTES = 8 << 20
"""Minimum number of bytes sent before the state is sent again, however small the state is."""
STATE_SLICE_SECONDS = 0.02
"""Time in seconds that the feed sends its state before it checks for live batches again."""
Result = TypeVar("Result")
_PAUSE_SECONDS = 0.1
"""Pause between two tries of the same record."""


class Stream(Protocol):
    """One worker's stream in a broker. Its errors are BrokerError: BrokerUnavailable if a retry may help."""

    name: str
    """The broker and the stream, for messages."""

    def open(self) -> int | None:
        """Connect. Return the number of the worker's last record there, if it can be known."""

    @property
    def max_payload(self) -> int:
        """Largest message that the broker accepts, in bytes."""

    def append(self, record: StreamRecord) -> str:
        """Append a record, once, also if called again with it after a failure; return its place."""

    def trim(self, place: str) -> None:
        """Remove this worker's records before `place`, if the broker can do that."""

    def keep_alive(self) -> None:
        """Do periodic work. Called every 10 ms."""

    def close(self) -> None:
        """Disconnect."""


@dataclass(frozen=True)
class BrokerSettings:
    """Checked settings of the transport."""

    piece_bytes: int = 512 << 10
    """Bound of batches and pieces of the state."""
    timeout_seconds: float = 5.0
    """Time for which a record is retried."""
    restate_seconds: float = 600.0
    min_bytes: int = MIN_BYTES
    writer: PayloadWriter = field(default_factory=PayloadWriter)


class BrokerTransport:
    """Writes a feed's batches and states to a stream."""

    subscribers = 0
    """The readers of a stream cannot be known."""

    def __init__(self, stream: Stream, settings: BrokerSettings) -> None:
        self.stream, self.settings = stream, settings
        self.clock: Callable[[], float] = time.monotonic
        """Clock by which the state is due again; tests replace it."""
        self.attempts = 0
        """Number of messages sent in pieces so far: states, and batches that were too large."""
        self._writer = settings.writer
        self._state: Iterator[StreamRecord] | None = None
        """The rest of the state being sent."""
        self._begin()

    def _begin(self) -> None:
        self._state = None
        self._kept: str | None = None
        """The first record kept: a whole state begins there."""
        self._state_at: str | None = None
        """Place where the state being sent begins."""
        self._state_bytes = self._bytes_since = 0
        self._restated_at = self.clock()

    def open(self, next_seq: int, worker: WorkerSeen | None = None) -> None:
        """Connect. Raises SinkUnavailable if the broker does not answer, SinkError if a retry would not help."""
        self._writer = self.settings.writer.for_worker(worker)
        self._begin()
        try:
            last = self.stream.open()
            self._refuse_misfit(last, next_seq)
        except BrokerError as error:
            self.stream.close()
            kind = SinkUnavailable if isinstance(error, BrokerUnavailable) else SinkError
            raise kind(str(error)) from None
        except BaseException:
            self.stream.close()
            raise

    def send(self, batch: FeedBatch) -> None:
        """Append a batch. Raises SinkError."""
        payload = self._writer.encode(batch.changes, batch.ts, batch.groups)
        place = self._append_all(batch.seq, payload)
        self._bytes_since += len(payload)
        if self._kept is None:
            self._kept = place  # a feed begins with its whole state

    def tick(self, take_state: Callable[[], FeedSnapshot]) -> None:
        """Send a part of the state, if it is due."""
        self.stream.keep_alive()
        try:
            if self._state is None and self._is_due():
                self.attempts += 1
                state = take_state()
                self._state = _records(state.seq, self._payloads(state), self.attempts)
            if self._state is not None:
                self._send_pieces(self._state)
        except BaseException:
            self._state = None  # readers cannot use their part of it
            raise

    def close(self) -> None:
        """Disconnect: all that was sent is there."""
        self.stream.close()

    def _refuse_misfit(self, last: int | None, next_seq: int) -> None:
        where, settings = self.stream.name, self.settings
        if last is not None and last >= next_seq:
            raise SinkError(
                f"{where} already has batches of this worker up to {last}, but the feed would start at "
                f"{next_seq}: set state= to the file with its numbers, omit first=, or set another worker="
            )
        if settings.piece_bytes + HEADER_BYTES > self.stream.max_payload:
            raise SinkError(
                f"{where} accepts messages of at most {self.stream.max_payload} bytes: set max_batch= to "
                f"{max(0, self.stream.max_payload - HEADER_BYTES)}B or less, or raise its limit"
            )

    def _append(self, record: StreamRecord) -> str:
        return self._until_done(lambda: self.stream.append(record))

    def _append_all(self, seq: int, payload: bytes) -> str:
        """Append a batch, in pieces if it is too large and may be cut; return the place of the first one."""
        pieces = self._cut(payload)
        if len(pieces) == 1:
            return self._append(StreamRecord(seq, payload))
        self.attempts += 1
        places = [self._append(record) for record in _records(seq, pieces, self.attempts)]
        return places[0]

    def _cut(self, payload: bytes) -> list[bytes]:
        size = self.settings.piece_bytes
        if not self._writer.is_cut or len(payload) <= size:
            return [payload]
        return [payload[at : at + size] for at in range(0, len(payload), size)]

    def _until_done(self, work: Callable[[], Result]) -> Result:
        deadline = time.monotonic() + self.settings.timeout_seconds
        while True:
            try:
                return work()
            except BrokerUnavailable as error:
                if time.monotonic() + _PAUSE_SECONDS >= deadline:
                    raise SinkError(str(error)) from None
                time.sleep(_PAUSE_SECONDS)
            except BrokerError as error:
                raise SinkError(str(error)) from None

    # --- the state ----------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        if self._kept is None:
            return False
        late = self.clock() - self._restated_at >= self.settings.restate_seconds
        return late or self._bytes_since > max(self._state_bytes, self.settings.min_bytes)

    def _payloads(self, state: FeedSnapshot) -> Iterator[bytes]:
        piece_bytes = self.settings.piece_bytes // self._writer.overhead
        for changes in in_batches(state.changes, piece_bytes):
            yield from self._cut(self._writer.encode(changes, state.ts, state.groups))

    def _send_pieces(self, state: Iterator[StreamRecord]) -> None:
        """Send pieces for a limited time, and at least one: batches sent from then on are not in the state."""
        deadline = time.perf_counter() + STATE_SLICE_SECONDS
        for record in state:
            place = self._append(record)
            if record.piece == 0:
                self._state_at, self._state_bytes, self._bytes_since = place, 0, 0
            self._state_bytes += len(record.payload)
            if record.last:
                self._end_state()
            elif time.perf_counter() >= deadline:
                return

    def _end_state(self) -> None:
        self._state = None
        self._restated_at = self.clock()
        kept, self._kept = self._kept, self._state_at
        assert kept is not None
        self._until_done(lambda: self.stream.trim(kept))


def _records(seq: int, payloads: Iterable[bytes], attempt: int) -> Iterator[StreamRecord]:
    """Yield the records of a message in pieces. A piece is known to be the last only after it."""
    numbered = enumerate(payloads)
    number, payload = next(numbered)
    for following, piece in numbered:
        yield StreamRecord(seq, payload, number, attempt)
        number, payload = following, piece
    yield StreamRecord(seq, payload, number, attempt, last=True)


class RedisOptions(BrokerOptions, frozen=True, kw_only=True):
    """Options of a ``redis:`` URL."""

    retain: str = "60min"


class NATSOptions(BrokerOptions, frozen=True, kw_only=True):
    """Options of a ``nats:`` URL."""

    retain: str = "60min"
    max_bytes: str = "0"
    replicas: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1


_OPTIONS: dict[str, type[BrokerOptions]] = {
    "kafka": BrokerOptions,
    "nats": NATSOptions,
    "redis": RedisOptions,
}


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """Create the sink for the URL of a broker."""
    options = url.read_options(_OPTIONS[url.scheme])
    worker = worker_of(url, options)
    try:
        stream = _stream(url, options, worker)
    except BrokerError as error:
        raise url.error(error.reason) from None
    writer = writer_of(url, options, context)
    settings = BrokerSettings(
        piece_bytes=int(url.quantity(options, "max_batch")),
        timeout_seconds=url.quantity(options, "timeout"),
        restate_seconds=url.quantity(options, "restate"),
        writer=writer,
    )
    transport = BrokerTransport(stream, settings)
    numbers_file = f"feed-{url.scheme}-{url.path.strip('/') or STREAM}-{worker}.numbers"
    return make_feed(url, options, context, transport, numbers_file, overhead=writer.overhead)


create.takes_login = True  # type: ignore[attr-defined]


def _stream(url: SinkURL, options: BrokerOptions, worker: str) -> Stream:
    address = BrokerAddress(
        url.scheme,
        url.host or "127.0.0.1",
        url.port or PORTS[url.scheme],
        url.path.strip("/") or STREAM,
        url.user,
        url.password,
        msgspec.convert(options, AccessOptions, from_attributes=True),
    )
    if isinstance(options, NATSOptions):
        return NATSStream(
            address,
            worker,
            retain_seconds=retain_seconds(url, options),
            max_bytes=int(url.quantity(options, "max_bytes")),
            replicas=options.replicas,
        )
    if isinstance(options, RedisOptions):
        if worker == NAMES:
            raise url.error(f"{NAMES} is the key of the list of workers: set another worker=")
        return RedisStream(address, worker, retain_seconds=retain_seconds(url, options))
    return KafkaStream(address, worker, timeout_seconds=url.quantity(options, "timeout"))
