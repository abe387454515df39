"""Batches become frames in segment files. The log's thread alone calls this.

A segment is created with its first frame, so that every segment has one, and named when its header is on disk, so that
every name has a whole header. Segments end by size and by the times of their batches only: equal batches give equal
files, except for the flag for frames on disk.

Frames count once they are durable. After a failure, `roll_back` goes back to the last durable frame, and the next write
begins there. Before a segment ends, all of it is durable, so going back never leaves a segment. After a failed write,
as on a full disk, the file is reopened and cut off at that place.

After a failed sync, the file is abandoned: the system may take unwritten pages for written, so a second sync could
succeed without a byte, and it is unknown what is still there. The durable frames are copied into a new file, verified
by their checksums; when that is on disk it takes the segment's name, and the rest is written there. If that fails too,
it is retried, each time with another file.

Frames where no reader will find them do not count either: after each sync, and in each `look`, the directory and the
segment must be those that were opened, and the segment as long as it was made. If not, the file there at the next try
is used if it holds all durable frames: it was put back. Nothing else is written to.

In a compressed log, the frames of one write are compressed together, in portions; each is on disk as a whole or not at
all. A portion that is written again is not compressed again: a stream has one beginning, and followers that read the
first write find the same bytes in the same places.

A log that is never synced counts frames accepted by the system. Each of its segments is synced once, when it ends: so
after a power cut only the last one may lack something. The copy after a failed sync then holds what the system still
has, if that is complete by its checksums.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from events.codec import batch_without_tokens, encode_batch
from events.errors import LogWriteFailed
from events.log import frames
from events.log.durable import Lock, sync_file, write_all
from events.log.segments import check_segment, make_segment, renew_segment, segment_name, unfinished_path
from events.log.zstd import Block, Portion, checksum, window_log
from events.types import FIRST_FORMAT, EventBatch

EXPANDED_TIMES = 8
"""A segment also ends when its frames have this multiple of its file's maximal bytes: the most that is read to get from
its beginning to any place in it."""


class Record(NamedTuple):
    """A batch encoded for the log."""

    seq: int
    events: int
    payload: bytes
    ts: int = 0
    """Time of the batch, nanoseconds since 1970."""


class LogOutput:
    """Writes one epoch of a log, from `chain` on."""

    def __init__(
        self,
        directory: Path,
        lock: Lock,
        chain: frames.Chain,
        *,
        record_tokens: bool,
        segment_bytes: int,
        sync: bool,
        window: int = 0,
        segment_seconds: float | None = None,
        segment_begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._reached = chain
        """The chain up to the last durable frame."""
        self._chain = chain
        """The chain up to the last waiting frame."""
        # Compression that refers back further than a segment reaches needs no memory. 0: nothing is compressed.
        self._window_log = window and window_log(min(window, EXPANDED_TIMES * segment_bytes))
        self.set_epoch(chain.epoch)
        self._record_tokens, self._sync = record_tokens, sync
        self._segment_bytes = segment_bytes
        self._segment_ns = None if segment_seconds is None else int(segment_seconds * 1e9)
        self._segment_begun = segment_begun
        self._begun_at = 0
        """Time of the segment's first batch."""
        self._path: Path | None = None
        """The segment that is being written; None: none."""
        self._unfinished: Path | None = None
        """A segment that could not be begun, of which parts may exist."""
        self._descriptor: int | None = None
        self._failed_sync = False
        """True if the segment's file must no longer be used."""
        self._file: tuple[int, int] | None = None
        """Identity of the segment's file; None: the file of that name must be checked before it is written to."""
        self._offset = 0
        """End of the last durable frame; if none is synced, of the last one written."""
        self._ahead = 0
        """End of the waiting frames."""
        self._waiting: list[Portion] = []
        """Portions after the last durable frame."""
        self._written = 0
        """Number of those in the file, unsynced."""
        self.durable_seq = self._last_seq = chain.seq - 1
        """The last batch known to be on disk; earlier ones are all on disk, unless the log calls them lost."""
        self.bytes_written = self.batches_written = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, before anything is written."""
        assert self._reached.log_id is not None
        self._reached.epoch = epoch
        self._chain = replace(self._reached)
        self._seed = frames.seed_of(self._reached.log_id, epoch)
        self._block = Block(self._seed, self._window_log)
        """Frames waiting to be compressed, after all those waiting to be written."""

    def encode(self, batch: EventBatch) -> Record:
        """Encode a batch for the log, without tokens if the log has none. Raises any encoding error."""
        recorded = batch if self._record_tokens else batch_without_tokens(batch)
        payload = encode_batch(recorded)
        if len(payload) > frames.MAX_PAYLOAD:
            raise OverflowError(
                f"batch {batch.seq} has {len(payload)} bytes, a frame holds {frames.MAX_PAYLOAD}"
            )
        return Record(batch.seq, len(batch.events), payload, batch.ts)

    def write(self, records: Sequence[Record]) -> None:
        """Write the batches. They count with the next `sync`, or now, if nothing is to be synced.

        Raises OSError if the system refuses, and LogWriteFailed if durable frames are gone; the batches counted by
        `batches_written` are durable nevertheless. Then `roll_back` must be called before anything else.
        """
        for record in records:
            # Those refused before are waiting already.
            if record.seq >= self._chain.seq:
                self._add(record, 0)
        self._put()

    def sync(self) -> None:
        """Make the written batches durable; raises as `write`."""
        if self._written:
            assert self._descriptor is not None
            self._force(self._descriptor)
            self._reach(self._written)

    def look(self) -> None:
        """Raise LogWriteFailed or OSError if the written batches are not all in their place."""
        if self._path is None:
            self._check_place()
        else:
            self._check_segment(self._opened())

    def close(self, next_seq: int) -> None:
        """Write the mark of an orderly end, if anything was written before it, all of which is durable then."""
        if self._path is None:
            return
        self._settle()
        self._sync = True
        if not self._chain.closed:
            self._add(Record(next_seq, 0, b""), frames.CLOSED)
        self._finish_segment()

    def roll_back(self) -> None:
        """Return to the last durable frame, after a failure; the frames after it will be written again."""
        descriptor, self._descriptor = self._descriptor, None
        self._written = 0
        if descriptor is not None:
            # If that fails, too, it is a torn tail, which readers and recovery understand. In an abandoned file, it
            # serves the process that resumes the log after a kill, which must not find the file whole.
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_size > self._offset:
                    os.ftruncate(descriptor, self._offset)
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def disown(self) -> None:
        """Release the file without touching it: it belongs to the process we were forked from."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _add(self, record: Record, flags: int) -> None:
        """Append a frame to those waiting; begin a segment if it does not fit."""
        seq, events, payload, ts = record
        size = frames.FRAME_HEADER_BYTES + len(payload)
        if is_full := self._is_full(size):
            self._compress()  # Its waiting frames take less room then.
            is_full = self._is_full(size)
        # With a clock set back, a segment would last as long as that and more.
        is_old = self._segment_ns is not None and abs(ts - self._begun_at) > self._segment_ns
        if self._path is None or ((is_full or is_old) and not flags & frames.CLOSED):
            self._finish_segment()
            self._begin_segment(seq)
            self._begun_at = ts
            self._segment_begun()
        chain = self._chain
        if seq != chain.seq:
            flags |= frames.AFTER_LOSS
        if self._block.is_full or not self._block.takes(size, flags):
            self._compress()
        compressed = self._block.takes(size, flags)
        if not compressed:
            flags |= self._sync_flag()
        header = frames.FrameHeader(len(payload), seq, events, flags, chain.crc, checksum(payload))
        if compressed:
            self._block.add(header, payload)
        else:
            self._wait(Portion((frames.pack_frame_header(header, self._seed), payload), header))
        chain.follow(header)

    def _sync_flag(self) -> int:
        """Return the flag of the next waiting frame: set if all before it is on disk."""
        return frames.AFTER_SYNC if self._sync and not self._waiting else 0

    def _compress(self) -> None:
        """Move the block's frames to those waiting to be written, compressed."""
        portion = self._block.take(self._sync_flag())
        if portion is not None:
            self._wait(portion)

    def _wait(self, portion: Portion) -> None:
        self._waiting.append(portion)
        self._ahead += portion.size

    def _is_full(self, size: int) -> bool:
        """Return True if a frame of this size is to begin a segment."""
        is_long = self._block.taken + size > EXPANDED_TIMES * self._segment_bytes
        ahead = self._ahead + self._block.size
        return ahead > frames.SEGMENT_HEADER_BYTES and (is_long or ahead + size > self._segment_bytes)

    def _put(self) -> None:
        """Write the waiting portions."""
        self._compress()
        new = self._waiting[self._written :]
        if not new:
            return
        descriptor = self._opened()
        try:
            write_all(descriptor, [part for portion in new for part in portion.parts])
        except OSError:
            self._keep_whole_frames(descriptor)
            raise
        self._written = len(self._waiting)
        if not self._sync:
            self._reach(self._written)

    def _keep_whole_frames(self, descriptor: int) -> None:
        """Keep the whole frames before the cut, after a write cut short, as on a full disk."""
        with contextlib.suppress(OSError):
            written, whole = os.fstat(descriptor).st_size - self._offset, 0
            for portion in self._waiting:
                written -= portion.size
                if written < 0:
                    break
                whole += 1
            if whole and self._sync:
                self._force(descriptor)
            self._reach(whole)

    def _force(self, descriptor: int) -> None:
        """Sync the segment, under the name that readers find."""
        try:
            sync_file(descriptor)
        except BaseException:
            self._failed_sync = True
            raise
        self._check_segment(descriptor)

    def _reach(self, count: int) -> None:
        """Count the first `count` portions as durable."""
        reached = self._waiting[:count]
        if not reached:
            return
        self._reached.follow(reached[-1].last)
        size = sum(portion.size for portion in reached)
        self._offset += size
        self.bytes_written += size
        del self._waiting[:count]
        self._written = max(self._written - count, 0)
        batches = [portion for portion in reached if not portion.last.flags & frames.CLOSED]
        if batches:
            self.batches_written += sum(portion.frames for portion in batches)
            self._last_seq = batches[-1].last.seq
        if self._sync:
            self.durable_seq = self._last_seq

    def _settle(self) -> None:
        """Make all of the segment durable."""
        self._put()
        descriptor = self._opened()
        if self._sync:
            self.sync()
            # No writer checks it afterwards, and all may have been synced before.
            self._check_segment(descriptor)
        else:
            self._force(descriptor)
            self.durable_seq = self._last_seq

    def _opened(self) -> int:
        """Return the segment, open after its last durable frame, or the last one that waits."""
        if self._descriptor is None:
            assert self._path is not None
            self._check_place()
            if self._failed_sync:
                self._descriptor = renew_segment(self._path, self._reached, self._offset)
                self._failed_sync = False
            else:
                self._descriptor = self._open_again(self._path)
            self._file = _identity(os.fstat(self._descriptor))
        return self._descriptor

    def _open_again(self, path: Path) -> int:
        """Return the segment, cut off after its last durable frame."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._misplaced(path, "it was moved or removed") from None
        try:
            own = os.fstat(descriptor)
            if own.st_size < self._offset:
                raise self._misplaced(path, "it has become shorter")
            if self._file != _identity(own):
                check_segment(path, self._reached, self._offset)
            os.ftruncate(descriptor, self._offset)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _finish_segment(self) -> None:
        if self._path is None:
            return
        self._settle()
        descriptor, self._descriptor, self._path = self._descriptor, None, None
        if descriptor is not None:
            os.close(descriptor)

    def _check_place(self) -> None:
        """Open nothing in a directory that has replaced ours: it may be another user's log."""
        if not self._lock.in_place():
            raise self._misplaced(self._directory, "the log's directory was moved or removed")

    def _check_segment(self, descriptor: int) -> None:
        """Check that the segment is in its place, and as long as it was written."""
        self._check_place()
        assert self._path is not None
        own = os.fstat(descriptor)
        try:
            there = self._path.lstat()
        except FileNotFoundError:
            raise self._misplaced(self._path, "it was moved or removed") from None
        if _identity(there) != _identity(own):
            raise self._misplaced(self._path, "it was replaced by another file")
        if self._written == len(self._waiting) and own.st_size != self._ahead:
            raise self._misplaced(self._path, "its size has changed")

    def _misplaced(self, path: Path, reason: str) -> LogWriteFailed:
        self._file = None
        return LogWriteFailed(path, reason, errno.ESTALE)

    def _begin_segment(self, base_seq: int) -> None:
        self._check_place()
        if self._unfinished is not None:
            # The rest of a segment that could not be begun; it holds no frame.
            unfinished_path(self._unfinished).unlink(missing_ok=True)
            self._unfinished.unlink(missing_ok=True)
            self._unfinished = None
        chain = self._chain
        assert chain.log_id is not None
        header = frames.SegmentHeader(
            frames.VERSION,
            FIRST_FORMAT,
            self._window_log,
            chain.log_id,
            chain.epoch,
            chain.number,
            base_seq,
            chain.crc,
        )
        path = self._directory / segment_name(base_seq)
        self._unfinished = path
        self._descriptor = make_segment(path, [[header.pack()]])
        self._failed_sync, self._file = False, _identity(os.fstat(self._descriptor))
        self._unfinished, self._path = None, path
        self._reached.enter(header)
        chain.enter(header)
        self._offset = self._ahead = frames.SEGMENT_HEADER_BYTES
        self._block = Block(self._seed, self._window_log)
        self.bytes_written += frames.SEGMENT_HEADER_BYTES


def _identity(of: os.stat_result) -> tuple[int, int]:
    """Return the identity of a file, as long as it is open."""
    return of.st_dev, of.st_ino
