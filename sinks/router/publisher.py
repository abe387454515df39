"""The socket that publishes a feed, and sends each new subscriber the state before anything else.

Readers connect to it, or it connects to a bound reader, as many workers do with one router; once connected, both are
the same.

It is an XPUB in manual mode: it passes on subscribers' messages, and a subscription takes effect only when it is
admitted. At that moment one message can be sent to that subscriber alone. So a router that connects late, or again,
receives nothing that it cannot interpret, and earlier subscribers are not disturbed.

SECURITY: any peer that can connect can send anything, and messages received by ZeroMQ wait in memory until read. Keys
(`events.subscribe.sockets`) authorise connections; ZeroMQ bounds the size of a frame, `Peers` the number of
connections. The messages read in one go are bounded, and the socket is closed for all, who reconnect by themselves, in
two cases: if reading cannot keep up, and if a message is no subscription, after which ZeroMQ confuses the owners of
subscriptions.
"""

from __future__ import annotations

import os
import resource
import socket as sockets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import zmq
from zmq.utils.monitor import recv_monitor_message

from events.diagnostics import get_logger
from events.formats.vllm import encode_seq
from events.subscribe.sockets import (
    REASONS,
    SEEN_BY_CLIENT,
    SEEN_BY_SERVER,
    is_final,
    is_loopback,
    is_wildcard,
    tcp_address,
)
from sinks.base import SinkError

MAX_CONNECTIONS = 1000
HANDSHAKE_SECONDS = 5.0
"""Time limit of the handshake, after which a connection is closed."""
SILENCE_SECONDS = 60.0
"""Minimum time between two warnings of the same kind."""

_BEGIN = zmq.Event.ACCEPTED | zmq.Event.CONNECTED
_READABLE = int(zmq.POLLIN)

_log = get_logger("sinks")


class PeerWarnings:
    """Rate-limited warnings about the peers of one socket, which could otherwise fill the log."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}
        self._num_suppressed: dict[str, int] = {}

    def warn(self, event: str, reason: str, endpoint: str, peer: str | None = None) -> None:
        """Log a warning, or count it for the next one if one of its kind was logged recently.

        - `endpoint`: the socket's own; `peer`: the peer's address, if known.
        """
        now = time.monotonic()
        if now - self._logged_at.get(event, float("-inf")) < SILENCE_SECONDS:
            self._num_suppressed[event] = self._num_suppressed.get(event, 0) + 1
            return
        self._logged_at[event] = now
        about = {"endpoint": endpoint} if peer is None else {"endpoint": endpoint, "peer": peer}
        _log.warning(event, **about, reason=reason, times_since_last=self._num_suppressed.pop(event, 0))


class Peers:
    """The connections of a socket. For the thread that owns the socket, created before it binds or connects.

    `refusals` are the events (`events.subscribe.sockets`) that are logged; at a port without keys none are.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        warnings: PeerWarnings,
        *,
        refusals: int = 0,
    ) -> None:
        self._socket = socket
        self._warnings = warnings
        events = _BEGIN | zmq.Event.DISCONNECTED
        self._monitor = socket.get_monitor_socket(int(events) | refusals)
        self._most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.connected: dict[int, float] = {}
        """Start time of each connection."""
        self.refused = 0
        """Connections that failed because of a key that is missing, wrong or not allowed."""
        self._refusal: str | None = None
        """The reason of a refused connection that has not ended yet: only its end shows which one it is."""
        self._addresses: dict[int, str | None] = {}
        self.turned_away = False
        """True if the other end of our own connection has refused us for good."""

    def refresh(self) -> list[int]:
        """Record new connections; return those that ended."""
        left: list[int] = []
        # The events that `poll` would report, without making a poller.
        while int(self._monitor.get(zmq.EVENTS)) & _READABLE:
            message = recv_monitor_message(self._monitor)
            connection, event = int(message["value"]), message["event"]
            if event & _BEGIN:
                # First, so that each connection seen here has an address, whatever becomes of it at that moment.
                self._addresses[connection] = _address_of(connection)
                self.connected[connection] = time.monotonic()
            elif event in REASONS:
                self.refused += 1
                self.turned_away = self.turned_away or is_final(event)
                self._refusal = REASONS[event]
            else:
                self._end(connection)
                left.append(connection)
            if len(self.connected) > self._most:
                self.cut_off(connection, "too many connections")
        return left

    def cut_off(self, connection: int | None, reason: str) -> None:
        """Close a connection; a descriptor reused for something else is left alone."""
        self.warn_about("peer_cut_off", reason, connection)
        if connection is not None:
            _hang_up(connection, port_of(endpoint_of(self._socket)))

    def warn_about(self, event: str, reason: str, connection: int | None = None) -> None:
        """Log a warning about a connection, with its address."""
        peer = None if connection is None else self._addresses.get(connection)
        self._warnings.warn(event, reason, endpoint_of(self._socket), peer)

    def _end(self, connection: int) -> None:
        since = self.connected.pop(connection, None)
        # A connection older than a handshake takes is not the one with the failed handshake.
        if (
            self._refusal is not None
            and since is not None
            and time.monotonic() - since < 2 * HANDSHAKE_SECONDS
        ):
            self.warn_about("peer_refused", self._refusal, connection)
            self._refusal = None
        self._addresses.pop(connection, None)

    def close(self) -> None:
        """Close the monitor; before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)


def connection_of(message: zmq.Frame) -> int | None:
    """Return the descriptor of a message's connection; None if there is none."""
    try:
        return int(message.get(zmq.MessageOption.SRCFD))
    except (zmq.ZMQError, ValueError):
        return None


