"""The server for readers that missed batches: a ROUTER socket on a thread of its own.

The protocol is vLLM's: a reader sends ``[b"", start]`` with the first number wanted, 8 bytes big-endian, and receives
``[b"", topic, seq, payload]`` for each batch from there up to the latest one, then the end marker ``[b"", b"", ff*8,
b""]``. Meanwhile it holds live batches.

Batches that the ring still has are sent as they were. In place of older ones the whole state is published (*compacted
replay*): "cleared" and all blocks, parents first, under the numbers up to the one of that state; batches sent since
follow. So an answer is as long as the state is large, however old the feed. Readers that require each number from the
one requested receive the state under the first of these numbers, and empty batches up to its own (`contiguous`). The
encoded state (`EncodedState`) is kept with the batches sent since, for all late readers: encoding a million blocks
takes about a second, so it is done a moment at a time, and anew only when the batches outweigh the state.

A few answers are sent at once, by turns; the other readers queue, since an empty answer would mean that nothing was
missed. Each has one place there, which it loses when it disconnects. A reader that sends a request during its answer
goes to the end of the queue, and of several such requests the last one counts. Nothing is sent if the socket would
block, and a reader that receives nothing for `stall_seconds` is disconnected, so the messages that wait are bounded.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from events.diagnostics import get_logger
from events.formats.vllm import END_OF_REPLAY, encode_seq
from events.subscribe.sockets import SEEN_BY_SERVER
from sinks.router.feed import FeedSnapshot, in_batches
from sinks.router.options import PayloadWriter
from sinks.router.publisher import Peers, PeerWarnings, connection_of

ENTRY_BYTES = 100
"""Size counted per batch in addition to its payload, so that a ring of heartbeats is bounded too."""


class ReplayRing:
    """Payloads of consecutive batches, at most `max_bytes` of them. One thread writes, any may read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.start(0)

    def start(self, seq: int) -> None:
        """Drop everything; the next batch is `seq`."""
        self._payloads: dict[int, bytes] = {}
        self._bytes = 0
        self.next_seq = seq
        """Number of the next batch."""

    def append(self, seq: int, payload: bytes) -> None:
        """Append a batch, evicting the oldest. After a hole in the numbers everything before it is dropped."""
        if seq != self.next_seq:
            self.start(seq)
        self._payloads[seq] = payload
        self._bytes += len(payload) + ENTRY_BYTES
        self.next_seq = seq + 1
        while self._bytes > self._max_bytes:
            oldest = self._payloads.pop(self.next_seq - len(self._payloads))
            self._bytes -= len(oldest) + ENTRY_BYTES

    def get(self, seq: int) -> bytes | None:
        """Return the payload of a batch; None if it is not held."""
        return self._payloads.get(seq)


MIN_TAIL_BYTES = 1 << 20
"""Minimum number of bytes sent before the state is encoded again, however small it is."""


