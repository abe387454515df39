"""Whom ``kvcache subscribe`` listens to: one publisher, many that connect to it, or workers at a broker."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from events.brokers.address import is_broker
from events.subscribe.continuity import Report
from events.subscribe.endpoints import host_of, is_to_be_bound
from kvcache.errors import UsageError

if TYPE_CHECKING:
    from events.brokers.subscriber import BrokerSubscriber
    from events.sockets.curve import Curve
    from events.subscribe.gathering import Gathering, Worker
    from events.subscribe.subscriber import Subscriber

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
    add("--curve-server", type=Path, metavar="FILE", help="the public key, NAME.key, of the publisher")
    add(
        "--curve-clients",
        type=Path,
        metavar="DIR",
        help="with --bind: the public keys of those that may connect",
    )
    add(
        "--insecure", action="store_true", help="with --bind: let anybody who reaches ENDPOINT be a publisher"
    )


class Listening:
    """What is heard, each time with who said it (None: it is the only one)."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._one: Subscriber | None = None
        self._many: Gathering | BrokerSubscriber | None = None
        if is_broker(args.endpoint):
            self._many = _at_broker(args)
            self.endpoint = str(self._many.endpoint)
            return
        # Not at the top: no other command needs ZeroMQ, and loading it takes a while.
        from events.subscribe.gathering import Gathering, replay_in_topic
        from events.subscribe.subscriber import Subscriber

        binds = args.bind or is_to_be_bound(args.endpoint)
        curve = _curve(args, binds=binds)
        if binds:
            if args.replay not in (None, IN_TOPIC):
                raise UsageError(
                    "many publishers have many replays: write --replay topic for those in their topics"
                )
            replay = None if args.replay is None else replay_in_topic
            self._many = Gathering(
                args.endpoint, replay=replay, topic=args.topic, curve=curve, insecure=args.insecure
            )
            self.endpoint = self._many.endpoint
            return
        if args.insecure:
            raise UsageError("--insecure is about who may connect, but this connects itself: leave it out")
        for endpoint in (args.endpoint, args.replay):
            if endpoint is not None:
                _refuse_unknown_host(endpoint)
        start = None if args.replay is None else 0
        self._one = Subscriber(args.endpoint, replay=args.replay, topic=args.topic, start=start, curve=curve)
        self.endpoint = args.endpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def poll(self, timeout_ms: int) -> Sequence[tuple[Worker | None, Report]]:
        """What there is to report, after at most so many milliseconds."""
        if self._many is not None:
            return self._many.poll(timeout_ms)
        assert self._one is not None
        return [(None, report) for report in self._one.poll(timeout_ms)]

    @property
    def refused(self) -> int:
        """Connections that came to nothing because of keys."""
        return getattr(self._source, "refused", 0)

    @property
    def unanswered_seconds(self) -> float:
        """For how long the one replay endpoint that is waited for has not answered."""
        return 0.0 if self._one is None else self._one.unanswered_seconds

    @property
    def unavailable(self) -> str | None:
        """Why the broker cannot be read at present, if one is."""
        return getattr(self._source, "unavailable", None)

    @property
    def _source(self) -> Subscriber | Gathering | BrokerSubscriber:
        source = self._one or self._many
        assert source is not None
        return source


def _at_broker(args: argparse.Namespace) -> BrokerSubscriber:
    from events.brokers.subscriber import BrokerSubscriber

    for name in ("replay", "topic", "bind", "curve_key", "curve_server", "curve_clients", "insecure"):
        if getattr(args, name):
            reason = f"--{name.replace('_', '-')} is for publishers over ZeroMQ: leave it out"
            raise UsageError(f"{reason}; docs/brokers.md has the options of a broker's address")
    return BrokerSubscriber(args.endpoint)


def _curve(args: argparse.Namespace, *, binds: bool) -> Curve | None:
    from events.sockets.curve import Curve

    partner, other = ("clients", "server") if binds else ("server", "clients")
    if getattr(args, f"curve_{other}") is not None:
        raise UsageError(
            f"--curve-{other} is for {'connecting' if binds else 'binding'}: give --curve-{partner}"
        )
    if (args.curve_key is None) != (getattr(args, f"curve_{partner}") is None):
        raise UsageError(f"encryption needs both --curve-key and --curve-{partner}")
    if args.curve_key is None:
        return None
    return Curve.read(args.curve_key, server=args.curve_server, clients=args.curve_clients)


def _refuse_unknown_host(endpoint: str) -> None:
    """Raise `UsageError` for a name that stands for no address: a person would wait for nothing."""
    host = host_of(endpoint)
    if host is None:
        return
    try:
        socket.getaddrinfo(host, None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        raise UsageError(f"{endpoint}: the host {host!r} cannot be found: {reason}") from None
