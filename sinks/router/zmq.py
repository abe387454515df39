"""``zmq+pub://127.0.0.1:5557?replay=5558`` feeds routers that use vLLM's KV event protocol.

Each batch is one message of three frames (topic, number, payload) to all subscribers. A subscriber that connects, late
or again, first receives "cleared" and the whole state, alone, in one batch under the last number
(`sinks.router.publisher`). A subscriber that lags by more than `hwm` messages misses some; with ``replay=PORT`` it can
request them there (`sinks.router.replay`), however old. docs/reference/settings.md has the options.

SECURITY: the payloads hold token ids, that is the users' prompts, unless they are left out: without a host the sockets
are bound to loopback, and traffic that leaves the machine must be encrypted, or explicitly allowed in clear. A salt is
a secret that keeps tenants apart, so ``salts=plain`` is for ports that routers alone can reach.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from events.subscribe.sockets import Curve, CurveUnavailable, KeyFileError, is_wildcard
from sinks.base import SinkContext, SinkURL, SinkURLError
from sinks.router.feed import RouterFeed
from sinks.router.options import INT32, FeedOptions, make_feed, writer_of
from sinks.router.publisher import SocketPlace, binds_by_default
from sinks.router.transport import ZMQSettings, ZMQTransport

_REPLAY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]:|(?P<host>[^:\[\]@/]+):)?(?P<port>[0-9]{1,5})")
_MAX_PORT = (1 << 16) - 1


def feed_place(url: SinkURL, options: ZMQOptions) -> SocketPlace:
    """Return the feed's place to bind or connect to; raises SinkURLError."""
    if url.port is None:
        raise SinkURLError(str(url), "a port is required, as in zmq+pub://127.0.0.1:5557")
    host = _spelled(url.host or "127.0.0.1")
    connects = not binds_by_default(host) if options.connect is None else options.connect
    if connects and (not url.port or is_wildcard(host)):
        reason = "to connect, the router's host and port are required, as in zmq+pub://router:5557"
        raise SinkURLError(str(url), reason)
    return SocketPlace(host, url.port, connects)


def replay_place(url: SinkURL, options: ZMQOptions, feed: SocketPlace) -> SocketPlace | None:
    """Return the replay's place, always bound; None: there is no replay. Raises SinkURLError."""
    if options.replay is None:
        return None
    given = _REPLAY.fullmatch(options.replay)
    if given is None or int(given["port"]) > _MAX_PORT:
        raise SinkURLError(str(url), "bad option: replay must be a port or HOST:PORT")
    host = given["v6"] or given["host"]
    if host is None and feed.connects and not feed.is_near:
        reason = (
            "the feed connects, but its replay is bound on this machine: give its address, as in "
            "replay=*:5558"
        )
        raise SinkURLError(str(url), reason)
    place = SocketPlace(_spelled(host or feed.host), int(given["port"]))
    if place.address == feed.address and place.port:
        reason = (
            f"port {place.port} is used for both the feed and the replay: choose another in replay= (0: any)"
        )
        raise SinkURLError(str(url), reason)
    return place


def _spelled(host: str) -> str:
    """Return a host as ZeroMQ needs it: by IPv6 "localhost" may be another address than by IPv4."""
    return "127.0.0.1" if host == "localhost" else host


