"""`verify` reads with code of its own, and finds wrong what the usual reader finds wrong, at the same place."""

from __future__ import annotations

import ast
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
from events.log.segments import first_seq, segment_paths
from events.log.snapshots import snapshot_paths
from events.types import EventBatch
from kvcache.keep import raw
from kvcache.keep.scan import Damage, Found, Scan, State
from kvcache.keep.verify import verify
from tests.support.logs.damaging import CHANGES, Change, Pair, log_with_snapshots, pair, unreadable
from tests.support.logs.kept import random_log
from tests.support.logs.logs import batch, frame_offsets, write_log
from tests.support.places import ROOT
from tests.support.seeds import seeds

__all__ = ["pair"]

READERS = ("raw.py", "raw_snapshot.py", "scan.py", "losses.py")
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


def test_shares_no_code_with_the_writer() -> None:
    """Of `events.log` nothing is imported by what parses, nor the codec that encodes."""
    for name in READERS:
        tree = ast.parse((ROOT / "kvcache" / "keep" / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            modules = [f"{node.module}.{node.names[0].name}"] if isinstance(node, ast.ImportFrom) else []
            modules += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert not module.startswith(("events.log", "events.codec")), f"{name} imports {module}"
                ours = module.split(".")[0] == "kvcache"
                assert not ours or f"{module.split('.')[2]}.py" in READERS, f"{name} imports {module}"


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
    """Whatever is done to the files: both read the same up to the same place, or to the same end."""
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
        read = list[EventBatch]()
        for item in Scan(log):
            found_batch = item.snapshot.batch if isinstance(item, State) else getattr(item, "batch", None)
            read += [found_batch] if found_batch is not None else []
        assert read[: len(batches)] == batches
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
    first, behind = first_seq(place), first_seq(paths[paths.index(place) + 1])
    there = [batch.seq for batch in LogReader(whole)]
    assert found.batches == sum(not first + max(frames, 0) <= seq < behind for seq in there)


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
    looked_at, payload = [0], raw.File.payload

    def counted(file: raw.File, offset: int, frame: raw.Frame) -> bytes | None:
        looked_at[0] += frame.bytes
        return payload(file, offset, frame)

    with patch.object(raw.File, "payload", counted):
        assert [item for item in Scan(log) if isinstance(item, Damage)]
    assert looked_at[0] < 20 * len(data)


def test_a_snapshot_that_the_disk_does_not_give_back(whole: Path) -> None:
    """It is named, and the log is read."""
    snapshot = snapshot_paths(whole)[1]
    with unreadable(snapshot):
        assert verify(whole).problems == [f"{snapshot} cannot be read: Input/output error"]


def test_beside_a_writer(tmp_path: Path) -> None:
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
            scan = Scan(tmp_path)
            assert [item for item in scan if not isinstance(item, Found)] == []
            read.append(scan.seq)
        thread.join()
    assert read == sorted(read)
    assert sum(1 for _ in Scan(tmp_path)) == 601


def test_what_a_writer_adds_at_the_last_moment(tmp_path: Path) -> None:
    """A segment that grows, and gets a successor, just when its end was found, is read on."""
    paths = segment_paths(write_log(tmp_path, [batch(seq) for seq in range(4)], segment_bytes=600))
    whole = {path: path.read_bytes() for path in paths[:2]}
    size = raw.File.size
    paths[0].write_bytes(whole[paths[0]][: frame_offsets(whole[paths[0]])[-2]])
    for path in paths[1:]:
        path.unlink()

    def grows(file: raw.File) -> int:
        found = size(file)
        if scan.seq == int(paths[1].stem) - 1:
            for path, data in whole.items():
                path.write_bytes(data)
        return found

    scan = Scan(tmp_path)
    with patch.object(raw.File, "size", grows):
        found = list(scan)
    assert [item for item in found if not isinstance(item, Found)] == []
