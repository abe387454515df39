"""Where a socket of the feed is: an address of this machine that is bound, or another one's that it connects to."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from events.sockets.hosts import is_loopback, is_wildcard, tcp_address
from sinks.base import SinkError
from sinks.router.peers import own_address


@dataclass(frozen=True)
class Place:
    """A host and a port; 0, if it is to be bound, is any free one."""

    host: str
    port: int
    connects: bool = False
    """Whether someone else is bound there."""

    @property
    def address(self) -> str:
        """As ZeroMQ writes it."""
        return tcp_address(self.host, self.port)

    @property
    def is_near(self) -> bool:
        """Whether nothing leaves this machine."""
        return is_loopback(self.host)

    def take(self, socket: zmq.Socket[bytes]) -> None:
        """Bind or connect; raises SinkError if that cannot be done. One that connects tries for ever."""
        try:
            if self.connects:
                socket.connect(self.address)
            else:
                socket.bind(self.address)
        except zmq.ZMQError as error:
            raise SinkError(self._why_not(error)) from None

    def _why_not(self, error: zmq.ZMQError) -> str:
        host, port = self.host, self.port
        if self.connects:
            return f"{host}:{port} cannot be connected to ({error.strerror}): give the router's host and port"
        if error.errno == zmq.EADDRINUSE:
            remedy = "end the process that has it, or name another port (0: any free one)"
            return f"port {port} on {host} is in use: {remedy}"
        return f"port {port} on {host} cannot be bound ({error.strerror}): the host must be an address of this machine"


def binds_by_default(host: str) -> bool:
    """Whether the place is taken or called, where nobody says: any address of this machine, and loopback, is taken."""
    return is_wildcard(host) or is_loopback(host)


def pod_at(endpoint: str) -> str:
    """Host and port of an endpoint as others reach them."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"{own_address() if is_wildcard(host.strip('[]')) else host}:{port}"
