"""A log whose complete segments are compressed is the log that it was, whoever reads it."""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from events.errors import LogBeingKept, ZstdMissing
from events.log import LogReader, LogWriter
from events.log.durable import take_lock
from events.log.groups import group_of
from events.log.retention import Kept, Limits
from events.log.segments import KEEPER_NAME, Segment, compressed_path, first_seq, segment_paths
from events.log.snapshots import snapshot_paths
from events.types import EventBatch
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.config import LogConfig
from kvcache.errors import InternalError
from kvcache.keep import compress as compressing
from kvcache.keep import raw
from kvcache.keep.compress import Compressed, compress
from kvcache.keep.prune import prune
from kvcache.keep.repair import repair
from kvcache.keep.salvage import salvage
from kvcache.keep.verify import verify
from kvcache.replay import replay
from tests.oracles.crash_model import Recording, put
from tests.support.logs.damaging import compressed_copy, log_with_snapshots
from tests.support.logs.kept import is_log_of, names, random_log, states_of
from tests.support.logs.logs import batch, segments
from tests.support.seeds import seeds
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many segments and some snapshots. Not to be changed."""
    return log_with_snapshots(3, tmp_path_factory.mktemp("plain") / "log")


@pytest.fixture(scope="module")
def whole(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, compressed. Not to be changed."""
    return compressed_copy(plain, tmp_path_factory.mktemp("whole") / "log")


def content_of(path: Path) -> bytes:
    with Segment(path) as segment:
        return segment.data(0, segment.size())


def raw_content_of(path: Path) -> bytes:
    with raw.File(path) as file:
        return file.read(0, file.size())


def test_the_bytes_are_the_same(plain: Path, whole: Path) -> None:
    """Each segment but the last is compressed, and expands, by both readers, to what it was."""
    before = {first_seq(path): path.read_bytes() for path in segment_paths(plain)}
    assert [path.suffix for path in segment_paths(whole)] == [".kvlogz"] * (len(before) - 1) + [".kvlog"]
    for path in segment_paths(whole):
        assert content_of(path) == raw_content_of(path) == before[first_seq(path)]
        assert path.stat().st_mode & 0o777 == 0o600


def test_every_reader_reads_the_same(plain: Path, whole: Path, tmp_path: Path) -> None:
    """Batches from any start, the state after each, what `verify` finds, and how the log ends."""
    every = list(LogReader(plain))
    assert list(LogReader(whole)) == every
    for each in every[::7]:
        assert list(LogReader(whole, start=each.seq)) == [other for other in every if other.seq >= each.seq]
        mine, other = replay(whole, each.seq), replay(plain, each.seq)
        assert (mine.fingerprint, mine.snapshot_seq) == (other.fingerprint, other.snapshot_seq)
    assert states_of(whole) == states_of(plain)
    found, expected = verify(whole), verify(plain)
    assert (
        found.batches,
        found.events,
        found.checkpoints,
        found.snapshots,
        found.problems,
        found.damage,
    ) == (
        expected.batches,
        expected.events,
        expected.checkpoints,
        expected.snapshots,
        [],
        [],
    )
    reader = LogReader(whole)
    left = reader.bytes_left()
    assert left == sum(path.stat().st_size for path in segment_paths(plain))
    list(reader)
    assert (reader.bytes_left(), reader.bytes_read) == (0, left)


def test_changing_what_is_kept_ends_the_same(plain: Path, whole: Path, tmp_path: Path) -> None:
    """Snapshots made of compressed segments are those of plain ones, and the same segments go."""
    for limits in (Limits(segments=3), Limits(seconds=20e-9), Limits(segments=1)):
        logs = [Path(shutil.copytree(log, tmp_path / f"{limits}{log.parent.name}")) for log in (plain, whole)]
        for log in logs:
            for path in snapshot_paths(log):
                path.unlink()
            prune(log, limits)
        assert [path.read_bytes() for path in snapshot_paths(logs[0])] == [
            path.read_bytes() for path in snapshot_paths(logs[1])
        ]
        assert [path.stem for path in segment_paths(logs[0])] == [
            path.stem for path in segment_paths(logs[1])
        ]
        assert states_of(logs[0]) == states_of(logs[1])


