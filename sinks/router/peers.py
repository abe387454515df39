"""The connections behind a ZeroMQ socket: who is there, how much it says, how to get rid of it, and who we are to it.

ZeroMQ tells over which connection a message came (its descriptor), and by a monitor which connections begin and end. It
bounds the size of a frame, but neither how many frames a message has nor how many messages a peer sends before anybody
reads them; and it has no call to end a connection. So what a peer has sent is asked of the system, where that can tell
(Linux), and who sends more than subscribers and readers of replays have reason to is cut off.
"""

from __future__ import annotations

import os
import resource
import socket as sockets
import struct
import time
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from events.diagnostics import get_logger
from events.sockets.hosts import tcp_address
from events.sockets.refusals import REASONS, is_final

ALLOWED_BYTES, ALLOWED_PER_SECOND = 16 << 10, 4 << 10
"""What a peer may send at the start, and then from second to second: a thousand times what a router does."""
MAX_CONNECTIONS = 1000
HANDSHAKE_SECONDS = 5.0
"""Who has not said by then what it is goes."""
SILENCE_SECONDS = 60.0
"""A complaint is logged once in this time, however often there is reason for it."""

_BEGIN = zmq.Event.ACCEPTED | zmq.Event.CONNECTED
_READABLE = int(zmq.POLLIN)
_TCP_INFO = getattr(sockets, "TCP_INFO", None)
_COUNTS = struct.Struct("=QQ")
_COUNTS_AT = 120
"""Where Linux tells of a connection how many bytes the peer has acknowledged, and how many it has sent."""

_log = get_logger("sinks")


class Complaints:
    """Warnings about the peers of one socket, who could otherwise fill the log."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def tell(self, event: str, reason: str, endpoint: str, peer: str | None = None) -> None:
        """Log it, unless that was done lately; then it is counted for the next time.

        - `endpoint`: the socket's own; `peer`: the address of who it is about, if known.
        """
        now = time.monotonic()
        if now - self._told.get(event, float("-inf")) < SILENCE_SECONDS:
            self._untold[event] = self._untold.get(event, 0) + 1
            return
        self._told[event] = now
        about = {"endpoint": endpoint} if peer is None else {"endpoint": endpoint, "peer": peer}
        _log.warning(event, **about, reason=reason, times_since_last=self._untold.pop(event, 0))


class Peers:
    """Who is connected to a socket. For the thread that owns the socket, which makes it before it binds or connects.

    `refusals` are the events (`events.sockets.refusals`) that are worth a word; at a port without keys none is: anybody
    may knock there.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        complaints: Complaints,
        *,
        most: int = MAX_CONNECTIONS,
        refusals: int = 0,
    ) -> None:
        self._socket = socket
        self._complaints = complaints
        events = _BEGIN | zmq.Event.DISCONNECTED
        self._monitor = socket.get_monitor_socket(int(events) | refusals)
        self._most = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.connected: dict[int, float] = {}
        """Since when each is there."""
        self.refused = 0
        """Connections that came to nothing because of a key that is missing, wrong or not allowed."""
        self._refusal: str | None = None
        """Why a connection came to nothing that has not ended yet: only its end says which one it is."""
        self._addresses: dict[int, str | None] = {}
        self.turned_away = False
        """Whether the other end, if we connect, has sent us away for good."""

    def refresh(self) -> list[int]:
        """Note who came; returns those that left."""
        left: list[int] = []
        # What `poll` finds out, without making a poller for it.
        while int(self._monitor.get(zmq.EVENTS)) & _READABLE:
            message = recv_monitor_message(self._monitor)
            connection, event = int(message["value"]), message["event"]
            if event & _BEGIN:
                # First, so that who is seen here has an address, whatever becomes of it at that moment.
                self._addresses[connection] = _address_of(connection)
                self.connected[connection] = time.monotonic()
            elif event in REASONS:
                self.refused += 1
                self.turned_away = self.turned_away or is_final(event)
                self._refusal = REASONS[event]
            else:
                self._end(connection)
                left.append(connection)
            if len(self.connected) > self._most:
                self.cut_off(connection, "there are too many connections")
        return left

    def police(self) -> None:
        """Cut off who has sent more than there is reason to; to be called often, as it bounds what can have come."""
        now = time.monotonic()
        for connection, since in self.connected.items():
            sent = traffic(connection)[1]
            if sent > ALLOWED_BYTES + ALLOWED_PER_SECOND * (now - since):
                self.cut_off(connection, "it sends without end")

    def cut_off(self, connection: int | None, reason: str) -> None:
        """End a connection; nothing happens to a descriptor that has become something else."""
        self.complain("peer_cut_off", reason, connection)
        if connection is not None:
            _hang_up(connection, port_of(endpoint_of(self._socket)))

    def complain(self, event: str, reason: str, connection: int | None = None) -> None:
        """Warn, of a connection with its address."""
        peer = None if connection is None else self._addresses.get(connection)
        self._complaints.tell(event, reason, endpoint_of(self._socket), peer)

    def _end(self, connection: int) -> None:
        since = self.connected.pop(connection, None)
        # Who is there for longer than a handshake takes is not the one whose handshake has failed.
        if (
            self._refusal is not None
            and since is not None
            and time.monotonic() - since < 2 * HANDSHAKE_SECONDS
        ):
            self.complain("peer_refused", self._refusal, connection)
            self._refusal = None
        self._addresses.pop(connection, None)

    def close(self) -> None:
        """End the monitor; before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)


def connection_of(message: zmq.Frame) -> int | None:
    """The descriptor of the connection over which a message came; None where there is none."""
    try:
        return int(message.get(zmq.MessageOption.SRCFD))
    except (zmq.ZMQError, ValueError):
        return None


def traffic(connection: int) -> tuple[int, int]:
    """Bytes that the peer has taken, and that it has sent; zeros where the system does not tell."""
    if _TCP_INFO is None:
        return 0, 0
    with suppress(OSError, struct.error):
        peer = sockets.socket(fileno=connection)
        try:
            told = peer.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _COUNTS_AT + _COUNTS.size)
        finally:
            peer.detach()  # it is ZeroMQ's
        taken, sent = _COUNTS.unpack_from(told, _COUNTS_AT)
        return taken, sent
    return 0, 0


def _address_of(connection: int) -> str | None:
    """Host and port of the other end; None if it has gone before anybody looked."""
    with suppress(OSError), sockets.socket(fileno=os.dup(connection)) as peer:
        host, port = peer.getpeername()[:2]
        return tcp_address(host, port).removeprefix("tcp://")
    return None


def _hang_up(connection: int, port: int) -> None:
    # A copy, so that what is looked at is what is ended, whoever closes the descriptor meanwhile.
    with suppress(OSError), sockets.socket(fileno=os.dup(connection)) as peer:
        if port in (peer.getsockname()[1], peer.getpeername()[1]):
            peer.shutdown(sockets.SHUT_RDWR)


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    """Where a socket was bound or connected last, as in ``tcp://127.0.0.1:5557``."""
    return str(socket.get_string(zmq.LAST_ENDPOINT))


def port_of(endpoint: str | None) -> int:
    """The port of a TCP endpoint; 0, any free one, where there is no endpoint yet."""
    return int(endpoint.rpartition(":")[2]) if endpoint else 0


def own_address() -> str:
    """The address by which other machines know this one; its name, if it has none."""
    with suppress(OSError), sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        # Sends nothing: it only makes the system choose the address from which it would be sent.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return sockets.gethostname()
