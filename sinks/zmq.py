"""``zmq+pub://127.0.0.1:5557?replay=5558`` feeds routers that speak vLLM's KV event protocol.

Each batch is one message of three frames (topic, number, payload) to whoever subscribes. Who connects, late or again,
is first told "cleared" and the whole state, alone, in one batch under the last number (`sinks.publisher`). A subscriber
that falls behind by more than `hwm` messages misses some; with ``replay=PORT`` it can ask for them there
(`sinks.replay_server`), whatever it missed.

Options:

- ``format``: what payloads look like; ``vllm``.
- ``replay``: port on the same host where missed batches are answered. Without it nobody can ask.
- ``topic``: by default ``kv@HOST:PORT@MODEL``, the form in which llm-d finds pod and model. Bound to all interfaces,
  HOST is this machine's address in its network.
- ``model``: for the topic; by default that of the cache, else ``unknown``.
- ``rank``: data-parallel rank, in each payload.
- ``salts``: how a prompt's cache salt is told: ``digest``, its SHA-256 in hex, or ``plain``, as the request gave it,
  which is what NVIDIA Dynamo looks for. A salt is a secret that keeps tenants apart: who knows one can find out, by how
  long requests take, what was asked under it. So ``plain`` is for ports that routers alone can reach. A salt that no
  request has used since the process began (a resumed state), that is longer than 128 bytes, or that was used before
  the last 65,536 others, goes out as its digest all the same.
- ``coalesce``, ``max_batch``, ``heartbeat``: see `sinks.router_feed.RouterFeed`; as in ``50ms``, ``1MiB``, ``1s``.
- ``ring``: memory for batches kept as they were sent. What is older is answered from the state.
- ``pad``: ``true`` for readers that want every number from the one they ask for, as llm-d does: empty batches fill up.
- ``hwm``: messages that wait per subscriber before it loses some.
- ``state``: file for the numbers (`sinks.feed_numbers`); by default ``feed-HOST-PORT.numbers`` in the context's
  `state_dir`. ``state=`` without a path, port 0, and a context without `state_dir` mean: in memory.
- ``first``: the number to begin with where no file knows better; by default the clock's, so that routers which followed
  an earlier feed hear this one; with ``pad`` 0.
- ``linger``: how long closing waits for subscribers to take what was sent.

Port 0 takes any free one. The payloads hold token ids, that is the users' prompts: without a host the sockets are
bound to loopback, and anything wider is warned of, since nothing on the wire is encrypted.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import zmq

from events.diagnostics import get_logger
from events.feed_changes import Change
from events.formats import vllm
from events.types import GroupCreated
from sinks.base import SinkContext, SinkError, SinkURL, SinkURLError
from sinks.feed_numbers import FeedNumbers, clock_number
from sinks.peers import endpoint_of, own_address, port_of
from sinks.publisher import Publisher
from sinks.quantities import parse_bytes, parse_seconds
from sinks.replay_ring import ReplayRing
from sinks.replay_server import STALL_SECONDS, ReplayServer
from sinks.router_feed import FeedBatch, FeedState, RouterFeed
from sinks.snapshot import Snapshot

MAX_INBOUND_BYTES = 4096
"""Subscriptions and requests are short; whoever sends more is cut off."""
REPLAY_HWM = 256
"""Messages of an answer that wait in the socket. They may be of `MAX_CHUNK_BYTES`, so not more of them."""
MAX_CHUNK_BYTES = 8 << 20
INBOUND_HWM = 100
"""What peers say waits with them, not here: a socket takes in all that its connections have room for."""
NEWCOMERS_AT_ONCE = 100
ENCODE_SECONDS = 0.02
"""How long the feed works on the state for who comes late before it looks for live batches again."""


class Format(NamedTuple):
    """How a feed is written."""

    encode: Callable[[Sequence[Change], float, int, Sequence[GroupCreated]], bytes]
    """Changes, time, rank and groups to a payload."""
    join: Callable[[Sequence[bytes], int], bytes]
    """Payloads of a rank to one with all their events."""


VLLM = Format(vllm.encode_batch, vllm.join_batches)

_FORMATS = {"vllm": VLLM}

_log = get_logger("sinks")


_INT32 = 2**31 - 1
"""More than any socket, and any rank, can be given."""


class ZMQOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    format: Literal["vllm"] = "vllm"
    replay: int | None = None
    topic: str | None = None
    model: str | None = None
    rank: Annotated[int, msgspec.Meta(le=_INT32)] = 0
    salts: Literal["digest", "plain"] = "digest"
    coalesce: str = "50ms"
    max_batch: str = "1MiB"
    ring: str = "64MiB"
    pad: bool = False
    heartbeat: str = "1s"
    hwm: Annotated[int, msgspec.Meta(le=_INT32)] = 1000
    state: str | None = None
    first: Annotated[int, msgspec.Meta(le=2**62)] | None = None
    linger: str = "1s"


@dataclass(frozen=True)
class ZMQSettings:
    """What the transport needs, checked."""

    host: str
    port: int
    replay_port: int | None = None
    topic: str | None = None
    """None: made of the address and the model."""
    model: str = "unknown"
    rank: int = 0
    ring_bytes: int = 64 << 20
    chunk_bytes: int = 1 << 20
    pad: bool = False
    """Whether answers have every number from the one that was asked for."""
    hwm: int = 1000
    linger_seconds: float = 1.0
    stall_seconds: float = STALL_SECONDS
    """After this a replay's reader that takes nothing is given up."""
    holds: str = "token ids"
    """What must not be read by everybody, to warn of."""


