r"""Snapshots: the whole state after the last batch of a segment, in a file next to the segments, to begin a fold with.

A snapshot is one batch of the kind that an epoch begins with: `EpochStarted`, the description of the cache or feed, and
its whole state. So any reader that can begin with an epoch can begin with a snapshot. Its number is that of the last
batch before it, and the file is named by that: `<seq>.kvsnap`.

A snapshot file is a header of 64 bytes, as that of the segment which follows it but for the magic, and two frames, both
with the snapshot's number: `About`, and the batch. Equal logs give equal files.

A snapshot belongs to its log if the segment after it continues it: same log, its number, its checksum of the frame
before. One that is not whole, or belongs to another log, is skipped: it only saves time, and, if the segments before it
are gone, there may be another one after it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from zlib import crc32

import msgspec

from events.codec import decode_batch, encode_batch
from events.errors import EventDecodeError, LogDamaged, LogTooNew
from events.log import frames
from events.log.durable import replace_file
from events.log.frames import SEGMENT_HEADER_BYTES, Chain, FrameHeader, SegmentHeader
from events.log.segments import (
    SHORT_HEADER,
    SNAPSHOT_SUFFIX,
    Broken,
    Frame,
    Segment,
    first_seq,
    segment_paths,
)
from events.types import FIRST_FORMAT, EventBatch, Gap

MAGIC = b"KVEVSNP\0"
UNFINISHED_SUFFIX = ".new"
"""Suffix of unfinished files, by `replace_file`."""
_FRAMES = 2
_NAME = re.compile(rf"[0-9]{{20}}\{SNAPSHOT_SUFFIX}")
_Count = Annotated[int, msgspec.Meta(ge=0)]


class About(msgspec.Struct, array_like=True, frozen=True):
    """Facts about a log up to a snapshot, in addition to the state."""

    next_seq: _Count
    """Number of the next frame; greater than the snapshot's number + 1 if batches were lost before it."""
    closed: bool
    """True if the segment before it ends with the mark of an orderly end."""
    first_ts: int
    """Time of the log's first batch, nanoseconds since 1970."""
    latest_ts: int
    """The latest time of any batch up to here: clocks may be set back."""
    fingerprint: bytes
    """Fingerprint of the state; empty if there is none."""


_decode_about = msgspec.msgpack.Decoder(About).decode


@dataclass(frozen=True)
class Snapshot:
    """A snapshot file with an intact beginning."""

    path: Path
    header: SegmentHeader
    about: About
    size: int
    """Bytes of the file."""

    @property
    def seq(self) -> int:
        """The last batch before it."""
        return self.header.base_seq

    def chain(self) -> Chain:
        """Return the chain that the segment after it must continue."""
        header, about = self.header, self.about
        return Chain(
            header.log_id, header.epoch, header.number, about.next_seq, header.previous_crc, about.closed
        )

    def fits(self) -> bool:
        """Return True if the log continues after it, or ends there. Raises OSError."""
        paths = segment_paths(self.path.parent)
        later = [path for path in paths if first_seq(path) > self.seq]
        if not paths:
            return False
        with Segment(later[0] if later else paths[-1]) as segment:
            header = segment.header()
        if header is None:
            return False
        if later:
            return self.chain().refuses_segment(header) is None
        own, following = self.header, (header.log_id, header.epoch, header.number + 1)
        return self.about.closed and following == (own.log_id, own.epoch, own.number)

    def batch(self) -> EventBatch:
        """Return the state. Raises LogDamaged, OSError."""
        _, (_, payload), _ = _read(self.path, _FRAMES)
        try:
            batch = decode_batch(payload)
        except EventDecodeError as error:
            raise LogDamaged(self.path, SEGMENT_HEADER_BYTES, self.seq, error.reason) from None
        if batch.seq != self.seq:
            raise LogDamaged(self.path, SEGMENT_HEADER_BYTES, self.seq, "header and payload disagree")
        return batch

    def after_gap(self, first: int, batch: EventBatch) -> EventBatch:
        """Return the state for a reader that lacks the batches before it, from `first` on."""
        gap = Gap(first_seq=first, last_seq=self.seq, reason="removed from the log by its retention")
        return msgspec.structs.replace(batch, events=(batch.events[0], gap, *batch.events[1:]))


