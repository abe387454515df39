"""Answers readers that missed batches, over a ROUTER socket and on a thread of its own.

The protocol is vLLM's: a reader sends ``[b"", start]`` with the number it wants to begin at, 8 bytes big-endian,
and gets ``[b"", topic, seq, payload]`` for each batch from there up to the latest one, then the end marker
``[b"", b"", ff*8, b""]``. Meanwhile it keeps what comes live.

Batches that the ring still has are sent as they were. For older ones the whole state is laid over the numbers that
were asked for (*compacted replay*): the first answer is "cleared" with the first part of the state, parents first,
the next numbers bring the rest, and empty batches fill up to the latest. The numbers begin where the reader asked and
have no holes, which some routers insist on, and folding the answer gives exactly the state at its last number. A
part of it is of no use, so the ring forgets those numbers: whoever was interrupted and asks for the rest gets the
whole state again. The state comes from the feed's thread, as of a number; encoding it happens here, part by part as
the reader takes it.

No reader can hold up another: answers take turns, nothing is sent where the socket would wait, and a reader that takes
nothing for `stall_seconds` loses the rest of its answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from events.diagnostics import get_logger
from events.feed_changes import Change, Cleared
from events.formats.vllm import END_OF_REPLAY, encode_seq
from events.types import GroupCreated
from sinks.feed_batches import at_most, in_batches
from sinks.replay_ring import ReplayRing
from sinks.router_feed import FeedState

END_MARKER = (b"", END_OF_REPLAY, b"")
TURN_MESSAGES = 64
"""Sent to one reader before the next one has its turn."""
MAX_WAITING = 64
"""Requests that may wait for the state; further ones are turned away with an empty answer."""
STOP_POLL_MS = 50
BUSY_POLL_MS = 5
STALL_SECONDS = 5.0

_NOBLOCK = int(zmq.NOBLOCK)
"""As a plain number: combining flags of the enumeration takes longer than sending."""

Encode = Callable[[Sequence[Change], Sequence[GroupCreated]], bytes]
"""Changes to a payload; called on the server's thread."""

_log = get_logger("sinks")


@dataclass
class Answer:
    """What one reader still gets."""

    reader: bytes
    messages: Iterator[tuple[bytes, bytes, bytes]]
    """Topic, seq, payload."""
    moved_at: float
    """When the reader last took something."""
    held: tuple[bytes, bytes, bytes] | None = field(default=None)
    """A message that it had no room for."""


