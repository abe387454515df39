"""The socket on which a feed is published, and which tells whoever comes what there is before anything else.

Readers come to it, or it connects to where a reader is bound, as many workers do with one router; once a connection
stands, both are the same.

It is an XPUB in manual mode: it hands over what subscribers say, and a subscription takes effect only when it is
admitted. Just then one message can be sent to that subscriber alone. So a router that connects late, or again, hears
of nothing that it cannot understand, and those that were there before are not disturbed.

SECURITY: anybody who can connect can send anything. What is read in one go is bounded, who sends too much is cut off
(`sinks.router.peers`), and the socket is closed for all, who connect again by themselves, in two cases: if what was
said cannot be worked off, and if a message is no subscription, by which ZeroMQ loses count of whose subscription is
whose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from events.formats.vllm import encode_seq
from events.sockets.refusals import SEEN_BY_CLIENT, SEEN_BY_SERVER
from sinks.base import SinkError
from sinks.router.peers import (
    MAX_CONNECTIONS,
    Complaints,
    Peers,
    connection_of,
    endpoint_of,
    port_of,
    traffic,
)
from sinks.router.places import Place

READ_AT_ONCE, READ_SECONDS = 1000, 0.003
"""What subscribers say is read in such portions, so that they cannot keep the feed from its work."""
BEHIND_SECONDS = 1.0
"""When they have said more than was read for so long, everybody has to come anew."""
MAX_PREFIX_BYTES = 256
MAX_PREFIXES = 64
"""Different subscriptions of one connection, which are remembered here and by ZeroMQ; a router has one or two."""
TOLD_AT_ONCE = 4
"""Different large first messages that may be on their way; further subscribers wait until one has been taken."""
IDLE_SECONDS = 1.0
"""While others wait, who takes nothing of its first message for so long is cut off."""
LARGE_BYTES = 64 << 10
REOPEN_SECONDS, REOPEN_TRIES = 1.0, 100
CALL_AGAIN_SECONDS = 1.0
"""ZeroMQ gives up for good who has turned it away; here it is called again, after so long."""

_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""Flags of a message's last frame and of the others, as plain numbers: combining flags of the enumeration takes longer
than sending."""
_COME, _GO = b"\x01", b"\x00"
"""What a subscriber's message begins with; a topic's beginning follows."""


@dataclass(frozen=True, slots=True)
class _Newcomer:
    prefix: bytes
    connection: int | None


@dataclass(slots=True)
class Told:
    """A large first message on its way."""

    tracker: zmq.MessageTracker
    payload: bytes
    connection: int
    taken: int
    """Bytes that were taken when it was looked at last."""
    moved_at: float


