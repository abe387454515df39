"""Sources of `kvcache subscribe`: publishers that it connects to, publishers that connect to it, and brokers."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self
from urllib.parse import parse_qsl

from events.brokers.address import is_broker
from events.subscribe.continuity import Received, ReceivedBatch
from events.subscribe.endpoints import host_of, refuse_foreign, should_bind
from kvcache.cli.options import option
from kvcache.cli.output import Output
from kvcache.cli.process import StopSignals
from kvcache.errors import UsageError

if TYPE_CHECKING:
    import zmq

    from events.subscribe.fan_in import Worker
    from events.subscribe.sockets import Curve

IN_TOPIC = "topic"
"""Value in place of a replay endpoint: the one in the worker's topic."""
SILENCE_SECONDS = 5.0
NOTHING_RECEIVED = "nothing received from {} yet: no publisher there, or no events"
_POLL_MS = 200
_PATIENCE_SECONDS = 2.0
"""Seconds before a replay endpoint is reported; a working one answers at once."""
_REFUSED = (
    "a connection was refused because its key is missing, wrong, or not among the allowed clients; retrying"
)
_OF_ZMQ = ("replay", "topic", "bind", "curve_key", "curve_server", "curve_clients", "insecure")


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Declare connection options, and filters for messages."""
    add = partial(option, parser.add_argument_group("connection"))
    add("--topic TOPIC", "receive only topics with this prefix, and batches without a topic", default="")
    add("--bind", "bind ENDPOINT, to which publishers connect; implied for tcp://*:PORT")
    add("--curve-key FILE", "own secret key for encryption, NAME.key_secret")
    add(
        "--curve-server FILE",
        "public key of the publisher, NAME.key; for one of several, ENDPOINT?curve_server=FILE",
    )
    add("--curve-clients DIR", "with --bind: directory of the public keys of allowed publishers")
    add("--insecure", "with --bind: accept any publisher that can reach ENDPOINT")


class Sender(NamedTuple):
    """Sender of a report."""

    endpoint: str
    """Endpoint that it is connected to, or connects to."""
    worker: Worker | None = None
    """Worker that connects there; None if it is the only one."""


class EndpointArgument(NamedTuple):
    """An ENDPOINT argument, as in ``tcp://10.0.0.1:5557?replay=5558&curve_server=one.key``."""

    endpoint: str
    replay: str | None
    curve_server: Path | None

    @classmethod
    def read(cls, text: str) -> EndpointArgument:
        """Parse an ENDPOINT. Raises `UsageError`."""
        endpoint, _, query = text.partition("?")
        refuse_foreign(endpoint)
        options = dict(parse_qsl(query, keep_blank_values=True))
        for name, value in options.items():
            if name not in ("replay", "curve_server") or not value:
                raise UsageError(f"{endpoint}: valid options after ? are replay=PORT and curve_server=FILE")
        server = options.get("curve_server")
        replay = _replay(endpoint, options.get("replay"))
        return cls(endpoint, replay, None if server is None else Path(server))

    def binds(self, args: argparse.Namespace) -> bool:
        """Return True if publishers connect to it."""
        return args.bind or should_bind(self.endpoint)

    def check(self, args: argparse.Namespace) -> None:
        """Raise `UsageError` for a replay or a host that cannot work."""
        if self.binds(args):
            if self.replay not in (None, IN_TOPIC):
                raise UsageError(
                    "publishers that connect have replay endpoints of their own: use --replay topic if their topics "
                    "name them"
                )
        else:
            for endpoint in filter(None, (self.endpoint, self.replay)):
                _refuse_unknown_host(endpoint)

    def curve(self, args: argparse.Namespace) -> Curve | None:
        """Return the given keys for the connecting or the binding end. Raises UsageError and KeyFileError."""
        from events.subscribe.sockets import Curve

        binds = self.binds(args)
        server = None if binds else self.curve_server or args.curve_server
        clients = args.curve_clients if binds else None
        if args.curve_key is None and server is None and clients is None:
            return None
        if args.curve_key is None or (server is None and clients is None):
            raise UsageError(
                f"encryption needs both --curve-key and --curve-{'clients' if binds else 'server'}"
            )
        return Curve.read(args.curve_key, server=server, clients=clients)


def _replay(endpoint: str, text: str | None) -> str | None:
    """Return the endpoint of a replay: another port of the same host, HOST:PORT, or an endpoint."""
    if text is None or text == IN_TOPIC or "://" in text:
        return text
    return f"{endpoint.rpartition(':')[0]}:{text}" if text.isdigit() else f"tcp://{text}"


