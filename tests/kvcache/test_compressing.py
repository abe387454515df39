"""A log whose segments are compressed is the log that it was, whoever reads it."""

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
from structlog.testing import capture_logs

from events.errors import LogBusy, ZstdMissing
from events.log import LogReader, LogWriter, zstd
from events.log.durable import take_lock
from events.log.retention import Limits, LogParts
from events.log.segments import MAINTENANCE_LOCK_NAME, first_seq, segment_paths
from events.types import EventBatch
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.config import LogConfig
from kvcache.errors import InternalError
from kvcache.maintenance.compress import Compressed, compress
from kvcache.maintenance.prune import prune
from kvcache.maintenance.salvage import salvage
from kvcache.maintenance.verify import verify
from kvcache.replay import replay
from tests.oracles.crash_model import Recording, put
from tests.support.logs.damaging import compressed_copy, log_with_snapshots
from tests.support.logs.kept import is_log_of, names, random_log, states_of
from tests.support.logs.logs import batch, frames_of, segments
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


def test_the_frames_are_the_same(plain: Path, whole: Path) -> None:
    """Each segment but the last is compressed, has its name, and holds what it held."""
    assert names(plain) == names(whole)
    assert frames_of(plain) == frames_of(whole)
    assert [part.is_compressed for part in LogParts(whole).parts] == [True] * (len(segments(whole)) - 1) + [
        False
    ]


def test_every_reader_reads_the_same(plain: Path, whole: Path) -> None:
    """Batches from any start, the state after each, what `verify` finds, and how the log ends."""
    content = list(LogReader(plain))
    for start in range(0, len(content), 7):
        wanted = content[start].seq
        assert list(LogReader(whole, start=wanted)) == content[start:]
    assert states_of(plain) == states_of(whole)
    found, other = verify(plain), verify(whole)
    assert (found.batches, found.checkpoints, found.snapshots) == (
        other.batches,
        other.checkpoints,
        other.snapshots,
    )
    assert (other.damage, other.problems, other.unused) == ([], [], [])


def test_changing_what_is_kept_ends_the_same(plain: Path, whole: Path, tmp_path: Path) -> None:
    """Snapshots made of compressed segments are those of plain ones, and the same segments go."""
    left = []
    for log in (plain, whole):
        copy = Path(shutil.copytree(log, tmp_path / f"{log.parent.name}"))
        prune(copy, Limits(segments=4))
        left.append((names(copy), [path.read_bytes() for path in sorted(copy.glob("*.kvsnap"))]))
    assert left[0] == left[1]


def test_followers_read_on_while_segments_are_compressed(tmp_path: Path) -> None:
    """A follower gets each batch once, in order, whatever is compressed before, under and behind it."""
    log, read, stopping = tmp_path / "log", list[EventBatch](), threading.Event()
    follower = LogReader(log, follow=True, stop=stopping.is_set, poll_seconds=0.001)
    with LogWriter(log, fsync="never", segment_bytes=1000, compression="none") as writer:
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
        batches = iter(LogReader(log))
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
    expected, known, rng = frames_of(source), set[int](), random.Random(seed)
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
                assert frames_of(log) == expected
                assert [part.is_compressed for part in LogParts(log).parts] == [True, True, True, False]
                assert not list(log.glob("*.new"))
                shutil.rmtree(tmp_path / "left")
    print(f"{len(recording.steps)} steps, {len(known)} states")
    assert len(known) > 10


def test_what_does_not_read_back_equal_is_not_kept(plain: Path, tmp_path: Path) -> None:
    """A mistake in compressing would change nothing but the error."""
    log = Path(shutil.copytree(plain, tmp_path / "log"))
    before = {path: path.read_bytes() for path in segments(log)}
    add = zstd.Block.add

    def wrong(self: Any, header: Any, payload: bytes) -> None:
        add(self, header, bytes(payload[:-1]) + bytes([payload[-1] ^ 1]))

    with patch.object(zstd.Block, "add", wrong), pytest.raises(InternalError):
        compress(log)
    assert {path: path.read_bytes() for path in segments(log)} == before
    assert not list(log.glob("*.new"))


