"""Copy of the readable parts of a damaged log into a new one.

Batches and epochs keep their numbers, and the log its id: it is an incomplete copy. After missing batches, later ones
are of no use up to the next one with the whole state, or the next snapshot; that one gets a `Gap` for what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from events.errors import LogDamaged, LogError, LogExists, NotALog
from events.log import LogReader
from events.log.durable import Lock, replace_file, sync_directory, sync_file
from events.log.frames import AFTER_LOSS, CLOSED, SEGMENT_HEADER_BYTES, Chain, FrameHeader, SegmentHeader
from events.log.output import LogOutput, Record
from events.log.recovery import claim
from events.log.segments import Segment, first_seq, is_log, segment_paths
from events.log.snapshots import Snapshot, open_snapshot, snapshot_paths
from events.log.zstd import BLOCK_BYTES, MAX_WINDOW_LOG, has_zstd
from events.types import EpochStarted, EventBatch, FeedStarted, Gap, StateExported
from kvcache.maintenance.files import writing

_SEGMENT_BYTES, _WINDOW = 64 << 20, 1 << MAX_WINDOW_LOG
_UNFINISHED = ".salvaging"
"""Suffix of the new log's name until it is complete."""
_ADVICE = (
    "free disk space or fix the disk, remove this directory, and salvage again: the old log is unchanged"
)


@dataclass(eq=False, repr=False)
class PlaceTaken(LogExists):
    """A file exists where the new log was to be written."""

    text = (
        "{path} already exists: choose another directory, or remove it if it is left from an interrupted salvage "
        "(*.salvaging)"
    )


@dataclass
class Salvaged:
    """Copied and missing batches."""

    batches: int = 0
    """Batches in the new log."""
    last_seq: int | None = None
    losses: list[Loss] = field(default_factory=list)
    damage: list[LogDamaged] = field(default_factory=list)
    torn: bool = False
    """True if the old log ends with a part of a batch, which was left out."""


def salvage(log: Path, to: Path, progress: Callable[[int], None] = lambda _: None) -> Salvaged:
    """Copy all readable batches of `log`, which is not changed, into the new log `to`.

    Raises NotALog; PlaceTaken if a file exists at `to` or, from an interrupted run, next to it; NotWritten on a full
    disk; LogTooNew, OSError; and LogDamaged if nothing can begin a log.
    """
    if not is_log(log):
        raise NotALog(log)
    unfinished = to.with_name(to.name + _UNFINISHED)
    for path in (to, unfinished):
        if path.exists() or path.is_symlink():
            raise PlaceTaken(path)
    with writing(unfinished, _ADVICE):
        lock = claim(unfinished, resume=False)
    try:
        done = _copy(log, _Copy(unfinished, lock), progress)
    finally:
        lock.release()
    if not done.batches:
        raise LogDamaged(log, 0, None, "no batch in it can begin a log")
    unfinished.rename(to)
    sync_directory(to.absolute().parent)
    return done


def _copy(log: Path, copy: _Copy, progress: Callable[[int], None]) -> Salvaged:
    done, continuity = Salvaged(), SalvagedOrder()

    def note(damage: LogDamaged) -> None:
        done.damage.append(damage)
        continuity.lose()

    reader = LogReader(log, kind=None, damaged=note, places=_places(log))
    for read, batch in reader.frames():
        header = reader.header
        if isinstance(read, Snapshot):
            assert batch is not None
            copy.restore(read, batch, continuity)
        elif header is not None:
            if read.offset == SEGMENT_HEADER_BYTES and not continuity.continued_by(read.header):
                _add_snapshot(log, copy, continuity, header)
            taken = continuity.take(read.header, batch, header.epoch)
            if taken is not None:
                copy.write(taken, header)
            elif batch is None and continuity.seq == read.header.seq:
                copy.close(header.epoch, read.header.seq)
        progress(continuity.seq)
    _add_snapshot(log, copy, continuity)
    copy.end()
    done.batches, done.last_seq, done.losses = copy.batches, copy.last_seq, continuity.losses
    done.torn = reader.end.kind == "torn"
    return done


def _places(log: Path) -> dict[Path, int]:
    """Return segments with the positions in their headers, independent of their names, without those of other logs.

    A segment with a damaged header has the position in its name.
    """
    headers = dict[Path, SegmentHeader | None]()
    for path in segment_paths(log):
        headers[path] = None
        with suppress(LogError, OSError), Segment(path, is_named=False) as segment:
            headers[path] = segment.header()
    logs = Counter(header.log_id for header in headers.values() if header is not None)
    own = logs.most_common(1)[0][0] if logs else b""
    # Of two with one number the one with its own name stays: the other was put there by hand.
    named = sorted(
        headers.items(), key=lambda each: each[1] is not None and first_seq(each[0]) == each[1].base_seq
    )
    numbered = {header.number: path for path, header in named if header and header.log_id == own}
    return {
        path: header.base_seq if header else first_seq(path)
        for path, header in headers.items()
        if header is None or path in numbered.values()
    }