def test_bytes_that_are_kept_are_those_on_the_disk(whole: Path, tmp_path: Path) -> None:
    """Of a compressed log more is kept in the same room, and no more than that."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    sizes = [path.stat().st_size for path in segment_paths(log)]
    assert [part.bytes for part in Kept(log).parts] == sizes
    assert all(part.whole == len(content_of(part.path)) for part in Kept(log).parts)
    prune(log, Limits(bytes=20_000))
    there = [*segment_paths(log), *snapshot_paths(log)]
    assert sum(path.stat().st_size for path in there) <= 20_000
    assert len(segment_paths(log)) > 1


def test_a_writer_goes_on_behind_compressed_segments(whole: Path, tmp_path: Path) -> None:
    """Also where the last segment turns out to be empty, so that the one before it is compressed."""
    before = list(LogReader(whole))
    for empty in (False, True):
        log = Path(shutil.copytree(whole, tmp_path / f"{empty}"))
        if empty:
            last = segment_paths(log)[-1]
            last.write_bytes(last.read_bytes()[:64])
            before = [each for each in before if each.seq < first_seq(last)]
        with LogWriter(log, resume=True) as writer:
            assert writer.next_seq == before[-1].seq + 1
        assert repair(log, dry_run=True).chain.seq >= before[-1].seq + 1
        assert list(LogReader(log))[: len(before)] == before
        assert verify(log).damage == []


def test_followers_read_on_while_segments_are_compressed(tmp_path: Path) -> None:
    """A follower gets each batch once, in order, whatever is compressed before, under and behind it."""
    log, read, stopping = tmp_path / "log", list[EventBatch](), threading.Event()
    follower = LogReader(log, follow=True, stop=stopping.is_set, poll_seconds=0.001)
    with LogWriter(log, fsync="never", segment_bytes=1000) as writer:
        writer.append(batch(0))
        writer.flush()
        thread = threading.Thread(target=lambda: read.extend(follower))
        thread.start()
        done = Compressed()
        for seq in range(1, 300):
            writer.append(batch(seq))
            if seq % 30 == 0:
                writer.flush()
                done.segments += compress(log).segments
        writer.flush()
        late = LogReader(log)
        batches = iter(late)
        assert next(batches).seq == 0
        compress(log)
        assert [each.seq for each in batches] == list(range(1, 300))
        wait_until(lambda: len(read) == 300, "the follower has not got all")
        stopping.set()
        thread.join()
    assert done.segments > 25
    assert read == [batch(seq) for seq in range(300)]


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are asked of /proc")
@pytest.mark.parametrize("seed", seeds([0, 2], quick=1))
def test_a_power_cut_anywhere_leaves_the_log(tmp_path: Path, seed: int) -> None:
    """Whatever it leaves of names and sectors: all states are what they were, and a second go ends as one does."""
    (tmp_path / "run").mkdir()
    source = random_log(seed, tmp_path / "run" / "source")
    for path in segment_paths(source)[4:]:
        path.unlink()
    states, recording = states_of(source), Recording(tmp_path / "run")
    with recording.running():
        compress(source)
    expected, known, rng = names(source), set[int](), random.Random(seed)
    with patch.object(os, "fsync"), patch.object(os, "fdatasync"):
        for disk, _ in recording.disks():
            for state in disk.states(5, rng):
                if (key := hash(frozenset(state.items()))) in known:
                    continue
                known.add(key)
                put(state, tmp_path / "left")
                log = tmp_path / "left" / source.relative_to(tmp_path / "run")
                is_log_of(log, states, 0)
                assert verify(log).damage == []
                compress(log)
                assert names(log) == expected
                assert not list(log.glob("*.new"))
                is_log_of(log, states, 0)
                shutil.rmtree(tmp_path / "left")
    print(f"{len(recording.steps)} steps, {len(known)} states")
    assert len(known) > 20


def test_of_a_segment_that_is_there_twice_the_plain_one_counts(plain: Path, tmp_path: Path) -> None:
    """What a crash leaves between the two names is read once; both go when the segment goes."""
    log = Path(shutil.copytree(plain, tmp_path / "log"))
    before = list(LogReader(log))
    compress(log)
    for path in segment_paths(plain)[:3]:
        shutil.copy(path, log)
        compressed_path(log / path.name).write_bytes(b"not the same")
    assert list(LogReader(log)) == before
    assert verify(log).damage == []
    assert [path.suffix for path in segment_paths(log)[:4]] == [".kvlog"] * 3 + [".kvlogz"]
    prune(log, Limits(segments=len(segment_paths(log)) - 2))
    assert not {path.stem for path in segments(log)} & {path.stem for path in segment_paths(plain)[:2]}
    again = Path(shutil.copytree(log, tmp_path / "again"))
    compress(again)
    assert len(list(again.glob("*.kvlog"))) == 1


def test_what_does_not_read_back_equal_is_not_kept(plain: Path, tmp_path: Path) -> None:
    """A mistake in compressing would change nothing but the error."""
    log = Path(shutil.copytree(plain, tmp_path / "log"))
    before = {path: path.read_bytes() for path in segments(log)}
    wrong = lambda data, begin, whole, pieces: group_of(data[:-1] + b"\xff", begin, whole, pieces)  # noqa: E731
    with patch.object(compressing, "group_of", wrong), pytest.raises(InternalError):
        compress(log)
    assert {path: path.read_bytes() for path in segments(log)} == before
    assert not list(log.glob("*.new"))


def test_one_at_a_time_and_never_the_last(plain: Path, tmp_path: Path) -> None:
    """The lock is that of whoever removes segments; a second go finds nothing to do."""
    log = Path(shutil.copytree(plain, tmp_path / "log"))
    lock = take_lock(log / KEEPER_NAME)
    with pytest.raises(LogBeingKept, match="try again when it is done"):
        compress(log)
    lock.give_back()
    first = compress(log)
    assert first.bytes < first.whole
    assert compress(log) == Compressed()
    assert segment_paths(log)[-1].suffix == ".kvlog"


@pytest.fixture
def without_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_zstd")
@pytest.mark.parametrize(
    "use",
    [
        lambda log: list(LogReader(log)),
        lambda log: replay(log, verify=True),
        verify,
        compress,
        lambda log: prune(log, Limits(segments=2)),
        lambda log: salvage(log, log.with_name("new")),
    ],
)
def test_without_zstd_all_that_needs_it_says_so(
    whole: Path, tmp_path: Path, use: Callable[[Path], Any]
) -> None:
    """It is no damage: the error names the extra. To go on writing needs none."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    LogWriter(log, resume=True).close()
    with pytest.raises(ZstdMissing, match=r"pip install 'kvcache\[zstd\]'"):
        use(log)