def test_one_at_a_time_and_never_the_last(plain: Path, tmp_path: Path) -> None:
    """The lock is that of whoever removes segments; a second go finds nothing to do."""
    log = Path(shutil.copytree(plain, tmp_path / "log"))
    last = segment_paths(log)[-1].read_bytes()
    lock = take_lock(log / MAINTENANCE_LOCK_NAME)
    with pytest.raises(LogBusy, match="try again when it is done"):
        compress(log)
    lock.release()
    first = compress(log)
    assert 0 < first.bytes < first.bytes_before
    assert compress(log) == Compressed()
    assert segment_paths(log)[-1].read_bytes() == last


def test_a_writer_goes_on_after_either(plain: Path, whole: Path, tmp_path: Path) -> None:
    """Whatever the segments before are, the next epoch is compressed, or is not, as it is told to be."""
    for source, compression in ((plain, "zstd"), (whole, "none"), (whole, "zstd")):
        log = Path(shutil.copytree(source, tmp_path / f"{source.parent.name} {compression}"))
        options: Any = {"compression": compression}
        with LogWriter(log, resume=True, **options) as writer:
            writer.append(batch(writer.next_seq))
        assert LogParts(log).parts[-1].is_compressed == (compression == "zstd")
        seqs = [each.seq for each in LogReader(source)]
        assert [each.seq for each in LogReader(log)] == [*seqs, writer.next_seq]


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
def test_without_zstd_an_engine_s_log_is_not_compressed(tmp_path: Path) -> None:
    """It is written all the same, and told once; not where nothing was to be compressed."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=2, primary_blocks=64)
    with capture_logs() as reported:
        KVCacheManager(config, log=tmp_path / "log").close()
    [warning] = reported
    assert (warning["event"], warning["log_level"]) == ("log_not_compressed", "warning")
    assert "pip install 'kvcache[zstd]'" in warning["reason"]
    assert replay(tmp_path / "log").last_seq is not None
    plain = config.model_copy(update={"log": LogConfig(compression="none")})
    with capture_logs() as reported:
        KVCacheManager(plain, log=tmp_path / "other").close()
    assert reported == []


def test_an_engine_s_log_is_compressed(tmp_path: Path) -> None:
    """By default, as it is written: prompts that come again take next to nothing, and it replays to the same state."""
    sizes, states = [], []
    for compression in ("zstd", "none"):
        log = tmp_path / compression
        settings: Any = {"fsync": "never", "compression": compression}
        config = KVCacheConfig(
            max_sequence_length=2048, tokens_per_block=16, primary_blocks=256, log=LogConfig(**settings)
        )
        manager = KVCacheManager(config, log=log)
        for number in range(30):
            prompt = [random.Random(at // 100).randrange(100_000) for at in range(1500)]
            manager.add_sequence(number, prompt)
            manager.store_context_blocks(number, len(prompt))
            manager.flush()
            manager.remove_sequence(number)
        manager.close()
        sizes.append(sum(path.stat().st_size for path in segments(log)))
        states.append(replay(log, verify=True).fingerprint)
    assert sizes[0] * 8 < sizes[1]
    assert states[0] == states[1]


def test_bytes_that_are_kept_are_those_on_the_disk(plain: Path, whole: Path, tmp_path: Path) -> None:
    """Of a compressed log more is kept in the same room, and no more than that."""
    limit, left = sum(path.stat().st_size for path in plain.glob("*.kv*")) // 2, []
    for log in (plain, whole):
        copy = Path(shutil.copytree(log, tmp_path / log.parent.name))
        prune(copy, Limits(bytes=limit))
        assert sum(path.stat().st_size for path in copy.glob("*.kv*")) <= limit
        left.append(first_seq(segment_paths(copy)[0]))
    assert left[1] < left[0]
