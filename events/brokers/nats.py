"""NATS JetStream as a broker: ``STREAM.WORKER`` is the subject of each worker.

The client is asyncio's. Its loop runs only during a call, on the caller's thread, so nothing here needs a lock. It does
not reconnect by itself: its user does, knowing what was lost.

Each message has an id, by which the server drops duplicates (`Nats-Msg-Id`, within two minutes), and the place of the
worker's previous message, without which the server refuses it. So a server that has lost acknowledged messages, and a
second process that publishes as the same worker, are noticed with the next message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from events.brokers.address import REFUSED, BrokerAddress, BrokerError, BrokerUnavailable, require_client
from events.brokers.records import StreamRecord, StreamRewound, parse_record, records_of
from events.errors import EventDecodeError, system_reason

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import RawStreamMsg, StreamInfo


CONNECT_SECONDS = 2
Result = TypeVar("Result")


class NATSSession:
    """A connection made on demand. All its errors are BrokerError."""

    def __init__(self, address: BrokerAddress) -> None:
        require_client(address, "nats")
        self._address = address
        self._runner: asyncio.Runner | None = None
        self._client: Client | None = None
        self._noted: Exception | None = None
        """The client's last report about its connection."""

    @property
    def connected(self) -> bool:
        """True if there is a connection, according to the client."""
        return self._client is not None and self._client.is_connected

    @property
    def max_payload(self) -> int:
        """Largest message that the server accepts, headers included, in bytes."""
        assert self._client is not None
        return self._client.max_payload

    @property
    def jetstream(self) -> JetStreamContext:
        """The client's calls; to be awaited in `run`."""
        assert self._client is not None
        return self._client.jetstream()

    def connect(self) -> None:
        """Connect anew. Raises BrokerUnavailable, and BrokerError if the server refuses."""
        from nats.aio.client import Client

        self.close()
        self._noted = None
        self._runner = asyncio.Runner()
        self._client = Client()
        self.run(self._connect(self._client), CONNECT_SECONDS * 2)

    def run(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        """Run `work` within `seconds`; disconnect if it fails. BrokerUnavailable: it may succeed later."""
        import nats.errors

        assert self._runner is not None
        failure: BrokerError
        try:
            return self._runner.run(asyncio.wait_for(work, seconds))
        except nats.errors.MaxPayloadError:
            raise
        except nats.errors.NoServersError as error:
            failure = self._refused(self._noted or error)
        except (TimeoutError, OSError, EOFError) as error:
            failure = BrokerUnavailable(str(self._address), system_reason(error, "no answer"))
        except nats.errors.Error as error:
            failure = self._refused(error)
        except BrokerError as error:
            failure = error
        self.close()
        raise failure

    def find(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result | None:
        """Run `work` as `run` does; None: the server does not have the object."""
        return self.run(_found(work), seconds)

    def keep_alive(self) -> None:
        """Let the client answer the server's pings."""
        if self._runner is not None and self.connected:
            self._runner.run(asyncio.sleep(0))

    def close(self) -> None:
        """Disconnect; may be called twice."""
        client, self._client = self._client, None
        runner, self._runner = self._runner, None
        if runner is None:
            return
        with runner, contextlib.suppress(Exception):  # a connection that cannot be closed is gone
            if client is not None:
                runner.run(asyncio.wait_for(client.close(), CONNECT_SECONDS))

    async def _connect(self, client: Client) -> None:
        address = self._address
        host = f"[{address.host}]" if ":" in address.host else address.host
        await client.connect(
            f"nats://{host}:{address.port}",
            user=address.user,
            password=address.secret,
            tls=address.tls_context(),
            allow_reconnect=False,
            connect_timeout=CONNECT_SECONDS,
            # The client tries a server at most twice, and reports errors only here.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            error_cb=self._note,
        )

    async def _note(self, error: Exception) -> None:
        self._noted = error

    def _refused(self, error: Exception) -> BrokerError:
        from nats.js.errors import APIError

        where = str(self._address)
        if isinstance(error, OSError):
            return BrokerUnavailable(where, os.strerror(error.errno) if error.errno else "cannot be reached")
        # The server's message quotes at most our own names.
        text = str(error).removeprefix("nats: ").strip("'\" ")
        if "authorization" in text.lower() or "authentication" in text.lower():
            return BrokerError(where, REFUSED)
        if isinstance(error, APIError):
            return BrokerUnavailable(where, f"JetStream refuses: {error.description or type(error).__name__}")
        return BrokerUnavailable(where, text or type(error).__name__)


async def _found(work: Coroutine[Any, Any, Result]) -> Result | None:
    from nats.js.errors import NotFoundError

    try:
        return await work
    except NotFoundError:
        return None


TAG = "Kvcache-Record"
"""The header with a record's tag."""
_AT_ONCE = 100
_ASK_SECONDS = 3.0
"""Time limit of the server's answer."""
_LOOK_SECONDS = 2.0
"""Silence after which the server is checked to still have the reader."""
_FORGET_SECONDS = 60.0
"""Time after which the server forgets an inactive reader."""


class NATSReader:
    """Reads all workers, or one. It keeps its place itself, so nothing of it has to survive in the server."""

    def __init__(self, address: BrokerAddress, worker: str | None) -> None:
        self._address = address
        self._subject = f"{address.stream}.{worker or '*'}"
        self._session = NATSSession(address)
        self._pull: JetStreamContext.PullSubscription | None = None
        self._last = 0
        """Place in the stream of the last record read."""
        self._last_record: tuple[str | None, str | None] = None, None
        """Subject and tag of the last record read."""
        self._created: datetime | None = None
        """Time at which the stream was made."""
        self._received_at = 0.0

    def read(self, seconds: float) -> list[tuple[str, StreamRecord]]:
        """Return the next records."""
        if self._pull is None or not self._session.connected:
            self._begin()
        assert self._pull is not None
        # If that fails, the server may count unread messages as delivered: they are requested again from there on.
        messages = self._session.run(self._fetch(self._pull, max(seconds, 0.01)), seconds + _ASK_SECONDS)
        self._look(self._pull, received=bool(messages))
        return [record for message in messages for record in self._records(message)]

    def close(self) -> None:
        """Disconnect."""
        self._session.close()

    def _begin(self) -> None:
        """Connect, and continue where reading broke off. Raises StreamRewound if that place is gone."""
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
        self._received_at = time.monotonic()
        if rewound:
            raise StreamRewound(None)

    def _is_where_it_was(self, info: StreamInfo) -> bool:
        """Return True if the last record read is still in its place, or was removed as old."""
        if not self._last:
            return True
        if info.created != self._created or info.state.last_seq < self._last:
            return False
        there = self._session.find(
            self._session.jetstream.get_msg(self._address.stream, self._last), _ASK_SECONDS
        )
        return there is None or (there.subject, (there.headers or {}).get(TAG)) == self._last_record

    def _look(self, pull: JetStreamContext.PullSubscription, *, received: bool) -> None:
        """Check the server after silence: it may have restarted, without this reader."""
        now = time.monotonic()
        if not received and now - self._received_at > _LOOK_SECONDS:
            self._session.run(pull.consumer_info(), _ASK_SECONDS)
            received = True
        if received:
            self._received_at = now

    def _records(self, message: Msg) -> list[tuple[str, StreamRecord]]:
        tag = (message.headers or {}).get(TAG)
        self._last = message.metadata.sequence.stream
        self._last_record = message.subject, tag
        return records_of(message.subject.rpartition(".")[2], tag, message.data)

    async def _fetch(self, pull: JetStreamContext.PullSubscription, seconds: float) -> list[Msg]:
        import nats.errors

        try:
            return await pull.fetch(_AT_ONCE, timeout=seconds)
        except nats.errors.TimeoutError:
            return []


_ANSWER_SECONDS = 2.0
"""Time limit of the server's answer."""
_REMEMBER_SECONDS = 120.0
"""Time for which the server remembers the ids of messages."""
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
        """Place in the stream of our last message; 0: there is none."""
        self._tried: str | None = None
        """The id of the last message sent; it may be there."""

    @property
    def max_payload(self) -> int:
        """Largest message that the server accepts."""
        return self._session.max_payload

    def open(self) -> int | None:
        """Connect, make the stream if there is none, and find our last message."""
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
                self.name, f"the subject {self._subject} has messages of another kind"
            ) from None

    def append(self, record: StreamRecord) -> str:
        """Publish, and wait for the acknowledgement."""
        import nats.errors

        if not self._session.connected:
            self._connect()
        unique = f"{self._worker}.{record.tag}"
        try:
            self._last = self._publish(record, unique)
        except nats.errors.MaxPayloadError:
            reason = f"a batch of {len(record.payload)} bytes exceeds the maximum message size"
            raise BrokerError(self.name, f"{reason} (max_payload in the server's configuration)") from None
        finally:
            self._tried = unique
        return str(self._last)

    def trim(self, place: str) -> None:
        """Purge the subject up to `place`."""
        if int(place) <= 1:
            return  # to the server that would mean all of it
        if not self._session.connected:
            self._connect()
        work = self._session.jetstream.purge_stream(self._stream, seq=int(place), subject=self._subject)
        self._session.run(work, _ANSWER_SECONDS)

    def keep_alive(self) -> None:
        """Answer the server's pings."""
        self._session.keep_alive()

    def close(self) -> None:
        """Disconnect."""
        self._session.close()

    def _connect(self) -> None:
        self._session.connect()
        self._session.run(self._make_stream(), _ANSWER_SECONDS)

    async def _make_stream(self) -> None:
        from nats.js.api import StorageType, StreamConfig

        jetstream = self._session.jetstream
        if await _found(jetstream.stream_info(self._stream)) is None:
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

    def _publish(self, record: StreamRecord, unique: str) -> int:
        """Publish after our last message; return its place."""
        work = self._session.run(self._acknowledged(record, unique), _ANSWER_SECONDS)
        if work is not None:
            return work
        # Our last message is not in its known place.
        last = self._last_message()
        found = (last.headers or {}).get(_ID) if last is not None else None
        place = 0 if last is None or last.seq is None else last.seq
        if found == unique:
            return place  # an acknowledgement was lost
        lost = found != self._tried
        self._last = place
        if lost:
            reason = (
                f"the last message of worker {self._worker} is missing: the server has lost it, or another "
                "process publishes as the same worker (give each its own with worker=)"
            )
            raise BrokerError(self.name, reason)
        return self._publish(record, unique)

    async def _acknowledged(self, record: StreamRecord, unique: str) -> int | None:
        """Return its place; None if our last message is not in its known place."""
        from nats.js.errors import BadRequestError

        headers = {_ID: unique, _EXPECTED: str(self._last), TAG: record.tag}
        try:
            answer = await self._session.jetstream.publish(
                self._subject, record.payload, timeout=_ANSWER_SECONDS, stream=self._stream, headers=headers
            )
        except BadRequestError as error:
            if error.err_code != _WRONG_LAST_SEQUENCE:
                raise
            return None
        return answer.seq

    def _last_message(self) -> RawStreamMsg | None:
        work = self._session.jetstream.get_last_msg(self._stream, self._subject)
        return self._session.find(work, _ANSWER_SECONDS)
