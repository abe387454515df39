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

ALLOWED_BYTES, ALLOWED_PER_SECOND = 16 << 10, 4 << 10
"""What a peer may send at the start, and then from second to second: a thousand times what a router does."""
MAX_CONNECTIONS = 1000
SILENCE_SECONDS = 60.0
"""A complaint is logged once in this time, however often there is reason for it."""

_READABLE = int(zmq.POLLIN)
_TCP_INFO = getattr(sockets, "TCP_INFO", None)
_COUNTS = struct.Struct("=QQ")
_COUNTS_AT = 120
"""Where Linux tells of a connection how many bytes the peer has acknowledged, and how many it has sent."""

_log = get_logger("sinks")


class Complaints:
    """Warnings about peers, who could otherwise fill the log."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def tell(self, event: str, reason: str) -> None:
        """Log it, unless that was done lately; then it is counted for the next time."""
        now = time.monotonic()
        if now - self._told.get(event, float("-inf")) < SILENCE_SECONDS:
            self._untold[event] = self._untold.get(event, 0) + 1
            return
        self._told[event] = now
        _log.warning(event, reason=reason, times_since_last=self._untold.pop(event, 0))


class Peers:
    """Who is connected to a bound socket. For the thread that owns the socket."""

    def __init__(self, socket: zmq.Socket[bytes], complaints: Complaints) -> None:
        self._socket = socket
        self._port = port_of(endpoint_of(socket))
        self._complaints = complaints
        # What begins before this is asked for belongs to nobody, so it comes right after binding.
        self._monitor = socket.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self._most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.connected: dict[int, float] = {}
        """Since when each is there."""

    def refresh(self) -> list[int]:
        """Note who came; returns those that left."""
        left: list[int] = []
        # What `poll` finds out, without making a poller for it.
        while int(self._monitor.get(zmq.EVENTS)) & _READABLE:
            message = recv_monitor_message(self._monitor)
            connection = int(message["value"])
            if message["event"] == zmq.Event.ACCEPTED:
                self.connected[connection] = time.monotonic()
            else:
                self.connected.pop(connection, None)
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
        self._complaints.tell("peer_cut_off", reason)
        if connection is not None:
            _hang_up(connection, self._port)

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


def _hang_up(connection: int, port: int) -> None:
    # A copy, so that what is looked at is what is ended, whoever closes the descriptor meanwhile.
    with suppress(OSError), sockets.socket(fileno=os.dup(connection)) as peer:
        if peer.getsockname()[1] == port:
            peer.shutdown(sockets.SHUT_RDWR)


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    """Where a socket was bound last, as in ``tcp://127.0.0.1:5557``."""
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