def _add_snapshot(
    log: Path, copy: _Copy, continuity: SalvagedOrder, header: SegmentHeader | None = None
) -> None:
    """Add the snapshot before this segment (None: the newest one), if batches are missing there."""
    newest = max([first_seq(path) for path in segment_paths(log)], default=0)
    for path in reversed(snapshot_paths(log)):
        with suppress(LogError, OSError):
            snapshot = open_snapshot(path)
            state = snapshot.batch() if snapshot.seq >= continuity.seq else None
            if state is not None and (header is None or not snapshot.chain().refuses_segment(header)):
                more = header is None and snapshot.seq < newest
                batch = continuity.restore(snapshot, state, more=more)
                break
    else:
        return
    if batch is not None:
        copy.write(batch, snapshot.header)


class _Copy:
    """The new log, with the epochs of the old one."""

    def __init__(self, directory: Path, lock: Lock) -> None:
        self._directory, self._lock = directory, lock
        self._chain = Chain()
        self._output: LogOutput | None = None
        self._records: list[Record] = []
        self._waiting = 0
        """Bytes of the records to be written."""
        self._begun: tuple[Snapshot, EventBatch] | None = None
        """Snapshot with which the log begins, until something follows it."""
        self.last_seq: int | None = None
        self.batches = 0

    def restore(self, snapshot: Snapshot, state: EventBatch, continuity: SalvagedOrder) -> None:
        """Continue with a snapshot that stands for segments which are not kept."""
        if self.last_seq is None:
            continuity.begin(snapshot)
            self._begin(snapshot, state)
            return
        continuity.lose()  # They were removed while the log was copied.
        batch = continuity.restore(snapshot, state, more=False)
        if batch is not None:
            self.write(batch, snapshot.header)

    def _begin(self, snapshot: Snapshot, state: EventBatch) -> None:
        """Begin with a snapshot, like a log with its beginning pruned."""
        try:
            content = snapshot.path.read_bytes()
        except FileNotFoundError:  # It was removed meanwhile.
            self._write_state(snapshot, state)
            return
        self._begun = snapshot, state
        self._chain = snapshot.chain()
        with writing(self._directory, _ADVICE):
            replace_file(self._directory / snapshot.path.name, content)
        self.last_seq = snapshot.seq
        self.batches = 1

    def _write_state(self, snapshot: Snapshot, state: EventBatch) -> None:
        """Begin with the state of a snapshot, as a batch after a `Gap`."""
        batch, self._chain, self.batches = after_loss(state, 0, snapshot.seq), Chain(), 0
        if batch is not None:
            self.write(batch, snapshot.header)

    def write(self, batch: EventBatch, header: SegmentHeader) -> None:
        """Write the next batch, which belongs to the epoch in the header."""
        chain, self._begun = self._chain, None
        if self._output is None or header.epoch != chain.epoch:
            self.finish()
            chain.log_id, chain.epoch = header.log_id, header.epoch
            self._output = LogOutput(
                self._directory,
                self._lock,
                chain,
                record_tokens=True,
                segment_bytes=_SEGMENT_BYTES,
                sync=False,
                window=_WINDOW if has_zstd() else 0,
            )
        record = self._output.encode(batch)
        self._records.append(record)
        self._waiting += len(record.payload)
        if self._waiting >= BLOCK_BYTES:
            self._write()
        self.last_seq = batch.seq
        self.batches += 1

    def _write(self) -> None:
        """Write the pending records, which are compressed together."""
        if self._output is not None:
            with writing(self._directory, _ADVICE):
                self._output.write(self._records)
        self._records, self._waiting = [], 0

    def close(self, epoch: int, next_seq: int) -> None:
        """Write the mark of an orderly end, if `epoch` is the current one."""
        if self._output is not None and epoch == self._chain.epoch:
            self._write()
            with writing(self._directory, _ADVICE):
                self._output.close(next_seq)
            self._output = None

    def end(self) -> None:
        """Write the rest, and make everything durable."""
        if self._begun is not None:
            # A log has segments, so the snapshot becomes a batch.
            (self._directory / self._begun[0].path.name).unlink()
            self._write_state(*self._begun)
        self.finish()
        for path in segment_paths(self._directory):
            with Segment(path) as segment, writing(self._directory, _ADVICE):
                sync_file(segment.descriptor)
        sync_directory(self._directory)

    def finish(self) -> None:
        """End the epoch without a mark."""
        self._write()
        if self._output is not None:
            self._output.disown()
            self._output = None


