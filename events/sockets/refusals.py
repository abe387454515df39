"""How ZeroMQ tells of connections that come to nothing, mostly because of keys: events of a socket's monitor."""

from __future__ import annotations

import zmq

_FINAL = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
SEEN_BY_SERVER = _FINAL
"""To who is bound the third kind only says that somebody went away, as who does who just looks."""
SEEN_BY_CLIENT = _FINAL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
"""To who connects it may mean that the server did not like what it heard, and hung up."""
REASONS = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "a key is not on the list of those that may connect",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "one end has no key, or the wrong one, or is no ZeroMQ",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "the other end hung up before keys were compared",
}


def is_final(event: int) -> bool:
    """Whether ZeroMQ does not connect again by itself after this."""
    return bool(event & _FINAL)
