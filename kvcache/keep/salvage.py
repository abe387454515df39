"""Copying what can be read of a damaged log into a new one.

Batches keep their numbers, epochs theirs, and the log its id: it is a copy that lacks something. Where batches are
missing, those behind them are of no use up to the next one with the whole state, or the next snapshot; that one has a
`Gap` which says what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from events.errors import LogDamaged, LogError, LogExists, NotALog
from events.log.compressing import BLOCK_BYTES
from events.log.durable import Lock, replace_file, sync_directory, sync_file
from events.log.frames import Chain
from events.log.output import LogOutput, Record
from events.log.recovery import claim
from events.log.segments import Segment, is_log
from events.log.zstd import MAX_WINDOW_LOG, has_zstd
from events.types import EventBatch
from kvcache.keep import raw
from kvcache.keep.losses import Continuity, Loss, behind_loss
from kvcache.keep.raw_snapshot import RawSnapshot, read_snapshot
from kvcache.keep.scan import Damage, Found, Scan, State
from kvcache.keep.writing import writing

_SEGMENT_BYTES, _WINDOW = 64 << 20, 1 << MAX_WINDOW_LOG
_UNFINISHED = ".salvaging"
"""Behind the name of the new log, until it is whole."""
_ADVICE = (
    "make room or mend the disk, remove this directory, and salvage the old log again: it was not changed"
)


@dataclass(eq=False, repr=False)
class PlaceTaken(LogExists):
    """Something is where the new log was to be written."""

    text = "{path} exists: choose another directory, or remove it if an interrupted salvage has left it (*.salvaging)"


@dataclass
class Salvaged:
    """What was copied, and what was not."""

    batches: int = 0
    """That the new log has."""
    last_seq: int | None = None
    losses: list[Loss] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    torn: bool = False
    """Whether the old log ends with a part of a batch, which was left out."""


def salvage(log: Path, to: Path, progress: Callable[[int], None] = lambda _: None) -> Salvaged:
    """Copy all that can be read of `log`, which is not changed, into the new log `to`.

    Raises NotALog; PlaceTaken if there is something at `to` or, from an interrupted go, beside it; NotWritten on a full
    disk; LogTooNew, OSError; and LogDamaged if there is nothing with which a log could begin.
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
        lock.give_back()
    if not done.batches:
        raise LogDamaged(log, 0, None, "no batch of it can be gone on from")
    unfinished.rename(to)
    sync_directory(to.absolute().parent)
    return done


def _copy(log: Path, copy: _Copy, progress: Callable[[int], None]) -> Salvaged:
    done, continuity = Salvaged(), Continuity()
    scan, snapshots = Scan(log, order(log)), _Snapshots(log)
    for item in scan:
        if isinstance(item, Damage):
            done.damage.append(item)
            continuity.lose()
        elif isinstance(item, State):
            done.batches += copy.restore(item.snapshot, continuity)
        else:
            for batch, header in _batches(item, continuity, snapshots):
                done.batches += 1
                copy.write(batch, header)
            if item.frame.ends_epoch and continuity.seq == item.frame.seq:
                copy.close(item.header.epoch, item.frame.seq)
        progress(scan.seq)
    for snapshot, batch in snapshots.behind(continuity):
        done.batches += 1
        copy.write(batch, snapshot.header)
    copy.end()
    done.last_seq, done.losses, done.torn = copy.last_seq, continuity.losses, scan.kind == "torn"
    return done


def _batches(
    found: Found, continuity: Continuity, snapshots: _Snapshots
) -> Iterator[tuple[EventBatch, raw.Header]]:
    """What a frame adds to the copy: nothing, its batch, or a snapshot and perhaps its batch."""
    if found.offset == raw.HEADER_BYTES and not continuity.continued_by(found.frame):
        for snapshot, batch in snapshots.behind(continuity, found.header):
            yield batch, snapshot.header
    taken = continuity.take(found)
    if taken is not None:
        yield taken, found.header


def order(log: Path) -> list[Path]:
    """The segments of a log by their own numbers, whatever their names are; those of other logs left out.

    One whose header is damaged stands where its name says.
    """
    headers = dict[Path, raw.Header | None]()
    for path in raw.segments(log):
        headers[path] = None
        with suppress(LogError, OSError), raw.File(path) as file:
            headers[path] = file.header(raw.SEGMENT_MAGIC)
    logs = Counter(header.log_id for header in headers.values() if header is not None)
    own = logs.most_common(1)[0][0] if logs else b""
    # Of two with one number that stays which has its own name: the other one was put there by hand.
    named = sorted(
        headers.items(), key=lambda each: each[1] is not None and int(each[0].stem) == each[1].first
    )
    numbered = {header.number: path for path, header in named if header and header.log_id == own}
    place = {path: (header.first if header else int(path.stem)) for path, header in headers.items()}
    kept = [path for path, header in headers.items() if header is None or path in numbered.values()]
    return sorted(kept, key=lambda path: (place[path], path.name))


