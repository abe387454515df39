"""A reader's sockets: connected or bound, encrypted or not, and called again where they were turned away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from events.sockets.curve import Curve
from events.sockets.hosts import is_loopback
from events.sockets.keepalive import KEEPALIVE_SECONDS, set_keepalive
from events.sockets.refusals import SEEN_BY_CLIENT, SEEN_BY_SERVER, is_final
from events.subscribe.endpoints import EndpointError, InsecureEndpoint, host_of, host_to_bind

CALL_AGAIN_SECONDS = 1.0
"""ZeroMQ gives up for good who has turned it away; here it is called again, after so long."""
_HEARTBEAT_MS = 10_000
_READABLE = int(zmq.POLLIN)
_CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
_DISCONNECTED = zmq.Event.DISCONNECTED


class Readable(Protocol):
    """Takes sockets that end a wait when they can be read: a `zmq.Poller`, or what asyncio has in its place."""

    def register(self, socket: zmq.Socket[bytes], flags: int) -> object:
        """Wait for this one, too."""


@dataclass(frozen=True)
class LineOptions:
    """What is the same for all sockets of a reader."""

    max_queued: int = 100_000
    """Messages in the receiving queue of each; beyond it the publisher drops live ones."""
    max_message_bytes: int = 1 << 30
    """Who sends more in one frame is disconnected."""
    keepalive: float = KEEPALIVE_SECONDS
    """Seconds of silence after which TCP looks whether the other end is there; 0: never."""
    curve: Curve | None = None
    """Keys; None: nothing is encrypted."""
    clock: Callable[[], float] = time.monotonic
    """The seconds by which all waits for the other end count."""


class Line:
    """One socket. For one thread, which calls `look` again and again."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        endpoint: str,
        options: LineOptions,
        *,
        bind: bool = False,
        server: bytes | None = None,
    ) -> None:
        """Bind, or connect to who has the public key `server` (None: the one that the options name).

        Raises EndpointError.
        """
        host = (
            host_to_bind(endpoint) if bind else host_of(endpoint)
        )  # raises, where ZeroMQ would try for ever
        self._endpoint, self._bound, self._keyed = endpoint, bind, options.curve is not None
        self._clock = options.clock
        self.socket = context.socket(kind)
        self._set(endpoint, host, options)
        if options.curve is not None:
            self._encrypt(options.curve, server)
        seen = SEEN_BY_SERVER if bind else SEEN_BY_CLIENT | _CONNECTED | _DISCONNECTED
        self._monitor = self.socket.get_monitor_socket(int(seen))
        self._call_at: float | None = None
        self.calls = 0
        """How often it was connected again, after which what was sent before is lost."""
        self.refused = 0
        """Connections that came to nothing because of a key that is missing, wrong or not allowed."""
        self.connected = False
        """Whether the other end was there at the last `look`; of a bound socket False."""
        try:
            (self.socket.bind if bind else self.socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            verb = "bound" if bind else "connected to"
            raise EndpointError(endpoint, f"cannot be {verb}: {error.strerror}") from None

    def _set(self, endpoint: str, host: str | None, options: LineOptions) -> None:
        socket = self.socket
        socket.linger = 0
        socket.rcvhwm = options.max_queued
        socket.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)  # a machine that vanished is noticed
        set_keepalive(socket, options.keepalive)
        # By IPv6 "localhost" is ::1 alone where a machine calls both so, and publishers are at 127.0.0.1.
        near = endpoint.lower().startswith("tcp://localhost:")
        socket.setsockopt(zmq.IPV6, int(":" in (host or "") if self._bound else not near))

    def _encrypt(self, curve: Curve, server: bytes | None) -> None:
        if self._bound and curve.clients is None:
            raise EndpointError(
                self._endpoint, "the keys of those that may connect are needed to bind it encrypted"
            )
        if not self._bound and (server or curve.server) is None:
            raise EndpointError(
                self._endpoint, "the publisher's public key is needed to connect to it encrypted"
            )
        if self._bound:
            curve.serve(self.socket)
        else:
            curve.call(self.socket, server)

    @property
    def endpoint(self) -> str:
        """As it was given; where any free port was asked for, with the port that was found."""
        return str(self.socket.get_string(zmq.LAST_ENDPOINT)) if self._bound else self._endpoint

    def look(self) -> None:
        """Hear who came and went and of refusals, and call again who has turned us away: its list may have grown."""
        # What `poll` finds out, without making a poller for it.
        while int(self._monitor.get(zmq.EVENTS)) & _READABLE:
            event = recv_monitor_message(self._monitor)["event"]
            if event in (_CONNECTED, _DISCONNECTED):
                self.connected = event == _CONNECTED
                continue
            self.refused += 1
            if not self._bound and self._call_at is None and is_final(event):
                self._call_at = self._clock() + CALL_AGAIN_SECONDS
        if self._call_at is not None and self._clock() >= self._call_at:
            self._call_at = None
            self.calls += 1
            self._call_again()

    def wait(self, poller: Readable) -> float | None:
        """Have it end a wait when there is a message to `receive` or something to `look` at.

        Returns after how many seconds the wait must end anyway; None: it need not.
        """
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        return None if self._call_at is None else max(0.0, self._call_at - self._clock())

    def receive(self) -> list[bytes] | None:
        """The frames of the next message, if there is one."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def receive_from(self) -> tuple[list[bytes], str] | None:
        """The frames of the next message, and its sender's public key (empty: not encrypted), if there is one."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        try:
            key = str(frames[0].get("User-Id")) if self._keyed else ""
        except zmq.ZMQError:
            key = ""
        return [frame.bytes for frame in frames], key

    def close(self) -> None:
        """Disconnect."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)

    def _call_again(self) -> None:
        with suppress(zmq.ZMQError):  # it may have let go of it by itself
            self.socket.disconnect(self._endpoint)
        self.socket.connect(self._endpoint)


def wait_for(poller: zmq.Poller, waits: Iterable[float | None], deadline: float | None) -> None:
    """Until there is something, at most for the shortest of `waits` (seconds) and up to the deadline (monotonic)."""
    seconds = shortest(waits, deadline)
    # Rounded up: a wait that is cut short would turn into a busy loop.
    poller.poll(None if seconds is None else int(seconds * 1000) + 1)


def shortest(waits: Iterable[float | None], deadline: float | None) -> float | None:
    """The shortest of `waits`, and of the time up to the deadline (monotonic), in seconds; None: none ends."""
    seconds = [wait for wait in waits if wait is not None]
    if deadline is not None:
        seconds.append(max(0.0, deadline - time.monotonic()))
    return min(seconds, default=None)


def refuse_insecure(endpoint: str, options: LineOptions) -> None:
    """Raise InsecureEndpoint if anybody on another machine could connect to what is to be bound there."""
    host = host_to_bind(endpoint)
    if options.curve is None and host is not None and not is_loopback(host):
        raise InsecureEndpoint(endpoint)
