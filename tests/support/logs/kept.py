"""Random logs of many segments, and the state after each of their batches."""

from __future__ import annotations

import random
from pathlib import Path

from events.log import LogReader
from events.log.segments import segment_paths
from events.log.snapshots import snapshot_paths
from events.types import EpochStarted
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed, fold, replay
from tests.support.logs import random_logs


def states_of(log: Path) -> dict[int, bytes]:
    """The fingerprint after each batch."""
    replayed, found = Replayed(CacheState()), {}
    for batch in LogReader(log):
        replayed.fold(batch, verify=False)
        found[batch.seq] = replayed.fingerprint
    return found


def names(log: Path) -> list[str]:
    return sorted(path.name for path in [*segment_paths(log), *snapshot_paths(log)])


def is_log_of(log: Path, states: dict[int, bytes], intended: int) -> None:
    """From at most `intended` on, everything is there, and each state is what it was."""
    batches = iter(LogReader(log))
    first = next(batches)
    assert first.seq <= intended
    assert isinstance(first.events[0], EpochStarted)
    assert [first.seq, *(batch.seq for batch in batches)] == [seq for seq in states if seq >= first.seq]
    for seq in [
        first.seq,
        *random.Random(intended).choices([each for each in states if each >= first.seq], k=2),
    ]:
        assert replay(log, seq).fingerprint == states[seq]
    assert fold(LogReader(log)).fingerprint == states[max(states)]


SEGMENT_BYTES = 2048


def random_log(seed: int, directory: Path) -> Path:
    """A random log of many segments."""
    return random_logs.random_log(seed, directory, branches=True, segment_bytes=SEGMENT_BYTES)
