"""`verify` finds what is wrong with a log, all of it, as an oracle does that reads with code of its own."""

from __future__ import annotations

import ast
import os
import random
import shutil
import struct
import threading
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import pytest

from events.errors import LogDamaged
from events.log import LogEnd, LogReader, LogWriter
from events.log.segments import Segment, first_seq, segment_paths
from events.log.snapshots import snapshot_paths
from events.types import EventBatch
from kvcache.maintenance.verify import verify
from tests.oracles import log_files as raw
from tests.oracles.log_scan import Damage, Found, Scan, State
from tests.support.logs.damaging import CHANGES, Change, Pair, log_with_snapshots, pair, unreadable
from tests.support.logs.kept import random_log
from tests.support.logs.logs import batch, frame_offsets, write_log
from tests.support.places import ROOT
from tests.support.seeds import seeds
from tests.support.sources import imported, parsed_file

__all__ = ["pair"]

ORACLE = ("log_files.py", "log_scan.py")
TOGETHER = 5
"""Seeds of one test of random damage: in some of them it is found."""


@pytest.fixture(scope="module", params=[1, 3])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many segments and some snapshots. Not to be changed."""
    return log_with_snapshots(request.param, tmp_path_factory.mktemp("whole") / "log")


def by_reader(log: Path) -> tuple[list[EventBatch], LogEnd | tuple[Path, int]]:
    """What the usual reader reads, and where it ends or stops."""
    reader, batches = LogReader(log), list[EventBatch]()
    try:
        batches.extend(reader)
    except LogDamaged as error:
        return batches, (error.path, error.offset)
    return batches, reader.end


def by_tolerant_reader(log: Path) -> tuple[list[EventBatch], list[LogDamaged]]:
    """What is read, as `verify` and `salvage` do, and what is said to be damaged."""
    damage = list[LogDamaged]()
    return list(LogReader(log, damaged=damage.append)), damage


def by_oracle(log: Path) -> tuple[list[EventBatch], list[tuple[Path, int]]]:
    """What the oracle reads, and all places where it finds damage."""
    read, damage = list[EventBatch](), list[tuple[Path, int]]()
    for item in Scan(log):
        match item:
            case State():
                read.append(item.snapshot.batch)
            case Found(batch=EventBatch() as whole):
                read.append(whole)
            case Damage():
                damage.append((item.path, item.offset))
    return read, damage


def test_the_oracle_shares_no_code_with_the_log() -> None:
    """Of `events.log` nothing is imported by it, nor the codec, nor anything of the cache."""
    for name in ORACLE:
        for module in imported(ast.walk(parsed_file(ROOT / "tests" / "oracles" / name))):
            assert not module.startswith(("events.log", "events.codec", "kvcache")), (
                f"{name} imports {module}"
            )


def test_whole_logs(pair: Pair) -> None:
    """Nothing is wrong, every batch is read, and the end is the same."""
    for log in pair:
        found = verify(log)
        batches, end = by_reader(log)
        assert (found.damage, found.problems, found.unused) == ([], [], [])
        assert (found.batches, found.end) == (len(batches), end)
        assert found.snapshots == len(snapshot_paths(log))


@pytest.mark.parametrize("first", seeds(range(0, 40, TOGETHER), quick=1))
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_agrees_with_the_reader(pair: Pair, tmp_path: Path, change: Change, first: int) -> None:
    """Whatever is done to the files, all read the same up to the same place; `verify` and the oracle also behind it."""
    damaged = 0
    for seed in range(first, first + TOGETHER):
        rng = random.Random(seed)
        log = Path(shutil.copytree(rng.choice(pair), tmp_path / f"{seed}"))
        for _ in range(rng.choice((1, 1, 2))):
            change(rng, log)
        batches, stopped = by_reader(log)
        found = verify(log)
        damaged += bool(found.damage)
        if found.damage:
            assert (found.damage[0].path, found.damage[0].offset) == stopped, seed
        else:
            assert found.end == stopped, seed
        read, damage = by_oracle(log)
        assert read[: len(batches)] == batches
        assert [(each.path, each.offset) for each in found.damage] == damage, seed
        assert found.batches == len(read), seed
    assert damaged > TOGETHER // 4


def test_other_logs_segment(whole: Path, tmp_path: Path) -> None:
    """A segment of another log is found, and what is behind it is read."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    other = random_log(2, tmp_path / "other")
    place = segment_paths(log)[1]
    own = segment_paths(other)[1]
    shutil.copy(own, log)
    if own.name != place.name:
        place.unlink()
    damage = verify(log).damage
    assert (damage[0].path, damage[0].offset) == by_reader(log)[1]
    assert verify(log).batches > len(by_reader(log)[0])


