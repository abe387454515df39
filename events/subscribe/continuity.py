"""The order of a publisher's messages: new, repeated or missing. Independent of sockets.

Live messages are numbered, and some may never arrive. What an order does with each message::

    state      message                                     becomes    reports
    following  live, the number expected                   following  Received
    following  live, too high; replay can be requested     asking     (held)
    following  live, too high; replay cannot be requested  following  Missed, Received
    following  live, too high, has a whole state           following  Restated, Received
    following  live, received already                      following
    following  live, number went back                      following  Restarted, Received
    asking     live                                        asking     (held, at most HELD_MAX)
    asking     answer                                      asking     Received; Missed or Restated before a hole
    asking     end of a complete answer                    following  Missed(recovered), then as above for those held
    asking     end of an answer that broke off             asking     (the rest is requested)

An answer is used up to its end, beyond the first live message that is held, because a publisher may answer with its
whole state as of now instead of the earlier batches; the live messages up to there are then included already and are
dropped. An answer that breaks off may be a part of such a state, to which no live message fits. A whole state replaces
everything before it: numbers that it jumps over need not be requested.

*Maps* (`Continuity`): a batch that begins with "cleared" is a whole state. A live number that goes back means that the
publisher has restarted, with two exceptions. After a replay, live messages included in it are still in flight: those
are older than its newest message, by the publisher's clock; a restart is younger. And a publisher may send a
reconnecting subscriber its state under the last number, which is of the same time then. (Nothing else in this format
distinguishes one life of a publisher from the next.)

*All events* (`NativeContinuity`): two numbers identify the next message, the feed's and that of the cache's batch. A
batch with the whole state names its epoch and log: so a repeated state is recognised, and a publisher that was
restarted, but serves the same epoch, simply continues. There is a further state, *waiting*: at the beginning, and after
a loss, all is dropped until a state arrives, since it builds on batches that were not received.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Generic, TypeVar, cast

import msgspec

from events.errors import EventDecodeError
from events.formats.native import Origin, decode_native, has_unhealed_gap, origin_of_state
from events.formats.vllm import AllBlocksCleared, Message, VLLMBatch, decode_batch
from events.types import EventBatch

HELD_MAX = 10_000
"""Live messages held during a replay. Further ones stay in the socket's own queue, if it is one publisher's alone."""


class Received(msgspec.Struct, frozen=True):
    """A batch, in its place."""

    seq: int
    topic: str
    batch: VLLMBatch
    replayed: bool
    """True if it came from the replay socket."""


class Missed(msgspec.Struct, frozen=True):
    """The batches `first` to `last` did not arrive as live messages."""

    first: int
    last: int
    recovered: bool
    """True: a replay has just delivered them. False: their content is lost."""
    reason: str = "not received"


class Restated(msgspec.Struct, frozen=True):
    """The publisher sent its whole state, which includes the batches `first` to `last`."""

    first: int
    last: int


class Restarted(msgspec.Struct, frozen=True):
    """The publisher restarted; its earlier batches no longer hold."""

    last: int
    """The last number before."""
    first: int
    """The first number received after."""


Report = Received | Missed | Restated | Restarted


AnyReport = TypeVar("AnyReport")


class MessageOrder(ABC, Generic[AnyReport]):
    """The order of one publisher's messages. Turns messages into reports, and requests replays if it `can_ask`."""

    def __init__(self, start: int | None, *, can_ask: bool) -> None:
        self._can_ask = can_ask
        self.next = start
        """The feed's number expected next; None: any."""
        self._asked: int | None = None
        """The first number requested, while live messages are held."""
        self._request: int | None = None
        self._in_vain: int | None = None
        """The start of a request, because of a gap, that was not answered: not requested again."""
        self.held: list[Message] = []
        """Live messages that wait for the end of a replay."""
        self._reports: list[AnyReport | Missed] = []

    def take(self) -> list[AnyReport]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return cast("list[AnyReport]", reports)

    def take_request(self) -> int | None:
        """Return the number from which to request a replay now, once."""
        request, self._request = self._request, None
        return request

    def live(self, message: Message) -> None:
        """Accept a message of the stream. At the limit of held messages, it replaces the last one.

        So it shows a gap later, which is requested again.
        """
        if self._asked is None:
            self._accept(message, replayed=False)
            return
        if len(self.held) >= HELD_MAX:
            self.held.pop()
        self.held.append(message)

    def give_up(self, reason: str) -> None:
        """Stop following: from the next message on nothing is known."""
        if self.next is not None:
            self._reports.append(Missed(self.next, self.next, recovered=False, reason=reason))

    @abstractmethod
    def answer(self, message: Message) -> None:
        """Accept a message of the replay."""

    @abstractmethod
    def end_of_replay(self, *, complete: bool = True) -> None:
        """End the answer, which is complete or broke off."""

    @abstractmethod
    def _accept(self, message: Message, *, replayed: bool) -> None:
        """Accept a message that is not held."""

    def _release_held(self) -> None:
        """Release held messages; the first one may show another gap, and then the others wait again."""
        held, self.held = self.held, []
        for message in held:
            self.live(message)