class EncodedState:
    """An encoded state and the batches since. The feed's thread only appends, so any may read once `ready`.

    `encode` is a feed's `PayloadWriter.encode`.
    """

    def __init__(self, state: FeedSnapshot, encode: Callable[..., bytes], piece_bytes: int) -> None:
        self.seq = state.seq
        """The number of the last batch that the state includes."""
        self.ts = state.ts
        """Time at which that batch was sent."""
        self.ready = False
        self.pieces: list[bytes] = []
        """Payloads that together are the state: the first one clears, parents come first."""
        self.tail: list[bytes] = []
        """The payloads of the batches after `seq`."""
        self._groups, self._encode = state.groups, encode
        self._changes = in_batches(state.changes, piece_bytes)
        self._state_bytes = self._tail_bytes = 0

    @property
    def last_seq(self) -> int:
        """Number of the last batch in the tail; `seq` if there is none."""
        return self.seq + len(self.tail)

    @property
    def is_stale(self) -> bool:
        """True if more was sent since than the state has bytes."""
        return self.ready and self._tail_bytes > max(self._state_bytes, MIN_TAIL_BYTES)

    def advance(self, seconds: float) -> bool:
        """Encode for about `seconds`, and at least one piece, so that it comes to an end; return `ready`."""
        deadline = time.perf_counter() + seconds
        for changes in self._changes:
            self.pieces.append(self._encode(changes, self.ts, self._groups))
            self._state_bytes += len(self.pieces[-1])
            if time.perf_counter() >= deadline:
                return False
        self.ready = True
        return True

    def append(self, payload: bytes) -> None:
        """Append the batch after `last_seq`, which was sent."""
        self.tail.append(payload)
        self._tail_bytes += len(payload)

    def in_payloads(self, count: int, join: Callable[[Sequence[bytes]], bytes]) -> Iterator[bytes]:
        """Yield the state in at most `count` payloads, joined by `join`."""
        each = -(-len(self.pieces) // count)
        for at in range(0, len(self.pieces), each):
            yield join(self.pieces[at : at + each])


TURN_MESSAGES = 64
"""Messages sent to one reader before the next one's turn."""
READ_AT_ONCE = 1000
"""Requests read before answering."""
ANSWERS_AT_ONCE = 8
SHARED_BYTES = 4096
"""Payloads above this size are not copied for each reader."""
MAX_PADDED = 10_000_000
"""Empty batches that an answer may need; a reader that would need more, and would never wait for the end, gets none."""
STOP_POLL_MS = 20
BUSY_POLL_MS = 5
STALL_SECONDS = 5.0

_MORE, _LAST = int(zmq.NOBLOCK) | int(zmq.SNDMORE), int(zmq.NOBLOCK)
"""Plain numbers: combining flags of the enumeration takes longer than sending."""

Numbered = tuple[int, bytes]
"""A number and a payload."""

_log = get_logger("sinks")


@dataclass(slots=True)
class ReplayAnswer:
    """The rest of a reader's answer."""

    reader: bytes
    connection: int | None
    messages: Iterator[Numbered | None]
    """Messages to send. None: the state is needed, and not there yet."""
    moved_at: float
    """Time at which the reader last received something."""
    held: Numbered | None = None
    """A message for which it had no room, or `_END`."""
    taken: zmq.MessageTracker | None = None
    """Tracker of the end marker, once it is sent: done when the reader's connection has received everything."""


class ReplayServer:
    """Owns `socket` from `start` on, and closes it.

    `wants_snapshot`, `snapshot`, `start` and `stop` are for the feed's thread; the counters for any.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        ring: ReplayRing,
        topic: bytes,
        writer: PayloadWriter,
        *,
        contiguous: bool = False,
        stall_seconds: float = STALL_SECONDS,
        keyed: bool = False,
    ) -> None:
        self._socket = socket
        self._socket.copy_threshold = SHARED_BYTES
        self._peers = Peers(socket, PeerWarnings(), refusals=SEEN_BY_SERVER if keyed else 0)
        self._ring, self._topic, self._writer = ring, topic, writer
        self._contiguous = contiguous
        self._stall_seconds = stall_seconds
        self.clock: Callable[[], float] = time.monotonic
        """Clock by which a stalled reader is disconnected; tests replace it."""
        self._warned = False
        self._state_numbers = (sys.maxsize, -1)
        """Numbers within which some reader may have received a part of the state. A request from there on, but not from
        the first one, may be that reader's, and receives the whole state again: the batches sent under the numbers are
        not the rest."""
        self.answers: deque[ReplayAnswer] = deque()
        self.line: dict[bytes, tuple[int, int | None]] = {}
        """Waiting readers, longest wait first: the first number and the connection of each request. All of them were
        connected at the last check."""
        self.snapshot: EncodedState | None = None
        """The ready state, and the batches since; None: there is none."""
        self.wants_snapshot = False
        """True if a reader waits for `snapshot`."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-feed-replay", daemon=True)
        self.answered = 0
        """Completed answers."""
        self.compacted = 0
        """Answers made from the whole state."""
        self.dropped = 0
        """Answers abandoned, or not begun, because the reader received nothing or had disconnected."""

    @property
    def refused(self) -> int:
        """Connections that failed because of keys."""
        return self._peers.refused

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the socket. Messages it accepted are still delivered during its linger time."""
        self._stopping.set()
        self._thread.join()

    # --- the server's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        timeout = STOP_POLL_MS
        try:
            while not self._stopping.is_set():
                asked = self._receive() if self._socket.poll(timeout) else ()
                self._forget_disconnected()
                self._enqueue(asked)
                self._start_answers()
                timeout = self._serve_round()
        finally:
            self._peers.close()
            self._socket.close()

    def _receive(self) -> list[tuple[bytes, int, int | None]]:
        """Read the pending requests: sender, first number, connection. Messages that are no request get no answer."""
        asked: list[tuple[bytes, int, int | None]] = []
        for _ in range(READ_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if len(frames) == 3 and not len(frames[1]):
                start = int.from_bytes(frames[2].bytes, "big")
                asked.append((frames[0].bytes, start, connection_of(frames[2])))
        return asked

    def _forget_disconnected(self) -> None:
        left = set(self._peers.refresh())
        if left:
            waiting = len(self.line)
            self.line = {reader: asked for reader, asked in self.line.items() if asked[1] not in left}
            self.dropped += waiting - len(self.line)

    def _enqueue(self, asked: Iterable[tuple[bytes, int, int | None]]) -> None:
        """Append still connected senders to the queue; those in it keep their place."""
        for reader, start, connection in asked:
            if connection in self._peers.connected:
                self.line[reader] = start, connection
                self._start_answers()
            else:
                self.dropped += 1

    def _start_answers(self) -> None:
        """Begin the first answers in the queue; a reader being answered stays there until its answer ends."""
        if not self.line or len(self.answers) >= ANSWERS_AT_ONCE:
            return
        busy = {answer.reader for answer in self.answers}
        ready = [reader for reader in self.line if reader not in busy]
        for reader in ready[: ANSWERS_AT_ONCE - len(self.answers)]:
            start, connection = self.line.pop(reader)
            self.answers.append(ReplayAnswer(reader, connection, self._messages(start), self.clock()))

    def _messages(self, start: int) -> Iterator[Numbered | None]:
        """Yield the batches from `start` up to the last one sent when this began: later ones come live."""
        seq, end = start, self._ring.next_seq
        if start > end:
            self._warn_of_higher_numbers(start, end)
        first, last = self._state_numbers
        broken_off = first < start <= last
        while seq < end:
            payload = None if broken_off else self._ring.get(seq)
            snapshot = self.snapshot
            if payload is not None:
                yield seq, payload
            elif snapshot is not None and snapshot.last_seq >= seq:
                self.compacted += seq <= snapshot.seq
                for message in self._from_snapshot(snapshot, seq):
                    yield message
                    seq = message[0]
                broken_off = False
            else:
                self.wants_snapshot = True
                yield None
                continue
            seq += 1

    def _warn_of_higher_numbers(self, asked: int, end: int) -> None:
        if not self._warned:
            self._warned = True
            reason = (
                "a reader has seen higher sequence numbers than were used here; it may ignore batches "
                "until they are reached"
            )
            _log.warning("feed_numbers_went_back", asked=min(asked, 2**64), next=end, reason=reason)

    def _from_snapshot(self, snapshot: EncodedState, start: int) -> Iterator[Numbered]:
        """Yield the state and the batches since; only the latter if `start` is among them."""
        if start <= snapshot.seq:
            count = snapshot.seq + 1 - start
            seq = max(start, snapshot.seq + 1 - len(snapshot.pieces))
            if self._contiguous and seq - start <= MAX_PADDED:
                seq = start
            if len(snapshot.pieces) > 1:
                first, last = self._state_numbers
                self._state_numbers = min(first, seq), max(last, seq + len(snapshot.pieces) - 1)
            for payload in snapshot.in_payloads(count, self._writer.join):
                yield seq, payload
                seq += 1
            empty = self._writer.encode((), snapshot.ts, ())
            for rest in range(seq, snapshot.seq + 1):
                yield rest, empty
            start = snapshot.seq + 1
        for seq in range(start, snapshot.last_seq + 1):
            yield seq, snapshot.tail[seq - snapshot.seq - 1]

    def _serve_round(self) -> int:
        """Send each reader a part of its answer; return the milliseconds until the next round."""
        moved = False
        for _ in range(len(self.answers)):
            answer = self.answers.popleft()
            sent, goes_on = self._advance(answer)
            moved = moved or sent > 0
            if goes_on:
                self.answers.append(answer)
        if moved:
            return 0
        return BUSY_POLL_MS if self.answers else STOP_POLL_MS

    def _advance(self, answer: ReplayAnswer) -> tuple[int, bool]:
        """Send until the turn is over or there is no room; return messages sent and True if there are more."""
        sent = 0
        try:
            while answer.taken is None and sent < TURN_MESSAGES:
                if answer.held is None:
                    answer.held = next(answer.messages, _END)
                if answer.held is None:
                    answer.moved_at = self.clock()  # the delay is not the reader's
                    return sent, True
                if answer.held is _END:
                    answer.taken = self._send_end(answer.reader)
                else:
                    self._send(answer.reader, answer.held)
                answer.held = None
                sent += 1
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.dropped += 1
            return sent, False
        except Exception as error:  # noqa: BLE001  one payload that cannot be made must not end the others' answers
            # The text might quote token ids.
            _log.error("replay_failed", error=type(error).__name__)
            self.dropped += 1
            return sent, False
        if answer.taken is not None and answer.taken.done:
            self.answered += 1
            return sent, False
        return sent, self._has_patience(answer, sent)

    def _send(self, reader: bytes, message: Numbered) -> None:
        send, (seq, payload) = self._socket.send, message
        # The first frame selects the reader and its room; the others then have it.
        send(reader, _MORE)
        send(b"", _MORE)
        send(self._topic, _MORE)
        send(encode_seq(seq), _MORE)
        send(payload, _LAST, copy=len(payload) < SHARED_BYTES)

    def _send_end(self, reader: bytes) -> zmq.MessageTracker:
        end = zmq.Frame(END_OF_REPLAY, copy=False, track=True)
        taken = end.tracker
        assert isinstance(taken, zmq.MessageTracker)
        send = self._socket.send
        send(reader, _MORE)
        send(b"", _MORE)
        send(b"", _MORE)
        send(end, _MORE, copy=False)
        send(b"", _LAST)
        return taken

    def _has_patience(self, answer: ReplayAnswer, sent: int) -> bool:
        now = self.clock()
        if sent:
            answer.moved_at = now
        if now - answer.moved_at < self._stall_seconds:
            return True
        self.dropped += 1
        self._peers.cut_off(answer.connection, "it does not read the replay that it requested")
        return False


_END: Numbered = (-1, b"")
"""End marker of an answer."""
