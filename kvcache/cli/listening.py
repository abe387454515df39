"""Whom ``kvcache subscribe`` listens to: publishers that it connects to, and such as connect to it."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, cast
from urllib.parse import parse_qsl

from events.subscribe.continuity import Report
from events.subscribe.endpoints import host_of, is_to_be_bound, refuse_foreign
from kvcache.errors import UsageError

if TYPE_CHECKING:
    import zmq

    from events.subscribe.gathering import Gathering, Worker
    from events.subscribe.sockets import Curve
    from events.subscribe.subscriber import NativeSubscriber, Subscriber

    AnySource = Subscriber | NativeSubscriber | Gathering

IN_TOPIC = "topic"
"""Given in place of a replay's endpoint: it is the one in the worker's topic."""


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Declare how an endpoint is reached."""
    add = parser.add_argument_group("connection").add_argument
    add(
        "--bind",
        action="store_true",
        help="bind ENDPOINT, for many publishers that connect; tcp://*:PORT always is",
    )
    add("--curve-key", type=Path, metavar="FILE", help="our own keys, NAME.key_secret, where it is encrypted")
    add(
        "--curve-server",
        type=Path,
        metavar="FILE",
        help="the public key, NAME.key, of the publisher; of one of several, ENDPOINT?curve_server=FILE",
    )
    add(
        "--curve-clients",
        type=Path,
        metavar="DIR",
        help="with --bind: the public keys of those that may connect",
    )
    add(
        "--insecure", action="store_true", help="with --bind: let anybody who reaches ENDPOINT be a publisher"
    )


class Speaker(NamedTuple):
    """Who has said something."""

    endpoint: str
    """Where it is connected to, or connects to."""
    worker: Worker | None = None
    """Which of those that connect there; None: it is the only one."""


class Place(NamedTuple):
    """An ENDPOINT as it is given, as in ``tcp://10.0.0.1:5557?replay=5558&curve_server=one.key``."""

    endpoint: str
    replay: str | None
    curve_server: Path | None

    @classmethod
    def read(cls, text: str) -> Place:
        """Raises `UsageError`."""
        endpoint, _, query = text.partition("?")
        refuse_foreign(endpoint)
        options = dict(parse_qsl(query, keep_blank_values=True))
        for name, value in options.items():
            if name not in ("replay", "curve_server") or not value:
                raise UsageError(f"{endpoint}: the options behind it are replay=PORT and curve_server=FILE")
        server = options.get("curve_server")
        replay = _replay(endpoint, options.get("replay"))
        return cls(endpoint, replay, None if server is None else Path(server))


def _replay(endpoint: str, text: str | None) -> str | None:
    """Where a replay is: another port of the same host, HOST:PORT, or an endpoint."""
    if text is None or text == IN_TOPIC or "://" in text:
        return text
    return f"{endpoint.rpartition(':')[0]}:{text}" if text.isdigit() else f"tcp://{text}"


