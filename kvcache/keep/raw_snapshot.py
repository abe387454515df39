"""A snapshot once more, as docs/log.md describes it: see `kvcache.keep.raw`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from events.errors import LogDamaged, LogTooNew
from events.types import EventBatch
from kvcache.keep import raw

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Beside(msgspec.Struct, array_like=True, frozen=True):
    """What is known beside the state."""

    next_seq: _Count
    closed: bool
    first_ts: int
    latest_ts: int
    fingerprint: bytes


@dataclass(frozen=True)
class RawSnapshot:
    """A snapshot that is whole."""

    path: Path
    header: raw.Header
    beside: Beside
    batch: EventBatch

    @property
    def seq(self) -> int:
        """Of the last batch before it."""
        return self.header.first

    def continued_by(self, header: raw.Header) -> bool:
        """Whether this is the header of the segment behind it."""
        mine, closed = self.header, self.beside.closed
        return (
            (header.log_id, header.number, header.before) == (mine.log_id, mine.number, mine.before)
            and header.first >= self.beside.next_seq
            and (header.epoch > mine.epoch or (header.epoch == mine.epoch and not closed))
        )

    def is_in_use(self) -> bool:
        """Whether the segment behind it continues it, or the log ends with it. Raises LogError, OSError."""
        paths = raw.segments(self.path.parent)
        behind = [path for path in paths if int(path.stem) > self.seq]
        if not paths:
            return False
        with raw.File(behind[0] if behind else paths[-1]) as file:
            header = file.header(raw.SEGMENT_MAGIC)
        if header is None or int(file.path.stem) != header.first:
            return False
        if behind:
            return self.continued_by(header)
        mine = self.header
        return self.beside.closed and header[:3] == (mine.log_id, mine.epoch, mine.number - 1)


def read_snapshot(path: Path) -> RawSnapshot:
    """Read all of it. Raises LogDamaged, LogTooNew, OSError."""
    with raw.File(path) as file:
        header = file.header(raw.SNAPSHOT_MAGIC)
        if header is None or f"{header.first:020d}.kvsnap" != path.name:
            raise LogDamaged(path, 0, None, "its header is not whole, or not that of this file")
        offset, crc, payloads = raw.HEADER_BYTES, header.before, list[bytes]()
        for _ in range(2):
            frame = file.frame(offset, header.seed)
            payload = None if frame is None else file.payload(offset, frame)
            if frame is None or payload is None or (frame.before, frame.seq) != (crc, header.first):
                raise LogDamaged(
                    path, offset, header.first, "a frame is not whole, or not the one that belongs there"
                )
            payloads.append(payload)
            offset, crc = offset + raw.FRAME_HEADER_BYTES + frame.bytes, frame.crc
        if offset != file.size():
            raise LogDamaged(path, offset, header.first, "something follows the state")
    try:
        beside = msgspec.msgpack.decode(payloads[0], type=Beside)
        batch = msgspec.msgpack.decode(payloads[1], type=EventBatch)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise LogDamaged(path, raw.HEADER_BYTES, header.first, "it holds no state") from None
    if batch.seq != header.first:
        raise LogDamaged(path, raw.HEADER_BYTES, header.first, "header and payload disagree")
    return RawSnapshot(path, header, beside, batch)


def usable_snapshots(directory: Path) -> Iterator[RawSnapshot]:
    """Those with which reading can begin, oldest first. All others are passed over."""
    for path in raw.snapshots(directory):
        with suppress(LogDamaged, LogTooNew, OSError):
            snapshot = read_snapshot(path)
            if snapshot.is_in_use():
                yield snapshot
