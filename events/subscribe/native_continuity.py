"""Puts the messages of a feed in the native format in order. Knows no socket.

Two numbers say whether a message is the next one: the feed's, which is consecutive in all that it sends, and that of
the batch, which is consecutive in what the cache did. Reading begins with a batch that tells the whole state, and so it
goes on where something is missing for good: what comes before such a batch is dropped, since it follows from what was
not heard. Where the publisher can be asked, it is, and its answer is what was missed, or a newer state.

A batch that tells the state says of which epoch of which log it is. So a state that is told again is known as such, and
a publisher that was started anew, but serves the same epoch, simply goes on.
"""

from __future__ import annotations

import msgspec

from events.errors import EventDecodeError
from events.formats.native import Origin, decode_native, loses_track, origin_told
from events.formats.vllm import Message
from events.subscribe.continuity import HELD_MAX, Missed, Restarted, Restated
from events.types import EventBatch


class ReceivedBatch(msgspec.Struct, frozen=True):
    """A batch of the cache's events, in its place; the first one tells the whole state."""

    seq: int
    """The feed's number; the batch has its own."""
    topic: str
    batch: EventBatch
    replayed: bool
    """Whether it was asked for."""


NativeReport = ReceivedBatch | Missed | Restated | Restarted


class NativeContinuity:
    """Follows one publisher. Fed with messages, it gives reports, and asks for what is missing if it `can_ask`."""

    def __init__(self, *, can_ask: bool = False) -> None:
        self._can_ask = can_ask
        self._next: int | None = None
        """The feed's number that should come; None: nothing was heard yet."""
        self._origin: Origin | None = None
        """Whose batches are heard; None: no state was heard yet."""
        self._last_seq = -1
        """That of the last batch that was handed out."""
        self.waiting = True
        """Whether nothing can be handed out before a state is told."""
        self._wanted_since: int | None = None
        """The first number that was dropped while waiting."""
        self._asked: int | None = None
        self._request: int | None = None
        self._in_vain: int | None = None
        """A number that was asked for without success."""
        self._gap_last = -1
        """The last number of what was asked for; -1 once a state was told in its place."""
        self._held: list[Message] = []
        self._reports: list[NativeReport] = []

    def take(self) -> list[NativeReport]:
        """What is to be reported since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def take_request(self) -> int | None:
        """The number from which to ask for a replay now, once."""
        request, self._request = self._request, None
        return request

    @property
    def holding(self) -> int:
        """How many live messages wait for the end of a replay."""
        return len(self._held)

    @property
    def next(self) -> int | None:
        """The feed's number that should come; None: nothing was heard yet."""
        return self._next

    def live(self, message: Message) -> None:
        """A message of the stream. While as many are held as may be, it takes the place of the last one."""
        if self._asked is None:
            self._accept(message, replayed=False)
            return
        if len(self._held) >= HELD_MAX:
            self._held.pop()
        self._held.append(message)

    def answer(self, message: Message) -> None:
        """A message of the replay."""
        if self._next is None or message.seq >= self._next:
            self._accept(message, replayed=True)

    def end_of_replay(self, *, complete: bool = True) -> None:
        """The answer is complete, or the publisher does not answer any more."""
        asked, self._asked = self._asked, None
        if self._next == asked:
            self._in_vain = asked
        elif asked is not None and self._next is not None and asked <= self._gap_last:
            self._reports.append(Missed(asked, min(self._next - 1, self._gap_last), recovered=True))
        held, self._held = self._held, []
        for message in held:
            self.live(message)

    def give_up(self, reason: str) -> None:
        """Nobody listens any more: from the next message on nothing is known."""
        if self._next is not None:
            self._reports.append(Missed(self._next, self._next, recovered=False, reason=reason))

    def _accept(self, message: Message, *, replayed: bool) -> None:
        try:
            batch = decode_native(message.payload)
        except EventDecodeError as error:
            self._lose(message.seq, message.seq, error.reason)
            return
        origin = origin_told(batch)
        if origin is not None:
            self._take_state(message, batch, origin, replayed=replayed)
        elif self._next is not None and message.seq < self._next:
            return  # a replay has told it
        elif self.waiting:
            self._drop(message.seq)
        elif self._next is not None and message.seq > self._next:
            self._miss(message, replayed=replayed)
        elif batch.events:
            self._deliver(message, batch, replayed=replayed)
        else:
            self._hear_heartbeat(message, batch)

    def _take_state(self, message: Message, batch: EventBatch, origin: Origin, *, replayed: bool) -> None:
        seq = message.seq
        if not self.waiting and origin == self._origin and batch.seq <= self._last_seq:
            # Told again: nothing is new, and numbers that are jumped over told nothing that it does not include.
            self._next = max(seq + 1, self._next or 0)
            return
        if self._origin is not None and origin != self._origin:
            self._reports.append(Restarted((self._next or 0) - 1, seq))
        elif self._origin is not None and self._next is not None:
            first = self._next if self._wanted_since is None else self._wanted_since
            if first < seq:
                self._reports.append(Restated(first, seq - 1))
        self._origin, self.waiting, self._wanted_since, self._gap_last = origin, False, None, -1
        self._deliver(message, batch, replayed=replayed)

    def _miss(self, message: Message, *, replayed: bool) -> None:
        assert self._next is not None
        if self._can_ask and not replayed and self._in_vain != self._next:
            self._asked = self._request = self._next
            self._gap_last = message.seq - 1
            self._held.append(message)
            return
        self._lose(self._next, message.seq - 1, "not received")
        self._drop(message.seq)

    def _lose(self, first: int, last: int, reason: str) -> None:
        """What was told there is lost, and what follows from it is of no use."""
        if not self.waiting or self._origin is None:
            self._reports.append(Missed(first, last, recovered=False, reason=reason))
        self._drop(last)
        self._wanted_since = min(first, self._wanted_since or first)

    def _drop(self, seq: int) -> None:
        self.waiting, self._next = True, seq + 1

    def _hear_heartbeat(self, message: Message, batch: EventBatch) -> None:
        if batch.seq > self._last_seq:
            self._lose(message.seq, message.seq, "the publisher has told other batches since")
        self._next = message.seq + 1

    def _deliver(self, message: Message, batch: EventBatch, *, replayed: bool) -> None:
        topic = message.topic.decode(errors="replace")
        self._reports.append(ReceivedBatch(message.seq, topic, batch, replayed))
        if loses_track(batch, self._last_seq):
            self.waiting = True
        self._next, self._last_seq = message.seq + 1, batch.seq
