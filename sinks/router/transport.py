"""A feed over ZeroMQ: the sockets, and what is told to whom on them.

One socket publishes (`sinks.router.publisher`), another one answers who missed something
(`sinks.router.replay_server`). Both tell who comes late the same snapshot of the state (`sinks.router.snapshot`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from events.diagnostics import get_logger
from events.feed.changes import Change
from events.formats import vllm
from events.types import GroupCreated
from sinks.base import SinkError
from sinks.router.feed import FeedBatch, FeedState
from sinks.router.peers import endpoint_of, own_address, port_of
from sinks.router.publisher import Publisher
from sinks.router.replay_ring import ReplayRing
from sinks.router.replay_server import STALL_SECONDS, ReplayServer
from sinks.router.snapshot import Snapshot

MAX_INBOUND_BYTES = 512
"""Subscriptions and requests are short; whoever sends a longer frame is cut off."""
HANDSHAKE_MS = 5000
"""Who has not said by then what it is goes."""
REPLAY_HWM = 256
"""Messages of an answer that wait in the socket; each may be as large as a piece of the state, so not more of them."""
INBOUND_HWM = 100
"""What peers say waits with them, not here: a socket takes in all that its connections have room for."""
NEWCOMERS_AT_ONCE = 100
ENCODE_SECONDS = 0.02
"""How long the feed works on the state for who comes late before it looks for live batches again."""


_log = get_logger("sinks")
INT32 = 2**31 - 1
"""More than any socket, and any rank, can be given."""


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
    salts: Callable[[bytes], str | None] | None = None
    """Finds a cache salt by its digest, to tell it itself; None: all are told as digests."""


class ZMQTransport:
    """Publishes a feed on a socket, tells who comes late, and answers readers that missed something on another."""

    def __init__(self, settings: ZMQSettings) -> None:
        self._settings = settings
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
            holds = "token ids, cache salts" if self._settings.salts else "token ids"
            _log.warning("feed_leaves_machine", endpoint=self.endpoint, holds=holds, encrypted=False)

    def send(self, batch: FeedBatch) -> None:
        """Publish a batch. Subscribers without room lose it."""
        payload = self._encode(batch.changes, batch.ts, batch.groups)
        if self._snapshot is not None:
            # Before the ring: whoever misses something there finds it here.
            self._snapshot.append(payload)
            if self._snapshot.worn or self._snapshot.last_seq != batch.seq:
                self._forget_snapshot()
        if self.replay is not None:
            self._ring.append(batch.seq, payload)
        self._last = (batch.seq, b"")
        self._publisher.send(batch.seq, payload)

    def tick(self, take_state: Callable[[], FeedState]) -> None:
        """Tell newcomers what there is, and make the state that readers of replays need."""
        replay = self.replay
        self._publisher.look_around()
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
        self._publisher = Publisher(lambda port: self._bound(zmq.XPUB, port, settings.hwm), port)
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
            zmq.LINGER: min(int(self._settings.linger_seconds * 1000), INT32),
            zmq.MAXMSGSIZE: MAX_INBOUND_BYTES,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
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
        return vllm.encode_batch(changes, ts, self._settings.rank, groups, salts=self._settings.salts)

    def _join(self, payloads: Sequence[bytes]) -> bytes:
        return vllm.join_batches(payloads, self._settings.rank)


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