def snapshot_paths(directory: Path) -> list[Path]:
    """The snapshots of a log, oldest first."""
    return [directory / name for name in sorted(os.listdir(directory)) if _NAME.fullmatch(name)]


def snapshots(
    directory: Path, *, at_most: int | None = None, newest_first: bool = False
) -> Iterator[Snapshot]:
    """Yield those which belong to the log, with which reading can begin: all, or up to that of batch `at_most`.

    Their states are not read yet.
    """
    paths = [path for path in snapshot_paths(directory) if at_most is None or first_seq(path) <= at_most]
    for path in reversed(paths) if newest_first else paths:
        # A damaged or missing one is as good as none.
        with suppress(LogDamaged, LogTooNew, OSError):
            found = open_snapshot(path)
            if found.fits():
                yield found


def readable(found: Iterator[Snapshot]) -> Iterator[tuple[Snapshot, EventBatch]]:
    """Yield those with an intact state, with it."""
    for snapshot in found:
        with suppress(LogDamaged, OSError):
            yield snapshot, snapshot.batch()


def open_snapshot(path: Path) -> Snapshot:
    """Read a snapshot's description. Raises LogDamaged, LogTooNew, OSError."""
    header, (payload,), size = _read(path, 1)
    try:
        about = _decode_about(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise LogDamaged(path, SEGMENT_HEADER_BYTES, None, "its description cannot be decoded") from None
    return Snapshot(path, header, about, size)


def write_snapshot(directory: Path, chain: Chain, about: About, batch: EventBatch) -> Snapshot:
    """Write the state after the batch before `chain.number`, the next segment; durable afterwards.

    Raises OSError, and OverflowError if the state is larger than a frame.
    """
    assert chain.log_id is not None
    payloads = [msgspec.msgpack.encode(about), encode_batch(batch)]
    if len(payloads[1]) > frames.MAX_PAYLOAD:
        raise OverflowError(f"the state has {len(payloads[1])} bytes, a snapshot holds {frames.MAX_PAYLOAD}")
    seed, crc = frames.seed_of(chain.log_id, chain.epoch), chain.crc
    header = SegmentHeader(
        frames.VERSION, FIRST_FORMAT, 0, chain.log_id, chain.epoch, chain.number, batch.seq, crc
    )
    parts = [header.pack(MAGIC)]
    for payload, events in zip(payloads, (0, len(batch.events)), strict=True):
        frame = FrameHeader(len(payload), batch.seq, events, 0, crc, crc32(payload))
        parts += [frames.pack_frame_header(frame, seed), payload]
        crc = frame.payload_crc
    path = directory / f"{batch.seq:020d}{SNAPSHOT_SUFFIX}"
    content = b"".join(parts)
    replace_file(path, content)
    return Snapshot(path, header, about, len(content))


def _read(path: Path, count: int) -> tuple[SegmentHeader, list[memoryview], int]:
    """Return the header, the payloads of the first `count` frames, and the size of the file.

    Raises as `open_snapshot`.
    """
    with Segment(path, MAGIC) as file:
        header, payloads = file.header(), list[memoryview]()
        if header is None:
            raise LogDamaged(path, 0, None, SHORT_HEADER)
        chain = header.chain()
        for _ in range(count):
            chain.seq = header.base_seq
            frame = file.read(chain)
            if not isinstance(frame, Frame) or (frame.header.seq, frame.header.flags) != (header.base_seq, 0):
                reason = frame.reason if isinstance(frame, Broken) else "a frame is out of place"
                raise LogDamaged(path, file.offset, header.base_seq, reason)
            payloads.append(frame.payload)
        if count == _FRAMES and file.offset != file.size():
            raise LogDamaged(path, file.offset, header.base_seq, "data follows the state")
        return header, payloads, file.size()
