"""Reads the records of workers from a stream of NATS JetStream: ``STREAM.WORKER`` is the subject of each."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

from events.brokers.address import BrokerAddress, BrokerError
from events.brokers.nats_session import NATSSession
from events.brokers.records import Record, StreamRewound, parse_record
from events.errors import EventDecodeError

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import RawStreamMsg, StreamInfo

TAG = "Kvcache-Record"
"""The header with a record's tag."""
_AT_ONCE = 100
_ASK_SECONDS = 3.0
"""What the server has to answer within."""
_LOOK_SECONDS = 2.0
"""After so much silence it is looked whether the server still knows us."""
_FORGET_SECONDS = 60.0
"""When the server forgets a reader that does not ask any more."""


class NATSReader:
    """Reads all workers, or one. It keeps its place itself, so nothing of it has to survive in the server."""

    def __init__(self, address: BrokerAddress, worker: str | None) -> None:
        self._address = address
        self._subject = f"{address.stream}.{worker or '*'}"
        self._session = NATSSession(address)
        self._pull: JetStreamContext.PullSubscription | None = None
        self._last = 0
        """Where in the stream what was read last stands."""
        self._last_record: tuple[str | None, str | None] = None, None
        """Its subject and tag."""
        self._created: datetime | None = None
        """When the stream was made."""
        self._heard_at = 0.0

    def read(self, seconds: float) -> list[tuple[str, Record]]:
        """The next records."""
        if self._pull is None or not self._session.connected:
            self._begin()
        assert self._pull is not None
        try:
            messages = self._session.run(self._fetch(self._pull, max(seconds, 0.01)), seconds + _ASK_SECONDS)
            self._look(self._pull, heard=bool(messages))
        except BrokerError:
            # The server may take for delivered what was not read: it is asked for from there on again.
            self._pull = None
            raise
        return [record for message in messages for record in self._records(message)]

    def close(self) -> None:
        """Disconnect."""
        self._session.close()

    def _begin(self) -> None:
        """Connect, and go on where it broke off. Raises StreamRewound where that is not there any more."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        self._pull = None
        self._session.connect()
        stream = self._address.stream
        jetstream = self._session.jetstream
        info = self._session.run(jetstream.stream_info(stream), _ASK_SECONDS)
        rewound = not self._is_where_it_was(info)
        if rewound:
            self._last = 0
        self._created = info.created
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._last + 1,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_FORGET_SECONDS,
        )
        work = jetstream.pull_subscribe(self._subject, stream=stream, config=config)
        self._pull = self._session.run(work, _ASK_SECONDS)
        self._heard_at = time.monotonic()
        if rewound:
            raise StreamRewound(None)

    def _is_where_it_was(self, info: StreamInfo) -> bool:
        """Whether what was read last still stands in its place, or was removed as old."""
        if not self._last:
            return True
        if info.created != self._created or info.state.last_seq < self._last:
            return False
        there = self._session.run(self._find(self._last), _ASK_SECONDS)
        return there is None or (there.subject, (there.headers or {}).get(TAG)) == self._last_record

    async def _find(self, place: int) -> RawStreamMsg | None:
        from nats.js.errors import NotFoundError

        try:
            return await self._session.jetstream.get_msg(self._address.stream, place)
        except NotFoundError:
            return None

    def _look(self, pull: JetStreamContext.PullSubscription, *, heard: bool) -> None:
        """Silence may mean that the server was started anew, and knows nothing of us."""
        now = time.monotonic()
        if not heard and now - self._heard_at > _LOOK_SECONDS:
            self._session.run(pull.consumer_info(), _ASK_SECONDS)
            heard = True
        if heard:
            self._heard_at = now

    def _records(self, message: Msg) -> list[tuple[str, Record]]:
        tag = (message.headers or {}).get(TAG)
        self._last = message.metadata.sequence.stream
        self._last_record = message.subject, tag
        try:
            record = parse_record(tag, message.data)
        except EventDecodeError:
            return []  # not the feed's
        return [(message.subject.rpartition(".")[2], record)]

    async def _fetch(self, pull: JetStreamContext.PullSubscription, seconds: float) -> list[Msg]:
        import nats.errors

        try:
            return await pull.fetch(_AT_ONCE, timeout=seconds)
        except nats.errors.TimeoutError:
            return []