REASON = "lost to damage of the log's files"


def begins_epoch(batch: EventBatch) -> bool:
    """Return True if a fold can begin with this batch, independent of earlier ones."""
    return bool(batch.events) and type(batch.events[0]) is EpochStarted


def after_loss(batch: EventBatch, first: int, last: int) -> EventBatch | None:
    """Return the batch with a gap from `first` to `last` before its state; None if it holds no state."""
    events = batch.events
    for at, event in enumerate(events):
        if isinstance(event, Gap):
            wider = replace(event, first_seq=min(first, event.first_seq))
            return replace(batch, events=(*events[:at], wider, *events[at + 1 :]))
    gap = Gap(first_seq=first, last_seq=last, reason=REASON)
    if begins_epoch(batch):
        return replace(batch, events=(events[0], gap, *events[1:]))
    for at, event in enumerate(events):
        if isinstance(event, StateExported | FeedStarted):
            return replace(batch, events=(*events[:at], gap, *events[at:]))
    return None


@dataclass
class Loss:
    """Missing batches."""

    first: int
    last: int | None = None
    """Last missing batch; None: no later batch can be used, so their number is unknown."""
    left_out: list[int] = field(default_factory=list)
    """Intact batches among them, of no use without the others."""


class SalvagedOrder:
    """Filter that passes intact batches, and leaves out those that do not continue them."""

    def __init__(self) -> None:
        self.seq = 0
        """Number of the next batch."""
        self._crc = 0
        self._epoch = -1
        """Epoch of which the beginning was taken."""
        self.losses: list[Loss] = []

    @property
    def _is_whole(self) -> bool:
        return not self.losses or self.losses[-1].last is not None

    def lose(self) -> None:
        """Note that what comes next is lost; `take` may find that nothing is missing all the same."""
        if self._is_whole:
            self.losses.append(Loss(self.seq))

    def begin(self, snapshot: Snapshot) -> None:
        """Continue with a snapshot before which nothing is missing that should be there."""
        header = snapshot.header
        self.seq, self._crc, self._epoch = snapshot.about.next_seq, header.previous_crc, header.epoch

    def take(self, frame: FrameHeader, batch: EventBatch | None, epoch: int) -> EventBatch | None:
        """Return the batch as it continues here, with a `Gap` if some are missing; None if it does not, or is a
        mark.
        """
        if self.continued_by(frame):
            if not self._is_whole:
                self.losses.pop()
        elif batch is None or frame.seq < self.seq:
            return None
        elif frame.seq == self.seq and begins_epoch(batch):
            if not self._is_whole:
                self.losses.pop()  # Only the mark of the end was lost.
        else:
            self.lose()
            # The cache is described only at the beginning of an epoch.
            known = begins_epoch(batch) or epoch == self._epoch
            goes_on = known and batch.seq > self.seq
            batch = after_loss(batch, self.seq, batch.seq - 1) if goes_on else None
            if batch is None:
                self.losses[-1].left_out.append(frame.seq)
                return None
            self.losses[-1].last = frame.seq - 1
        self.seq, self._crc = frame.seq + (not frame.flags & CLOSED), frame.payload_crc
        self._epoch = epoch
        return batch

    def restore(self, snapshot: Snapshot, state: EventBatch, *, more: bool) -> EventBatch | None:
        """Continue with a snapshot after missing batches; None if it is not later than what was taken.

        `more` is True if what followed it is also lost.
        """
        if self._is_whole or snapshot.seq < self.seq:
            return None
        batch = after_loss(state, self.seq, snapshot.seq)
        loss = self.losses[-1]
        later = [seq for seq in loss.left_out if seq > snapshot.seq]
        loss.last, loss.left_out = snapshot.seq, [seq for seq in loss.left_out if seq <= snapshot.seq]
        self.begin(snapshot)
        if more:
            self.losses.append(Loss(self.seq, left_out=later))
        return batch

    def continued_by(self, frame: FrameHeader) -> bool:
        """Return True if this is the next frame."""
        follows = frame.seq == self.seq or (frame.flags & AFTER_LOSS and frame.seq > self.seq)
        return frame.previous_crc == self._crc and bool(follows)
