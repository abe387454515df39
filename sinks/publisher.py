"""The socket on which a feed is published, and which tells whoever comes what there is before anything else.

It is an XPUB in manual mode: it hands over what subscribers say, and a subscription takes effect only when it is
admitted. Just then one message can be sent to that subscriber alone. So a router that connects late, or again, hears
of nothing that it cannot understand, and those that were there before are not disturbed.

SECURITY: anybody who can connect can send anything. What is read in one go is bounded, who talks too much is cut off,
and a message that is no subscription, by which ZeroMQ loses count of whose subscription is whose, closes the socket
for all if there is any doubt: they connect again by themselves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from events.diagnostics import get_logger
from events.formats.vllm import encode_seq
from sinks.base import SinkError
from sinks.peers import Peers, connection_of, endpoint_of, hang_up, port_of

READ_AT_ONCE = 200
"""What subscribers say is read in such portions, so that they cannot keep the feed from its work."""
TALK_PER_SECOND = 1000
"""Who says more is cut off: a subscriber says a word when it comes and one when it goes."""
TOLD_AT_ONCE = 4
"""Large first messages that may be on their way; further subscribers wait until one has been taken."""
LARGE_BYTES = 64 << 10
REOPEN_SECONDS, REOPEN_TRIES = 1.0, 100

_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""Flags of a message's last frame and of the others, as plain numbers: combining flags of the enumeration takes longer
than sending."""
_COME, _GO = b"\x01", b"\x00"
"""What a subscriber's message begins with; a topic's beginning follows."""

_log = get_logger("sinks")


@dataclass(frozen=True, slots=True)
class _Newcomer:
    prefix: bytes
    connection: int | None


@dataclass(frozen=True, slots=True)
class _Told:
    """A large first message on its way."""

    tracker: zmq.MessageTracker
    connection: int | None
    since: float


