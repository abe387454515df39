"""One worker's stream in Redis, or in a server like it.

The ids of entries are the numbers of batches; those of pieces lie between them. The server takes an entry only
behind the one that this worker has written last, which a script compares: so an entry is there once, and a server
that has lost entries, and a second process that writes as the same worker, are noticed with the next one.
"""

from __future__ import annotations

from typing import Any, cast

from events.brokers.address import BrokerAddress, BrokerError, BrokerUnavailable
from events.brokers.records import Record, parse_record
from events.brokers.redis_reader import number_of
from events.brokers.redis_session import NAMES, PAYLOAD, TAG, RedisSession
from events.errors import EventDecodeError

MAX_PAYLOAD = 512 << 20
"""What the server takes as one value."""
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
"""Adds an entry behind another one; returns whether it is there now, or was already, and the last id that is."""


class RedisStream:
    """Writes as one worker. Its stream is removed by the server when nothing was added for `retain_seconds`."""

    max_payload = MAX_PAYLOAD

    def __init__(self, address: BrokerAddress, worker: str, *, retain_seconds: float = 3600.0) -> None:
        self.name = str(address)
        self._worker = worker
        self._session = RedisSession(address)
        self._key, self._workers = self._session.key(worker), self._session.key(NAMES)
        self._retain = int(retain_seconds * 1000)
        self._last = self._tried = _NOTHING
        """The id of the last entry that is there, and of the last one that was sent; it may be there."""

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

    def append(self, record: Record) -> str:
        """Add an entry."""
        if not self._session.connected:
            self._session.connect()
        place, found = self._add(record)
        if place is None and found == self._tried:
            # What was sent last is there, though its answer was lost.
            self._last = found
            place, found = self._add(record)
        if place is None:
            self._last = self._tried = found
            reason = (
                f"it does not have the last entry of worker {self._worker}: it has lost it, or another process "
                "writes as the same worker (give each its own with worker=)"
            )
            raise BrokerError(self.name, reason)
        self._last = self._tried = place
        return place.decode()

    def trim(self, place: str) -> None:
        """Remove the entries before that one."""
        if not self._session.connected:
            self._session.connect()
        self._session.run(lambda client: client.xtrim(self._key, minid=place, approximate=False))

    def breathe(self) -> None:
        """The server asks nothing of us."""

    def close(self) -> None:
        """Disconnect."""
        self._session.close()

    def _place(self, record: Record) -> bytes:
        """The batch's number; of pieces a number more behind it than what stands there."""
        if record.piece is None:
            return b"%d-0" % record.seq
        last, inner = number_of(self._last) if self._last else (0, 0)
        first = max(last, record.seq)
        return b"%d-%d" % (first, inner + 1 if first == last else 1)

    def _add(self, record: Record) -> tuple[bytes | None, bytes]:
        """Returns the entry's id (None: it could not be added), and the last id that is there."""
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
