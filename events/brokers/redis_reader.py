"""Reads the records of workers from streams in Redis."""

from __future__ import annotations

import time
from typing import Any, cast

from events.brokers.address import BrokerAddress
from events.brokers.records import Record, StreamRewound, parse_record
from events.brokers.redis_session import NAMES, PAYLOAD, SECONDS, TAG, RedisSession, WrongType
from events.diagnostics import get_logger
from events.errors import EventDecodeError

_AT_ONCE = 100
"""Entries of each worker in one answer."""
_LOOK_SECONDS = 0.5
"""How often it is looked for new workers, and whether the old entries are still there."""

_BEGINNING = b"0-0"
_log = get_logger(__name__)


class RedisReader:
    """Reads all workers, or one. It keeps its place in each stream itself."""

    def __init__(self, address: BrokerAddress, worker: str | None) -> None:
        self._session = RedisSession(address)
        self._only = worker
        self._places: dict[str, bytes] = {}
        """The id of the last entry that was read of each worker."""
        self._looked_at = float("-inf")
        self._set_aside: set[str] = set()
        """Workers of whom it was said that their keys are no streams."""

    def read(self, seconds: float) -> list[tuple[str, Record]]:
        """The next records."""
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
        """Find new workers, and those whose stream is another one. Raises StreamRewound."""
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
        """The id of a stream's last entry, empty if it has none; None: one that cannot be read would fail all."""
        key = self._session.key(name)
        try:
            last = cast("Any", self._session.run(lambda client: client.xrevrange(key, count=1)))
        except WrongType:
            if name not in self._set_aside:
                self._set_aside.add(name)
                _log.warning(
                    "worker_set_aside", key=key.decode(), reason="it is no stream: somebody else's key"
                )
            return None
        return cast("bytes", last[0][0]) if last else b""

    def _records(self, name: str, entries: list[Any]) -> list[tuple[str, Record]]:
        records = []
        for place, fields in entries:
            self._places[name] = place
            try:
                records.append((name, parse_record(fields.get(TAG), fields.get(PAYLOAD, b""))))
            except EventDecodeError:
                continue  # not the feed's
        return records


def number_of(place: bytes) -> tuple[int, int]:
    """An entry's id as numbers that can be compared."""
    first, _, second = place.partition(b"-")
    return int(first), int(second or b"0")


def _flat(entries: Any) -> list[Any]:
    """The newer protocol of the server has a list more around them."""
    return entries[0] if entries and isinstance(entries[0], list) else entries
