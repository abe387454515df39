"""What is kept of a log: as much as the limits allow, always a log, wherever keeping it so is interrupted."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from events.errors import LogBusy, LogDamaged
from events.log import LogReader, LogWriter, durable, leases
from events.log.durable import Lock, take_lock
from events.log.leases import Lease, leased
from events.log.retention import Limits, LogParts
from events.log.segments import MAINTENANCE_LOCK_NAME, first_seq, segment_paths
from events.log.snapshots import snapshot_paths, snapshots
from events.types import Gap
from kvcache.maintenance import prune as keep_prune
from kvcache.maintenance.prune import make_snapshot, prune
from kvcache.replay import BeforeLogStart, fold, replay
from tests.oracles.crash_model import Recording, put
from tests.support.logs.kept import is_log_of, names, random_log, states_of
from tests.support.seeds import seeds

NO_LIMITS = Limits()


@pytest.mark.parametrize("seed", seeds(range(4), quick=1))
@pytest.mark.parametrize(
    "limits", [Limits(segments=3), Limits(bytes=20_000), Limits(seconds=9e-9), Limits(segments=1)]
)
def test_keeps_what_the_limits_allow(tmp_path: Path, seed: int, limits: Limits) -> None:
    """The oldest segment stands behind a snapshot, older ones are gone, and every state since is what it was."""
    log = random_log(seed, tmp_path)
    states, before = states_of(log), LogParts(log).parts
    pruned = prune(log, limits)
    kept = LogParts(log)
    assert pruned.removed.segments == len(before) - len(kept.parts) > 0
    assert first_seq(snapshot_paths(log)[0]) < kept.parts[0].first
    begins = next(snapshots(log)).seq
    is_log_of(log, states, begins)
    if limits.segments is not None:
        assert len(kept.parts) == limits.segments
    if limits.seconds is not None:
        oldest, second, newest = (kept.parts[at].ts for at in (0, 1, -1))
        assert newest - second <= 9
        assert before[-1].ts - before[-len(kept.parts)].ts > 9 or oldest == second
    if limits.bytes is not None and len(kept.parts) > 1:
        assert (
            sum(path.stat().st_size for path in [*segment_paths(log), *snapshot_paths(log)]) <= limits.bytes
        )
    with pytest.raises(BeforeLogStart):
        replay(log, begins - 1)
    assert prune(log, limits).removed.segments == 0


def test_without_limits_there_are_snapshots_and_all_the_rest(tmp_path: Path) -> None:
    """Without limits nothing is removed; snapshots are no more than the log, and none is made twice."""
    log = random_log(1, tmp_path)
    segments = segment_paths(log)
    assert prune(log, NO_LIMITS).made
    assert not prune(log, NO_LIMITS).made
    assert segment_paths(log) == segments


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are asked of /proc")
@pytest.mark.parametrize("seed", seeds(range(2), quick=1))
def test_a_power_cut_anywhere_leaves_a_log(tmp_path: Path, seed: int) -> None:
    """Whatever it leaves of names and sectors: all that was to be kept is there, and a second go ends as one does."""
    whole = random_log(seed, tmp_path / "whole")
    make_snapshot(whole, first_seq(segment_paths(whole)[2]))
    states, limits = states_of(whole), Limits(segments=2)
    (tmp_path / "run").mkdir()
    pruned = Path(shutil.copytree(whole, tmp_path / "run" / "log"))
    recording = Recording(tmp_path / "run")
    with recording.running():
        prune(pruned, limits)
    expected, intended = names(pruned), next(snapshots(pruned)).seq
    known, rng = set[int](), random.Random(seed)
    with patch.object(os, "fsync"), patch.object(os, "fdatasync"):
        for disk, _ in recording.disks():
            for state in disk.states(5, rng):
                key = hash(frozenset(state.items()))
                if key in known:
                    continue
                known.add(key)
                put(state, tmp_path / "left")
                log = tmp_path / "left" / "log"
                is_log_of(log, states, intended)
                LogWriter(log, resume=True).close()
                prune(log, limits)
                assert names(log) == expected
                assert not list(log.glob("*.new"))
                shutil.rmtree(tmp_path / "left")
    print(f"{len(recording.steps)} steps, {len(known)} states")
    assert len(known) > 20


@pytest.mark.parametrize("first", seeds(range(12), quick=1))
def test_damaged_snapshots_are_passed_over(tmp_path: Path, first: int) -> None:
    """Wherever a snapshot is damaged, an older one or the log's beginning serves, and nothing is removed for it."""
    log = random_log(0, tmp_path)
    states, paths = states_of(log), segment_paths(log)
    for path in paths[2:4]:
        make_snapshot(log, first_seq(path))
    newest = snapshot_paths(log)[-1]
    content = newest.read_bytes()
    for offset in [*range(first, 200, 12), *range(200 + first, len(content), len(content) // 8)]:
        newest.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        assert replay(log).snapshot_seq == first_seq(snapshot_paths(log)[0])
        newest.write_bytes(content[:offset])
        assert replay(log).fingerprint == states[max(states)]
    for size in (0, 64):
        snapshot_paths(log)[0].write_bytes(content[:size])
    assert replay(log).snapshot_seq is None
    assert LogParts(log).remove(first_seq(newest)).segments == 0
    assert segment_paths(log) == paths


def test_the_next_snapshot_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    """Where the snapshot before the oldest segment is damaged, a log begins with the next one."""
    log = random_log(2, tmp_path)
    states, paths = states_of(log), segment_paths(log)
    made = [make_snapshot(log, first_seq(path)) for path in paths[2:5]]
    LogParts(log).remove(first_seq(paths[2]))
    assert segment_paths(log) == paths[2:]
    assert made[0] is not None
    made[0].path.write_bytes(made[0].path.read_bytes()[:-1])
    assert made[1] is not None
    is_log_of(log, states, made[1].seq)
    for path in snapshot_paths(log):
        path.unlink()
    with pytest.raises(LogDamaged, match="segment 0 is missing"):
        replay(log)


def test_snapshots_of_another_log_are_passed_over(tmp_path: Path) -> None:
    """A snapshot that the segments do not continue, as one copied from elsewhere, is not read."""
    one, other = random_log(1, tmp_path / "one"), random_log(4, tmp_path / "other")
    for log in (one, other):
        make_snapshot(log, first_seq(segment_paths(log)[2]))
    states = states_of(one)
    for path in snapshot_paths(other):
        shutil.copy(path, one)
    for seq in states:
        assert replay(one, seq).fingerprint == states[seq]


def test_a_hole_is_damage_all_the_same(tmp_path: Path) -> None:
    """A segment that is missing between others was not removed by retention, whatever snapshots there are."""
    log = random_log(3, tmp_path)
    for path in segment_paths(log)[1:]:
        make_snapshot(log, first_seq(path))
    segment_paths(log)[2].unlink()
    with pytest.raises(LogDamaged, match="segment 2 is missing"):
        list(LogReader(log))


def test_followers_keep_what_they_need_up_to_twice_the_limits(tmp_path: Path) -> None:
    """A lease holds segments beyond the limits; a follower that is later still gets a gap and the state."""
    log = random_log(5, tmp_path)
    states, paths = states_of(log), segment_paths(log)
    follower = LogReader(log, follow=True, stop=lambda: True)
    batches = iter(follower)
    read = [next(batches).seq for _ in range(3)]
    held = leased(log)
    assert held is not None
    assert held <= read[-1]
    prune(log, Limits(segments=len(paths) // 2 + 1))
    assert segment_paths(log) == [path for path in paths if first_seq(path) >= held]
    prune(log, Limits(segments=3))
    assert len(segment_paths(log)) == 6
    rest = list(batches)
    at = next(
        index for index, batch in enumerate(rest) if any(isinstance(each, Gap) for each in batch.events)
    )
    gap = next(each for each in rest[at].events if isinstance(each, Gap))
    assert gap.first_seq == ([*read, *(batch.seq for batch in rest[:at])][-1]) + 1
    assert gap.last_seq == rest[at].seq == next(snapshots(log)).seq
    assert fold(rest[at:]).fingerprint == states[max(states)]
    assert leased(log) is None
    assert not list((log / "leases").iterdir())
    prune(log, Limits(segments=3))
    assert len(segment_paths(log)) == 3


@pytest.mark.parametrize("seed", [5, 7])
def test_reading_from_a_batch_that_is_gone_begins_with_a_gap(tmp_path: Path, seed: int) -> None:
    """Who wants to go on where it stopped, and comes too late, is told what it has missed, and then the state."""
    log = random_log(seed, tmp_path)  # that of 7 has no tokens
    states = states_of(log)
    prune(log, Limits(segments=2))
    first, *_ = LogReader(log, start=7)
    assert [event for event in first.events if isinstance(event, Gap)] == [
        Gap(first_seq=7, last_seq=first.seq, reason="removed from the log by its retention")
    ]
    assert fold([first]).fingerprint == states[first.seq]
    assert next(iter(LogReader(log, start=first.seq + 1))).seq == first.seq + 1


@contextmanager
def locks_taken() -> Iterator[list[Lock]]:
    """The locks that leases take meanwhile."""
    taken = list[Lock]()

    def take(path: Path) -> Lock:
        taken.append(take_lock(path))
        return taken[-1]

    with patch.object(leases, "take_lock", take):
        yield taken


def test_leases_of_readers_that_are_gone_hold_nothing(tmp_path: Path) -> None:
    """A lease lasts as long as its reader; one that cannot be written is none."""
    Lease(tmp_path / "missing").hold(3)
    with locks_taken() as locks:
        lease = Lease(tmp_path)
        lease.hold(12)
    lease.hold(7)
    assert leased(tmp_path) == 7
    locks[0].release()  # as the system does for a process that dies
    assert leased(tmp_path) is None
    assert not list((tmp_path / "leases").iterdir())


def test_one_at_a_time(tmp_path: Path) -> None:
    """Two processes do not keep one log."""
    log = random_log(1, tmp_path)
    lock = take_lock(log / MAINTENANCE_LOCK_NAME)
    with pytest.raises(LogBusy, match="try again"):
        prune(log, NO_LIMITS)
    lock.release()


def test_nothing_is_kept_of_what_is_not_on_disk(tmp_path: Path) -> None:
    """Segments that cannot be forced to the disk get no snapshot: a power cut could leave a log that ends before it."""
    log = random_log(1, tmp_path)
    with (
        patch.object(keep_prune, "sync_file", side_effect=OSError(errno.EIO, "bad")),
        pytest.raises(OSError),
    ):
        prune(log, NO_LIMITS)
    assert snapshot_paths(log) == []
    with patch.object(keep_prune, "sync_file") as sync:
        prune(log, NO_LIMITS)
    assert sync.call_count == len(segment_paths(log)) - 1


def test_a_lease_that_cannot_be_removed_holds_nothing(tmp_path: Path) -> None:
    """As one of another user whose reader is gone."""
    with locks_taken() as locks:
        lease = Lease(tmp_path)
        lease.hold(7)
    locks[0].release()
    with patch.object(Path, "unlink", side_effect=PermissionError):
        assert leased(tmp_path) is None


def test_a_disk_that_refuses_a_snapshot_loses_nothing(tmp_path: Path) -> None:
    """Without a snapshot no segment goes."""
    log = random_log(1, tmp_path)
    before = names(log)
    with (
        patch.object(durable, "write_all", side_effect=OSError(errno.ENOSPC, "full")),
        pytest.raises(OSError),
    ):
        prune(log, Limits(segments=1))
    assert names(log) == before
