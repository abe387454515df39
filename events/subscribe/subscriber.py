"""A subscriber to one publisher of KV events in vLLM's wire format, which requests missed batches from its replay
socket.

::

    with Subscriber("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558", start=0) as subscriber:
        for report in subscriber:          # Received, Missed, Restated or Restarted (events.subscribe.continuity)
            index.fold(report)             # events.subscribe.index

`AsyncSubscriber` is the same for asyncio (``async with``, ``async for``); `NativeSubscriber` reads all events of a
cache (``format=native``). For many publishers that connect to one reader, see `events.subscribe.fan_in`.

From the bottom up: a `Connection` is one socket, reopened if the other end refused it; a `Follower` puts the messages
of one publisher in order and opens a new connection for each replay request, so that no late answer to an old one mixes
in; a `Publication` is a live connection and a follower, without waiting; subscribers add the waiting. Publishers that
are not there yet are waited for, and those that come back are reconnected.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Generic, Protocol, Self, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from events.closing import Closing
from events.errors import EventDecodeError
from events.formats.vllm import parse_answer, parse_message, replay_request
from events.subscribe.continuity import (
    HELD_MAX,
    AnyReport,
    Continuity,
    MessageOrder,
    NativeContinuity,
    NativeReport,
    Report,
)
from events.subscribe.endpoints import EndpointError, InsecureEndpoint, host_of
from events.subscribe.sockets import (
    SEEN_BY_CLIENT,
    SEEN_BY_SERVER,
    Curve,
    is_final,
    is_loopback,
    set_keepalive,
)

CALL_AGAIN_SECONDS = 1.0
"""Pause before reconnecting after a refusal; ZeroMQ itself gives up for good."""
MAX_QUEUED = 100_000
"""Messages in the receiving queue of each socket; beyond it the publisher drops live ones."""
MAX_MESSAGE_BYTES = 1 << 30
"""Largest frame; senders of larger ones are disconnected."""
_HEARTBEAT_MS = 10_000
Item = TypeVar("Item")
_READABLE = int(zmq.POLLIN)
_CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
_DISCONNECTED = zmq.Event.DISCONNECTED


class Readable(Protocol):
    """A registry of sockets that end a wait when readable: a `zmq.Poller`, or its counterpart in asyncio."""

    def register(self, socket: zmq.Socket[bytes], flags: int) -> object:
        """Wait for this socket as well."""


class Connection:
    """One socket. For one thread, which calls `look` again and again."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        endpoint: str,
        *,
        bind: bool = False,
        curve: Curve | None = None,
        server: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind, or connect to the peer with the public key `server` (None: the one that `curve` names).

        Raises EndpointError.
        """
        host = host_of(endpoint, binds=bind)  # raises; ZeroMQ itself would retry for ever
        self._endpoint, self._bound, self._keyed = endpoint, bind, curve is not None
        self._clock = clock
        self.socket = context.socket(kind)
        self._set(endpoint, host)
        if curve is not None:
            self._encrypt(curve, server)
        seen = SEEN_BY_SERVER if bind else SEEN_BY_CLIENT | _CONNECTED | _DISCONNECTED
        self._monitor = self.socket.get_monitor_socket(int(seen))
        self._call_at: float | None = None
        self.calls = 0
        """Number of reconnections, at each of which messages sent before are lost."""
        self.refused = 0
        """Connections that failed because of a key that is missing, wrong or not allowed."""
        self.connected = False
        """True if the other end was there at the last `look`; of a bound socket False."""
        try:
            (self.socket.bind if bind else self.socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            verb = "bound" if bind else "connected to"
            raise EndpointError(endpoint, f"cannot be {verb}: {error.strerror}") from None

    def _set(self, endpoint: str, host: str | None) -> None:
        socket = self.socket
        socket.linger = 0
        socket.rcvhwm = MAX_QUEUED
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)  # a machine that vanished is noticed
        set_keepalive(socket)
        # By IPv6 "localhost" is ::1 alone where a machine calls both so, and publishers are at 127.0.0.1.
        near = endpoint.lower().startswith("tcp://localhost:")
        socket.setsockopt(zmq.IPV6, int(":" in (host or "") if self._bound else not near))

    def _encrypt(self, curve: Curve, server: bytes | None) -> None:
        if self._bound and curve.clients is None:
            raise EndpointError(
                self._endpoint, "to bind encrypted, the keys of the allowed clients are required"
            )
        if not self._bound and (server or curve.server) is None:
            raise EndpointError(
                self._endpoint, "to connect encrypted, the publisher's public key is required"
            )
        if self._bound:
            curve.serve(self.socket)
        else:
            curve.call(self.socket, server)

    @property
    def endpoint(self) -> str:
        """The endpoint as given; if any free port was requested, with the port found."""
        return str(self.socket.get_string(zmq.LAST_ENDPOINT)) if self._bound else self._endpoint

    def look(self) -> None:
        """Process connections and refusals, and reconnect after a refusal: the list of keys may have grown."""
        # The events that `poll` would report, without making a poller.
        while int(self._monitor.get(zmq.EVENTS)) & _READABLE:
            event = recv_monitor_message(self._monitor)["event"]
            if event in (_CONNECTED, _DISCONNECTED):
                self.connected = event == _CONNECTED
                continue
            self.refused += 1
            if not self._bound and self._call_at is None and is_final(event):
                self._call_at = self._clock() + CALL_AGAIN_SECONDS
        if self._call_at is not None and self._clock() >= self._call_at:
            self._call_at = None
            self.calls += 1
            self._call_again()

    def wait(self, poller: Readable) -> float | None:
        """Register it with `poller`, to end a wait when there is a message to `receive` or something to `look` at.

        Returns the longest allowed wait in seconds; None: unlimited.
        """
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        return None if self._call_at is None else max(0.0, self._call_at - self._clock())

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message, if there is one."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def receive_from(self) -> tuple[list[bytes], str] | None:
        """Return the next message's frames, and its sender's public key (empty: not encrypted), if there is one."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        try:
            key = str(frames[0].get("User-Id")) if self._keyed else ""
        except zmq.ZMQError:
            key = ""
        return [frame.bytes for frame in frames], key

    def close(self) -> None:
        """Disconnect."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)

    def _call_again(self) -> None:
        with suppress(zmq.ZMQError):  # the poller may have dropped it by itself
            self.socket.disconnect(self._endpoint)
        self.socket.connect(self._endpoint)


def poll_until(
    take: Callable[[], list[Item]], wait: Callable[[Readable], float | None], timeout_ms: int | None
) -> list[Item]:
    """Wait until there is something to `take`, and return it; empty after `timeout_ms`.

    `wait` registers with a poller, and returns the longest allowed wait in seconds.
    """
    deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
    while True:
        found = take()
        if found or (deadline is not None and time.monotonic() >= deadline):
            return found
        poller = zmq.Poller()
        seconds = shortest([wait(poller)], deadline)
        # Rounded up: a wait that is cut short would turn into a busy loop.
        poller.poll(None if seconds is None else int(seconds * 1000) + 1)


def shortest(waits: Iterable[float | None], deadline: float | None) -> float | None:
    """Return the shortest of `waits`, and of the time up to the deadline (monotonic), in seconds; None: unlimited."""
    seconds = [wait for wait in waits if wait is not None]
    if deadline is not None:
        seconds.append(max(0.0, deadline - time.monotonic()))
    return min(seconds, default=None)


def refuse_insecure(endpoint: str, curve: Curve | None) -> None:
    """Raise InsecureEndpoint if other machines could connect to the endpoint to be bound."""
    host = host_of(endpoint, binds=True)
    if curve is None and host is not None and not is_loopback(host):
        raise InsecureEndpoint(endpoint)


READ_AT_ONCE = 256 << 10
"""Bytes of messages between two reports, so that a flood cannot keep `work` from returning. The decoded batches of this
size are still in the processor's cache when they are reported: four times the size takes half as long again."""
_MESSAGE_BYTES = 256
"""Size counted for a message in addition to its payload."""