class ZMQTransport:
    """Publishes a feed on a socket, tells who comes late, and answers readers that missed something on another."""

    def __init__(self, settings: ZMQSettings, wire: Format) -> None:
        self._settings = settings
        self._wire = wire
        self._ring = ReplayRing(settings.ring_bytes if settings.replay_port is not None else 0)
        self._snapshot: Snapshot | None = None
        """The state for who comes late, in the making or ready; None: nobody has needed it lately."""
        self._last: tuple[int, bytes] | None = None
        """Number of the last batch, and what a newcomer gets under it, if that was made already."""
        self.endpoint = ""
        """Where subscribers connect, once it is open."""
        self.topic = b""
        self.replay_endpoint: str | None = None
        self.replay: ReplayServer | None = None

    @property
    def subscribers(self) -> int:
        """Connections that have subscribed."""
        return self._publisher.subscribers

    def open(self, next_seq: int) -> None:
        """Bind the sockets. Raises SinkError if that cannot be done."""
        self._ring.start(next_seq)
        self._snapshot = self._last = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open_sockets()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        if not next_seq and self._settings.port:
            reason = "routers that followed an earlier feed here may hear nothing for long: restart them"
            _log.warning("feed_numbers_begin_at_0", endpoint=self.endpoint, reason=reason)
        if not _is_loopback(self._settings.host):
            _log.warning(
                "feed_leaves_machine", endpoint=self.endpoint, holds=self._settings.holds, encrypted=False
            )

    def send(self, batch: FeedBatch) -> None:
        """Publish a batch. Subscribers without room lose it."""
        payload = self._encode(batch.changes, batch.ts, batch.groups)
        if self._snapshot is not None:
            # Before the ring: whoever misses something there finds it here.
            self._snapshot.append(payload)
            if self._snapshot.worn or self._snapshot.last_seq != batch.seq:
                self._forget_snapshot()
        self._ring.append(batch.seq, payload)
        self._last = (batch.seq, b"")
        self._publisher.send(batch.seq, payload)

    def tick(self, take_state: Callable[[], FeedState]) -> None:
        """Tell newcomers what there is, and make the state that readers of replays need."""
        replay = self.replay
        for _ in range(NEWCOMERS_AT_ONCE):
            if not self._publisher.newcomer_waits():
                break
            if self._last is not None and not self._has_snapshot(take_state):
                return
            self._publisher.admit(self._state_for_newcomer())
        if replay is not None and replay.wants_snapshot and self._has_snapshot(take_state):
            replay.wants_snapshot = False

    def close(self) -> None:
        """Close the sockets. Waits for readers to take what was sent, as long as the sockets linger."""
        if self.replay is not None:
            self.replay.stop()
        self._publisher.close()
        self._context.term()

    # --- who comes late -----------------------------------------------------------------------------------

    def _has_snapshot(self, take_state: Callable[[], FeedState]) -> bool:
        """Whether the state is ready to be told; else a part of the work on it is done."""
        if self._snapshot is None:
            self._snapshot = Snapshot(take_state(), self._encode, self._settings.chunk_bytes)
        if self._snapshot.advance(ENCODE_SECONDS) and self.replay is not None:
            self.replay.snapshot = self._snapshot
        return self._snapshot.ready

    def _forget_snapshot(self) -> None:
        self._snapshot = None
        if self.replay is not None:
            self.replay.snapshot = None

    def _state_for_newcomer(self) -> tuple[int, bytes] | None:
        """The state as of the last batch, under its number: for who has seen that, it is nothing new."""
        if self._last is None:
            return None
        assert self._snapshot is not None
        seq, payload = self._last
        if not payload:
            payload = self._join([*self._snapshot.pieces, *self._snapshot.tail])
            self._last = (seq, payload)
        return seq, payload

    # --- sockets ------------------------------------------------------------------------------------------

    def _open_sockets(self) -> None:
        settings = self._settings
        # Opened again, it has the ports that readers know.
        port = settings.port or port_of(self.endpoint)
        self._publisher = Publisher(
            lambda port: self._bound(zmq.XPUB, port, settings.hwm), port, settings.stall_seconds
        )
        self.endpoint = self._publisher.endpoint
        self.topic = self._publisher.topic = _topic(settings, self.endpoint).encode()
        if settings.replay_port is not None:
            port = settings.replay_port or port_of(self.replay_endpoint)
            router = self._bound(zmq.ROUTER, port, REPLAY_HWM)
            self.replay_endpoint = endpoint_of(router)
            self.replay = ReplayServer(
                router,
                self._ring,
                self.topic,
                self._encode,
                self._join,
                contiguous=settings.pad,
                stall_seconds=settings.stall_seconds,
            )
            self.replay.start()

    def _bound(self, kind: int, port: int, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        options = {
            zmq.SNDHWM: hwm,
            zmq.RCVHWM: INBOUND_HWM,
            zmq.LINGER: min(int(self._settings.linger_seconds * 1000), _INT32),
            zmq.MAXMSGSIZE: MAX_INBOUND_BYTES,
            zmq.TCP_KEEPALIVE: 1,
            zmq.IPV6: int(":" in self._settings.host),
        }
        if kind == zmq.ROUTER:
            options[zmq.ROUTER_MANDATORY] = 1  # to be told when a reader has no room
        for option, value in options.items():
            socket.set(option, value)
        try:
            socket.bind(_address(self._settings.host, port))
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise SinkError(_why_not_bound(self._settings.host, port, error)) from None
        return socket

    def _encode(self, changes: Sequence[Change], ts: float, groups: Sequence[GroupCreated]) -> bytes:
        return self._wire.encode(changes, ts, self._settings.rank, groups)

    def _join(self, payloads: Sequence[bytes]) -> bytes:
        return self._wire.join(payloads, self._settings.rank)


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """The sink for a ``zmq+pub:`` URL; its only transport is a `ZMQTransport`."""
    options = url.read_options(ZMQOptions)
    settings = _settings(url, options, context)
    pace = {name: _quantity(url, options, name) for name in ("coalesce", "max_batch", "heartbeat")}
    _refuse_idle(url, options)
    wire = _FORMATS[options.format]
    if options.salts == "plain":
        wire = wire._replace(encode=partial(vllm.encode_batch, salts=context.salts.ask()))
    return RouterFeed(
        [ZMQTransport(settings, wire)],
        FeedNumbers(_state_path(url, options, settings, context), first=_first_number(options)),
        coalesce_seconds=pace["coalesce"],
        max_batch_bytes=int(pace["max_batch"]),
        heartbeat_seconds=pace["heartbeat"],
    )


def _settings(url: SinkURL, options: ZMQOptions, context: SinkContext) -> ZMQSettings:
    url.refuse_login(
        "the feed asks nobody who he is, so a user and a password protect nothing: leave them out, "
        "and let only those reach the port who may read prompts"
    )
    if url.path not in ("", "/"):
        raise SinkURLError(str(url), "it takes no path; use zmq+pub://127.0.0.1:5557")
    if url.port is None:
        raise SinkURLError(str(url), "a port is needed, as in zmq+pub://127.0.0.1:5557")
    for name, value, least in (
        ("rank", options.rank, 0),
        ("hwm", options.hwm, 1),
        ("first", options.first, 0),
    ):
        if value is not None and value < least:
            raise SinkURLError(str(url), f"bad option: {name} must be at least {least}")
    if options.replay is not None and not 0 <= options.replay < 1 << 16:
        raise SinkURLError(str(url), "bad option: replay must be a port")
    if options.replay is not None and options.replay == url.port != 0:
        reason = f"port {url.port} cannot be both its own and the replay's: name another in replay= (0: any)"
        raise SinkURLError(str(url), reason)
    model = options.model or context.model or "unknown"
    if options.topic is None and "@" in model:
        reason = "routers cut the topic kv@HOST:PORT@MODEL at each @, so the model must have none: add model= or topic="
        raise SinkURLError(str(url), reason)
    host = url.host or "127.0.0.1"
    return ZMQSettings(
        host="127.0.0.1" if host == "localhost" else host,
        port=url.port,
        replay_port=options.replay,
        topic=options.topic,
        model=model,
        rank=options.rank,
        ring_bytes=int(_quantity(url, options, "ring")),
        chunk_bytes=min(int(_quantity(url, options, "max_batch")), MAX_CHUNK_BYTES),
        pad=options.pad,
        hwm=options.hwm,
        linger_seconds=_quantity(url, options, "linger"),
        holds="token ids" if options.salts == "digest" else "token ids, cache salts",
    )


def _refuse_idle(url: SinkURL, options: ZMQOptions) -> None:
    """Refuse an option that another one, or its absence, makes useless: whoever gave it expects something."""
    if options.topic is not None and options.model is not None:
        raise SinkURLError(
            str(url), "model= is a part of the topic that topic= replaces: leave one of them out"
        )
    if "ring" in url.options and options.replay is None:
        raise SinkURLError(str(url), "ring= is memory for answers on the port replay=, which is not given")


def _quantity(url: SinkURL, options: ZMQOptions, name: str) -> float:
    parse = parse_bytes if name in ("max_batch", "ring") else parse_seconds
    try:
        return parse(getattr(options, name))
    except ValueError as error:
        raise SinkURLError(str(url), f"bad option: {name}={error}") from None


def _state_path(
    url: SinkURL, options: ZMQOptions, settings: ZMQSettings, context: SinkContext
) -> Path | None:
    if options.state is not None:
        return Path(options.state) if options.state else None
    if context.state_dir is None or not url.port:
        return None
    host = "".join(char if char.isalnum() or char in ".-" else "_" for char in settings.host)
    return context.state_dir / f"feed-{host}-{url.port}.numbers"


def _first_number(options: ZMQOptions) -> int:
    """Where numbers begin that no file knows. To pad from there, they must not be high."""
    if options.first is not None:
        return options.first
    return 0 if options.pad else clock_number()


def _topic(settings: ZMQSettings, endpoint: str) -> str:
    if settings.topic is not None:
        return settings.topic
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host in ("0.0.0.0", "[::]"):  # noqa: S104  not bound here, but found so
        host = own_address()
    return f"kv@{host}:{port}@{settings.model}"


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # "*" or the name of a network interface.
        return host in ("lo", "lo0")


def _why_not_bound(host: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return f"port {port} on {host} is in use: end the process that has it, or name another port (0: any free one)"
    return f"port {port} on {host} cannot be bound ({error.strerror}): the host must be an address of this machine"
