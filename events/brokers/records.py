"""The records of a broker's stream: a feed's batches and, at intervals, its whole state in pieces.

Each record has a tag next to its payload. ``17`` is the batch of that number. ``17/2/0`` is the first piece of the
state as of batch 17, the third state sent in this life of the feed; ``17/2/5/last`` is its last one. Every payload is a
batch in a form that `events.formats.vllm.decode_batch` reads. A state's first piece begins with "cleared", and is in
the stream after the batches that the state includes, and before those that it does not.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from events.errors import EventDecodeError

_TAG = re.compile(r"(\d{1,19})(?:/(\d{1,9})/(\d{1,9})(/last)?)?")


class StreamRecord(NamedTuple):
    """A batch, or a piece of a state."""

    seq: int
    """The batch's number; for a piece, that of the last batch included in the state."""
    payload: bytes
    piece: int | None = None
    """Index of the piece in the state, from 0; None: it is a batch."""
    attempt: int = 0
    last: bool = False

    @property
    def tag(self) -> str:
        """The tag next to the payload; no other record of the same worker has the same."""
        if self.piece is None:
            return f"{self.seq}"
        return f"{self.seq}/{self.attempt}/{self.piece}{'/last' * self.last}"


class Reader(Protocol):
    """A reader of a stream's records, from the first one it holds."""

    def read(self, seconds: float) -> list[tuple[str, StreamRecord]]:
        """Return the next records, with the worker of each; empty after `seconds`. Connects, if needed.

        Raises BrokerUnavailable and StreamRewound, after which to call it again, and BrokerError.
        """

    def close(self) -> None:
        """Disconnect."""


class StreamRewound(Exception):
    """The broker has lost records that were read: the next one is the first that it holds.

    `workers`: those affected; None: all.
    """

    def __init__(self, workers: frozenset[str] | None) -> None:
        super().__init__()
        self.workers = workers


def parse_record(tag: str | bytes | None, payload: bytes) -> StreamRecord:
    """Parse a record from a tag and a payload; raises EventDecodeError."""
    text = tag.decode(errors="replace") if isinstance(tag, bytes) else tag or ""
    match = _TAG.fullmatch(text)
    if match is None:
        raise EventDecodeError("the stream contains records that were not written by this feed")
    if match[2] is None:
        return StreamRecord(int(match[1]), payload)
    return StreamRecord(int(match[1]), payload, int(match[3]), int(match[2]), match[4] is not None)


def records_of(worker: str, tag: str | bytes | None, payload: bytes) -> list[tuple[str, StreamRecord]]:
    """Return the record with its worker; none if the entry is not a feed's."""
    try:
        return [(worker, parse_record(tag, payload))]
    except EventDecodeError:
        return []