def weight(frames: list[bytes]) -> int:
    """Return the size of a message that counts towards `READ_AT_ONCE`."""
    return _MESSAGE_BYTES + len(frames[-1])


class Follower(Generic[AnyReport]):
    """One publisher.

    `ask` opens a socket to its replay (None: it has none); `order` makes reports of its messages, which begin with
    `topic`; `replay_timeout` is that of `events.subscribe.subscriber.Subscriber`, in seconds of the clock.
    """

    def __init__(
        self,
        ask: Callable[[], Connection] | None,
        order: MessageOrder[AnyReport],
        *,
        topic: bytes,
        replay_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = ask
        self._clock = clock
        self._topic = topic
        self._replay_timeout = replay_timeout
        self.order = order
        """The order of its messages."""
        self._waiting_since: float | None = None
        self._asked_since: float | None = None
        self._question = 0
        self.asking: Connection | None = None
        """The socket of the open replay request."""
        self.malformed = 0
        """Messages ignored because they do not even have a number."""
        self.last_received_at = self._clock()
        """Time of its last message."""
        self.refused = 0
        """Connections to the replay that failed because of keys."""

    @property
    def unanswered_seconds(self) -> float:
        """Seconds for which a replay request has had no answer; 0: there is none, or an answer has begun."""
        return 0.0 if self._asked_since is None else self._clock() - self._asked_since

    @property
    def has_room(self) -> bool:
        """True if more live messages can be held until the answer is complete."""
        return len(self.order.held) < HELD_MAX

    def live(self, frames: list[bytes]) -> None:
        """Accept a message of the stream."""
        self.last_received_at = self._clock()
        try:
            self.order.live(parse_message(frames))
        except EventDecodeError:
            self.malformed += 1

    def give_up(self, reason: str) -> list[AnyReport]:
        """Return the last reports of a publisher that is no longer followed."""
        self.close()
        self.order.give_up(reason)
        return self.order.take()

    def read_answers(self) -> None:
        """Read the messages of the answer."""
        if self.asking is None:
            return
        self._look()
        read = 0
        while read < READ_AT_ONCE and (frames := self.asking.receive()) is not None:
            read += weight(frames)
            self._waiting_since = self._asked_since = None
            try:
                message = parse_answer(frames)
            except EventDecodeError:
                self.malformed += 1
                continue
            if message is None:
                self._end_replay(complete=True)
                return
            # Live messages were filtered by their publisher; replays are requested by numbers, not by topics.
            if not message.topic or message.topic.startswith(self._topic):
                self.order.answer(message)
        if self.patience() == 0:
            self._end_replay(complete=False)

    def ask(self) -> None:
        """Request a replay, if one is wanted."""
        start = self.order.take_request()
        if start is None:
            return
        self.close()
        self._question = start
        self._ask_at_new_socket()
        self._asked_since = self._clock()

    def patience(self) -> float | None:
        """Seconds until the wait for an answer ends; None: nothing waits for one."""
        if self.asking is None or not self.order.held:
            return None
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        return max(0.0, self._waiting_since + self._replay_timeout - now)

    def wait(self, poller: Readable) -> float | None:
        """Register the answer's socket; return the longest allowed wait in seconds (None: unlimited)."""
        if self.asking is None:
            return None
        return shortest([self.asking.wait(poller), self.patience()], None)

    def _look(self) -> None:
        """Process refusals. ZeroMQ reconnects, but the request was lost with the connection."""
        assert self.asking is not None
        before, again = self.asking.refused, self.asking.calls
        self.asking.look()
        self.refused += self.asking.refused - before
        if self.asking.calls > again:
            self.asking.close()
            self._ask_at_new_socket()

    def _ask_at_new_socket(self) -> None:
        assert self._open is not None
        self.asking = self._open()
        self.asking.socket.send_multipart(replay_request(self._question))

    def _end_replay(self, *, complete: bool) -> None:
        self.close()
        self.order.end_of_replay(complete=complete)

    def close(self) -> None:
        """Close the open replay request."""
        if self.asking is not None:
            self.asking.close()
        self.asking = self._waiting_since = self._asked_since = None


class Publication(Generic[AnyReport]):
    """Follows one publisher.

    Args:
        endpoint: its address, as ``tcp://127.0.0.1:5557``.
        replay: the endpoint of its replay; None: missed batches are lost.
        topic: only messages whose topic begins with this; answers without any topic pass, too.
        start: the first batch wanted: 0 for all that the publisher can still replay; None: the next one.
        replay_timeout: seconds that live messages wait for a publisher that does not answer.
        curve: our keys and the publisher's public one, if it encrypts.
        context: ZeroMQ's, to share its threads between many publishers; None: one of its own.
        clock: the seconds by which all waits for the publisher count; the timeout of a `poll` is in real ones.

    Raises EndpointError if an endpoint is malformed. The name of a host is resolved repeatedly, in the background: it
    may become known only later.
    """

    _order: Callable[..., MessageOrder[AnyReport]]
    """Makes the order of its messages, of the first batch wanted and `can_ask`."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        start: int | None = None,
        replay_timeout: float = 5.0,
        curve: Curve | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replay, self._topic = replay, topic
        self._curve, self._clock = curve, clock
        self._ready: deque[AnyReport] = deque()
        self._lines = ExitStack()
        self.closed = False
        """True after `close`."""
        try:
            if context is None:
                context = zmq.Context()
                self._lines.callback(context.destroy, linger=0)
            self._context = context
            self._live = Connection(context, zmq.SUB, endpoint, curve=curve, clock=clock)
            self._lines.callback(self._live.close)
            self._live.socket.subscribe(topic)
            if replay is not None:
                # A wrong endpoint is reported now, not at the first gap.
                self._line_to_replay().close()
            ask = None if replay is None else self._line_to_replay
            order = self._order(start, can_ask=ask is not None)
            self._follower = Follower(
                ask, order, topic=topic.encode(), replay_timeout=replay_timeout, clock=clock
            )
            self._lines.callback(self._follower.close)
            self._follower.ask()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect; may be called twice."""
        self.closed = True
        self._lines.close()

    @property
    def connected(self) -> bool:
        """True if the publisher was there at the last look."""
        return self._live.connected

    @property
    def malformed(self) -> int:
        """Messages ignored because they do not even have a number."""
        return self._follower.malformed

    @property
    def refused(self) -> int:
        """Refusals by the publisher because of a key that is missing, wrong or not allowed."""
        return self._live.refused + self._follower.refused

    @property
    def unanswered_seconds(self) -> float:
        """Seconds for which a replay request has had no answer; 0: there is none, or an answer has begun."""
        return self._follower.unanswered_seconds

    def wait(self, poller: Readable) -> float | None:
        """Register it with `poller`, to end a wait for several readers when it is to be polled again.

        Returns the longest allowed wait in seconds; None: unlimited.
        """
        waits = [self._follower.wait(poller)]
        if self._follower.has_room:
            waits.append(self._live.wait(poller))
        return shortest(waits, None)

    def _take(self) -> list[AnyReport]:
        """Return the pending reports, in order, including those left over by an abandoned iteration."""
        self._follower.read_answers()
        self._read_live()
        self._follower.ask()
        reports = [*self._ready, *self._follower.order.take()]
        self._ready.clear()
        return reports

    def _read_live(self) -> None:
        self._live.look()
        read = 0
        while (
            read < READ_AT_ONCE and self._follower.has_room and (frames := self._live.receive()) is not None
        ):
            read += weight(frames)
            self._follower.live(frames)

    def _line_to_replay(self) -> Connection:
        assert self._replay is not None
        return Connection(self._context, zmq.DEALER, self._replay, curve=self._curve, clock=self._clock)


class BlockingPublication(Publication[AnyReport], Closing):
    """A `Publication` to wait for, or to iterate over."""

    def __iter__(self) -> Iterator[AnyReport]:
        """Yield reports as they come, until the subscriber is closed. A loop that is left and resumed misses none."""
        while not self.closed:
            self._ready += self.poll()
            while self._ready:
                yield self._ready.popleft()

    def poll(self, timeout_ms: int | None = None) -> list[AnyReport]:
        """Wait for reports, and return them in order; empty after `timeout_ms`.

        To be called all the time: ZeroMQ renews the subscription at a publisher that came back only inside a call.
        """
        return poll_until(self._take, self.wait, timeout_ms)


class Subscriber(BlockingPublication[Report]):
    """A `Publication` to wait for, or to iterate over; made with the same arguments."""

    _order = Continuity


class AsyncSubscriber(Publication[Report]):
    """A `Publication` to wait for with asyncio; made with the same arguments, in the running loop or before."""

    _order = Continuity

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        """Yield reports as they come, until the subscriber is closed."""
        return self

    async def __anext__(self) -> Report:
        while not self._ready:
            if self.closed:
                raise StopAsyncIteration
            self._ready += await self.poll()
        return self._ready.popleft()

    async def poll(self, timeout_ms: int | None = None) -> list[Report]:
        """Wait for reports, and return them in order; empty after `timeout_ms`, and once closed.

        To be awaited all the time: ZeroMQ renews the subscription at a publisher that came back only inside a call.
        """
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        # A publisher that is faster than its reader must not keep all other tasks from running.
        await asyncio.sleep(0)
        while not self.closed:
            reports = self._take()
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports
            self._watch = _Watch()
            seconds = shortest([self.wait(self._watch)], deadline)
            await self._watch.wait(seconds)
        return []

    def close(self) -> None:
        """Disconnect, and end a wait that is going on; may be called twice, by any task of the loop."""
        if self._watch is not None:
            self._watch.end()
        super().close()

    _watch: _Watch | None = None


class _Watch:
    """One wait for ZeroMQ's sockets, by the file descriptors that signal their events.

    Not `zmq.asyncio.Poller`: after a cancelled wait it releases descriptors a moment later, and takes them away from
    the next wait.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = self._loop.create_future()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._descriptors: list[int] = []

    def register(self, socket: zmq.Socket[bytes], flags: int) -> None:
        """Register like a `zmq.Poller`; always for reading, whatever the `flags`."""
        descriptor = int(socket.get(zmq.FD))
        self._loop.add_reader(descriptor, self._wake)
        self._descriptors.append(descriptor)
        self._sockets.append(socket)

    async def wait(self, seconds: float | None) -> None:
        """Wait until a socket may be readable, for at most `seconds`."""
        try:
            # A descriptor signals changes only, so pending messages have to be checked for.
            if not any(int(socket.get(zmq.EVENTS)) & int(zmq.POLLIN) for socket in self._sockets):
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._woken
        finally:
            self.end()

    def end(self) -> None:
        """Unregister; at once, since a descriptor's number may soon be another's."""
        while self._descriptors:
            self._loop.remove_reader(self._descriptors.pop())
        self._wake()

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


_ASK_AGAIN_SECONDS = 1.0
"""Interval between two new subscriptions: a large state takes a while to arrive."""


class NativeSubscriber(BlockingPublication[NativeReport]):
    """Subscribes to one publisher of msgpack messages (``format=native``).

    The arguments are those of `events.subscribe.subscriber.Publication`, but that it always begins with the state.
    """

    @property
    def waiting(self) -> bool:
        """True if it has no state yet, or none that fits the messages received."""
        return self._continuity.waiting

    def _order(self, start: int | None, *, can_ask: bool) -> NativeContinuity:
        self._continuity = NativeContinuity(can_ask=can_ask)
        self._asked_at = self._clock()
        return self._continuity

    def _take(self) -> list[NativeReport]:
        reports = super()._take()
        now = self._clock()
        is_stalled = self._continuity.waiting and self._continuity.next is not None
        if is_stalled and now - self._asked_at >= _ASK_AGAIN_SECONDS:
            # For the publisher this is a new subscriber, which receives the state.
            self._asked_at = now
            self._live.socket.unsubscribe(self._topic)
            self._live.socket.subscribe(self._topic)
        return reports
