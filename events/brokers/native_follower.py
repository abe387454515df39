"""Makes of one worker's records in the native format what a reader is to know, in order.

A record may be a piece of a batch: of one that tells the state, again and again (`events.brokers.records`), or of one
that was too large for the broker. Put together they are a message as any other. While those of a state come in, batches
come in between, some of them in pieces, too; who waits for that state keeps them, since they follow it.
"""

from __future__ import annotations

from events.brokers.records import Record
from events.formats.vllm import Message
from events.subscribe.continuity import HELD_MAX
from events.subscribe.native_continuity import NativeContinuity, NativeReport

_AT_ONCE = 2
"""Batches whose pieces come between each other: a state, and one that follows it. Others were not told to the end."""


class NativeRecordFollower:
    """Follows one worker."""

    malformed = 0
    """What cannot be read is reported as missed."""

    def __init__(self, worker: str) -> None:
        self._topic = worker.encode()
        self._continuity = NativeContinuity()
        self._pieces: dict[tuple[int, int], list[bytes]] = {}
        """Of batches, by number and telling, those that came, oldest batch first."""
        self._held: list[Message] = []
        """Batches since the first of these pieces."""

    @property
    def waiting(self) -> bool:
        """Whether it has no state yet, or none that what it hears fits to."""
        return self._continuity.waiting

    def take(self, record: Record) -> list[NativeReport]:
        """What is to be reported once this record is known."""
        payload = record.payload if record.piece is None else self._put_together(record)
        if payload is not None:
            message = Message(self._topic, record.seq, payload)
            self._continuity.live(message)
            if record.piece is not None and not self.waiting:
                # Those that are known already are passed over.
                for each in self._held:
                    self._continuity.live(each)
            self._hold(message)
        return self._continuity.take()

    def _put_together(self, record: Record) -> bytes | None:
        """The payload whose last piece this is; None: it is none, or others are missing."""
        of = record.seq, record.telling
        if record.piece == 0 and self._wants(record):
            self._pieces[of] = []
            if len(self._pieces) > _AT_ONCE:
                del self._pieces[next(iter(self._pieces))]
        pieces = self._pieces.get(of)
        if pieces is None or record.piece != len(pieces):
            self._pieces.pop(of, None)
            return None
        pieces.append(record.payload)
        return b"".join(self._pieces.pop(of)) if record.last else None

    def _wants(self, record: Record) -> bool:
        """Whether the piece is not of a state that is known already: that of the last batch."""
        return self.waiting or record.seq + 1 != self._continuity.next

    def _hold(self, message: Message) -> None:
        if not self._pieces:
            self._held.clear()
            return
        self._held.append(message)
        if len(self._held) > HELD_MAX:
            # Nobody goes on with a state that was begun so long ago.
            self._pieces.clear()
            self._held.clear()