class _Snapshots:
    """What a salvaged log can go on with."""

    def __init__(self, log: Path) -> None:
        self._paths = raw.snapshots(log)
        self._newest = max([int(path.stem) for path in raw.segments(log)], default=0)

    def behind(
        self, continuity: Continuity, header: raw.Header | None = None
    ) -> Iterator[tuple[RawSnapshot, EventBatch]]:
        """That which stands before this segment (None: the newest one), if batches are missing there."""
        for path in reversed(self._paths):
            with suppress(LogError, OSError):
                snapshot = read_snapshot(path) if int(path.stem) >= continuity.seq else None
                if snapshot is not None and (header is None or snapshot.continued_by(header)):
                    batch = continuity.restore(snapshot, more=header is None and snapshot.seq < self._newest)
                    if batch is not None:
                        yield snapshot, batch
                    return


class _Copy:
    """A new log, epoch by epoch as the old one."""

    def __init__(self, directory: Path, lock: Lock) -> None:
        self._directory, self._lock = directory, lock
        self._chain = Chain()
        self._output: LogOutput | None = None
        self._records: list[Record] = []
        self._waiting = 0
        """Bytes of the records, which are to be written."""
        self._begun: RawSnapshot | None = None
        """With which the log begins, as long as nothing stands behind it."""
        self.last_seq: int | None = None

    def restore(self, snapshot: RawSnapshot, continuity: Continuity) -> int:
        """Go on with a snapshot that stands for segments which are not kept; returns how many batches that has."""
        if self.last_seq is None:
            continuity.begin(snapshot)
            self._begin(snapshot)
            return 1
        continuity.lose()  # They were removed while the log was copied.
        batch = continuity.restore(snapshot, more=False)
        if batch is not None:
            self.write(batch, snapshot.header)
        return int(batch is not None)

    def _begin(self, snapshot: RawSnapshot) -> None:
        """Begin with a snapshot, as a log does whose beginning is not kept."""
        try:
            content = snapshot.path.read_bytes()
        except FileNotFoundError:  # By now it is not kept any longer.
            self._write_state(snapshot)
            return
        header, beside = snapshot.header, snapshot.beside
        self._begun = snapshot
        self._chain = Chain(
            header.log_id, header.epoch, header.number, beside.next_seq, header.before, beside.closed
        )
        with writing(self._directory, _ADVICE):
            replace_file(self._directory / snapshot.path.name, content)
        self.last_seq = snapshot.seq

    def _write_state(self, snapshot: RawSnapshot) -> None:
        """Begin with the state of a snapshot, as a batch behind a `Gap`."""
        batch = behind_loss(snapshot.batch, 0, snapshot.seq)
        self._chain = Chain()
        if batch is not None:
            self.write(batch, snapshot.header)

    def write(self, batch: EventBatch, header: raw.Header) -> None:
        """Write the next batch, which is of the epoch in the header."""
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

    def _write(self) -> None:
        """Write what waits, which is compressed together."""
        if self._output is not None:
            with writing(self._directory, _ADVICE):
                self._output.write(self._records)
        self._records, self._waiting = [], 0

    def close(self, epoch: int, next_seq: int) -> None:
        """Write the mark of an orderly end, if the epoch is the one that is being written."""
        if self._output is not None and epoch == self._chain.epoch:
            self._write()
            with writing(self._directory, _ADVICE):
                self._output.close(next_seq)
            self._output = None

    def end(self) -> None:
        """Write what is left to write, and make all of it durable."""
        if self._begun is not None:
            # A log has segments: what stands for them is a batch then.
            (self._directory / self._begun.path.name).unlink()
            self._write_state(self._begun)
        self.finish()
        for path in raw.segments(self._directory):
            with Segment(path) as segment, writing(self._directory, _ADVICE):
                sync_file(segment.descriptor)
        sync_directory(self._directory)

    def finish(self) -> None:
        """End the epoch without a mark."""
        self._write()
        if self._output is not None:
            self._output.disown()
            self._output = None