def _refuse_unknown_host(endpoint: str) -> None:
    """Raise `UsageError` for a name that does not resolve: the command would wait forever."""
    host = host_of(endpoint)
    if host is None:
        return
    try:
        socket.getaddrinfo(host, None)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "not a host name"
        raise UsageError(f"{endpoint}: the host {host!r} cannot be found: {reason}") from None


def endpoints_of(args: argparse.Namespace) -> list[EndpointArgument]:
    """Return the given endpoints, each with its replay. Raises UsageError."""
    given = [EndpointArgument.read(text) for text in args.endpoint]
    if args.replay is not None:
        if len(given) > 1 and args.replay != IN_TOPIC:
            raise UsageError("--replay is for a single ENDPOINT: give each its own as ENDPOINT?replay=PORT")
        if any(each.replay is not None for each in given):
            raise UsageError("a replay endpoint is given twice: use either --replay or ENDPOINT?replay=PORT")
        given = [each._replace(replay=_replay(each.endpoint, args.replay)) for each in given]
    binding = [each.binds(args) for each in given]
    if args.curve_server is not None and all(binding):
        raise UsageError(
            "--curve-server is only valid for publishers to connect to: use --curve-clients with --bind"
        )
    if args.curve_clients is not None and not any(binding):
        raise UsageError("--curve-clients is only valid with --bind: use --curve-server")
    if args.insecure and not any(binding):
        raise UsageError("--insecure is only valid with --bind")
    return given


class _Source(NamedTuple):
    """One source."""

    kind: Literal["publisher", "bound", "broker"]
    subscriber: Any
    """A Subscriber or NativeSubscriber, a FanInSubscriber, a BrokerSubscriber or NativeBrokerSubscriber."""
    replay: str | None = None


class Subscriptions:
    """Reports of all sources, each with its sender."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._sources: dict[str, _Source] = {}
        with ExitStack() as opened:
            (self._add_broker if any(map(is_broker, args.endpoint)) else self._add_sockets)(args, opened)
            self._open = opened.pop_all()

    def _add_broker(self, args: argparse.Namespace, opened: ExitStack) -> None:
        from events.brokers.subscriber import BrokerSubscriber, NativeBrokerSubscriber

        if len(args.endpoint) > 1:
            raise UsageError("a broker's stream cannot be combined with other endpoints")
        for name in _OF_ZMQ:
            if vars(args)[name]:
                reason = f"--{name.replace('_', '-')} is only valid for ZeroMQ publishers"
                raise UsageError(f"{reason}; `kvcache docs brokers` lists the options of a broker address")
        reads = NativeBrokerSubscriber if args.format == "native" else BrokerSubscriber
        subscriber = reads(args.endpoint[0])
        opened.callback(subscriber.close)
        self._sources[str(subscriber.endpoint)] = _Source("broker", subscriber)

    def _add_sockets(self, args: argparse.Namespace, opened: ExitStack) -> None:
        # Not at the top: no other command needs ZeroMQ, and loading it takes a while.
        import zmq

        given = endpoints_of(args)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        opened.callback(context.destroy, linger=0)
        for each in given:
            source = _source(each, args, context)
            opened.callback(source.subscriber.close)
            endpoint = source.subscriber.endpoint if source.kind == "bound" else each.endpoint
            if self._sources.setdefault(endpoint, source) is not source:
                raise UsageError(f"{endpoint} is given twice")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints, as given or bound."""
        return tuple(self._sources)

    @property
    def expected(self) -> list[Sender]:
        """Senders that it connects to and that can be known by name."""
        return [Sender(endpoint) for endpoint, each in self._sources.items() if each.kind == "publisher"]

    def poll(self, timeout_ms: int) -> Sequence[tuple[Sender, Any]]:
        """Return reports, after at most `timeout_ms`."""
        from events.subscribe.subscriber import Readable, poll_until, shortest

        def take() -> list[tuple[Sender, Any]]:
            return [each for endpoint in self._sources for each in self._poll(endpoint, timeout_ms)]

        def wait(poller: Readable) -> float | None:
            sources = [each for each in self._sources.values() if each.kind != "broker"]
            return shortest([each.subscriber.wait(poller) for each in sources], None)

        return poll_until(take, wait, timeout_ms)

    def _poll(self, endpoint: str, timeout_ms: int) -> list[tuple[Sender, Any]]:
        kind, subscriber, _ = self._sources[endpoint]
        if kind == "publisher":
            return [(Sender(endpoint), report) for report in subscriber.poll(0)]
        # A broker's stream is the only source, and waits by itself.
        found = subscriber.poll(timeout_ms if kind == "broker" else 0)
        return [(Sender(endpoint, worker), report) for worker, report in found]

    def connected(self, sender: Sender) -> bool | None:
        """Return True if the sender is connected; None if it connects by itself, so that this is unknown."""
        kind, subscriber, _ = self._sources[sender.endpoint]
        return bool(subscriber.connected) if kind == "publisher" else None

    def counts(self, endpoint: str) -> dict[str, int]:
        """Return counters of an endpoint: connections refused because of keys, unreadable messages, excess workers'."""
        subscriber = self._sources[endpoint].subscriber
        return {name: getattr(subscriber, name, 0) for name in ("refused", "malformed", "ignored")}

    def unanswered(self, endpoint: str) -> tuple[str | None, float]:
        """Return the replay endpoint of the one publisher there, and for how many seconds it has not answered."""
        _, subscriber, replay = self._sources[endpoint]
        return replay, getattr(subscriber, "unanswered_seconds", 0.0)

    def unavailable(self, endpoint: str) -> str | None:
        """Return why a broker cannot be read at present. ZeroMQ connects in the background, and does not report it."""
        found: str | None = getattr(self._sources[endpoint].subscriber, "unavailable", None)
        return found


