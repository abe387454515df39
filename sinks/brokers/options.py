"""The options of the sinks that feed routers by way of a broker, and what is made of them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from events.brokers.address import NAME, PORTS, STREAM, AccessOptions, BrokerAddress, BrokerURLError
from events.formats.native import Encoding
from events.units import parse_bytes, parse_seconds
from sinks.base import SinkContext, SinkURL, SinkURLError
from sinks.brokers.transport import BrokerSettings, BrokerTransport, Stream
from sinks.router.feed import RouterFeed
from sinks.router.forms import Style, WireFormat, form_of, tells_tokens
from sinks.router.native import NativeFeed
from sinks.router.numbers import FeedNumbers, clock_number
from sinks.router.options import INT32
from sinks.router.whose import feed_for

_BYTES = ("max_batch", "max_bytes")
LEAST_RETAIN = 3
"""So many times `restate` messages must be kept: for the state before, the one in the making, and some air."""


class BrokerOptions(AccessOptions, frozen=True, kw_only=True):
    """Options that all brokers have."""

    format: WireFormat = "vllm"
    style: Style = "map"
    encoding: Encoding = "msgpack"
    tokens: bool | None = None
    worker: str | None = None
    engine: str | None = None
    rank: Annotated[int, msgspec.Meta(ge=0, le=INT32)] = 0
    salts: Literal["digest", "plain"] = "digest"
    coalesce: str = "50ms"
    max_batch: str = "512KiB"
    heartbeat: str = "5s"
    restate: str = "10min"
    timeout: str = "5s"
    state: str | None = None
    first: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None


Options = TypeVar("Options", bound=BrokerOptions)


def address_of(url: SinkURL, options: BrokerOptions) -> BrokerAddress:
    """Where the broker is. Raises SinkURLError."""
    try:
        return BrokerAddress(
            url.scheme,
            url.host or "127.0.0.1",
            url.port or PORTS[url.scheme],
            url.path.strip("/") or STREAM,
            url.user,
            url.password,
            options,
        )
    except BrokerURLError as error:
        raise SinkURLError(str(url), error.reason) from None


def worker_of(url: SinkURL, options: BrokerOptions) -> str:
    """The name under which readers know this feed: by default this machine's, and the rank."""
    name = options.worker
    if name is None:
        name = socket.gethostname().partition(".")[0] + (f"-{options.rank}" if options.rank else "")
    if not NAME.fullmatch(name):
        raise SinkURLError(
            str(url), "a worker's name has letters, digits, _ and - only: give one with worker="
        )
    return name


def quantity(url: SinkURL, options: BrokerOptions, name: str) -> float:
    """A duration in seconds, or a size in bytes. Raises SinkURLError."""
    parse = parse_bytes if name in _BYTES else parse_seconds
    try:
        return parse(getattr(options, name))
    except ValueError as error:
        raise SinkURLError(str(url), f"bad option: {name}={error}") from None


def retain_seconds(url: SinkURL, options: BrokerOptions) -> float:
    """How long messages are kept. Raises SinkURLError where a live worker's state would be forgotten."""
    retain, restate = quantity(url, options, "retain"), quantity(url, options, "restate")
    if retain < LEAST_RETAIN * restate:
        reason = (
            f"retain must be {LEAST_RETAIN} times restate, or a state is forgotten before the next is told"
        )
        raise SinkURLError(str(url), f"bad option: {reason}")
    return retain


def feed_of(
    url: SinkURL, options: BrokerOptions, context: SinkContext, stream: Stream, worker: str
) -> RouterFeed:
    """The sink that feeds a worker's stream."""
    pace = {name: quantity(url, options, name) for name in ("coalesce", "max_batch", "heartbeat")}
    form = form_of(url, options, context)
    settings = BrokerSettings(
        rank=options.rank,
        piece_bytes=int(pace["max_batch"]),
        timeout_seconds=quantity(url, options, "timeout"),
        restate_seconds=quantity(url, options, "restate"),
        salts=context.salts.ask() if options.salts == "plain" else None,
        form=form,
    )
    transport = BrokerTransport(stream, settings)
    first = clock_number() if options.first is None else options.first
    numbers = FeedNumbers(_state_path(url, options, worker, context), first=first)
    if options.format == "native":
        tokens, heartbeat = tells_tokens(options), pace["heartbeat"]
        return NativeFeed(transport, numbers, context, tokens=tokens, heartbeat_seconds=heartbeat)
    return RouterFeed(
        transport,
        numbers,
        coalesce_seconds=pace["coalesce"],
        max_batch_bytes=int(pace["max_batch"] / form.overhead),
        heartbeat_seconds=pace["heartbeat"],
        feed=feed_for(url, options.engine, context),
        opens_as=transport.speak_as,
    )


def _state_path(url: SinkURL, options: BrokerOptions, worker: str, context: SinkContext) -> Path | None:
    if options.state is not None:
        return url.file_path(options.state) if options.state else None
    if context.state_dir is None:
        return None
    stream = url.path.strip("/") or STREAM
    return context.state_dir / f"feed-{url.scheme}-{stream}-{worker}.numbers"
