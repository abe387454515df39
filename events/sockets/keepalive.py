"""TCP's own probes, by which an end learns that the other machine has gone without a word."""

from __future__ import annotations

import zmq

KEEPALIVE_SECONDS = 60.0
_PROBES = 6


def set_keepalive(socket: zmq.Socket[bytes], seconds: float) -> None:
    """Probe after `seconds` of silence, and give the connection up after as long again; 0: never.

    For all TCP connections of a socket, to be set before it is bound or connects.
    """
    if not seconds:
        socket.setsockopt(zmq.TCP_KEEPALIVE, 0)
        return
    whole = max(1, round(seconds))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, whole)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, whole // _PROBES))
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
