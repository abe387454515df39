r"""Snapshots: the whole state after the last batch of a segment, in a file beside the segments, to begin a fold with.

A snapshot is one batch of the kind that an epoch begins with: `EpochStarted`, what the cache or feed is, and its whole
state. So whoever can begin with an epoch can begin with a snapshot. Its number is that of the last batch before it, and
the file is named by that: `<seq>.kvsnap`.

A snapshot file is a header of 64 bytes, as that of the segment which follows it but for the magic, and two frames, both
with the snapshot's number: `About`, and the batch. Equal logs give equal files.

A snapshot belongs to its log if the segment behind it continues it: same log, its number, its checksum of the frame
before. One that is not whole, or belongs to another log, is passed over: what it saves is time, and, where the segments
before it are gone, there may be another one behind it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self
from zlib import crc32

import msgspec

from events.codec import decode_batch, encode_batch
from events.errors import EventDecodeError, LogDamaged, LogTooNew
from events.log import frames
from events.log.durable import replace_file
from events.log.frames import FRAME_HEADER_BYTES, SEGMENT_HEADER_BYTES, Chain, FrameHeader, SegmentHeader
from events.log.segments import SNAPSHOT_SUFFIX, Segment, first_seq, open_file, segment_paths
from events.types import FIRST_FORMAT, FORMAT_VERSION, EventBatch, Gap

MAGIC = b"KVEVSNP\0"
UNFINISHED_SUFFIX = ".new"
"""As `replace_file` calls what is not whole yet."""
_NAME = re.compile(rf"[0-9]{{20}}\{SNAPSHOT_SUFFIX}")
_Count = Annotated[int, msgspec.Meta(ge=0)]


class About(msgspec.Struct, array_like=True, frozen=True):
    """What is known of a log up to a snapshot, beside the state."""

    next_seq: _Count
    """Of the next frame; greater than the snapshot's number + 1 if batches were lost before it."""
    closed: bool
    """Whether the segment before it ends with the mark of an orderly end."""
    first_ts: int
    """When the log's first batch was made, nanoseconds since 1970."""
    latest_ts: int
    """The latest time of any batch up to here: clocks may be set back."""
    fingerprint: bytes
    """Of the state; empty where there is none."""


_decode_about = msgspec.msgpack.Decoder(About).decode


@dataclass(frozen=True)
class Snapshot:
    """A snapshot file whose beginning is whole."""

    path: Path
    header: SegmentHeader
    about: About
    size: int
    """Bytes of the file."""

    @property
    def seq(self) -> int:
        """Of the last batch before it."""
        return self.header.base_seq

    def chain(self) -> Chain:
        """What the segment behind it must continue."""
        header, about = self.header, self.about
        return Chain(
            header.log_id, header.epoch, header.number, about.next_seq, header.previous_crc, about.closed
        )

    def fits(self) -> bool:
        """Whether the log goes on behind it, or ends there. Raises OSError."""
        paths = segment_paths(self.path.parent)
        behind = [path for path in paths if first_seq(path) > self.seq]
        header = _header_of(behind[0] if behind else paths[-1]) if paths else None
        if header is None:
            return False
        if behind:
            return self.chain().refuses_segment(header) is None
        return self.about.closed and (header.log_id, header.epoch, header.number + 1) == (
            self.header.log_id,
            self.header.epoch,
            self.header.number,
        )

    def batch(self) -> EventBatch:
        """The state. Raises LogDamaged, OSError."""
        with _File(self.path) as file:
            _, payload = file.frames(self.header, self.size)
            try:
                batch = decode_batch(payload)
            except EventDecodeError as error:
                raise LogDamaged(self.path, SEGMENT_HEADER_BYTES, self.seq, error.reason) from None
        if batch.seq != self.seq:
            raise LogDamaged(self.path, SEGMENT_HEADER_BYTES, self.seq, "header and payload disagree")
        return batch

    def behind_gap(self, first: int, batch: EventBatch) -> EventBatch:
        """The state for a reader that lacks what came before it, from batch `first` on."""
        gap = Gap(first_seq=first, last_seq=self.seq, reason="removed from the log by its retention")
        return msgspec.structs.replace(batch, events=(batch.events[0], gap, *batch.events[1:]))


def snapshot_name(seq: int) -> str:
    """File name of the snapshot of the state after batch `seq`."""
    return f"{seq:020d}{SNAPSHOT_SUFFIX}"


