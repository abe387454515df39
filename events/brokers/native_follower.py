"""Makes of one worker's records in the native format what a reader is to know, in order.

A record may be a piece of a batch: of one that tells the state, again and again (`events.brokers.records`), or of one
that was too large for the broker. Put together they are a message as any other. While those of a state come in, batches
come in between; who waits for that state keeps them, since they follow it.
"""

from __future__ import annotations

from events.brokers.records import Record
from events.formats.vllm import Message
from events.subscribe.continuity import HELD_MAX
from events.subscribe.native_continuity import NativeContinuity, NativeReport


class NativeRecordFollower:
    """Follows one worker."""

    malformed = 0
    """What cannot be read is reported as missed."""

    def __init__(self, worker: str) -> None:
        self._topic = worker.encode()
        self._continuity = NativeContinuity()
        self._pieces: list[bytes] = []
        self._of: tuple[int, int] | None = None
        """The batch of which there are pieces: its number and telling."""
        self._held: list[Message] = []
        """Batches since its first piece."""

    @property
    def waiting(self) -> bool:
        """Whether it has no state yet, or none that what it hears fits to."""
        return self._continuity.waiting

    def take(self, record: Record) -> list[NativeReport]:
        """What is to be reported once this record is known."""
        if record.piece is None:
            message = Message(self._topic, record.seq, record.payload)
            if self._of is not None:
                self._held.append(message)
                if len(self._held) > HELD_MAX:
                    self._forget_pieces()  # nobody goes on with that state
            self._continuity.live(message)
        elif self._wants(record) and self._is_whole(record):
            payload, held = b"".join(self._pieces), self._held
            self._forget_pieces()
            self._continuity.live(Message(self._topic, record.seq, payload))
            for message in held:
                self._continuity.live(message)
        return self._continuity.take()

    def _wants(self, record: Record) -> bool:
        """Whether the piece is not of a state that is known already: that of the last batch."""
        return self.waiting or self._of is not None or record.seq + 1 != self._continuity.next

    def _is_whole(self, record: Record) -> bool:
        """Take a piece; whether it was the last one, and all are there."""
        of = record.seq, record.telling
        if record.piece == 0:
            self._forget_pieces()
            self._of = of
        if self._of != of or record.piece != len(self._pieces):
            self._forget_pieces()  # one that was not told to its end
            return False
        self._pieces.append(record.payload)
        return record.last

    def _forget_pieces(self) -> None:
        self._pieces, self._of, self._held = [], None, []
