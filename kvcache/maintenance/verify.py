"""Verification of a log: all of it and all of its snapshots are read and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from events.errors import LogDamaged, LogError, NotALog
from events.log import LogEnd, LogReader
from events.log.segments import UNREADABLE, Frame, is_log
from events.log.snapshots import Snapshot, open_snapshot, snapshot_paths
from events.subscribe.workers import FeedState
from events.types import FEED_EVENTS, EventBatch, PoolShared, StateExported
from kvcache.fold.state import CacheState
from kvcache.maintenance.salvage import SalvagedOrder
from kvcache.replay import Replayed, fold_feed_batch


@dataclass
class Verified:
    """Result of a verification."""

    batches: int = 0
    events: int = 0
    checkpoints: int = 0
    """Checkpoints that agree."""
    snapshots: int = 0
    """Snapshots that agree."""
    unused: list[Path] = field(default_factory=list)
    """Snapshots with which no reading begins: the segments after them are missing, or do not continue them."""
    damage: list[LogDamaged] = field(default_factory=list)
    """Places in segments that differ from what was written."""
    problems: list[str] = field(default_factory=list)
    """Damaged or disagreeing snapshots, and disagreeing checkpoints, in words."""
    end: LogEnd | None = None


def verify(log: Path, progress: Callable[[int], None] = lambda _: None) -> Verified:
    """Read a log from its retained beginning to its end, and compare each snapshot on the way.

    After damage it continues with the next whole state. Raises NotALog, LogTooNew, `Unreplayable`, OSError.
    """
    if not is_log(log):
        raise NotALog(log)
    found = Verified()

    def note(damage: LogDamaged) -> None:
        found.damage.append(damage)
        fold.continuity.lose()

    reader = LogReader(log, kind=None, damaged=note)
    fold = _Fold(found, _snapshots(log, found))
    for read, batch in reader.frames():
        fold.take(read, batch, reader.header.epoch if reader.header else 0)
        progress(fold.continuity.seq)
    # A missing one was removed meanwhile, like what was before it.
    found.unused = [path for path in (*found.unused, *fold.snapshots.values()) if path.exists()]
    found.problems += fold.problems()
    found.end = reader.end
    return found


class _Fold:
    """State after the batches read, for comparison with checkpoints and snapshots."""

    def __init__(self, found: Verified, snapshots: dict[int, Path]) -> None:
        self._found = found
        self.snapshots = snapshots
        """Snapshots still to be compared, by batch."""
        self.continuity = SalvagedOrder()
        self._cache, self._feed = Replayed(CacheState()), FeedState()
        self._is_feed: bool | None = None

    def take(self, read: Snapshot | Frame, batch: EventBatch | None, epoch: int) -> None:
        """Fold what was read, if it continues what was folded."""
        if batch is not None:
            self._found.batches += 1
            self._found.events += len(batch.events)
        if isinstance(read, Snapshot):
            self.continuity.begin(read)
        else:
            batch = self.continuity.take(read.header, batch, epoch)
        if batch is not None:
            self._apply(batch)

    def _apply(self, batch: EventBatch) -> None:
        if self._is_feed is None:
            self._is_feed = any(isinstance(event, FEED_EVENTS) for event in batch.events)
        if self._is_feed:
            fold_feed_batch(self._feed, batch)
            return
        self._cache.fold(batch, verify=True)
        if batch.seq in self.snapshots:
            self._compare(self.snapshots.pop(batch.seq))

    def _compare(self, path: Path) -> None:
        try:
            snapshot = open_snapshot(path)
            events = snapshot.batch().events
        except FileNotFoundError:
            return  # It was removed meanwhile.
        state = tuple([event for event in events if isinstance(event, StateExported | PoolShared)])
        now = (self._cache.state.export(), *self._cache.state.export_shared())
        if state == now and snapshot.about.fingerprint == self._cache.fingerprint:
            self._found.snapshots += 1
        else:
            self._found.problems.append(
                f"{path} differs from the state of the log: remove it, or make a new one"
            )

    def problems(self) -> list[str]:
        """Return the problems of checkpoints."""
        self._found.checkpoints = self._cache.checkpoints_verified
        return [f"the checkpoint in batch {seq} disagrees" for seq in self._cache.checkpoints_failed]


def _snapshots(log: Path, found: Verified) -> dict[int, Path]:
    """Return the snapshots that can be read and belong to the log, by batch."""
    good = {}
    for path in snapshot_paths(log):
        try:
            snapshot = open_snapshot(path)
            snapshot.batch()
            if snapshot.fits():
                good[snapshot.seq] = path
            else:
                found.unused.append(path)
        except FileNotFoundError:
            continue  # It was removed meanwhile.
        except LogError as error:
            found.problems.append(str(error))
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            if error.filename == str(path):
                found.problems.append(f"{path} cannot be read: {error.strerror}")
            else:
                found.unused.append(path)  # The damaged segment after it is reported when it is read.
    return good
