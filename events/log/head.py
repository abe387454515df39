"""How far a log has got, without decoding what is in it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from events.log.frames import CLOSED, Chain
from events.log.segments import Frame, Segment, is_log, segment_paths


class Stamp(msgspec.Struct, array_like=True, frozen=True):
    """How a batch begins."""

    seq: int
    ts: int


stamp_of = msgspec.msgpack.Decoder(Stamp).decode


@dataclass(frozen=True)
class Head:
    """The end of a log at one moment."""

    log_id: bytes
    epoch: int
    seq: int
    """Of the last batch; one less than the first one of a segment that holds none yet."""
    ts: int | None
    """When that batch was made, nanoseconds since 1970; None: it was not looked at."""
    closed: bool
    """Whether the writer has ended in order."""


class LogHead:
    """Looks at the end of a log again and again; reads what came since, and at first the last segment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segment: Segment | None = None
        self._chain = Chain()
        self._seq = -1
        self._ts: int | None = None

    def look(self) -> Head | None:
        """The end now; None if there is no segment. What is broken ends it. Raises LogDamaged, LogTooNew, OSError."""
        if not is_log(self._directory) or not (paths := segment_paths(self._directory)):
            return None
        segment = self._segment
        if segment is None or segment.path != paths[-1] or (not segment.renewed() and segment.replaced()):
            with suppress(FileNotFoundError):
                self._enter(paths[-1])
        if self._segment is None or self._chain.log_id is None:
            return None
        last = None
        while isinstance(found := self._segment.read(self._chain), Frame):
            last = last if found.header.flags & CLOSED else found
        if last is not None:
            stamp = stamp_of(last.payload)
            self._seq, self._ts = stamp.seq, stamp.ts
        chain = self._chain
        assert chain.log_id is not None
        return Head(chain.log_id, chain.epoch, self._seq, self._ts, chain.closed)

    def close(self) -> None:
        """Close the file."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.__exit__()

    def _enter(self, path: Path) -> None:
        segment = Segment(path)
        header = segment.header()
        if header is None:
            segment.__exit__()
            return
        self.close()
        if header.log_id != self._chain.log_id or self._seq != header.base_seq - 1:
            self._seq, self._ts = header.base_seq - 1, None
        self._segment = segment
        self._chain = header.chain()
        self._chain.enter(header)
