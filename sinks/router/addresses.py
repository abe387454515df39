"""Which places a ``zmq+pub:`` URL names: the feed's, and its replay's."""

from __future__ import annotations

import re

from events.sockets.hosts import is_wildcard
from sinks.base import SinkURL, SinkURLError
from sinks.router.options import ZMQOptions
from sinks.router.places import Place, binds_by_default

_REPLAY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]:|(?P<host>[^:\[\]@/]+):)?(?P<port>[0-9]{1,5})")
_MAX_PORT = (1 << 16) - 1


def feed_place(url: SinkURL, options: ZMQOptions) -> Place:
    """Where the feed binds or connects; raises SinkURLError."""
    if url.port is None:
        raise SinkURLError(str(url), "a port is needed, as in zmq+pub://127.0.0.1:5557")
    if options.bind and options.connect:
        raise SinkURLError(str(url), "bind= and connect= exclude each other: leave one of them out")
    host = _spelled(url.host or "127.0.0.1")
    connects = options.connect or not (options.bind or binds_by_default(host))
    if connects and (not url.port or is_wildcard(host)):
        reason = "to connect, the router's host and port are needed, as in zmq+pub://router:5557"
        raise SinkURLError(str(url), reason)
    return Place(host, _of_rank(url, options, url.port), connects)


def replay_place(url: SinkURL, options: ZMQOptions) -> Place | None:
    """Where replays are asked for, always bound; None: nowhere. Raises SinkURLError."""
    if options.replay is None:
        return None
    feed, given = feed_place(url, options), _REPLAY.fullmatch(options.replay)
    if given is None or int(given["port"]) > _MAX_PORT:
        raise SinkURLError(str(url), "bad option: replay must be a port or HOST:PORT")
    host = given["v6"] or given["host"]
    if host is None and feed.connects and not feed.is_near:
        reason = "the feed connects, but its replay is bound here: say at which address, as in replay=*:5558"
        raise SinkURLError(str(url), reason)
    place = Place(_spelled(host or feed.host), _of_rank(url, options, int(given["port"])))
    if place.address == feed.address and place.port:
        reason = (
            f"port {place.port} cannot be both its own and the replay's: name another in replay= (0: any)"
        )
        raise SinkURLError(str(url), reason)
    return place


def _of_rank(url: SinkURL, options: ZMQOptions, port: int) -> int:
    """The port of this rank; any free one is any free one for each."""
    moved = port + options.rank if options.rank_ports and port else port
    if moved > _MAX_PORT:
        raise SinkURLError(str(url), f"port {port} and rank {options.rank} make {moved}, which is no port")
    return moved


def _spelled(host: str) -> str:
    """By IPv6 "localhost" may be another address than by IPv4."""
    return "127.0.0.1" if host == "localhost" else host
