"""``zmq+pub://127.0.0.1:5557?replay=5558`` feeds routers that speak vLLM's KV event protocol.

Each batch is one message of three frames (topic, number, payload) to whoever subscribes. A subscriber that falls
behind by more than `hwm` messages, or connects late, misses some; with ``replay=PORT`` it can ask for them there
(`sinks.replay_server`), whatever it missed.

Options:

- ``format``: what payloads look like; ``vllm``.
- ``replay``: port on the same host where missed batches are answered. Without it nobody can ask.
- ``topic``: by default ``kv@HOST:PORT@MODEL``, the form in which llm-d finds pod and model.
- ``model``: for the topic; by default that of the cache, else ``unknown``.
- ``rank``: data-parallel rank, in each payload.
- ``salts``: how a prompt's cache salt is told: ``digest``, its SHA-256 in hex, or ``plain``, as the request gave it,
  which is what NVIDIA Dynamo looks for. A salt is a secret that keeps tenants apart: who knows one can find out, by how
  long requests take, what was asked under it. So ``plain`` is for ports that routers alone can reach. A salt that no
  request has used since the process began (a resumed state), that is longer than 128 bytes, or that was used before
  the last 65,536 others, goes out as its digest all the same.
- ``coalesce``, ``max_batch``, ``heartbeat``: see `sinks.router_feed.RouterFeed`; as in ``50ms``, ``1MiB``, ``1s``.
- ``ring``: memory for batches kept as they were sent. What is older is answered from the state.
- ``hwm``: messages that wait per subscriber before it loses some.
- ``state``: file for the numbers (`sinks.feed_numbers`); by default ``feed-HOST-PORT.numbers`` in the context's
  `state_dir`. ``state=`` without a path, port 0, and a context without `state_dir` mean: in memory, from 0.
- ``linger``: how long closing waits for subscribers to take what was sent.

Port 0 takes any free one. The payloads hold token ids, that is the users' prompts: without a host the sockets are
bound to loopback, and anything wider is warned of, since nothing on the wire is encrypted.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import zmq

from events.diagnostics import get_logger
from events.feed_changes import Change
from events.formats import vllm
from events.types import GroupCreated
from sinks.base import SinkContext, SinkError, SinkURL, SinkURLError
from sinks.feed_numbers import FeedNumbers
from sinks.quantities import parse_bytes, parse_seconds
from sinks.replay_ring import ReplayRing
from sinks.replay_server import STALL_SECONDS, ReplayServer
from sinks.router_feed import FeedBatch, FeedState, RouterFeed

MAX_INBOUND_BYTES = 4096
"""Subscriptions and requests are short; whoever sends more is cut off."""
REPLAY_HWM = 256
"""Messages of an answer that wait in the socket. They may be of `MAX_CHUNK_BYTES`, so not more of them."""
MAX_CHUNK_BYTES = 8 << 20

_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""Flags of a message's last frame and of the others, as plain numbers: combining flags of the enumeration takes longer
than sending."""
_SUBSCRIPTIONS = {b"\x01": 1, b"\x00": -1}
"""What the first byte of a message from a subscriber says: it came, or it left. Anything else is ignored."""

EncodeBatch = Callable[[Sequence[Change], float, int, Sequence[GroupCreated]], bytes]
"""Changes, time, rank and groups to a payload."""

_FORMATS = {"vllm": vllm.encode_batch}

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
    heartbeat: str = "1s"
    hwm: Annotated[int, msgspec.Meta(le=_INT32)] = 1000
    state: str | None = None
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
    hwm: int = 1000
    linger_seconds: float = 1.0
    stall_seconds: float = STALL_SECONDS
    """After this a replay's reader that takes nothing is given up."""
    holds: str = "token ids"
    """What must not be read by everybody, to warn of."""