def _source(
    given: EndpointArgument, args: argparse.Namespace, context: zmq.Context[zmq.Socket[bytes]]
) -> _Source:
    from events.subscribe.fan_in import FanInSubscriber, replay_in_topic
    from events.subscribe.subscriber import NativeSubscriber, Subscriber

    endpoint, replay, _ = given
    common: dict[str, Any] = {"topic": args.topic, "curve": given.curve(args)}
    if given.binds(args) and args.format == "native":
        raise UsageError(f"{endpoint}: --format native cannot be combined with --bind")
    given.check(args)
    if given.binds(args):
        find = None if replay is None else replay_in_topic
        return _Source("bound", FanInSubscriber(endpoint, replay=find, insecure=args.insecure, **common))
    if args.format == "native":
        return _Source(
            "publisher", NativeSubscriber(endpoint, replay=replay, context=context, **common), replay
        )
    start = None if replay is None else 0
    subscriber = Subscriber(endpoint, replay=replay, start=start, context=context, **common)
    return _Source("publisher", subscriber, replay)


def receive(
    subscriptions: Subscriptions, stop: StopSignals, args: argparse.Namespace, out: Output
) -> Iterator[tuple[Sender, Any] | None]:
    """Yield reports until a signal or the last requested batch; also None several times a second."""
    batches = 0
    troubles = _ProblemReporter(subscriptions, out)
    for endpoint in subscriptions.endpoints:
        out.note(f"subscribed to {endpoint}")
    while not stop.is_set():
        troubles.report()
        for sender, report in subscriptions.poll(_POLL_MS):
            troubles.silent.discard(sender.endpoint)
            yield sender, report
            batches += isinstance(report, Received | ReceivedBatch) and bool(report.batch.events)
            if batches == args.count:
                return
        yield None


class _ProblemReporter:
    """Reporter of problems, each once."""

    def __init__(self, subscriptions: Subscriptions, out: Output) -> None:
        self._subscriptions, self._out = subscriptions, out
        self._unanswered: set[str] = set()
        self._refused: set[str] = set()
        self.silent, self._begun = set(subscriptions.endpoints), time.monotonic()
        """Endpoints at which nothing was received yet."""
        self._absent: dict[str, str | None] = {}

    def report(self) -> None:
        """Report current problems."""
        if self.silent and time.monotonic() - self._begun >= SILENCE_SECONDS:
            for endpoint in sorted(self.silent):
                self._out.note(NOTHING_RECEIVED.format(endpoint))
            self.silent.clear()
        for endpoint in self._subscriptions.endpoints:
            replay, waited = self._subscriptions.unanswered(endpoint)
            if endpoint not in self._unanswered and waited >= _PATIENCE_SECONDS:
                # Nothing is shown before the replay endpoint answers.
                self._unanswered.add(endpoint)
                self._out.note(f"no answer yet from the replay endpoint {replay}")
            absent = self._subscriptions.unavailable(endpoint)
            if absent is not None and absent != self._absent.get(endpoint):
                self._out.note(f"{endpoint}: {absent}; retrying")
            self._absent[endpoint] = absent
            if endpoint not in self._refused and self._subscriptions.counts(endpoint)["refused"] > 1:
                self._refused.add(endpoint)
                self._out.warning(f"{endpoint}: {_REFUSED}")
