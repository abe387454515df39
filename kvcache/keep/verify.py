"""Reading all of a log and all of its snapshots, and comparing what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from events.errors import LogError
from events.log import LogEnd, LogReader
from events.log.epochs import kind_of
from events.log.snapshots import Snapshot, open_snapshot, snapshot_paths
from events.told.state import FeedState
from events.types import StateExported
from kvcache.fold.exported_state import export
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed, fitting


@dataclass
class Verified:
    """What was found."""

    batches: int = 0
    events: int = 0
    checkpoints: int = 0
    """That agree."""
    snapshots: int = 0
    """That agree."""
    unused: list[Path] = field(default_factory=list)
    """Snapshots with which no reading begins: the segments behind them are not there, or do not continue them."""
    problems: list[str] = field(default_factory=list)
    """Snapshots that are damaged or disagree, and checkpoints that disagree, in words."""
    end: LogEnd | None = None


def verify(log: Path, progress: Callable[[int], None] = lambda _: None) -> Verified:
    """Read a log from its beginning, as far as that is kept, to its end, and compare each snapshot on the way.

    Raises `Unreplayable`, and what `LogReader` raises: what is behind damage is not looked at.
    """
    found = Verified()
    if kind_of(log) == "feed":
        _read_feed(log, found, progress)
        return found
    snapshots = _snapshots(log, found)
    reader, replayed = LogReader(log), Replayed(CacheState())
    for batch in reader:
        replayed.fold(batch, verify=True)
        if batch.seq in snapshots:
            _compare(snapshots.pop(batch.seq), replayed, found)
        progress(batch.seq)
    found.unused += [snapshot.path for snapshot in snapshots.values()]
    found.problems += [f"the checkpoint in batch {seq} disagrees" for seq in replayed.checkpoints_failed]
    found.batches, found.events, found.end = replayed.batches, replayed.events, reader.end
    found.checkpoints = replayed.checkpoints_verified
    return found


def _read_feed(log: Path, found: Verified, progress: Callable[[int], None]) -> None:
    reader, state = LogReader(log, kind="feed"), FeedState()
    for batch in reader:
        with fitting(batch.seq):
            for event in batch.events:
                state.apply(event)
        found.batches, found.events = found.batches + 1, found.events + len(batch.events)
        progress(batch.seq)
    found.end = reader.end


def _snapshots(log: Path, found: Verified) -> dict[int, Snapshot]:
    """Those that can be read and belong to the log."""
    good = {}
    for path in snapshot_paths(log):
        try:
            snapshot = open_snapshot(path)
            if snapshot.fits():
                good[snapshot.seq] = snapshot
            else:
                found.unused.append(path)
        except LogError as error:
            found.problems.append(str(error))
    return good


def _compare(snapshot: Snapshot, replayed: Replayed, found: Verified) -> None:
    try:
        batch = snapshot.batch()
    except LogError as error:
        found.problems.append(str(error))
        return
    state = next((event for event in batch.events if isinstance(event, StateExported)), None)
    agrees = state == export(replayed.state) and snapshot.about.fingerprint == replayed.fingerprint
    if agrees:
        found.snapshots += 1
    else:
        found.problems.append(f"{snapshot.path} has another state than the log: remove it, or make a new one")