class ZMQTransport:
    """Publishes a feed on a socket, and answers readers that missed something on another.

    The publishing socket is an XPUB: like a PUB, and it says who subscribes.
    """

    def __init__(self, settings: ZMQSettings, encode: EncodeBatch) -> None:
        self._settings = settings
        self._encode_batch = encode
        self._ring = ReplayRing(settings.ring_bytes if settings.replay_port is not None else 0)
        self._topic = b""
        self.subscribers = 0
        self.endpoint = ""
        """Where subscribers connect, once it is open."""
        self.replay_endpoint: str | None = None
        self.replay: ReplayServer | None = None

    def open(self, next_seq: int) -> None:
        """Bind the sockets. Raises SinkError if that cannot be done."""
        self._ring.start(next_seq)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open_sockets()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        if not _is_loopback(self._settings.host):
            _log.warning(
                "feed_leaves_machine", endpoint=self.endpoint, holds=self._settings.holds, encrypted=False
            )

    def send(self, batch: FeedBatch) -> None:
        """Publish a batch. Subscribers without room lose it."""
        payload = self._encode_batch(batch.changes, batch.ts, self._settings.rank, batch.groups)
        if self.replay is not None:
            self._ring.append(batch.seq, payload)
        # What `send_multipart` does, without looking at each frame twice and combining flags.
        send = self._socket.send
        send(self._topic, _MORE)
        send(vllm.encode_seq(batch.seq), _MORE)
        send(payload, _LAST)

    def tick(self, take_state: Callable[[], FeedState]) -> None:
        """Note who came and went; hand the state to readers that need it."""
        while self._socket.poll(0):
            message = self._socket.recv()
            self.subscribers += _SUBSCRIPTIONS.get(message[:1], 0)
        if self.replay is not None and self.replay.wants_state:
            state = take_state()
            # Who has read a part of such an answer, and asks for the rest, must not get it from the ring: what was
            # sent under those numbers is not what lies there in the answer.
            self._ring.start(state.seq + 1)
            self.replay.give_state(state)

    def close(self) -> None:
        """Close the sockets. Waits for readers to take what was sent, as long as the sockets linger."""
        if self.replay is not None:
            self.replay.stop()
        self._socket.close()
        self._context.term()

    def _open_sockets(self) -> None:
        settings = self._settings
        self.subscribers = 0
        # Opened again, it has the ports that readers know.
        port = settings.port or _port(self.endpoint)
        self._socket = self._bound(zmq.XPUB, port, settings.hwm)
        self.endpoint = _last_endpoint(self._socket)
        self._topic = _topic(settings, self.endpoint).encode()
        if settings.replay_port is not None:
            port = settings.replay_port or _port(self.replay_endpoint)
            router = self._bound(zmq.ROUTER, port, REPLAY_HWM)
            self.replay_endpoint = _last_endpoint(router)
            self.replay = ReplayServer(
                router,
                self._ring,
                self._topic,
                self._encode,
                chunk_bytes=settings.chunk_bytes,
                stall_seconds=settings.stall_seconds,
            )
            self.replay.start()

    def _bound(self, kind: int, port: int, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        options = {
            zmq.SNDHWM: hwm,
            zmq.LINGER: min(int(self._settings.linger_seconds * 1000), _INT32),
            zmq.MAXMSGSIZE: MAX_INBOUND_BYTES,
            zmq.TCP_KEEPALIVE: 1,
            zmq.IPV6: int(":" in self._settings.host),
            # To know of each subscription and its end; to be told when a reader has no room.
            (zmq.XPUB_VERBOSER if kind == zmq.XPUB else zmq.ROUTER_MANDATORY): 1,
        }
        for option, value in options.items():
            socket.set(option, value)
        try:
            socket.bind(_address(self._settings.host, port))
        except zmq.ZMQError as error:
            raise SinkError(_why_not_bound(self._settings.host, port, error)) from None
        return socket

    def _encode(self, changes: Sequence[Change], groups: Sequence[GroupCreated]) -> bytes:
        return self._encode_batch(changes, time.time(), self._settings.rank, groups)


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """The sink for a ``zmq+pub:`` URL; its only transport is a `ZMQTransport`."""
    options = url.read_options(ZMQOptions)
    settings = _settings(url, options, context)
    pace = {name: _quantity(url, options, name) for name in ("coalesce", "max_batch", "heartbeat")}
    _refuse_idle(url, options)
    encode: EncodeBatch = _FORMATS[options.format]
    if options.salts == "plain":
        encode = partial(_FORMATS[options.format], salts=context.salts.ask())
    return RouterFeed(
        [ZMQTransport(settings, encode)],
        FeedNumbers(_state_path(url, options, settings, context)),
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
    for name, value, least in (("rank", options.rank, 0), ("hwm", options.hwm, 1)):
        if value < least:
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


def _topic(settings: ZMQSettings, endpoint: str) -> str:
    if settings.topic is not None:
        return settings.topic
    return f"kv@{endpoint.removeprefix('tcp://')}@{settings.model}"


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _port(endpoint: str | None) -> int:
    """The port of an endpoint that was bound before; 0, any free one, where none was."""
    return int(endpoint.rpartition(":")[2]) if endpoint else 0


def _last_endpoint(socket: zmq.Socket[bytes]) -> str:
    return str(socket.get_string(zmq.LAST_ENDPOINT))


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
