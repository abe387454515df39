"""The connections behind a ZeroMQ socket: who is there, how to get rid of one, and who we are to them.

ZeroMQ tells over which connection a message came (its descriptor), and by a monitor which connections begin and end.
It has no call to end one, so that is done to the connection itself: ZeroMQ then drops all that waits for it.
"""

from __future__ import annotations

import os
import socket as sockets
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message


class Peers:
    """Who is connected to a bound socket. For the thread that owns the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self.connected: set[int] = set()

    def refresh(self) -> list[int]:
        """Note who came; returns those that left."""
        left = []
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            connection = int(message["value"])
            if message["event"] == zmq.Event.ACCEPTED:
                self.connected.add(connection)
            else:
                self.connected.discard(connection)
                left.append(connection)
        return left

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


def hang_up(connection: int, port: int) -> None:
    """End a connection to this port; nothing happens to a descriptor that has become something else."""
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
