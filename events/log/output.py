"""Batches become frames in segment files. The writer thread's half of the log: it alone calls this.

A segment is created with its first frame, so that every segment has one, and gets its name when its header
is on disk, so that every name has a whole header. Segments end by size only: equal batches give equal files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from events.codec import batch_without_tokens, encode_batch
from events.durable import sync_directory, sync_file
from events.log.frames import (
    AFTER_LOSS,
    CLOSED,
    FRAME_HEADER_BYTES,
    MAX_PAYLOAD,
    SEGMENT_HEADER_BYTES,
    VERSION,
    Chain,
    FrameHeader,
    SegmentHeader,
    pack_frame_header,
    seed_of,
)
from events.log.segments import UNFINISHED_SUFFIX, segment_name
from events.types import FORMAT_VERSION, EventBatch

_PARTS_MAX = 1000
"""Systems take 1024 buffers in one write."""


class LogOutput:
    """Writes one epoch of a log, from `chain` on."""

    def __init__(
        self, directory: Path, chain: Chain, *, record_tokens: bool, segment_bytes: int, sync: bool
    ) -> None:
        assert chain.log_id is not None
        self._directory = directory
        self._chain = chain
        self.set_epoch(chain.epoch)
        self._record_tokens = record_tokens
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._descriptor: int | None = None
        self._offset = 0
        """End of the last frame that was written as a whole."""
        self._ahead = 0
        """End of the last frame of `_parts`."""
        self._parts: list[bytes] = []
        self.bytes_written = 0
        self.batches_written = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch to write, before anything is written."""
        assert self._chain.log_id is not None
        self._chain.epoch = epoch
        self._seed = seed_of(self._chain.log_id, epoch)

    def write(self, batches: Sequence[EventBatch]) -> None:
        """Write the batches; with `sync`, they are durable afterwards. OSError if the system refuses."""
        for batch in batches:
            recorded = batch if self._record_tokens else batch_without_tokens(batch)
            self._add(encode_batch(recorded), batch.seq, len(batch.events), 0)
        self._flush()
        if self._sync and self._descriptor is not None:
            sync_file(self._descriptor)

    def close(self, next_seq: int) -> None:
        """Write the mark of an orderly end, if anything was written before it."""
        if self._descriptor is None:
            return
        self._add(b"", next_seq, 0, CLOSED)
        self._finish_segment()

    def abandon(self) -> None:
        """Stop after a failure: keep the whole frames that reached the file, take back one that was begun."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            self._count_frames(os.fstat(descriptor).st_size)
            os.ftruncate(descriptor, self._offset)
        except OSError:
            pass  # Then it is a torn tail, which readers and recovery understand.
        finally:
            os.close(descriptor)

    def disown(self) -> None:
        """Let go of the file without touching it: it belongs to the process we were forked from."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _add(self, payload: bytes, seq: int, events: int, flags: int) -> None:
        """Put a frame behind those waiting; begin a segment where it does not fit any more."""
        if len(payload) > MAX_PAYLOAD:
            raise OverflowError(f"batch {seq} has {len(payload)} bytes, a frame holds {MAX_PAYLOAD}")
        chain = self._chain
        size = FRAME_HEADER_BYTES + len(payload)
        if self._descriptor is None or (self._ahead + size > self._segment_bytes and not flags & CLOSED):
            self._finish_segment()
            self._begin_segment(seq)
        if seq != chain.seq:
            flags |= AFTER_LOSS
        header = FrameHeader(len(payload), seq, events, flags, chain.crc, crc32(payload))
        chain.follow(header)
        self._parts.append(pack_frame_header(header, self._seed))
        self._parts.append(payload)
        self._ahead += size
        if len(self._parts) >= _PARTS_MAX:
            self._flush()

    def _flush(self) -> None:
        """Write the frames that wait."""
        if self._descriptor is None or not self._parts:
            return
        _write_all(self._descriptor, self._parts, self._ahead - self._offset)
        self._count_frames(self._ahead)
        self._parts.clear()

    def _count_frames(self, reached: int) -> None:
        """Count the waiting frames that end at or before this offset as written."""
        for header, payload in zip(self._parts[::2], self._parts[1::2], strict=True):
            size = len(header) + len(payload)
            if self._offset + size > reached:
                return
            self._offset += size
            self.bytes_written += size
            self.batches_written += bool(payload)  # Only the closing mark has none.

    def _finish_segment(self) -> None:
        self._flush()
        if self._descriptor is None:
            return
        if self._sync:
            sync_file(self._descriptor)
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)

    def _begin_segment(self, base_seq: int) -> None:
        chain = self._chain
        assert chain.log_id is not None
        header = SegmentHeader(
            VERSION, FORMAT_VERSION, chain.log_id, chain.epoch, chain.number, base_seq, chain.crc
        )
        path = self._directory / segment_name(base_seq)
        unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        self._offset = self._ahead = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(unfinished, flags, 0o600)
        _write_all(self._descriptor, [header.pack()], SEGMENT_HEADER_BYTES)
        # Whatever `sync` says: once per segment costs nothing, and a header cut short looks like damage.
        sync_file(self._descriptor)
        unfinished.rename(path)
        sync_directory(self._directory)
        chain.enter(header)
        self._offset = self._ahead = SEGMENT_HEADER_BYTES
        self.bytes_written += SEGMENT_HEADER_BYTES


def _write_all(descriptor: int, parts: list[bytes], size: int) -> None:
    """Write all parts, however little the system takes at a time."""
    written = os.writev(descriptor, parts)
    if written == size:
        return
    rest = memoryview(b"".join(parts))[written:]
    while rest:
        rest = rest[os.write(descriptor, rest) :]