class Listening:
    """What is heard at all of them, each time with who said it."""

    def __init__(self, args: argparse.Namespace) -> None:
        # Not at the top: no other command needs ZeroMQ, and loading it takes a while.
        import zmq

        places = places_of(args)
        self._sources: dict[str, AnySource] = {}
        self._replays: dict[str, str | None] = {}
        self._open = ExitStack()
        try:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            self._open.callback(context.destroy, linger=0)
            for place in places:
                source = _source(place, args, context)
                self._open.callback(source.close)
                endpoint = _bound_at(source) or place.endpoint
                if self._sources.setdefault(endpoint, source) is not source:
                    raise UsageError(f"{endpoint} is named twice")
                self._replays[endpoint] = place.replay
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All of them, as they were given or bound."""
        return tuple(self._sources)

    @property
    def expected(self) -> list[Speaker]:
        """Those that it connects to."""
        return [Speaker(endpoint) for endpoint, source in self._sources.items() if not _bound_at(source)]

    def poll(self, timeout_ms: int) -> Sequence[tuple[Speaker, Report]]:
        """What there is to report, after at most so many milliseconds."""
        import zmq

        from events.subscribe.subscriber import wait_for

        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            reports = [each for endpoint in self._sources for each in self._poll(endpoint)]
            if reports or time.monotonic() >= deadline:
                return reports
            poller = zmq.Poller()
            wait_for(poller, [source.wait(poller) for source in self._sources.values()], deadline)

    def connected(self, speaker: Speaker) -> bool | None:
        """Whether it is there now; None: that cannot be told of one that connects itself."""
        source = self._sources[speaker.endpoint]
        return None if _bound_at(source) else source.connected  # type: ignore[union-attr]

    def replay(self, endpoint: str) -> str | None:
        """Where the one publisher there is asked for what was missed."""
        return self._replays[endpoint]

    def refused(self, endpoint: str) -> int:
        """Connections that came to nothing because of keys."""
        return self._sources[endpoint].refused

    def malformed(self, endpoint: str) -> int:
        """Messages there that were ignored since they do not even have a number."""
        return self._sources[endpoint].malformed

    def ignored(self, endpoint: str) -> int:
        """Messages there of workers that were too many."""
        return getattr(self._sources[endpoint], "ignored", 0)

    def unavailable(self, endpoint: str) -> str | None:
        """ZeroMQ connects in the background, and does not say why it cannot."""
        return None

    def unanswered_seconds(self, endpoint: str) -> float:
        """For how long the replay of the one publisher there has not answered."""
        return getattr(self._sources[endpoint], "unanswered_seconds", 0.0)

    def _poll(self, endpoint: str) -> list[tuple[Speaker, Report]]:
        from events.subscribe.gathering import Gathering

        source = self._sources[endpoint]
        if isinstance(source, Gathering):
            return [(Speaker(endpoint, worker), report) for worker, report in source.poll(0)]
        reports = cast("Sequence[Report]", source.poll(0))
        return [(Speaker(endpoint), report) for report in reports]


def places_of(args: argparse.Namespace) -> list[Place]:
    """The endpoints that were given, each with its replay. Raises UsageError."""
    places = [Place.read(text) for text in args.endpoint]
    if args.replay is not None:
        places = _with_replay(places, args.replay)
    _refuse_idle(args, places)
    return places


def refuse_named_replay(replay: str | None) -> None:
    """Raise `UsageError` for a replay of an endpoint where many connect."""
    if replay not in (None, IN_TOPIC):
        raise UsageError("many publishers have many replays: write --replay topic for those in their topics")


def _with_replay(places: list[Place], replay: str) -> list[Place]:
    if len(places) > 1 and replay != IN_TOPIC:
        raise UsageError(
            "each publisher has a replay of its own: write ENDPOINT?replay=PORT in place of --replay"
        )
    if any(place.replay is not None for place in places):
        raise UsageError("a replay is given twice: write either --replay or ENDPOINT?replay=PORT")
    return [place._replace(replay=_replay(place.endpoint, replay)) for place in places]


def _source(place: Place, args: argparse.Namespace, context: zmq.Context[zmq.Socket[bytes]]) -> AnySource:
    from events.subscribe.gathering import Gathering, replay_in_topic
    from events.subscribe.subscriber import NativeSubscriber, Subscriber

    endpoint, replay, _ = place
    binds = is_bound(place, args)
    curve = curve_of(args, place, binds=binds)
    if binds and args.format == "native":
        raise UsageError(f"{endpoint}: --format native connects to one publisher, and is not bound")
    if binds:
        refuse_named_replay(replay)
        find = None if replay is None else replay_in_topic
        return Gathering(endpoint, replay=find, topic=args.topic, curve=curve, insecure=args.insecure)
    for each in (endpoint, replay):
        if each is not None:
            refuse_unknown_host(each)
    if args.format == "native":
        return NativeSubscriber(endpoint, replay=replay, topic=args.topic, curve=curve, context=context)
    start = None if replay is None else 0
    return Subscriber(endpoint, replay=replay, topic=args.topic, start=start, curve=curve, context=context)


def _bound_at(source: AnySource) -> str | None:
    """Where it is bound; None: it is not."""
    return getattr(source, "endpoint", None)


def _refuse_idle(args: argparse.Namespace, places: Sequence[Place]) -> None:
    """Raise `UsageError` for options that are about none of the endpoints."""
    binding = [is_bound(place, args) for place in places]
    if args.curve_server is not None and all(binding):
        raise UsageError("--curve-server is for connecting: give --curve-clients")
    if args.curve_clients is not None and not any(binding):
        raise UsageError("--curve-clients is for binding: give --curve-server")
    if args.insecure and not any(binding):
        raise UsageError("--insecure is about who may connect, but this connects itself: leave it out")


def is_bound(place: Place, args: argparse.Namespace) -> bool:
    """Whether publishers connect to it."""
    return args.bind or is_to_be_bound(place.endpoint)


def curve_of(args: argparse.Namespace, place: Place, *, binds: bool) -> Curve | None:
    """The keys that were given, for one end or the other. Raises UsageError, and KeyFileError."""
    from events.subscribe.sockets import Curve

    server = None if binds else place.curve_server or args.curve_server
    clients = args.curve_clients if binds else None
    if args.curve_key is None and server is None and clients is None:
        return None
    if args.curve_key is None or (server is None and clients is None):
        raise UsageError(f"encryption needs both --curve-key and --curve-{'clients' if binds else 'server'}")
    return Curve.read(args.curve_key, server=server, clients=clients)


def refuse_unknown_host(endpoint: str) -> None:
    """Raise `UsageError` for a name that stands for no address: a person would wait for nothing."""
    host = host_of(endpoint)
    if host is None:
        return
    try:
        socket.getaddrinfo(host, None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        raise UsageError(f"{endpoint}: the host {host!r} cannot be found: {reason}") from None
