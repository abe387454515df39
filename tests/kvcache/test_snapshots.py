"""Snapshots: a fold that begins with one comes to the same state, at every batch, as one that begins with the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from events.log import LogReader
from events.log.segments import first_seq, segment_paths
from events.log.snapshots import snapshot_paths
from kvcache.fold.state import CacheState
from kvcache.maintenance.prune import make_snapshot
from kvcache.replay import Replayed, fold, replay
from tests.support.logs.kept import random_log
from tests.support.seeds import seeds


def boundaries(directory: Path) -> list[int]:
    """The first batches of all segments but the first, and one behind the end."""
    return [*map(first_seq, segment_paths(directory)[1:]), 1 << 62]


@pytest.mark.parametrize("seed", seeds(range(6), quick=1))
def test_every_batch_is_as_without_snapshots(tmp_path: Path, seed: int) -> None:
    """From whichever snapshot a replay begins, it comes to the state that a fold of all batches has there."""
    log = random_log(seed, tmp_path)
    made = [make_snapshot(log, before) for before in boundaries(log)]
    assert sum(each is not None for each in made) == len(snapshot_paths(log)) > 2
    full, begun = Replayed(CacheState()), set[int | None]()
    for batch in LogReader(log):
        full.fold(batch, verify=True)
        found = replay(log, batch.seq)
        begun.add(found.snapshot_seq)
        assert found.fingerprint == full.fingerprint
        assert found.state.export() == full.state.export()
        assert found.last_ts == full.last_ts
    assert not full.checkpoints_failed
    assert {first_seq(path) for path in snapshot_paths(log)} == begun - {None}


@pytest.mark.parametrize("seed", seeds(range(3), quick=1))
def test_snapshots_are_canonical(tmp_path: Path, seed: int) -> None:
    """A snapshot has the same bytes whether it was made from the one before or from the beginning of the log."""
    log = random_log(seed, tmp_path)
    for before in boundaries(log):
        make_snapshot(log, before)
    paths = snapshot_paths(log)
    chained = {path.name: path.read_bytes() for path in paths}
    for path in paths:
        for each in paths:
            each.unlink(missing_ok=True)
        made = make_snapshot(log, first_seq(path) + 1)
        assert made is not None
        assert made.path.read_bytes() == chained[path.name]
    assert fold(LogReader(log)).fingerprint == replay(log).fingerprint