@pytest.mark.parametrize("frames", [-1, 0, 1])
def test_a_segment_that_the_disk_does_not_give_back(whole: Path, frames: int) -> None:
    """It is named, with the system's reason; what stands before and behind what cannot be read is read."""
    paths = segment_paths(whole)
    place = next(path for path in paths[2:-1] if len(frame_offsets(path.read_bytes())) > 2)
    begin = 0 if frames < 0 else frame_offsets(place.read_bytes())[frames]
    with unreadable(place, begin):
        found = verify(whole)
        with pytest.raises(OSError, match=place.name):
            list(LogReader(whole))
    [damage] = found.damage
    assert damage.path == place
    assert damage.reason == "it cannot be read: Input/output error"
    assert found.problems == []
    first, after = first_seq(place), first_seq(paths[paths.index(place) + 1])
    there = [batch.seq for batch in LogReader(whole)]
    assert found.batches == sum(not first + max(frames, 0) <= seq < after for seq in there)


def test_many_headers_for_the_same_bytes_end(tmp_path: Path) -> None:
    """Behind damage no more payloads are looked at than together have some times the bytes of their segment."""
    log = write_log(tmp_path, [batch(seq) for seq in range(4)])
    [place] = segment_paths(log)
    data = place.read_bytes()
    with raw.File(place) as file:
        header = file.header(raw.SEGMENT_MAGIC)
    assert header is not None
    count = 500
    for at in range(count):
        size = (count - 1 - at) * raw.FRAME_HEADER_BYTES
        packed = struct.pack("<4sIQ4I", b"\xc1\x4b\x56\x46", size, 9, 1, 4, 0, 0)
        data += packed + struct.pack("<I", crc32(packed, header.seed))
    place.write_bytes(data)
    looked_at, pread = [0], os.pread

    def counted(descriptor: int, count: int, offset: int) -> bytes:
        found = pread(descriptor, count, offset)
        looked_at[0] += len(found)
        return found

    with patch.object(os, "pread", counted):
        assert by_tolerant_reader(log)[1]
    assert looked_at[0] < 20 * len(data)


def test_a_snapshot_that_the_disk_does_not_give_back(whole: Path) -> None:
    """It is named, and the log is read."""
    snapshot = snapshot_paths(whole)[1]
    with unreadable(snapshot):
        assert verify(whole).problems == [f"{snapshot} cannot be read: Input/output error"]


def test_with_a_writer_at_work(tmp_path: Path) -> None:
    """While a log grows, segment by segment, nothing in it is called damaged."""
    with LogWriter(tmp_path, fsync="never", segment_bytes=2000) as writer:
        done = threading.Event()

        def write() -> None:
            for seq in range(600):
                writer.append(batch(seq))
            writer.flush()
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        read = list[int]()
        while not done.is_set():
            batches, damage = by_tolerant_reader(tmp_path)
            assert damage == []
            read.append(len(batches))
        thread.join()
    assert read == sorted(read)
    assert len(by_tolerant_reader(tmp_path)[0]) == 600


def test_what_a_writer_adds_at_the_last_moment(tmp_path: Path) -> None:
    """A segment that grows, and gets a successor, just when its end was found, is read on."""
    paths = segment_paths(write_log(tmp_path, [batch(seq) for seq in range(4)], segment_bytes=600))
    whole = {path: path.read_bytes() for path in paths[:2]}
    paths[0].write_bytes(whole[paths[0]][: frame_offsets(whole[paths[0]])[-2]])
    for path in paths[1:]:
        path.unlink()
    renewed = Segment.renewed

    def grows(segment: Segment) -> bool:
        for path, data in whole.items():
            path.write_bytes(data)
        return renewed(segment)

    with patch.object(Segment, "renewed", grows):
        batches, damage = by_tolerant_reader(tmp_path)
    assert damage == []
    assert batches[: int(paths[1].stem) + 1] == [batch(seq) for seq in range(int(paths[1].stem) + 1)]
