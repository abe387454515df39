"""Follows one publisher, wherever its messages come in: puts them in order and asks it for what was missed.

The order of things is `events.subscribe.continuity`'s business; here is the socket that asks, a new one for each
question, so that no late answer to an old question mixes in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from events.errors import EventDecodeError
from events.formats.vllm import Message, parse_answer, parse_message, replay_request
from events.subscribe.continuity import HELD_MAX
from events.subscribe.lines import Line, Readable

READ_AT_ONCE = 256 << 10
"""Bytes of messages between two reports, so that a flood cannot keep `work` from returning. What is decoded of so much
is still in the processor's cache when it is reported: four times as much at once takes half as long again."""
_MESSAGE_BYTES = 256
"""What a message counts besides its payload."""


def weight(frames: list[bytes]) -> int:
    """What a message counts towards `READ_AT_ONCE`."""
    return _MESSAGE_BYTES + len(frames[-1])


AnyReport = TypeVar("AnyReport")


class Order(Protocol[AnyReport]):
    """Puts messages in order, and makes reports of them, as `events.subscribe.continuity.Continuity` does."""

    @property
    def holding(self) -> int:
        """How many live messages wait for the end of a replay."""

    def take(self) -> list[AnyReport]:
        """What is to be reported since the last call."""

    def take_request(self) -> int | None:
        """The number from which to ask for a replay now, once."""

    def live(self, message: Message) -> None:
        """A message of the stream."""

    def answer(self, message: Message) -> None:
        """A message of the replay."""

    def end_of_replay(self, *, complete: bool = True) -> None:
        """The answer is complete, or the publisher does not answer any more."""

    def give_up(self, reason: str) -> None:
        """Nobody listens any more."""


class Follower(Generic[AnyReport]):
    """One publisher.

    `ask` opens a socket to its replay (None: it cannot be asked); `order` makes reports of its messages, which begin
    with `topic`; `replay_timeout` is that of `events.subscribe.subscriber.Subscriber`, in seconds of the clock.
    """

    def __init__(
        self,
        ask: Callable[[], Line] | None,
        order: Order[AnyReport],
        *,
        topic: bytes,
        replay_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = ask
        self._clock = clock
        self._topic = topic
        self._replay_timeout = replay_timeout
        self._continuity = order
        self._waiting_since: float | None = None
        self._asked_since: float | None = None
        self._question = 0
        self.asking: Line | None = None
        """The socket of the question that is open."""
        self.malformed = 0
        """Messages that were ignored since they do not even have a number."""
        self.heard_at = self._clock()
        """When its last message came."""
        self.refused = 0
        """Connections to the replay that came to nothing because of keys."""

    @property
    def unanswered_seconds(self) -> float:
        """For how long it has been asked without a word of answer; 0: it is not, or has answered."""
        return 0.0 if self._asked_since is None else self._clock() - self._asked_since

    @property
    def has_room(self) -> bool:
        """Whether more live messages can be held until the answer is there."""
        return self._continuity.holding < HELD_MAX

    def live(self, frames: list[bytes]) -> None:
        """Take in a message of the stream."""
        self.heard_at = self._clock()
        try:
            self._continuity.live(parse_message(frames))
        except EventDecodeError:
            self.malformed += 1

    def give_up(self, reason: str) -> list[AnyReport]:
        """What is to be reported where it is not followed any more."""
        self.close()
        self._continuity.give_up(reason)
        return self._continuity.take()

    def read_answers(self) -> None:
        """Take in what was answered."""
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
            # Live messages were filtered by their publisher; it is asked for numbers, not for topics.
            if not message.topic or message.topic.startswith(self._topic):
                self._continuity.answer(message)
        if self.patience() == 0:
            self._end_replay(complete=False)

    def ask(self) -> None:
        """Ask for a replay, if one is wanted."""
        start = self._continuity.take_request()
        if start is None:
            return
        self._stop_asking()
        self._question = start
        self._ask_at_new_socket()
        self._asked_since = self._clock()

    def take(self) -> list[AnyReport]:
        """What is to be reported since the last call."""
        return self._continuity.take()

    def patience(self) -> float | None:
        """Seconds until waiting for an answer is given up; None: nothing is waiting for it."""
        if self.asking is None or not self._continuity.holding:
            return None
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        return max(0.0, self._waiting_since + self._replay_timeout - now)

    def wait(self, poller: Readable) -> float | None:
        """Have an answer end a wait; returns after how many seconds it must end anyway (None: it need not)."""
        if self.asking is None:
            return None
        waits = (self.asking.wait(poller), self.patience())
        return min((wait for wait in waits if wait is not None), default=None)

    def close(self) -> None:
        """Ask no more."""
        self._stop_asking()

    def _look(self) -> None:
        """Hear of refusals. ZeroMQ calls again, but what was asked went with the connection."""
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
        self._stop_asking()
        self._continuity.end_of_replay(complete=complete)

    def _stop_asking(self) -> None:
        if self.asking is not None:
            self.asking.close()
        self.asking = self._waiting_since = self._asked_since = None