def _address_of(connection: int) -> str | None:
    """Return the other end's host and port; None if it has closed already."""
    with suppress(OSError), sockets.socket(fileno=os.dup(connection)) as peer:
        host, port = peer.getpeername()[:2]
        return tcp_address(host, port).removeprefix("tcp://")
    return None


def _hang_up(connection: int, port: int) -> None:
    # A copy, so that the descriptor inspected is the one shut down, even if it is closed meanwhile.
    with suppress(OSError), sockets.socket(fileno=os.dup(connection)) as peer:
        if port in (peer.getsockname()[1], peer.getpeername()[1]):
            peer.shutdown(sockets.SHUT_RDWR)


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    """Return the last bound or connected address of a socket, as in ``tcp://127.0.0.1:5557``."""
    return str(socket.get_string(zmq.LAST_ENDPOINT))


def port_of(endpoint: str | None) -> int:
    """Return the port of a TCP endpoint; 0, any free one, if there is no endpoint yet."""
    return int(endpoint.rpartition(":")[2]) if endpoint else 0


def own_address() -> str:
    """Return the address by which other machines reach this one; its name, if it has none."""
    with suppress(OSError), sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        # Sends nothing: it only makes the system choose the source address.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return sockets.gethostname()


@dataclass(frozen=True)
class SocketPlace:
    """A host and a port to bind or to connect to; port 0, if bound, is any free one."""

    host: str
    port: int
    connects: bool = False
    """True if the place is connected to, and another socket is bound there."""

    @property
    def address(self) -> str:
        """The address as ZeroMQ writes it."""
        return tcp_address(self.host, self.port)

    @property
    def is_near(self) -> bool:
        """True if nothing leaves this machine."""
        return is_loopback(self.host)

    def take(self, socket: zmq.Socket[bytes]) -> None:
        """Bind or connect; raises SinkError if that fails. A connecting socket retries for ever."""
        try:
            if self.connects:
                socket.connect(self.address)
            else:
                socket.bind(self.address)
        except zmq.ZMQError as error:
            raise SinkError(self._why_not(error)) from None

    def _why_not(self, error: zmq.ZMQError) -> str:
        host, port = self.host, self.port
        if self.connects:
            return f"cannot connect to {host}:{port} ({error.strerror}): give the router's host and port"
        if error.errno == zmq.EADDRINUSE:
            remedy = "stop the process that uses it, or choose another port (0: any free one)"
            return f"port {port} on {host} is in use: {remedy}"
        return (
            f"cannot bind port {port} on {host} ({error.strerror}): the host must be an address of this "
            "machine"
        )


def pod_at(endpoint: str) -> str:
    """Return the host and port of an endpoint as others reach them."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"{own_address() if is_wildcard(host.strip('[]')) else host}:{port}"


READ_AT_ONCE, READ_SECONDS = 1000, 0.003
"""Limits of one round of reading subscribers' messages, so that they cannot keep the feed from its work."""
BACKLOG_SECONDS = 1.0
"""Time for which messages may exceed these limits before all connections are closed."""
MAX_PREFIX_BYTES = 256
MAX_PREFIXES = 64
"""Different subscriptions of one connection, which are kept here and by ZeroMQ; a router has one or two."""
SNAPSHOTS_AT_ONCE = 4
"""Maximum number of different large first messages in flight; further subscribers wait until one has been received."""
TAKING_SECONDS = 10.0
"""Time in seconds after which a subscriber that has not received its first message is disconnected, if others wait."""
LARGE_BYTES = 64 << 10
REOPEN_SECONDS, REOPEN_TRIES = 1.0, 100
CALL_AGAIN_SECONDS = 1.0
"""Pause in seconds before reconnecting after a refusal; ZeroMQ itself gives up for good."""

