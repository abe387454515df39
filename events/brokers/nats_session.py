"""A connection to NATS JetStream, for one thread.

The client is asyncio's. Its loop runs only while something is asked of it, on the thread that asks; so nothing here
needs a lock. It does not connect again by itself: who uses it does, knowing what was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from events.brokers.address import BrokerAddress, BrokerError, BrokerUnavailable, missing_extra

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

CONNECT_SECONDS = 2
Result = TypeVar("Result")


class NATSSession:
    """Connects when it is needed. All its errors are BrokerError."""

    def __init__(self, address: BrokerAddress) -> None:
        try:
            import nats  # noqa: F401
        except ImportError:
            raise missing_extra(address) from None
        self._address = address
        self._runner: asyncio.Runner | None = None
        self._client: Client | None = None
        self._noted: Exception | None = None
        """What the client has said last about its connection."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._client is not None and self._client.is_connected

    @property
    def max_payload(self) -> int:
        """What the server takes in one message, headers included, in bytes."""
        assert self._client is not None
        return self._client.max_payload

    @property
    def jetstream(self) -> JetStreamContext:
        """The client's calls; to be awaited in `run`."""
        assert self._client is not None
        return self._client.jetstream()

    def connect(self) -> None:
        """Connect anew. Raises BrokerUnavailable, and BrokerError if we are refused."""
        from nats.aio.client import Client

        self.close()
        self._noted = None
        self._runner = asyncio.Runner()
        self._client = Client()
        try:
            self.run(self._connect(self._client), CONNECT_SECONDS * 2)
        except BrokerError:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        """Do it, within so many seconds. Raises BrokerUnavailable where the connection is the trouble."""
        import nats.errors

        assert self._runner is not None
        try:
            return self._runner.run(asyncio.wait_for(work, seconds))
        except nats.errors.NoServersError as error:
            raise self._refused(self._noted or error) from None
        except (TimeoutError, OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or "it does not answer"
            raise BrokerUnavailable(str(self._address), reason) from None
        except nats.errors.MaxPayloadError:
            raise
        except nats.errors.Error as error:
            raise self._refused(error) from None

    def breathe(self) -> None:
        """Let the client answer the server's pings."""
        if self._runner is not None and self.connected:
            self._runner.run(asyncio.sleep(0))

    def close(self) -> None:
        """Disconnect; may be called twice."""
        client, self._client = self._client, None
        runner, self._runner = self._runner, None
        if runner is None:
            return
        with runner, contextlib.suppress(Exception):  # what cannot be closed is gone
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
            # The client tries a server at most twice before it gives up, and says only here what was wrong.
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
            return BrokerUnavailable(
                where, os.strerror(error.errno) if error.errno else "it cannot be reached"
            )
        # What the server says quotes at most our own names.
        text = str(error).removeprefix("nats: ").strip("'\" ")
        if "authorization" in text.lower() or "authentication" in text.lower():
            return BrokerError(where, "user or password is wrong, or has no right to this")
        if isinstance(error, APIError):
            return BrokerUnavailable(where, f"JetStream refuses: {error.description or type(error).__name__}")
        return BrokerUnavailable(where, text or type(error).__name__)
