"""Keeping a log as large as it may be: a snapshot where one is due, and nothing before the oldest that is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from events.errors import NotALog
from events.log.retention import Kept, Limits, Removed
from events.log.segments import is_log
from events.log.snapshots import Snapshot
from kvcache.keep.alone import alone
from kvcache.keep.snapshot import make_snapshot


@dataclass(frozen=True)
class Pruned:
    """What was done."""

    made: tuple[Snapshot, ...]
    removed: Removed
    kept: Kept
    """What there is now."""


def prune(directory: Path, limits: Limits, progress: Callable[[int], None] = lambda _: None) -> Pruned:
    """Make the snapshots that are due, and remove what the limits do not allow. A writer may be at work.

    One is due behind the newest complete segment, when those since the last snapshot have as many bytes as that has
    itself: so snapshots take no more room than the log, and no more time than reading it once. And where the oldest
    segment begins that is to be kept. Raises LogBeingKept if another process is at it, and what `make_snapshot` raises;
    nothing is removed then.
    """
    if not is_log(directory):
        raise NotALog(directory)
    with alone(directory):
        kept, made = Kept(directory), list[Snapshot | None]()
        if len(kept.parts) > 1 and _is_due(kept):
            made.append(make_snapshot(directory, kept.parts[-1].first, progress))
            kept = Kept(directory)
        first = kept.wanted(limits)
        if first and not kept.has_snapshot_before(first):
            made.append(make_snapshot(directory, first, progress))
            kept = Kept(directory)
        removed = kept.remove(first)
        return Pruned(tuple(each for each in made if each is not None), removed, Kept(directory))


def _is_due(kept: Kept) -> bool:
    return not kept.snapshots or kept.unmarked_bytes() >= kept.snapshots[-1].size