class ReplayServer:
    """Owns `socket` from `start` on, and closes it.

    `wants_state` and `give_state` are for the feed's thread, `start` and `stop` too; the counters for any.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        ring: ReplayRing,
        topic: bytes,
        encode: Encode,
        *,
        chunk_bytes: int,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._socket = socket
        self._ring = ring
        self._topic = topic
        self._encode = encode
        self._chunk_bytes = chunk_bytes
        self._stall_seconds = stall_seconds
        self._answers: deque[Answer] = deque()
        self._waiting: deque[tuple[bytes, int]] = deque()
        """Readers that need the whole state, and the numbers that they asked for."""
        self._states: deque[tuple[list[tuple[bytes, int]], FeedState]] = deque()
        self._expected_states = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-feed-replay", daemon=True)
        self.answered = 0
        """Answers sent to the end."""
        self.compacted = 0
        """Answers that were made from the whole state."""
        self.dropped = 0
        """Answers given up because the reader took nothing, was gone, or too many were waiting."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the socket. What it has taken is still delivered as long as it lingers."""
        self._stopping.set()
        self._thread.join()

    @property
    def wants_state(self) -> bool:
        """Whether somebody waits for `give_state`."""
        return bool(self._waiting)

    def give_state(self, state: FeedState) -> None:
        """Hand over the state as of the last batch that was sent."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._states.append((waiting, state))

    # --- the server's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        timeout = STOP_POLL_MS
        try:
            while not self._stopping.is_set():
                if self._socket.poll(timeout):
                    self._receive()
                self._begin_compacted()
                timeout = self._take_turns()
        finally:
            self._socket.close()

    def _receive(self) -> None:
        """Take the requests that are there. What is no request gets no answer."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and not frames[1]:
                self._begin(frames[0], int.from_bytes(frames[2], "big"))

    def _begin(self, reader: bytes, start: int) -> None:
        batches = self._ring.since(start)
        if batches is not None:
            self._add_answer(reader, self._from_ring(batches))
        elif self._expected_states < MAX_WAITING:
            self._expected_states += 1
            self._waiting.append((reader, start))
        else:
            self.dropped += 1
            self._add_answer(reader, iter([END_MARKER]))

    def _begin_compacted(self) -> None:
        while self._states:
            waiting, state = self._states.popleft()
            for reader, start in waiting:
                self._expected_states -= 1
                self.compacted += 1
                self._add_answer(reader, self._from_state(start, state))

    def _add_answer(self, reader: bytes, messages: Iterator[tuple[bytes, bytes, bytes]]) -> None:
        self._answers.append(Answer(reader, messages, time.monotonic()))

    def _from_ring(self, batches: Sequence[tuple[int, bytes]]) -> Iterator[tuple[bytes, bytes, bytes]]:
        for seq, payload in batches:
            yield self._topic, encode_seq(seq), payload
        yield END_MARKER

    def _from_state(self, start: int, state: FeedState) -> Iterator[tuple[bytes, bytes, bytes]]:
        """The whole state on the numbers from `start` to that of the state."""
        chunks = list(in_batches([Cleared(), *state.changes], self._chunk_bytes))
        seq = start
        for chunk in at_most(chunks, state.seq + 1 - start):
            yield self._topic, encode_seq(seq), self._encode(chunk, state.groups)
            seq += 1
        empty = self._encode((), state.groups)
        for rest in range(seq, state.seq + 1):
            yield self._topic, encode_seq(rest), empty
        yield END_MARKER

    def _take_turns(self) -> int:
        """Send each reader a part of its answer; returns how many milliseconds may pass before the next time."""
        moved = False
        busy: set[bytes] = set()
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            # Two answers to one reader must not mix: the second waits until the first is through.
            if answer.reader in busy:
                answer.moved_at = time.monotonic()
                self._answers.append(answer)
                continue
            sent, goes_on = self._advance(answer)
            moved = moved or sent > 0
            if goes_on:
                busy.add(answer.reader)
                self._answers.append(answer)
        if moved and self._answers:
            return 0
        return BUSY_POLL_MS if self._answers or self._expected_states else STOP_POLL_MS

    def _advance(self, answer: Answer) -> tuple[int, bool]:
        """Send until the turn is over or there is no room; returns messages sent and whether there is more."""
        for sent in range(TURN_MESSAGES):
            message = answer.held or self._next_message(answer)
            if message is None:
                return sent, False
            try:
                self._socket.send_multipart((answer.reader, b"", *message), _NOBLOCK)
            except zmq.Again:
                answer.held = message
                return sent, self._has_patience(answer, sent)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.dropped += 1
                return sent, False
            answer.held = None
        answer.moved_at = time.monotonic()
        return TURN_MESSAGES, True

    def _next_message(self, answer: Answer) -> tuple[bytes, bytes, bytes] | None:
        """The next message; None at the end, or where it cannot be made, which must not end the others' answers."""
        try:
            message = next(answer.messages, None)
        except Exception as error:  # noqa: BLE001  whatever is wrong with one payload
            # The text might quote token ids.
            _log.error("replay_failed", error=type(error).__name__)
            self.dropped += 1
            return None
        self.answered += message is None
        return message

    def _has_patience(self, answer: Answer, sent: int) -> bool:
        now = time.monotonic()
        if sent:
            answer.moved_at = now
        if now - answer.moved_at < self._stall_seconds:
            return True
        self.dropped += 1
        _log.warning("replay_reader_dropped", seconds=self._stall_seconds)
        return False
