"""A connection to Redis, or to a server like it, for one thread; and the keys under which a feed is there.

``STREAM:WORKER`` is the stream of each worker, ``STREAM:workers`` the set of their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from events.brokers.address import BrokerAddress, BrokerError, BrokerUnavailable, missing_extra

if TYPE_CHECKING:
    from redis import Redis

TAG, PAYLOAD = b"record", b"payload"
"""The fields of an entry."""
NAMES = "workers"
"""In place of a worker's name, the set of all: no worker can be called so."""
SECONDS = 2.0
"""What the server has to answer within."""
Result = TypeVar("Result")


class WrongType(BrokerUnavailable):
    """What stands under the key is no stream; the connection holds on."""


class RedisSession:
    """Connects when it is needed. All its errors are BrokerError."""

    def __init__(self, address: BrokerAddress) -> None:
        try:
            import redis  # noqa: F401
        except ImportError:
            raise missing_extra(address) from None
        self._address = address
        self._client: Redis | None = None

    @property
    def connected(self) -> bool:
        """Whether there has been no trouble since `connect`."""
        return self._client is not None

    def key(self, name: str) -> bytes:
        """The key of a worker's stream, or of another thing."""
        return f"{self._address.stream}:{name}".encode()

    def connect(self) -> None:
        """Connect anew. Raises BrokerUnavailable, and BrokerError if we are refused."""
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.close()
        address, access = self._address, self._address.access
        address.tls_context()  # raises, and says which files are wrong
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
            retry=Retry(NoBackoff(), 0),  # who uses it tries again, knowing what was lost
            **tls,
        )
        self.run(lambda client: client.ping())

    def run(self, work: Callable[[Redis], Result]) -> Result:
        """Do it. Raises BrokerUnavailable where the connection, or the server's state, is the trouble."""
        from redis import exceptions

        where = str(self._address)
        assert self._client is not None
        try:
            return work(self._client)
        except (exceptions.AuthenticationError, exceptions.NoPermissionError):
            self.close()
            raise BrokerError(where, "user or password is wrong, or has no right to this") from None
        except exceptions.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise WrongType(where, "it refuses: WRONGTYPE, the key is no stream") from None
            self.close()
            # The server's words may quote what was sent; its first one is the kind of error.
            kind = (
                str(error).partition(" ")[0]
                if type(error) is exceptions.ResponseError
                else type(error).__name__
            )
            if kind in ("NOAUTH", "WRONGPASS", "NOPERM"):
                raise BrokerError(where, "user or password is wrong, or has no right to this") from None
            raise BrokerUnavailable(where, f"it refuses: {kind}") from None
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
    return "it does not answer"
