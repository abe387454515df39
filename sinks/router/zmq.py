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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
import zmq

from events.diagnostics import get_logger
from events.subscribe.sockets import Curve, CurveUnavailable, Gate, KeyFileError, is_wildcard, set_keepalive
from events.types import WorkerSeen
from sinks.base import SinkContext, SinkURL
from sinks.router.feed import FeedBatch, FeedSnapshot, RouterFeed
from sinks.router.options import INT32, FeedOptions, PayloadWriter, make_feed, writer_of
from sinks.router.publisher import HANDSHAKE_SECONDS, FeedSocket, SocketPlace, endpoint_of, pod_at, port_of
from sinks.router.replay import STALL_SECONDS, EncodedState, ReplayRing, ReplayServer

MAX_INBOUND_BYTES = 512
"""Limit of a received frame: subscriptions and requests are short; senders of longer ones are disconnected."""
MAX_KEYED_BYTES = 1024
"""The limit with encryption, since a handshake is longer than any of them."""
REPLAY_HWM = 256
"""Messages of an answer that wait in the socket; each may be as large as a piece of the state, so not more of them."""
INBOUND_HWM = 100
"""Peers' messages wait at their end, not here: a socket accepts all that its connections have room for."""
ADMITTED_AT_ONCE = 100
ENCODE_SECONDS = 0.02
"""Time that the feed works on the state for late readers before it checks for live batches again."""


_log = get_logger("sinks")


@dataclass(frozen=True)
class ZMQSettings:
    """Checked settings of the transport."""

    place: SocketPlace
    """Place of the feed."""
    replay: SocketPlace | None = None
    topic: str | None = None
    """Topic of the messages; None: the engine's or, for a cache of our own, one made of the feed's address and the
    model."""
    model: str = "unknown"
    ring_bytes: int = 64 << 20
    chunk_bytes: int = 1 << 20
    pad: bool = False
    """True if answers have every number from the one requested."""
    hwm: int = 1000
    linger_seconds: float = 1.0
    stall_seconds: float = STALL_SECONDS
    """Time after which a stalled reader of a replay is disconnected."""
    writer: PayloadWriter = field(default_factory=PayloadWriter)
    curve: Curve | None = None
    """Keys, if the feed is encrypted."""

    @property
    def is_near(self) -> bool:
        """True if nothing of the feed leaves this machine."""
        return self.place.is_near and (self.replay is None or self.replay.is_near)