class Continuity(MessageOrder[Report]):
    """The order of messages with maps as payloads."""

    def __init__(self, start: int | None, *, can_ask: bool) -> None:
        super().__init__(start, can_ask=can_ask)
        self._last_live: int | None = None
        self._last_ts = -math.inf
        """Time at which that was published."""
        self._newest_replayed = -math.inf
        self._broken_first: int | None = None
        """The beginning of an answer that broke off and was not completed since."""
        self._gap_last: int | None = None
        self._run_first = 0
        """The beginning of the unbroken part of the answer."""
        if can_ask and start is not None:
            self._ask(start, None)

    def answer(self, message: Message) -> None:
        """Accept a message of the replay."""
        assert self.next is not None
        if message.seq < self.next:
            return
        if message.seq > self.next:
            self._report_recovered()
            if begins_with_clear(message):
                # It is the state in place of the batches requested, under numbers of its choice.
                self._restate(message.seq)
                self._gap_last = None
            else:
                self._miss(message.seq - 1)
            self._run_first = message.seq
        self._deliver(message, replayed=True)

    def end_of_replay(self, *, complete: bool = True) -> None:
        """End the answer, which is complete or broke off."""
        assert self.next is not None
        self._report_recovered()
        if not complete and self._asked is not None and self.next > self._asked:
            if self._broken_first is None:
                self._broken_first = self._asked
            self._ask(self.next, self._gap_last)
            return
        if not complete and self._broken_first is not None:
            reason = "the publisher's answer is incomplete"
            self._reports.append(Missed(self._broken_first, self.next - 1, recovered=False, reason=reason))
        self._broken_first = None
        # Only if live messages prove it: a publisher without batches then may have some by now.
        self._in_vain = self._asked if self.next == self._asked and self._gap_last is not None else None
        self._asked = None
        self._release_held()

    def _ask(self, start: int, gap_last: int | None) -> None:
        self._asked = self._request = self._run_first = start
        self._gap_last = gap_last

    def _accept(self, message: Message, *, replayed: bool) -> None:
        seq = message.seq
        if self.next is None:
            self.next = seq
        went_back = self._last_live is not None and seq <= self._last_live
        if seq < self.next and self._is_known(message, went_back=went_back):
            self._last_live, self._last_ts = seq, _published_at(message)
            return
        if went_back or seq < self.next:
            self._restart(seq)
        if seq > self.next and begins_with_clear(message):
            self._restate(seq)
        elif seq > self.next:
            if self._can_ask and self._in_vain != self.next:
                self._ask(self.next, seq - 1)
                self.held.append(message)
                return
            self._miss(seq - 1)
        self._last_live = seq
        self._deliver(message, replayed=False)

    def _is_known(self, message: Message, *, went_back: bool) -> bool:
        """Return True if an old number was received already."""
        ts = _published_at(message)
        if went_back:
            return message.seq == self._last_live and ts == self._last_ts
        return ts <= self._newest_replayed

    def _restart(self, first: int) -> None:
        assert self.next is not None
        self._reports.append(Restarted(self.next - 1, first))
        self.next, self._last_live, self._in_vain = 0, None, None
        self._newest_replayed = self._last_ts = -math.inf

    def _restate(self, seq: int) -> None:
        assert self.next is not None
        # For a subscriber that has received nothing yet, nothing is repeated.
        if max(self._last_ts, self._newest_replayed) > -math.inf:
            self._reports.append(Restated(self.next, seq - 1))
        self.next = seq

    def _miss(self, last: int) -> None:
        assert self.next is not None
        self._reports.append(Missed(self.next, last, recovered=False))
        self.next = last + 1

    def _report_recovered(self) -> None:
        """Report the unbroken part of the answer, within the gap, as recovered."""
        if self._gap_last is None:
            return
        assert self.next is not None
        last = min(self.next - 1, self._gap_last)
        if self._run_first <= last:
            self._reports.append(Missed(self._run_first, last, recovered=True))

    def _deliver(self, message: Message, *, replayed: bool) -> None:
        seq = message.seq
        try:
            batch = decode_batch(message.payload)
        except EventDecodeError as error:
            if replayed:
                self._report_recovered()
                self._run_first = seq + 1
            self._reports.append(Missed(seq, seq, recovered=False, reason=error.reason))
        else:
            if replayed:
                self._newest_replayed = max(self._newest_replayed, batch.ts)
            else:
                self._last_ts = batch.ts
            topic = message.topic.decode(errors="replace")
            self._reports.append(Received(seq, topic, batch, replayed))
        self.next = seq + 1


