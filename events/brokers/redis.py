"""Redis Streams as a broker: ``STREAM:WORKER`` is the stream of each worker, ``STREAM:workers`` the set of their names.

The ids of entries are the numbers of batches; those of pieces lie between them. The server takes an entry only after
the one that this worker has written last, as checked by a script: so an entry is there once, and a server that has lost
entries, and a second process that writes as the same worker, are noticed with the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from events.brokers.address import REFUSED, BrokerAddress, BrokerError, BrokerUnavailable, require_client
from events.brokers.records import StreamRecord, StreamRewound, parse_record, records_of
from events.diagnostics import get_logger
from events.errors import EventDecodeError

if TYPE_CHECKING:
    from redis import Redis


TAG, PAYLOAD = b"record", b"payload"
"""The fields of an entry."""
NAMES = "workers"
"""Name of the set of all workers: no worker can be called so."""
SECONDS = 2.0
"""Time limit of the server's answer."""
Result = TypeVar("Result")


class RedisSession:
    """A connection made on demand. All its errors are BrokerError."""

    def __init__(self, address: BrokerAddress) -> None:
        require_client(address, "redis")
        self._address = address
        self._client: Redis | None = None

    @property
    def connected(self) -> bool:
        """True if there has been no error since `connect`."""
        return self._client is not None

    def key(self, name: str) -> bytes:
        """Return the key of a worker's stream, or of another object."""
        return f"{self._address.stream}:{name}".encode()

    def connect(self) -> None:
        """Connect anew. Raises BrokerUnavailable, and BrokerError if the server refuses."""
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.close()
        address, access = self._address, self._address.access
        address.tls_context()  # raises, naming the files that are wrong
        tls: dict[str, Any] = {}
        if access.tls:
            tls = {
                "ssl_ca_certs": access.cafile,
                "ssl_certfile": access.certfile,
                "ssl_keyfile": access.keyfile,
            }
        self._client = Redis(
            host=address.host,
            port=address.port,
            username=address.user,
            password=address.secret,
            ssl=access.tls,
            socket_timeout=SECONDS,
            socket_connect_timeout=SECONDS,
            retry=Retry(NoBackoff(), 0),  # the caller retries, knowing what was lost
            **tls,
        )
        self.run(lambda client: client.ping())

    def run(self, work: Callable[[Redis], Result]) -> Result:
        """Run `work`. Raises BrokerUnavailable for errors of the connection, or of the server's state."""
        from redis import exceptions

        where = str(self._address)
        assert self._client is not None
        try:
            return work(self._client)
        except (exceptions.AuthenticationError, exceptions.NoPermissionError):
            self.close()
            raise BrokerError(where, REFUSED) from None
        except exceptions.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                # The connection stays.
                raise BrokerUnavailable(where, "refused: WRONGTYPE, the key is not a stream") from None
            self.close()
            # The server's message may quote the data sent; its first word is the kind of error.
            is_plain = type(error) is exceptions.ResponseError
            kind = str(error).partition(" ")[0] if is_plain else type(error).__name__
            if kind in ("NOAUTH", "WRONGPASS", "NOPERM"):
                raise BrokerError(where, REFUSED) from None
            raise BrokerUnavailable(where, f"refused: {kind}") from None
        except (exceptions.RedisError, OSError) as error:
            self.close()
            raise BrokerUnavailable(where, _why(error)) from None

    def close(self) -> None:
        """Disconnect; may be called twice."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _why(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return "no answer"


_AT_ONCE = 100
"""Entries of each worker in one answer."""
_LOOK_SECONDS = 0.5
"""Interval of the check for new workers, and for the old entries."""

_BEGINNING = b"0-0"
_log = get_logger(__name__)


class RedisReader:
    """Reads all workers, or one. It keeps its place in each stream itself."""

    def __init__(self, address: BrokerAddress, worker: str | None) -> None:
        self._session = RedisSession(address)
        self._only = worker
        self._places: dict[str, bytes] = {}
        """The id of the last entry read of each worker."""
        self._looked_at = float("-inf")
        self._set_aside: set[str] = set()
        """Workers reported to have keys that are no streams."""

    def read(self, seconds: float) -> list[tuple[str, StreamRecord]]:
        """Return the next records."""
        if not self._session.connected:
            self._session.connect()
            self._looked_at = float("-inf")
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._look()
        if not self._places:
            time.sleep(seconds)
            return []
        wait = max(1, int(min(seconds, SECONDS / 2) * 1000))
        names = {self._session.key(name): name for name in self._places}
        streams = {key: self._places[name] for key, name in names.items()}
        answer = self._session.run(
            lambda client: cast("Any", client.xread(cast("Any", streams), count=_AT_ONCE, block=wait))
        )
        found = answer.items() if isinstance(answer, dict) else answer or ()
        return [record for key, entries in found for record in self._records(names[key], _flat(entries))]

    def close(self) -> None:
        """Disconnect."""
        self._session.close()

    def _look(self) -> None:
        """Find new workers, and those with a new stream. Raises StreamRewound."""
        self._looked_at = time.monotonic()
        names = {self._only} if self._only is not None else self._workers()
        lost = []
        for name in names | self._places.keys():
            last = self._last_place(name)
            place = self._places.setdefault(name, _BEGINNING)
            if last is None:
                del self._places[name]
            elif place != _BEGINNING and (not last or number_of(last) < number_of(place)):
                # Entries never go down: it is another stream.
                self._places[name] = _BEGINNING
                lost.append(name)
        if lost:
            raise StreamRewound(frozenset(lost))

    def _workers(self) -> set[str]:
        key = self._session.key(NAMES)
        members = cast("set[bytes]", self._session.run(lambda client: client.smembers(key)))
        return {member.decode(errors="replace") for member in members}

    def _last_place(self, name: str) -> bytes | None:
        """Return a stream's last id, empty if it has none; None: an unreadable key would fail all reads."""
        key = self._session.key(name)
        try:
            last = cast("Any", self._session.run(lambda client: client.xrevrange(key, count=1)))
        except BrokerUnavailable:
            if not self._session.connected:
                raise
            if name not in self._set_aside:
                self._set_aside.add(name)
                _log.warning(
                    "worker_set_aside",
                    key=key.decode(),
                    reason="the key is not a stream; something else uses it",
                )
            return None
        return cast("bytes", last[0][0]) if last else b""

    def _records(self, name: str, entries: list[Any]) -> list[tuple[str, StreamRecord]]:
        records: list[tuple[str, StreamRecord]] = []
        for place, fields in entries:
            self._places[name] = place
            records += records_of(name, fields.get(TAG), fields.get(PAYLOAD, b""))
        return records


