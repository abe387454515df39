"""Pruning of a log to its limits: snapshots where due, and removal of everything before the oldest one needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from events.errors import NotALog
from events.log import LogReader
from events.log.durable import sync_file
from events.log.retention import Limits, LogParts, RemovedParts
from events.log.segments import Segment, first_seq, is_closed, is_log, segment_paths
from events.log.snapshots import UNFINISHED_SUFFIX, About, Snapshot, write_snapshot
from events.types import AnyEvent, EpochStarted, EventBatch
from kvcache.errors import invariant
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.state import CacheState
from kvcache.maintenance.files import exclusive_access
from kvcache.replay import Replayed, fitting, fold


@dataclass(frozen=True)
class Pruned:
    """Result of pruning."""

    made: tuple[Snapshot, ...]
    removed: RemovedParts
    kept: LogParts
    """Parts of the log that exist now."""


def prune(directory: Path, limits: Limits, progress: Callable[[int], None] = lambda _: None) -> Pruned:
    """Make the snapshots that are due, and remove what exceeds the limits. A writer may be at work.

    A snapshot is due after the newest complete segment, once the segments since the last snapshot have as many bytes as
    that one: so snapshots take no more room than the log, and no more time than reading it once. Another is due at the
    start of the oldest segment to keep. Raises LogBusy if another process is at work, and what `make_snapshot`
    raises; nothing is removed then.
    """
    if not is_log(directory):
        raise NotALog(directory)
    with exclusive_access(directory):
        kept, made = LogParts(directory), list[Snapshot | None]()
        due = not kept.snapshots or kept.unmarked_bytes() >= kept.snapshots[-1].size
        if len(kept.parts) > 1 and due:
            made.append(make_snapshot(directory, kept.parts[-1].first, progress))
            kept = LogParts(directory)
        first = kept.wanted(limits)
        if first and not kept.has_snapshot_before(first):
            made.append(make_snapshot(directory, first, progress))
            kept = LogParts(directory)
        removed = kept.remove(first)
        return Pruned(tuple(each for each in made if each is not None), removed, LogParts(directory))


Progress = Callable[[int], None]


def make_snapshot(
    directory: Path, before: int | None = None, progress: Progress = lambda _: None
) -> Snapshot | None:
    """Make a snapshot at the end of the last complete segment; None if it exists, or if there is no such segment.

    With `before`, it is at the end of the last segment before the one that begins with this batch.

    Raises `LogDamaged`, `LogTooNew`, `LogOfOtherKind`, `Unreplayable`, OSError, and OverflowError for a state that is
    too large for a snapshot.
    """
    for path in directory.glob(f"*.kvsnap{UNFINISHED_SUFFIX}"):
        path.unlink(missing_ok=True)
    if before is None:
        # The last segment may still grow, if the log is not closed.
        last = segment_paths(directory)[-1:]
        before = max([sys.maxsize if is_closed(path) else first_seq(path) for path in last], default=0)
    reader = LogReader(directory, state_at=before - 1, before=before)
    watched = _Watched(reader, progress)
    replayed = fold(watched)
    if not watched.batches or watched.started is None:
        return None
    begins = 0 if reader.snapshot is None else reader.snapshot.seq + 1
    _sync(directory, begins, replayed.last_seq)
    if reader.snapshot is not None:
        watched.join(reader.snapshot.about)
    about = About(
        reader.chain.seq, reader.chain.closed, watched.first_ts, watched.latest_ts, replayed.fingerprint
    )
    return write_snapshot(directory, reader.chain, about, state_batch(replayed, watched.started))


def state_batch(replayed: Replayed, started: EpochStarted) -> EventBatch:
    """Return the state as a batch with which a fold can begin, and verify that; `started` is its epoch's start."""
    state = replayed.state
    assert state.created is not None
    assert replayed.last_ts is not None
    events: tuple[AnyEvent, ...] = (started, state.created, state.export(), *state.export_shared())
    with fitting(replayed.last_seq):
        again = CacheState()
        for event in events:
            again.apply(event)
        invariant(fingerprint(again) == replayed.fingerprint, "the exported state is another one")
    return EventBatch(replayed.last_seq, replayed.last_ts, events)


class _Watched:
    """Batches, with further facts needed besides their state."""

    def __init__(self, batches: LogReader, progress: Progress) -> None:
        self._batches, self._progress = batches, progress
        self.batches = 0
        """Batches after the snapshot with which reading began."""
        self.started: EpochStarted | None = None
        """Start of the last epoch."""
        self.first_ts = self.latest_ts = 0

    def __iter__(self) -> Iterator[EventBatch]:
        for batch in self._batches:
            first = batch.events[0] if batch.events else None
            if isinstance(first, EpochStarted):
                self.started = first
            begun = self._batches.snapshot
            if self.batches or begun is None or batch.seq != begun.seq:
                self.first_ts = self.first_ts if self.batches else batch.ts
                self.latest_ts = max(self.latest_ts, batch.ts) if self.batches else batch.ts
                self.batches += 1
            self._progress(batch.seq)
            yield batch

    def join(self, about: About) -> None:
        """Add what an older snapshot knows of earlier batches."""
        self.first_ts, self.latest_ts = about.first_ts, max(about.latest_ts, self.latest_ts)


def _sync(directory: Path, first: int, last: int) -> None:
    """Sync segments, so that no snapshot is of page cache only: after a power cut the log would end before it."""
    paths = segment_paths(directory)
    for path, following in zip(paths, [*paths[1:], None], strict=True):
        if first_seq(path) <= last and (following is None or first_seq(following) > first):
            with Segment(path) as segment:
                sync_file(segment.descriptor)