class Publisher:
    """Owns the XPUB that `bind` makes for a port. For one thread.

    `newcomer_waits` says whether there is a subscriber to `admit`; until then it hears nothing.
    """

    def __init__(
        self,
        bind: Callable[[int], zmq.Socket[bytes]],
        port: int,
        stall_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bind, self._stall_seconds, self._monotonic = bind, stall_seconds, monotonic
        self.topic = b""
        self._open(port)

    def _open(self, port: int) -> None:
        self._socket = self._bind(port)
        _address_newcomers(self._socket, False)
        self._socket.copy_threshold = LARGE_BYTES
        self._peers = Peers(self._socket)
        self.endpoint = endpoint_of(self._socket)
        self._port = port_of(self.endpoint)
        self._newcomer: _Newcomer | None = None
        self._topics: dict[int, set[bytes]] = {}
        self._told: set[int] = set()
        """Connections that were told; a further subscription needs no second telling."""
        self._on_their_way: list[_Told] = []
        self._talk: Counter[int] = Counter()
        self._talk_since = self._monotonic()

    @property
    def subscribers(self) -> int:
        """Connections with at least one subscription."""
        return len(self._topics)

    def send(self, seq: int, payload: bytes) -> None:
        """Publish to all that were admitted. Who has no room loses it."""
        # What `send_multipart` does, without looking at each frame twice and combining flags.
        send = self._socket.send
        send(self.topic, _MORE)
        send(encode_seq(seq), _MORE)
        send(payload, _LAST)

    def newcomer_waits(self) -> bool:
        """Hear what subscribers say, up to one that waits to be admitted, or as much as is bearable."""
        self._forget_who_left()
        for _ in range(READ_AT_ONCE):
            if self._newcomer is not None:
                return self._may_tell()
            try:
                message = self._socket.recv(_LAST, copy=False)
            except zmq.Again:
                break
            self._hear(message)
        return False

    def admit(self, first: tuple[int, bytes] | None) -> None:
        """Let the newcomer hear everything from now on, and before it `first`: a number and a payload, for it alone."""
        newcomer, self._newcomer = self._newcomer, None
        assert newcomer is not None
        self._socket.setsockopt(zmq.SUBSCRIBE, newcomer.prefix)
        if newcomer.connection is not None:
            self._told.add(newcomer.connection)
        if first is None or newcomer.connection not in self._peers.connected:
            return  # sent to nobody in particular, it would go to all
        seq, payload = first
        _address_newcomers(self._socket, True)
        self._socket.send(self.topic, _MORE)
        self._socket.send(encode_seq(seq), _MORE)
        tracker = self._socket.send(payload, _LAST, copy=False, track=True)
        _address_newcomers(self._socket, False)
        if not tracker.done:
            self._on_their_way.append(_Told(tracker, newcomer.connection, self._monotonic()))

    def close(self) -> None:
        """Close the socket; what was sent is still delivered as long as it lingers."""
        self._peers.close()
        self._socket.close()

    # --- what subscribers say -----------------------------------------------------------------------------

    def _hear(self, message: zmq.Frame) -> None:
        text, connection = message.bytes, connection_of(message)
        word, prefix = text[:1], text[1:]
        self._forget_who_left()
        if connection is not None and self._talks_too_much(connection):
            hang_up(connection, self._port)
        if word == _COME:
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
        if connection in self._peers.connected:
            self._topics.setdefault(connection, set()).add(prefix)
        if self.topic.startswith(prefix) and connection not in self._told:
            self._newcomer = _Newcomer(prefix, connection)
        else:
            self._socket.setsockopt(zmq.SUBSCRIBE, prefix)

    def _go(self, prefix: bytes, connection: int | None) -> None:
        topics = self._topics.get(connection, set()) if connection is not None else set()
        topics.discard(prefix)
        if not topics:
            self._topics.pop(connection, None)  # type: ignore[arg-type]  # None is not in it

    def _forget_who_left(self) -> None:
        for connection in self._peers.refresh():
            self._topics.pop(connection, None)
            self._told.discard(connection)

    def _talks_too_much(self, connection: int) -> bool:
        now = self._monotonic()
        if now - self._talk_since > 1.0:
            self._talk.clear()
            self._talk_since = now
        self._talk[connection] += 1
        if self._talk[connection] == TALK_PER_SECOND:
            _log.warning("subscriber_cut_off", reason="it subscribes and unsubscribes without end")
        return self._talk[connection] % TALK_PER_SECOND == 0

    def _meet_stranger(self, connection: int | None) -> None:
        """A message that is no subscription: ZeroMQ takes the next subscription's sender for this one's."""
        if connection is not None:
            hang_up(connection, self._port)
        if self._socket.poll(0):
            _log.warning("feed_reopened", reason="a peer sent what is no subscription")
            self.close()
            self._reopen()

    def _reopen(self) -> None:
        """Bind again, once ZeroMQ has closed the old socket, which it does in its own time."""
        for left in reversed(range(REOPEN_TRIES)):
            try:
                self._open(self._port)
            except SinkError:
                if not left:
                    raise
                time.sleep(REOPEN_SECONDS / REOPEN_TRIES)
            else:
                return

    def _may_tell(self) -> bool:
        """Whether there is room for another large message; who takes none in time is cut off."""
        self._on_their_way = [told for told in self._on_their_way if not told.tracker.done]
        if len(self._on_their_way) < TOLD_AT_ONCE:
            return True
        oldest = self._on_their_way[0]
        if self._monotonic() - oldest.since > self._stall_seconds and oldest.connection is not None:
            hang_up(oldest.connection, self._port)
        return False


def _address_newcomers(socket: zmq.Socket[bytes], alone: bool) -> None:
    """Whether the next message goes to the last subscriber that was heard alone, or to all that were admitted."""
    socket.setsockopt(zmq.XPUB_MANUAL_LAST_VALUE, int(alone))
    socket.setsockopt(zmq.XPUB_MANUAL, 1)  # which the option before has switched off with itself
