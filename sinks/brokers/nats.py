"""One worker's subject in a stream of NATS JetStream.

Each message has an id, by which the server drops one that it has (`Nats-Msg-Id`, within two minutes), and the place
of the worker's message before it, without which the server does not take it: so a server that has lost what it
acknowledged, and a second process that publishes as the same worker, are noticed with the next message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from events.brokers.address import BrokerAddress, BrokerError, BrokerUnavailable
from events.brokers.nats_reader import TAG
from events.brokers.nats_session import NATSSession
from events.brokers.records import Record, parse_record
from events.errors import EventDecodeError

if TYPE_CHECKING:
    from nats.js.api import RawStreamMsg

_ASK_SECONDS = 2.0
"""What the server has to answer within."""
_REMEMBER_SECONDS = 120.0
"""How long the server knows the ids of messages."""
_ID = "Nats-Msg-Id"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_WRONG_LAST_SEQUENCE = 10071


class NATSStream:
    """Publishes as one worker.

    The stream is made if there is none: kept in files, `replicas` times, its messages for `retain_seconds`, and at most
    `max_bytes` of them (0: any number).
    """

    def __init__(
        self,
        address: BrokerAddress,
        worker: str,
        *,
        retain_seconds: float = 3600.0,
        max_bytes: int = 0,
        replicas: int = 1,
    ) -> None:
        self.name = str(address)
        self._stream, self._worker = address.stream, worker
        self._subject = f"{address.stream}.{worker}"
        self._session = NATSSession(address)
        self._retain, self._max_bytes, self._replicas = retain_seconds, max_bytes, replicas
        self._last = 0
        """Where in the stream our last message stands; 0: there is none."""
        self._tried: str | None = None
        """The id of the last message that was sent; it may be there."""

    @property
    def max_payload(self) -> int:
        """What the server takes in one message."""
        return self._session.max_payload

    def open(self) -> int | None:
        """Connect, make the stream where there is none, and find our last message."""
        self._connect()
        self._tried = None
        last = self._last_message()
        self._last = 0 if last is None or last.seq is None else last.seq
        if last is None:
            return None
        try:
            return parse_record((last.headers or {}).get(TAG), b"").seq
        except EventDecodeError:
            raise BrokerError(
                self.name, f"the subject {self._subject} has messages of something else"
            ) from None

    def append(self, record: Record) -> str:
        """Publish, and wait for the acknowledgement."""
        import nats.errors

        if not self._session.connected:
            self._connect()
        unique = f"{self._worker}.{record.tag}"
        try:
            self._last = self._publish(record, unique)
        except nats.errors.MaxPayloadError:
            reason = f"a batch of {len(record.payload)} bytes is more than it takes in one message"
            raise BrokerError(self.name, f"{reason} (max_payload in its configuration)") from None
        except BrokerUnavailable:
            self._session.close()
            raise
        finally:
            self._tried = unique
        return str(self._last)

    def trim(self, place: str) -> None:
        """Purge the subject up to there."""
        if int(place) <= 1:
            return  # to the server that would mean all of it
        if not self._session.connected:
            self._connect()
        work = self._session.jetstream.purge_stream(self._stream, seq=int(place), subject=self._subject)
        try:
            self._session.run(work, _ASK_SECONDS)
        except BrokerUnavailable:
            self._session.close()
            raise

    def breathe(self) -> None:
        """Answer the server's pings."""
        self._session.breathe()

    def close(self) -> None:
        """Disconnect."""
        self._session.close()

    def _connect(self) -> None:
        self._session.connect()
        self._session.run(self._make_stream(), _ASK_SECONDS)

    async def _make_stream(self) -> None:
        from nats.js.api import StorageType, StreamConfig
        from nats.js.errors import NotFoundError

        jetstream = self._session.jetstream
        try:
            await jetstream.stream_info(self._stream)
        except NotFoundError:
            config = StreamConfig(
                name=self._stream,
                subjects=[f"{self._stream}.*"],
                max_age=self._retain,
                max_bytes=self._max_bytes or -1,
                storage=StorageType.FILE,
                num_replicas=self._replicas,
                duplicate_window=min(_REMEMBER_SECONDS, self._retain),
            )
            await jetstream.add_stream(config)

    def _publish(self, record: Record, unique: str) -> int:
        """Publish behind our last message; returns where it stands."""
        work = self._session.run(self._acknowledged(record, unique), _ASK_SECONDS)
        if work is not None:
            return work
        # Our last message is not where we know it.
        last = self._last_message()
        found = (last.headers or {}).get(_ID) if last is not None else None
        place = 0 if last is None or last.seq is None else last.seq
        if found == unique:
            return place  # an acknowledgement was lost
        lost = found != self._tried
        self._last = place
        if lost:
            reason = (
                f"it does not have the last message of worker {self._worker}: it has lost it, or another process "
                "publishes as the same worker (give each its own with worker=)"
            )
            raise BrokerError(self.name, reason)
        return self._publish(record, unique)

    async def _acknowledged(self, record: Record, unique: str) -> int | None:
        """Where it stands; None if our last message is not where we know it."""
        from nats.js.errors import BadRequestError

        headers = {_ID: unique, _EXPECTED: str(self._last), TAG: record.tag}
        try:
            answer = await self._session.jetstream.publish(
                self._subject, record.payload, timeout=_ASK_SECONDS, stream=self._stream, headers=headers
            )
        except BadRequestError as error:
            if error.err_code != _WRONG_LAST_SEQUENCE:
                raise
            return None
        return answer.seq

    def _last_message(self) -> RawStreamMsg | None:
        return self._session.run(self._find_last_message(), _ASK_SECONDS)

    async def _find_last_message(self) -> RawStreamMsg | None:
        from nats.js.errors import NotFoundError

        try:
            return await self._session.jetstream.get_last_msg(self._stream, self._subject)
        except NotFoundError:
            return None