class Publisher:
    """Owns an XPUB at a place. For one thread.

    `newcomer_waits` says whether there is a subscriber to `admit`; until then it hears nothing. `make` makes the
    socket, with all its options, but neither bound nor connected. `keyed` says that it is encrypted, `most_peers` how
    many connections it may have.
    """

    def __init__(
        self,
        make: Callable[[], zmq.Socket[bytes]],
        place: Place,
        *,
        keyed: bool = False,
        most_peers: int = MAX_CONNECTIONS,
    ) -> None:
        self._make, self._place = make, place
        self._keyed, self._most_peers = keyed, most_peers
        self._complaints = Complaints()
        self._refused_before = 0
        self.topic = b""
        self._open()

    def _open(self) -> None:
        self._socket = self._make()
        _address_newcomers(self._socket, False)
        self._socket.copy_threshold = LARGE_BYTES
        place = self._place
        refusals = SEEN_BY_CLIENT if place.connects else SEEN_BY_SERVER if self._keyed else 0
        # What begins before a connection is asked about belongs to nobody, so this comes first.
        self.peers = Peers(self._socket, self._complaints, most=self._most_peers, refusals=refusals)
        try:
            place.take(self._socket)
        except BaseException:
            self.peers.close()
            self._socket.close(linger=0)
            raise
        self.endpoint = place.address if place.connects else endpoint_of(self._socket)
        self._place = replace(place, port=port_of(self.endpoint))
        self._turned_away_at: float | None = None
        self._newcomer: _Newcomer | None = None
        self.topics: dict[int, set[bytes]] = {}
        """The subscriptions of each connection that has any."""
        self._told: set[int] = set()
        """Connections that were told and have heard everything since; a further subscription needs no telling."""
        self.on_their_way: list[Told] = []
        """Large first messages that subscribers may not have taken yet."""
        self._behind_since: float | None = None
        """Since when there has been more to read than was read."""

    @property
    def subscribers(self) -> int:
        """Connections with at least one subscription."""
        return len(self.topics)

    @property
    def refused(self) -> int:
        """Connections that came to nothing because of keys."""
        return self._refused_before + self.peers.refused

    def send(self, seq: int, payload: bytes) -> None:
        """Publish to all that were admitted. Who has no room loses it."""
        # What `send_multipart` does, without looking at each frame twice and combining flags.
        send = self._socket.send
        send(self.topic, _MORE)
        send(encode_seq(seq), _MORE)
        send(payload, _LAST)

    def look_around(self) -> None:
        """See who is there, and who must go; to be called often."""
        self._forget_who_left()
        self.peers.police()
        if self._place.connects and self.peers.turned_away:
            self._call_again()

    def newcomer_waits(self) -> bool:
        """Hear what subscribers say, up to one that waits to be admitted, or as much as is bearable."""
        deadline = time.monotonic() + READ_SECONDS
        for _ in range(READ_AT_ONCE):
            if self._newcomer is not None:
                return self._may_tell()
            try:
                message = self._socket.recv(_LAST, copy=False)
            except zmq.Again:
                self._behind_since = None
                return False
            self._hear(message)
            if time.monotonic() > deadline:
                break
        self._fall_behind()
        return False

    def admit(self, first: tuple[int, bytes] | None) -> None:
        """Let the newcomer hear everything from now on, and before it `first`: a number and a payload, for it alone."""
        newcomer, self._newcomer = self._newcomer, None
        assert newcomer is not None
        self._socket.setsockopt(zmq.SUBSCRIBE, newcomer.prefix)
        if newcomer.connection is None or newcomer.connection not in self.peers.connected:
            return  # sent to nobody in particular, it would go to all
        self._told.add(newcomer.connection)
        if first is None:
            return
        seq, payload = first
        _address_newcomers(self._socket, True)
        self._socket.send(self.topic, _MORE)
        self._socket.send(encode_seq(seq), _MORE)
        tracker = self._socket.send(payload, _LAST, copy=False, track=True)
        _address_newcomers(self._socket, False)
        if not tracker.done:
            taken = traffic(newcomer.connection)[0]
            told = Told(tracker, payload, newcomer.connection, taken, time.monotonic())
            self.on_their_way.append(told)

    def close(self) -> None:
        """Close the socket; what was sent is still delivered as long as it lingers."""
        self.peers.close()
        self._socket.close()

    # --- what subscribers say -----------------------------------------------------------------------------

    def _hear(self, message: zmq.Frame) -> None:
        text, connection = message.bytes, connection_of(message)
        word, prefix = text[:1], text[1:]
        self._forget_who_left()
        if len(prefix) > MAX_PREFIX_BYTES:
            self.peers.cut_off(connection, "it subscribes to what cannot be a topic")
        elif word == _COME:
            self._come(prefix, connection)
        elif word == _GO and connection is None:
            # Somebody left, and its connection's number may be another one's by now.
            self._told.clear()
        elif word == _GO:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, prefix)
            self._go(prefix, connection)
        else:
            self._meet_stranger(connection)

    def _come(self, prefix: bytes, connection: int | None) -> None:
        if connection in self.peers.connected:
            topics = self.topics.setdefault(connection, set())
            if len(topics) >= MAX_PREFIXES and prefix not in topics:
                self.peers.cut_off(connection, f"it has more than {MAX_PREFIXES} subscriptions")
                return
            topics.add(prefix)
        if not self.topic.startswith(prefix):
            return  # nothing is published that it could hear
        if connection in self._told:
            self._socket.setsockopt(zmq.SUBSCRIBE, prefix)
        else:
            self._newcomer = _Newcomer(prefix, connection)

    def _go(self, prefix: bytes, connection: int | None) -> None:
        topics = self.topics.get(connection, set()) if connection is not None else set()
        topics.discard(prefix)
        if connection is not None and not any(self.topic.startswith(each) for each in topics):
            self._told.discard(connection)  # it does not hear everything any more
        if not topics:
            self.topics.pop(connection, None)  # type: ignore[arg-type]  # None is not in it

    def _forget_who_left(self) -> None:
        for connection in self.peers.refresh():
            self.topics.pop(connection, None)
            self._told.discard(connection)

    def _fall_behind(self) -> None:
        now = time.monotonic()
        if self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since > BEHIND_SECONDS:
            self._reopen("peers say more than can be read")

    def _meet_stranger(self, connection: int | None) -> None:
        """A message that is no subscription: ZeroMQ takes the next subscription's sender for this one's."""
        self.peers.cut_off(connection, "it sends what is no subscription")
        if self._socket.poll(0):
            self._reopen("a peer sent what is no subscription")

    def _call_again(self) -> None:
        """Call who has turned us away: its list of keys may have grown."""
        now = time.monotonic()
        if self._turned_away_at is None:
            self._turned_away_at = now
        elif now - self._turned_away_at >= CALL_AGAIN_SECONDS:
            self._open_anew()

    def _reopen(self, reason: str) -> None:
        self._complaints.tell("feed_reopened", reason, self.endpoint)
        self._open_anew()

    def _open_anew(self) -> None:
        """Close the socket and take its place again, once ZeroMQ has let go of it, which it does in its own time."""
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

    def _may_tell(self) -> bool:
        """Whether there is room for another large message; who takes nothing of its own is cut off."""
        self.on_their_way = [told for told in self.on_their_way if not told.tracker.done]
        if len({id(told.payload) for told in self.on_their_way}) < TOLD_AT_ONCE:
            return True
        now = time.monotonic()
        for told in self.on_their_way:
            taken = traffic(told.connection)[0]
            if taken > told.taken:
                told.taken, told.moved_at = taken, now
            elif now - told.moved_at > IDLE_SECONDS:
                self.peers.cut_off(told.connection, "it takes nothing of what it is told")
        return False


def _address_newcomers(socket: zmq.Socket[bytes], alone: bool) -> None:
    """Whether the next message goes to the last subscriber that was heard alone, or to all that were admitted."""
    socket.setsockopt(zmq.XPUB_MANUAL_LAST_VALUE, int(alone))
    socket.setsockopt(zmq.XPUB_MANUAL, 1)  # which the option before has switched off with itself