def _published_at(message: Message) -> float:
    """Return the time at which a message was published; an unreadable one has none."""
    try:
        return decode_batch(message.payload).ts
    except EventDecodeError:
        return -math.inf


def begins_with_clear(message: Message) -> bool:
    """Return True if a batch first clears everything, so that nothing before it matters."""
    try:
        events = decode_batch(message.payload).events
    except EventDecodeError:
        return False
    return bool(events) and isinstance(events[0], AllBlocksCleared)


class ReceivedBatch(msgspec.Struct, frozen=True):
    """A batch of the cache's events, in its place; the first one has the whole state."""

    seq: int
    """The feed's number; the batch has its own."""
    topic: str
    batch: EventBatch
    replayed: bool
    """True if it was requested from a replay."""


NativeReport = ReceivedBatch | Missed | Restated | Restarted


class NativeContinuity(MessageOrder[NativeReport]):
    """The order of messages that are batches of a cache's own events."""

    def __init__(self, *, can_ask: bool = False) -> None:
        super().__init__(None, can_ask=can_ask)
        self._origin: Origin | None = None
        """The origin of these batches; None: no state was received yet."""
        self._last_seq = -1
        """Number of the last batch reported."""
        self.waiting = True
        """True if nothing can be reported before a state arrives."""
        self._wanted_since: int | None = None
        """The first number dropped while waiting."""
        self._gap_last = -1
        """The last number requested; -1 once a state came in its place."""

    def answer(self, message: Message) -> None:
        """Accept a message of the replay."""
        if self.next is None or message.seq >= self.next:
            self._accept(message, replayed=True)

    def end_of_replay(self, *, complete: bool = True) -> None:
        """End the answer, which is complete or broke off."""
        asked, self._asked = self._asked, None
        if self.next == asked:
            self._in_vain = asked
        elif asked is not None and self.next is not None and asked <= self._gap_last:
            self._reports.append(Missed(asked, min(self.next - 1, self._gap_last), recovered=True))
        self._release_held()

    def _accept(self, message: Message, *, replayed: bool) -> None:
        try:
            batch = decode_native(message.payload)
        except EventDecodeError as error:
            self._lose(message.seq, message.seq, error.reason)
            return
        origin = origin_of_state(batch)
        if origin is not None:
            self._take_state(message, batch, origin, replayed=replayed)
        elif self.next is not None and message.seq < self.next:
            return  # already received in a replay
        elif self.waiting:
            self._drop(message.seq)
        elif self.next is not None and message.seq > self.next:
            self._miss(message, replayed=replayed)
        elif batch.events:
            self._deliver(message, batch, replayed=replayed)
        else:
            self._take_heartbeat(message, batch)

    def _take_state(self, message: Message, batch: EventBatch, origin: Origin, *, replayed: bool) -> None:
        seq = message.seq
        if not self.waiting and origin == self._origin and batch.seq <= self._last_seq:
            # Repeated: nothing is new, and numbers that are jumped over had nothing that it does not include.
            self.next = max(seq + 1, self.next or 0)
            return
        if self._origin is not None and origin != self._origin:
            self._reports.append(Restarted((self.next or 0) - 1, seq))
        elif self._origin is not None and self.next is not None:
            first = self.next if self._wanted_since is None else self._wanted_since
            if first < seq:
                self._reports.append(Restated(first, seq - 1))
        self._origin, self.waiting, self._wanted_since, self._gap_last = origin, False, None, -1
        self._deliver(message, batch, replayed=replayed)

    def _miss(self, message: Message, *, replayed: bool) -> None:
        assert self.next is not None
        if self._can_ask and not replayed and self._in_vain != self.next:
            self._asked = self._request = self.next
            self._gap_last = message.seq - 1
            self.held.append(message)
            return
        self._lose(self.next, message.seq - 1, "not received")
        self._drop(message.seq)

    def _lose(self, first: int, last: int, reason: str) -> None:
        """Report a loss; batches that build on it are useless."""
        if not self.waiting or self._origin is None:
            self._reports.append(Missed(first, last, recovered=False, reason=reason))
        self._drop(last)
        self._wanted_since = min(first, self._wanted_since or first)

    def _drop(self, seq: int) -> None:
        self.waiting, self.next = True, seq + 1

    def _take_heartbeat(self, message: Message, batch: EventBatch) -> None:
        if batch.seq > self._last_seq:
            self._lose(message.seq, message.seq, "the publisher has sent other batches since")
        self.next = message.seq + 1

    def _deliver(self, message: Message, batch: EventBatch, *, replayed: bool) -> None:
        topic = message.topic.decode(errors="replace")
        self._reports.append(ReceivedBatch(message.seq, topic, batch, replayed))
        if has_unhealed_gap(batch, self._last_seq):
            self.waiting = True
        self.next, self._last_seq = message.seq + 1, batch.seq