def snapshot_paths(directory: Path) -> list[Path]:
    """The snapshots of a log, oldest first."""
    return [directory / name for name in sorted(os.listdir(directory)) if _NAME.fullmatch(name)]


def snapshots(
    directory: Path, *, at_most: int | None = None, newest_first: bool = False
) -> Iterator[Snapshot]:
    """Those which belong to the log, with which reading can begin: all, or up to that of batch `at_most`.

    Their states are not looked at yet.
    """
    paths = [path for path in snapshot_paths(directory) if at_most is None or first_seq(path) <= at_most]
    for path in reversed(paths) if newest_first else paths:
        # One that is damaged or gone is as good as none.
        with suppress(LogDamaged, LogTooNew, OSError):
            found = open_snapshot(path)
            if found.fits():
                yield found


def readable(found: Iterator[Snapshot]) -> Iterator[tuple[Snapshot, EventBatch]]:
    """Those of them whose state is whole, with it."""
    for snapshot in found:
        with suppress(LogDamaged, OSError):
            yield snapshot, snapshot.batch()


def open_snapshot(path: Path) -> Snapshot:
    """Read what a snapshot says of itself. Raises LogDamaged, LogTooNew, OSError."""
    with _File(path) as file:
        return file.opened()


def write_snapshot(directory: Path, chain: Chain, about: About, batch: EventBatch) -> Snapshot:
    """Write the state after the batch before `chain.number`, the next segment; durable afterwards.

    Raises OSError, and OverflowError where the state is larger than a frame.
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
    path = directory / snapshot_name(batch.seq)
    content = b"".join(parts)
    replace_file(path, content)
    return Snapshot(path, header, about, len(content))


def _header_of(path: Path) -> SegmentHeader | None:
    with Segment(path) as segment:
        return segment.header()


class _File:
    """A snapshot file, open for reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_file(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def opened(self) -> Snapshot:
        """What the file says of itself."""
        size = os.fstat(self._descriptor).st_size
        data = os.pread(self._descriptor, SEGMENT_HEADER_BYTES, 0)
        whole = len(data) == SEGMENT_HEADER_BYTES
        header = frames.parse_segment_header(data, MAGIC) if whole else None
        if header is None:
            raise self._damaged("the header is not intact")
        if max(header.version - frames.VERSION, header.event_format - FORMAT_VERSION) > 0:
            raise LogTooNew(self._path, max(header.version, header.event_format))
        if self._path.name != snapshot_name(header.base_seq):
            raise self._damaged("the file name is not that of this snapshot")
        _, payload = self._frame(header, SEGMENT_HEADER_BYTES, header.previous_crc, size)
        try:
            about = _decode_about(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._damaged("it does not say what it is about") from None
        return Snapshot(self._path, header, about, size)

    def frames(self, header: SegmentHeader, size: int) -> tuple[bytes, bytes]:
        """The payloads of both frames."""
        about, first = self._frame(header, SEGMENT_HEADER_BYTES, header.previous_crc, size)
        begin = SEGMENT_HEADER_BYTES + FRAME_HEADER_BYTES + about.payload_bytes
        state, second = self._frame(header, begin, about.payload_crc, size)
        if begin + FRAME_HEADER_BYTES + state.payload_bytes != size:
            raise self._damaged("something follows the state")
        return first, second

    def _frame(self, of: SegmentHeader, offset: int, crc: int, size: int) -> tuple[FrameHeader, bytes]:
        data = os.pread(self._descriptor, FRAME_HEADER_BYTES, offset)
        whole = len(data) == FRAME_HEADER_BYTES
        header = frames.parse_frame_header(data, frames.seed_of(of.log_id, of.epoch)) if whole else None
        if header is None or (header.previous_crc, header.seq) != (crc, of.base_seq):
            raise self._damaged("a frame header is not intact")
        begin = offset + FRAME_HEADER_BYTES
        if header.payload_bytes > min(frames.MAX_PAYLOAD, size - begin):
            raise self._damaged("a frame's payload is cut short")
        payload = os.pread(self._descriptor, header.payload_bytes, begin)
        if len(payload) != header.payload_bytes or crc32(payload) != header.payload_crc:
            raise self._damaged("a frame's payload is not intact")
        return header, payload

    def _damaged(self, reason: str) -> LogDamaged:
        return LogDamaged(self._path, 0, None, reason)