def curve_of(
    url: SinkURL, options: ZMQOptions, place: SocketPlace, replay: SocketPlace | None
) -> Curve | None:
    """Return the keys; None: nothing is encrypted, nor needs to be. Raises SinkURLError."""
    binds = not place.connects or replay is not None
    needed = ["curve_key", *["curve_clients"] * binds, *["curve_server"] * place.connects]
    paths = {name: getattr(options, name) for name in ("curve_key", "curve_clients", "curve_server")}
    files = {name: url.file_path(path) for name, path in paths.items() if path is not None}
    far = next((each for each in (place, replay) if each is not None and not each.is_near), None)
    if not files and far is not None and not options.insecure:
        reason = (
            f"prompts would be sent unencrypted to {far.address}, outside this machine: encrypt them with "
            f"{' and '.join(f'{name}=' for name in needed)} (`kvcache docs settings`), or set insecure=1 if "
            "the network is trusted"
        )
        raise SinkURLError(str(url), reason)
    if not files:
        return None
    if options.insecure:
        raise SinkURLError(str(url), "it is encrypted, so insecure= has no effect: omit it")
    if sorted(files) != sorted(needed):
        role = "connects" if place.connects else "binds"
        with_replay = " with a replay" if place.connects and replay is not None else ""
        reason = (
            f"a feed that {role}{with_replay} is encrypted with {', '.join(needed)}, but "
            f"{', '.join(files)} was given"
        )
        raise SinkURLError(str(url), reason)
    try:
        return Curve.read(
            files["curve_key"], server=files.get("curve_server"), clients=files.get("curve_clients")
        )
    except (KeyFileError, CurveUnavailable) as error:
        raise SinkURLError(str(url), str(error)) from None


MAX_CHUNK_BYTES = 8 << 20


class ZMQOptions(FeedOptions, frozen=True, kw_only=True):
    """Options of the URL."""

    connect: bool | None = None
    replay: str | None = None
    topic: str | None = None
    ring: str = "64MiB"
    pad: bool = False
    hwm: Annotated[int, msgspec.Meta(ge=1, le=INT32)] = 1000
    curve_key: str | None = None
    curve_clients: str | None = None
    curve_server: str | None = None


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """Create the sink for a ``zmq+pub:`` URL; its only transport is a `ZMQTransport`."""
    options = url.read_options(ZMQOptions)
    settings = _settings(url, options, context)
    _refuse_misfits(url, options, settings)
    place = settings.place
    plain = "".join(char if char.isalnum() or char in ".-" else "_" for char in place.host)
    return make_feed(
        url,
        options,
        context,
        ZMQTransport(settings),
        f"feed-{plain}-{place.port}.numbers" if place.port else None,
        overhead=settings.writer.overhead,
        first=0 if options.pad else None,  # Padding starts at the first number, so numbers must not be high.
    )


def _settings(url: SinkURL, options: ZMQOptions, context: SinkContext) -> ZMQSettings:
    if url.path not in ("", "/"):
        raise SinkURLError(str(url), "a path is not allowed; use zmq+pub://127.0.0.1:5557")
    place = feed_place(url, options)
    replay = replay_place(url, options, place)
    writer = writer_of(url, options, context)
    return ZMQSettings(
        place,
        replay,
        topic=options.topic,
        model=context.model or "unknown",
        ring_bytes=int(url.quantity(options, "ring")),
        chunk_bytes=min(int(url.quantity(options, "max_batch")), MAX_CHUNK_BYTES),
        pad=options.pad,
        hwm=options.hwm,
        writer=writer,
        curve=curve_of(url, options, place, replay),
    )


def _refuse_misfits(url: SinkURL, options: ZMQOptions, settings: ZMQSettings) -> None:
    """Refuse an option made useless, or lacking a requirement, by the other options: it would have no effect."""
    if options.is_native and "max_batch" in url.options:
        raise SinkURLError(
            str(url), "max_batch= does not apply to format=native, which never splits batches: omit it"
        )
    for name in ("ring", "pad"):
        if name in url.options and settings.replay is None:
            raise SinkURLError(str(url), f"{name}= requires replay=, the port for replays")
    if options.topic is None and "@" in settings.model:
        cut = "routers split the topic kv@POD@MODEL at each @"
        raise SinkURLError(str(url), f"{cut}, so the model must not contain one: add topic=")
    if options.topic is None and settings.place.connects and settings.replay is None:
        needs = "a router that subscribes to many feeds distinguishes them by topic: add topic= or replay="
        raise SinkURLError(
            str(url), f"{needs}; if readers should connect to this address instead, add connect=0"
        )