_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""Flags of a message's last frame and of the others, as plain numbers: combining flags of the enumeration takes longer
than sending."""
SUBSCRIBE_BYTE, UNSUBSCRIBE_BYTE = b"\x01", b"\x00"
"""First byte of a subscriber's message; the prefix of a topic follows."""


@dataclass(slots=True)
class FirstMessage:
    """A large first message in flight."""

    tracker: zmq.MessageTracker
    payload: bytes
    connection: int
    sent_at: float


class FeedSocket:
    """An XPUB at a place. For one thread.

    `has_pending_subscriber` returns True if a subscriber waits for `admit`; until then it receives nothing. `make`
    makes the socket, with all its options, but neither bound nor connected. `keyed`: True if it is encrypted.
    """

    def __init__(
        self,
        make: Callable[[], zmq.Socket[bytes]],
        place: SocketPlace,
        *,
        keyed: bool = False,
    ) -> None:
        self._make, self._place = make, place
        self._keyed = keyed
        self._warnings = PeerWarnings()
        self._refused_before = 0
        self.topic = b""
        self._open()

    def _open(self) -> None:
        self._socket = self._make()
        _address_last_subscriber(self._socket, False)
        self._socket.copy_threshold = LARGE_BYTES
        place = self._place
        refusals = SEEN_BY_CLIENT if place.connects else SEEN_BY_SERVER if self._keyed else 0
        # Events before the connections are read would belong to none, so this comes first.
        self.peers = Peers(self._socket, self._warnings, refusals=refusals)
        try:
            place.take(self._socket)
        except BaseException:
            self.peers.close()
            self._socket.close(linger=0)
            raise
        self.endpoint = place.address if place.connects else endpoint_of(self._socket)
        self._place = replace(place, port=port_of(self.endpoint))
        self._turned_away_at: float | None = None
        self._pending_subscriber: tuple[bytes, int | None] | None = None
        """The prefix and the connection of a subscription that waits to be admitted."""
        self.topics: dict[int, set[bytes]] = {}
        """The subscriptions per connection."""
        self._admitted: set[int] = set()
        """Connections that have the state and everything since; further subscriptions need no first message."""
        self.in_flight: list[FirstMessage] = []
        """Large first messages that subscribers may not have received yet."""
        self._backlog_since: float | None = None
        """Time since which there has been more to read than was read."""

    @property
    def subscribers(self) -> int:
        """Connections with at least one subscription."""
        return len(self.topics)

    @property
    def refused(self) -> int:
        """Connections that failed because of keys."""
        return self._refused_before + self.peers.refused

    def send(self, seq: int, payload: bytes) -> None:
        """Publish to all admitted subscribers. One without room loses it."""
        # Like `send_multipart`, without checking each frame twice and combining flags.
        send = self._socket.send
        send(self.topic, _MORE)
        send(encode_seq(seq), _MORE)
        send(payload, _LAST)

    def poll_connections(self) -> None:
        """Process connections, and close those over their limits; call often."""
        self._forget_disconnected()
        if self._place.connects and self.peers.turned_away:
            self._call_again()

    def has_pending_subscriber(self) -> bool:
        """Read subscribers' messages, up to one that waits to be admitted, or up to the limits; True if one waits."""
        deadline = time.monotonic() + READ_SECONDS
        for _ in range(READ_AT_ONCE):
            if self._pending_subscriber is not None:
                return self._has_room()
            try:
                message = self._socket.recv(_LAST, copy=False)
            except zmq.Again:
                self._backlog_since = None
                return False
            self._take_message(message)
            if time.monotonic() > deadline:
                break
        self._check_backlog()
        return False

    def admit(self, first: tuple[int, bytes] | None) -> None:
        """Send the new subscriber `first`, a number and a payload for it alone, then everything from now on."""
        assert self._pending_subscriber is not None
        (prefix, connection), self._pending_subscriber = self._pending_subscriber, None
        self._socket.setsockopt(zmq.SUBSCRIBE, prefix)
        if connection is None or connection not in self.peers.connected:
            return  # without a recipient, it would go to all
        self._admitted.add(connection)
        if first is None:
            return
        seq, payload = first
        _address_last_subscriber(self._socket, True)
        self._socket.send(self.topic, _MORE)
        self._socket.send(encode_seq(seq), _MORE)
        tracker = self._socket.send(payload, _LAST, copy=False, track=True)
        _address_last_subscriber(self._socket, False)
        if not tracker.done:
            self.in_flight.append(FirstMessage(tracker, payload, connection, time.monotonic()))

    def close(self) -> None:
        """Close the socket; sent messages are still delivered during its linger time."""
        self.peers.close()
        self._socket.close()

    # --- subscribers' messages ----------------------------------------------------------------------------

    def _take_message(self, message: zmq.Frame) -> None:
        text, connection = message.bytes, connection_of(message)
        word, prefix = text[:1], text[1:]
        self._forget_disconnected()
        if len(prefix) > MAX_PREFIX_BYTES:
            self.peers.cut_off(connection, "it subscribes to a prefix that is too long for a topic")
        elif word == SUBSCRIBE_BYTE:
            self._subscribe(prefix, connection)
        elif word == UNSUBSCRIBE_BYTE and connection is None:
            # A connection was closed, and its number may be another one's by now.
            self._admitted.clear()
        elif word == UNSUBSCRIBE_BYTE:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, prefix)
            self._unsubscribe(prefix, connection)
        else:
            self._reject_non_subscriber(connection)

    def _subscribe(self, prefix: bytes, connection: int | None) -> None:
        if connection in self.peers.connected:
            topics = self.topics.setdefault(connection, set())
            if len(topics) >= MAX_PREFIXES and prefix not in topics:
                self.peers.cut_off(connection, f"it has more than {MAX_PREFIXES} subscriptions")
                return
            topics.add(prefix)
        if not self.topic.startswith(prefix):
            return  # nothing is published that matches
        if connection in self._admitted:
            self._socket.setsockopt(zmq.SUBSCRIBE, prefix)
        else:
            self._pending_subscriber = prefix, connection

    def _unsubscribe(self, prefix: bytes, connection: int | None) -> None:
        topics = self.topics.get(connection, set()) if connection is not None else set()
        topics.discard(prefix)
        if connection is not None and not any(self.topic.startswith(each) for each in topics):
            self._admitted.discard(connection)  # it no longer receives everything
        if not topics:
            self.topics.pop(connection, None)  # type: ignore[arg-type]  # None is not in it

    def _forget_disconnected(self) -> None:
        for connection in self.peers.refresh():
            self.topics.pop(connection, None)
            self._admitted.discard(connection)

    def _check_backlog(self) -> None:
        now = time.monotonic()
        if self._backlog_since is None:
            self._backlog_since = now
        elif now - self._backlog_since > BACKLOG_SECONDS:
            self._reopen("peers send more than can be read")

    def _reject_non_subscriber(self, connection: int | None) -> None:
        """Handle a message that is no subscription: ZeroMQ takes the next subscription's sender for this one's."""
        self.peers.cut_off(connection, "it sends invalid subscriptions")
        if self._socket.poll(0):
            self._reopen("a peer sent an invalid subscription")

    def _call_again(self) -> None:
        """Reconnect after a refusal: the other end's list of keys may have grown."""
        now = time.monotonic()
        if self._turned_away_at is None:
            self._turned_away_at = now
        elif now - self._turned_away_at >= CALL_AGAIN_SECONDS:
            self._reconnect()

    def _reopen(self, reason: str) -> None:
        self._warnings.warn("feed_reopened", reason, self.endpoint)
        self._reconnect()

    def _reconnect(self) -> None:
        """Close the socket and bind or connect again, once ZeroMQ has released the address, which takes a while."""
        self._refused_before += self.peers.refused
        self.close()
        for left in reversed(range(REOPEN_TRIES)):
            try:
                self._open()
            except SinkError:
                if not left:
                    raise
                time.sleep(REOPEN_SECONDS / REOPEN_TRIES)
            else:
                return

    def _has_room(self) -> bool:
        """Return True if there is room for another large message; disconnect receivers that do not take theirs."""
        self.in_flight = [message for message in self.in_flight if not message.tracker.done]
        if len({id(message.payload) for message in self.in_flight}) < SNAPSHOTS_AT_ONCE:
            return True
        now = time.monotonic()
        for message in self.in_flight:
            if now - message.sent_at > TAKING_SECONDS:
                self.peers.cut_off(message.connection, "it does not read what it subscribed to")
        return False


def _address_last_subscriber(socket: zmq.Socket[bytes], alone: bool) -> None:
    """Direct the next message to the last subscriber alone, or to all admitted ones."""
    socket.setsockopt(zmq.XPUB_MANUAL_LAST_VALUE, int(alone))
    socket.setsockopt(zmq.XPUB_MANUAL, 1)  # which the option before has reset as well