class ZMQTransport:
    """Publishes a feed on one socket, with the state for late readers, and answers replay requests on another."""

    def __init__(self, settings: ZMQSettings) -> None:
        self.settings = settings
        self.publisher: FeedSocket
        """The socket that publishes the feed; there from `open` on."""
        self._ring = ReplayRing(0 if settings.replay is None else settings.ring_bytes)
        self.snapshot: EncodedState | None = None
        """The state for late readers, in progress or ready; None: not needed lately."""
        self._last: tuple[int, bytes] | None = None
        """Number of the last batch, and the state sent to a new subscriber under it, if that was made already."""
        self.endpoint = ""
        """The endpoint for subscribers, once it is open."""
        self.topic = b""
        self.replay_endpoint: str | None = None
        self.replay: ReplayServer | None = None
        self._gate: Gate | None = None
        self._writer = settings.writer

    @property
    def subscribers(self) -> int:
        """Connections with a subscription."""
        return self.publisher.subscribers

    @property
    def refused(self) -> int:
        """Connections, to the feed or to its replay, that failed because of keys."""
        if not self.endpoint:
            return 0  # It is not open yet.
        return self.publisher.refused + (0 if self.replay is None else self.replay.refused)

    def open(self, next_seq: int, worker: WorkerSeen | None = None) -> None:
        """Open the sockets. Raises SinkError if that fails."""
        self._writer = self.settings.writer.for_worker(worker)
        self._ring.start(next_seq)
        self.snapshot = self._last = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open_sockets(worker.topic if worker else "")
        except BaseException:
            self._close_gate()
            self._context.destroy(linger=0)
            raise
        if not next_seq and self.settings.place.port:
            reason = (
                "routers that followed an earlier feed here may ignore batches for a long time: restart them"
            )
            _log.warning("feed_numbers_begin_at_0", endpoint=self.endpoint, reason=reason)
        if self.settings.curve is None and not self.settings.is_near:
            holds = self._writer.holds
            _log.warning("feed_leaves_machine", endpoint=self.endpoint, holds=holds, encrypted=False)

    def send(self, batch: FeedBatch) -> None:
        """Publish a batch. Subscribers without room lose it."""
        payload = self._writer.encode(batch.changes, batch.ts, batch.groups)
        if self.snapshot is not None:
            # Before the ring: readers that miss something there find it here.
            self.snapshot.append(payload)
            if self.snapshot.is_stale or self.snapshot.last_seq != batch.seq:
                self.snapshot = None
                if self.replay is not None:
                    self.replay.snapshot = None
        if self.replay is not None:
            self._ring.append(batch.seq, payload)
        self._last = (batch.seq, b"")
        self.publisher.send(batch.seq, payload)

    def tick(self, take_state: Callable[[], FeedSnapshot]) -> None:
        """Send new subscribers the state, and make the state that readers of replays need."""
        replay = self.replay
        self.publisher.poll_connections()
        for _ in range(ADMITTED_AT_ONCE):
            if not self.publisher.has_pending_subscriber():
                break
            if self._last is not None and not self._has_snapshot(take_state):
                return
            self.publisher.admit(self._state_for_subscriber())
        if replay is not None and replay.wants_snapshot and self._has_snapshot(take_state):
            replay.wants_snapshot = False

    def close(self) -> None:
        """Close the sockets. Waits for readers to receive the sent messages, during the sockets' linger time."""
        if self.replay is not None:
            self.replay.stop()
        self.publisher.close()
        self._close_gate()
        self._context.term()

    def _close_gate(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()

    # --- late readers -------------------------------------------------------------------------------------

    def _has_snapshot(self, take_state: Callable[[], FeedSnapshot]) -> bool:
        """Return True if the state is ready to be sent; else work on a part of it."""
        if self.snapshot is None:
            self.snapshot = EncodedState(take_state(), self._writer.encode, self.settings.chunk_bytes)
        if self.snapshot.advance(ENCODE_SECONDS) and self.replay is not None:
            self.replay.snapshot = self.snapshot
        return self.snapshot.ready

    def _state_for_subscriber(self) -> tuple[int, bytes] | None:
        """Return the state as of the last batch, under its number: nothing new for one that has received it."""
        if self._last is None:
            return None
        assert self.snapshot is not None
        seq, payload = self._last
        if not payload:
            payload = self._writer.join([*self.snapshot.pieces, *self.snapshot.tail])
            self._last = (seq, payload)
        return seq, payload

    # --- sockets ------------------------------------------------------------------------------------------

    def _open_sockets(self, topic: str) -> None:
        settings = self.settings
        if settings.curve is not None and settings.curve.clients is not None:
            self._gate = Gate(self._context, settings.curve.clients)
            self._gate.open()
        # Reopened, it has the same ports as before.
        place = replace(settings.place, port=settings.place.port or port_of(self.endpoint))
        self.publisher = FeedSocket(
            lambda: self._socket(zmq.XPUB, settings.hwm, place),
            place,
            keyed=settings.curve is not None,
        )
        self.endpoint = self.publisher.endpoint
        router = None if settings.replay is None else self._replay_socket(settings.replay)
        if settings.topic is not None:
            topic = settings.topic
        elif not topic:
            pod = pod_at((self.replay_endpoint or "") if place.connects else self.endpoint)
            topic = f"kv@{pod}@{settings.model}"
        self.topic = self.publisher.topic = topic.encode()
        if router is not None:
            self.replay = ReplayServer(
                router,
                self._ring,
                self.topic,
                self._writer,
                contiguous=settings.pad,
                stall_seconds=settings.stall_seconds,
                keyed=settings.curve is not None,
            )
            self.replay.start()

    def _replay_socket(self, place: SocketPlace) -> zmq.Socket[bytes]:
        """Make the replay's socket, always bound: readers connect to it, even if the feed itself connects."""
        place = replace(place, port=place.port or port_of(self.replay_endpoint))
        router = self._socket(zmq.ROUTER, REPLAY_HWM, place)
        router.set(zmq.ROUTER_MANDATORY, 1)  # to be notified when a reader has no room
        try:
            place.take(router)
        except BaseException:
            router.close(linger=0)
            raise
        self.replay_endpoint = endpoint_of(router)
        return router

    def _socket(self, kind: int, hwm: int, place: SocketPlace) -> zmq.Socket[bytes]:
        settings, socket = self.settings, self._context.socket(kind)
        options = {
            zmq.SNDHWM: hwm,
            zmq.RCVHWM: INBOUND_HWM,
            zmq.LINGER: min(int(settings.linger_seconds * 1000), INT32),
            zmq.MAXMSGSIZE: MAX_INBOUND_BYTES if settings.curve is None else MAX_KEYED_BYTES,
            zmq.HANDSHAKE_IVL: int(HANDSHAKE_SECONDS * 1000),
            # By IPv6 "localhost" is ::1 alone on machines that call both so.
            zmq.IPV6: int(":" in place.host or (place.connects and place.host != "localhost")),
            # A reader that reconnects is a new one: no messages wait for it meanwhile.
            zmq.IMMEDIATE: int(place.connects),
        }
        for option, value in options.items():
            socket.set(option, value)
        set_keepalive(socket)
        if settings.curve is not None:
            (settings.curve.call if place.connects else settings.curve.serve)(socket)
        return socket


_REPLAY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]:|(?P<host>[^:\[\]@/]+):)?(?P<port>[0-9]{1,5})")
_MAX_PORT = (1 << 16) - 1