@pytest.mark.usefixtures("without_zstd")
def test_without_zstd_the_setting_is_refused_at_once(tmp_path: Path) -> None:
    """Not later, by a process that nobody listens to; a log that is not compressed needs no zstd."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=2, primary_blocks=64)
    with pytest.raises(ZstdMissing, match="zstd"):
        KVCacheManager(config.model_copy(update={"log": LogConfig(compress=True)}), log=tmp_path / "log")
    KVCacheManager(config, log=tmp_path / "other").close()
    assert replay(tmp_path / "other").last_seq is not None


def test_an_engine_s_log_is_compressed(tmp_path: Path) -> None:
    """By the setting alone: nothing is removed, no snapshot is made, and the log replays to the engine's state."""
    log = tmp_path / "log"
    config = KVCacheConfig(
        max_sequence_length=64,
        tokens_per_block=2,
        primary_blocks=64,
        log=LogConfig(fsync="never", compress=True, segment_bytes=20_000),
    )
    manager = KVCacheManager(config, log=log)
    for number in range(300):
        manager.add_sequence(number, [100 + number] * 50)
        manager.store_context_blocks(number, 50)
        manager.remove_sequence(number)
        manager.flush()
    manager.close()
    wait_until(
        lambda: all(path.suffix == ".kvlogz" for path in segment_paths(log)[:-1]), "it is not compressed"
    )
    assert len(segment_paths(log)) > 5
    assert first_seq(segment_paths(log)[0]) == 0
    assert snapshot_paths(log) == []
    assert replay(log, verify=True).checkpoints_failed == []
