"""What stands in a broker's stream: a feed's batches and, from time to time, its whole state in pieces.

Each record has a tag beside its payload. ``17`` is the batch of that number. ``17/2/0`` is the first piece of the
state as of batch 17, the third time in this life of the feed that it was told; ``17/2/5/last`` is its last one.
Every payload is a batch in a form that `events.formats.vllm.decode_batch` reads. A state's first piece begins with
"cleared", and stands in the stream behind the batches that the state includes, and before those that it does not.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from events.errors import EventDecodeError

_TAG = re.compile(r"(\d{1,19})(?:/(\d{1,9})/(\d{1,9})(/last)?)?")


class StreamRecord(NamedTuple):
    """A batch, or a piece of a state."""

    seq: int
    """The batch's number; of a piece that of the last batch that the state includes."""
    payload: bytes
    piece: int | None = None
    """Which piece of the state, from 0; None: it is a batch."""
    telling: int = 0
    last: bool = False

    @property
    def tag(self) -> str:
        """What it is, as it stands beside the payload; no other record of the same worker has the same."""
        if self.piece is None:
            return f"{self.seq}"
        return f"{self.seq}/{self.telling}/{self.piece}{'/last' * self.last}"


class Reader(Protocol):
    """Reads a stream's records, from the first one that it holds."""

    def read(self, seconds: float) -> list[tuple[str, StreamRecord]]:
        """The next ones, with the worker of each; empty after so many seconds. Connects, where that is needed.

        Raises BrokerUnavailable, after which it is to be called again, StreamRewound likewise, and BrokerError.
        """

    def close(self) -> None:
        """Disconnect."""


class StreamRewound(Exception):
    """The broker has lost records that were read: what follows begins with the first one that it holds.

    `workers` are those of whom that is so; None: all.
    """

    def __init__(self, workers: frozenset[str] | None) -> None:
        super().__init__()
        self.workers = workers


def parse_record(tag: str | bytes | None, payload: bytes) -> StreamRecord:
    """The record of a tag and a payload; raises EventDecodeError."""
    text = tag.decode(errors="replace") if isinstance(tag, bytes) else tag or ""
    match = _TAG.fullmatch(text)
    if match is None:
        raise EventDecodeError("what stands in the stream was not written by this feed")
    if match[2] is None:
        return StreamRecord(int(match[1]), payload)
    return StreamRecord(int(match[1]), payload, int(match[3]), int(match[2]), match[4] is not None)


def records_of(worker: str, tag: str | bytes | None, payload: bytes) -> list[tuple[str, StreamRecord]]:
    """The record with its worker; none where something stands there that is not a feed's."""
    try:
        return [(worker, parse_record(tag, payload))]
    except EventDecodeError:
        return []