def feed_place(url: SinkURL, options: ZMQOptions) -> SocketPlace:
    """Return the feed's place to bind or connect to; raises SinkURLError."""
    if url.port is None:
        raise url.error("a port is required, as in zmq+pub://127.0.0.1:5557")
    place = SocketPlace(_spelled(url.host or "127.0.0.1"), url.port)
    # Any address of this machine, and loopback, is bound by default.
    binds = is_wildcard(place.host) or place.is_near
    connects = not binds if options.connect is None else options.connect
    if connects and (not url.port or is_wildcard(place.host)):
        raise url.error("to connect, the router's host and port are required, as in zmq+pub://router:5557")
    return replace(place, connects=connects)


def replay_place(url: SinkURL, options: ZMQOptions, feed: SocketPlace) -> SocketPlace | None:
    """Return the replay's place, always bound; None: there is no replay. Raises SinkURLError."""
    if options.replay is None:
        return None
    given = _REPLAY.fullmatch(options.replay)
    if given is None or int(given["port"]) > _MAX_PORT:
        raise url.error("bad option: replay must be a port or HOST:PORT")
    host = given["v6"] or given["host"]
    if host is None and feed.connects and not feed.is_near:
        raise url.error(
            "the feed connects, but its replay is bound on this machine: give its address, as in "
            "replay=*:5558"
        )
    place = SocketPlace(_spelled(host or feed.host), int(given["port"]))
    if place.address == feed.address and place.port:
        raise url.error(
            f"port {place.port} is used for both the feed and the replay: choose another in replay= (0: any)"
        )
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
        raise url.error(
            f"prompts would be sent unencrypted to {far.address}, outside this machine: encrypt them with "
            f"{' and '.join(f'{name}=' for name in needed)} (`kvcache docs settings`), or set insecure=1 if "
            "the network is trusted"
        )
    if not files:
        return None
    if options.insecure:
        raise url.error("it is encrypted, so insecure= has no effect: omit it")
    if sorted(files) != sorted(needed):
        role = "connects" if place.connects else "binds"
        with_replay = " with a replay" if place.connects and replay is not None else ""
        raise url.error(
            f"a feed that {role}{with_replay} is encrypted with {', '.join(needed)}, but "
            f"{', '.join(files)} was given"
        )
    try:
        return Curve.read(
            files["curve_key"], server=files.get("curve_server"), clients=files.get("curve_clients")
        )
    except (KeyFileError, CurveUnavailable) as error:
        raise url.error(str(error)) from None


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
        raise url.error("a path is not allowed; use zmq+pub://127.0.0.1:5557")
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
        raise url.error("max_batch= does not apply to format=native, which never splits batches: omit it")
    for name in ("ring", "pad"):
        if name in url.options and settings.replay is None:
            raise url.error(f"{name}= requires replay=, the port for replays")
    if options.topic is None and "@" in settings.model:
        cut = "routers split the topic kv@POD@MODEL at each @"
        raise url.error(f"{cut}, so the model must not contain one: add topic=")
    if options.topic is None and settings.place.connects and settings.replay is None:
        needs = "a router that subscribes to many feeds distinguishes them by topic: add topic= or replay="
        raise url.error(f"{needs}; if readers should connect to this address instead, add connect=0")
