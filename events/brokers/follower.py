"""Makes of one worker's records in a broker's stream what a reader is to know, in order.

Whoever begins to read somewhere, or has missed something (old records are trimmed), needs a whole state. The stream
itself has it: the feed tells it again and again (`events.brokers.records`), and begins with it after every failure.
So a follower without one lets batches go by until a state begins. From its first piece on it holds the batches,
since the state may not have them; with the last piece the state is told at once, and the batches behind it. Where it
began, or what was trimmed, can therefore never make it wrong, only late.
"""

from __future__ import annotations

import struct

from events.brokers.records import Record
from events.errors import EventDecodeError
from events.formats.vllm import Message, decode_batch, join_batches
from events.subscribe.continuity import HELD_MAX, Continuity, Report, Restarted, begins_anew


class RecordFollower:
    """Follows one worker."""

    def __init__(self, worker: str) -> None:
        self._topic = worker.encode()
        self.malformed = 0
        """States that could not be read; the next one is waited for."""
        self._begin()

    @property
    def waiting(self) -> bool:
        """Whether it has no state yet, or none that what it hears fits to."""
        return self._asked is not None

    def take(self, record: Record) -> list[Report]:
        """What is to be reported once this record is known."""
        reports: list[Report] = []
        if record.piece is not None:
            if self._asked is not None:
                self._take_piece(record)
        elif self._asked is None:
            self._continuity.live(self._message(record.seq, record.payload))
        else:
            reports = self._take_unfitting(self._message(record.seq, record.payload))
        self._look_for_request()
        return reports + self._continuity.take()

    def _begin(self) -> None:
        self._continuity = Continuity(0, can_ask=True)
        self._asked: int | None = None
        """The first batch that is wanted, while a state is waited for."""
        self._look_for_request()

    def _look_for_request(self) -> None:
        start = self._continuity.take_request()
        if start is not None:
            self._asked = start
            self._forget_pieces()

    def _forget_pieces(self) -> None:
        self._pieces: list[bytes] = []
        self._of: tuple[int, int] | None = None
        """The state of which there are pieces: its number and telling."""
        self._held: list[Message] = []
        """Batches since its first piece."""

    def _message(self, seq: int, payload: bytes) -> Message:
        return Message(self._topic, seq, payload)

    def _take_unfitting(self, message: Message) -> list[Report]:
        assert self._asked is not None
        if begins_anew(message):
            # It is a whole state itself, or the start of one that goes on in the batches behind it.
            reports: list[Report] = []
            if message.seq < self._asked:
                reports = [Restarted(self._asked - 1, message.seq)]
                self._begin()
            self._answer([message])
            return reports
        if self._of is not None:
            self._held.append(message)
            if len(self._held) > HELD_MAX:
                self._forget_pieces()  # nobody goes on with that state
        return []

    def _take_piece(self, record: Record) -> None:
        state = (record.seq, record.telling)
        if record.piece == 0:
            self._forget_pieces()
            self._of = state
        if self._of != state or record.piece != len(self._pieces):
            self._forget_pieces()  # one that was not told to its end
            return
        self._pieces.append(record.payload)
        if record.last:
            self._answer(self._numbered(record.seq))

    def _numbered(self, seq: int) -> list[Message]:
        """The pieces under the numbers up to the state's, none of them below the one that is wanted."""
        assert self._asked is not None
        room = seq + 1 - self._asked
        if room <= 0:
            return []  # a state from before what was heard
        each = -(-len(self._pieces) // room)
        try:
            payloads = [
                self._joined(self._pieces[at : at + each]) for at in range(0, len(self._pieces), each)
            ]
        except (EventDecodeError, IndexError, struct.error):
            # Not what a feed writes: whole batches of this very form. The next state is waited for.
            self.malformed += 1
            return []
        return [self._message(seq + 1 - len(payloads) + at, payload) for at, payload in enumerate(payloads)]

    def _joined(self, pieces: list[bytes]) -> bytes:
        joined = pieces[0] if len(pieces) == 1 else join_batches(pieces, decode_batch(pieces[0]).rank or 0)
        decode_batch(joined)
        return joined

    def _answer(self, messages: list[Message]) -> None:
        if not messages:
            self._forget_pieces()
            return
        held = self._held
        self._asked = None
        self._forget_pieces()
        for message in messages:
            self._continuity.answer(message)
        self._continuity.end_of_replay()
        for message in held:
            self._continuity.live(message)
