"""`salvage`: of a damaged log a new one with all that is of use, which says what is missing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from events.errors import LogDamaged, LogExists
from events.log import LogReader, LogWriter
from events.log.segments import first_seq, segment_paths
from events.log.snapshots import snapshot_paths
from events.types import EventBatch, Gap
from kvcache.fold.state import CacheState
from kvcache.maintenance.salvage import salvage
from kvcache.maintenance.verify import verify
from kvcache.replay import Replayed, replay
from tests.support.logs.damaging import CHANGES, Change, Pair, log_with_snapshots, pair, unreadable
from tests.support.logs.kept import random_log, states_of
from tests.support.logs.logs import frame_offsets
from tests.support.logs.snapshots import snapshot as bytes_in
from tests.support.seeds import seeds

__all__ = ["pair"]

TOGETHER = 5
"""Seeds of one test of random damage: in some of them something is lost."""


@pytest.fixture(scope="module", params=[1, 3])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many segments and some snapshots. Not to be changed."""
    return log_with_snapshots(request.param, tmp_path_factory.mktemp("whole") / "log")


def has_gap(batch: EventBatch) -> bool:
    return any(isinstance(event, Gap) for event in batch.events)


def test_of_a_whole_log_it_makes_a_copy(pair: Pair, tmp_path: Path) -> None:
    """The same batches, the same end, and nothing lost, also where the beginning is not kept."""
    for log in pair:
        to = tmp_path / log.name
        done = salvage(log, to)
        assert (done.losses, done.damage, done.torn) == ([], [], False)
        mine, other = LogReader(to), LogReader(log)
        assert list(mine) == list(other)
        assert (mine.end.kind, mine.end.begins) == (other.end.kind, other.end.begins)
        assert done.batches == len(list(LogReader(log)))
        assert replay(to).fingerprint == replay(log).fingerprint
        assert not list(tmp_path.glob("*.salvaging"))


@pytest.mark.parametrize("first", seeds(range(0, 30, TOGETHER), quick=1))
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_salvaged_is_true_and_the_rest_is_reported(
    pair: Pair, tmp_path: Path, change: Change, first: int
) -> None:
    """The new log is whole, has the states that the old one had, and each batch is in it or told to be lost."""
    states, seqs, lost = states_of(pair.whole), {}, 0
    for log in pair:
        seqs[log] = [batch.seq for batch in LogReader(log)]
    for seed in range(first, first + TOGETHER):
        rng = random.Random(seed)
        source = rng.choice(pair)
        log = Path(shutil.copytree(source, tmp_path / f"{seed}"))
        for _ in range(rng.choice((1, 1, 3))):
            change(rng, log)
        before, to = bytes_in(log), tmp_path / f"{seed}.new"
        try:
            done = salvage(log, to)
        except LogDamaged:
            assert not to.exists()
            continue
        assert bytes_in(log) == before
        found, replayed, there = verify(to), Replayed(CacheState()), set[int]()
        assert (found.damage, found.problems, found.batches) == ([], [], done.batches)
        for batch in LogReader(to):
            replayed.fold(batch, verify=True)
            assert replayed.fingerprint == states[batch.seq]
            there.add(batch.seq)
        # That retention has not removed what is missing before a snapshot cannot be told.
        last, begins = max(states), -1 if found.end is None or found.end.begins is None else found.end.begins
        missing = {
            seq
            for each in done.losses
            for seq in range(each.first, (last if each.last is None else each.last) + 1)
        }
        torn = set(range(done.last_seq or 0, last + 1)) if not done.damage or done.torn else set()
        # Nor that the last file was there.
        ends = last if (log / segment_paths(source)[-1].name).exists() else first_seq(segment_paths(log)[-1])
        assert {seq for seq in seqs[source] if begins < seq <= ends} <= there | missing | torn
        lost += bool(done.losses)
        LogWriter(to, resume=True).close()
    assert lost or change.__name__ in ("swap", "copy", "repeat"), change


def test_no_more_is_lost_than_up_to_the_next_snapshot(whole: Path, tmp_path: Path) -> None:
    """Behind a damaged batch the log goes on with the snapshot behind its segment, and says what is missing."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    stands = snapshot_paths(log)[1]
    paths = segment_paths(log)
    at = sum(first_seq(path) <= first_seq(stands) for path in paths) - 1
    data = bytearray(paths[at].read_bytes())
    data[frame_offsets(bytes(data))[1] + 40] ^= 1
    paths[at].write_bytes(data)
    done = salvage(log, tmp_path / "new")
    [loss] = done.losses
    assert loss.last is not None
    assert (loss.first, loss.last) == (first_seq(paths[at]) + 1, first_seq(stands))
    assert loss.left_out == [*range(loss.first + 1, loss.last + 1)]
    batches = list(LogReader(tmp_path / "new"))
    gaps = [batch for batch in batches if has_gap(batch) and batch.seq == loss.last]
    assert [event for event in gaps[0].events if isinstance(event, Gap)][-1].first_seq == loss.first
    assert batches[-1] == list(LogReader(whole))[-1]


def test_a_segment_that_the_disk_does_not_give_back_is_lost_and_no_more(whole: Path, tmp_path: Path) -> None:
    """It is named, and what can be gone on with behind it is saved."""
    place = segment_paths(whole)[2]
    with unreadable(place):
        done = salvage(whole, tmp_path / "new")
        [damage], [loss] = done.damage, done.losses
    assert (damage.path, loss.first) == (place, first_seq(place))
    assert "cannot be read: Input/output error" in damage.reason
    batches = list(LogReader(tmp_path / "new"))
    assert batches[-1] == list(LogReader(whole))[-1]
    assert {batch.seq for batch in batches} >= set(range(loss.first))


@pytest.mark.parametrize("change", ["swap", "rename", "duplicate", "header", "first header", "foreign"])
def test_what_can_be_put_right_loses_nothing(whole: Path, tmp_path: Path, change: str) -> None:
    """Files under wrong names, twice, with a damaged header, and those of another log: all batches are there."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    paths = segment_paths(log)
    if change == "swap":
        data = paths[1].read_bytes()
        paths[1].write_bytes(paths[3].read_bytes())
        paths[3].write_bytes(data)
    elif change == "rename":
        paths[-1].rename(log / f"{10**9:020d}.kvlog")
    elif change == "duplicate":
        shutil.copy(paths[2], log / f"{10**9:020d}.kvlog")
    elif change == "foreign":
        shutil.copy(segment_paths(random_log(2, tmp_path / "other"))[0], log / f"{10**9:020d}.kvlog")
    else:
        place = paths[0 if change == "first header" else 2]
        header = bytearray(place.read_bytes())
        header[30] ^= 8
        place.write_bytes(header)
    with pytest.raises(LogDamaged):
        list(LogReader(log))
    assert salvage(log, tmp_path / "new").losses == []
    assert list(LogReader(tmp_path / "new")) == list(LogReader(whole))


def test_an_occupied_place_is_refused(whole: Path, tmp_path: Path) -> None:
    """Neither what is there nor what an interrupted go has left is touched."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there.salvaging").mkdir()
    for name in ("here", "there"):
        with pytest.raises(LogExists, match=r"remove it if it is left from an interrupted salvage"):
            salvage(whole, tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "there.salvaging"]