def number_of(place: bytes) -> tuple[int, int]:
    """Return an entry's id as numbers that can be compared."""
    first, _, second = place.partition(b"-")
    return int(first), int(second or b"0")


def _flat(entries: Any) -> list[Any]:
    """Flatten the entries: the server's newer protocol has one more list around them."""
    return entries[0] if entries and isinstance(entries[0], list) else entries


MAX_PAYLOAD = 512 << 20
"""Largest value that the server accepts."""
_NOTHING = b""
_SCRIPT = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local id = last and last[1] or ''
if id == ARGV[2] and last[2][2] == ARGV[4] then return {1, id} end
if id ~= ARGV[1] then return {0, id} end
redis.call('SADD', KEYS[2], ARGV[3])
id = redis.call('XADD', KEYS[1], ARGV[2], 'record', ARGV[4], 'payload', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return {1, id}
"""
"""Adds an entry after another one; returns if it is there now, or was already, and the last id there."""


class RedisStream:
    """Writes as one worker. The server removes its stream after `retain_seconds` without new entries."""

    max_payload = MAX_PAYLOAD

    def __init__(self, address: BrokerAddress, worker: str, *, retain_seconds: float = 3600.0) -> None:
        self.name = str(address)
        self._worker = worker
        self._session = RedisSession(address)
        self._key, self._workers = self._session.key(worker), self._session.key(NAMES)
        self._retain = int(retain_seconds * 1000)
        self._last = self._tried = _NOTHING
        """The id of the last entry there, and of the last one sent; it may be there."""

    def open(self) -> int | None:
        """Connect, and find our last entry."""
        self._session.connect()
        last = cast("Any", self._session.run(lambda client: client.xrevrange(self._key, count=1)))
        self._last = self._tried = last[0][0] if last else _NOTHING
        if not last:
            return None
        try:
            return parse_record(last[0][1].get(TAG), last[0][1].get(PAYLOAD, b"")).seq
        except EventDecodeError:
            raise BrokerError(self.name, f"the key {self._key.decode()} holds something else") from None

    def append(self, record: StreamRecord) -> str:
        """Add an entry."""
        if not self._session.connected:
            self._session.connect()
        place, found = self._add(record)
        if place is None and found == self._tried:
            # The entry sent last is there, though its answer was lost.
            self._last = found
            place, found = self._add(record)
        if place is None:
            self._last = self._tried = found
            reason = (
                f"the last entry of worker {self._worker} is missing: the server has lost it, or another "
                "process writes as the same worker (give each its own with worker=)"
            )
            raise BrokerError(self.name, reason)
        self._last = self._tried = place
        return place.decode()

    def trim(self, place: str) -> None:
        """Remove the entries before `place`."""
        if not self._session.connected:
            self._session.connect()
        self._session.run(lambda client: client.xtrim(self._key, minid=place, approximate=False))

    def keep_alive(self) -> None:
        """Do nothing: the server needs no answers."""

    def close(self) -> None:
        """Disconnect."""
        self._session.close()

    def _place(self, record: StreamRecord) -> bytes:
        """Return the batch's number; for pieces a number after it, above the last one there."""
        if record.piece is None:
            return b"%d-0" % record.seq
        last, inner = number_of(self._last) if self._last else (0, 0)
        first = max(last, record.seq)
        return b"%d-%d" % (first, inner + 1 if first == last else 1)

    def _add(self, record: StreamRecord) -> tuple[bytes | None, bytes]:
        """Return the entry's id (None: it could not be added), and the last id there."""
        place = self._place(record)
        arguments = [self._last, place, self._worker, record.tag, record.payload, self._retain]
        try:
            added, found = self._session.run(
                lambda client: cast(
                    "Any", client.eval(_SCRIPT, 2, self._key, self._workers, *cast("Any", arguments))
                )
            )
        except BrokerUnavailable:
            self._tried = place
            raise
        return (place if added else None), found
