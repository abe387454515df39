"""Damage to compressed segments: it is found, told, and loses no more than it must.

That what is true of damaged plain logs is true of these, too, is in `test_verifying` and `test_salvaging`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from events.errors import LogDamaged, LogTooNew
from events.log import LogReader, LogWriter, groups
from events.log.groups import GROUP_HEADER_BYTES, parse_group_header
from events.log.retention import Limits
from events.log.segments import compressed_path, segment_paths
from kvcache.keep import compress as compressing
from kvcache.keep import raw
from kvcache.keep.compress import compress
from kvcache.keep.prune import prune
from kvcache.keep.scan import Damage, Found, Scan
from kvcache.keep.verify import verify
from tests.support.logs.damaging import compressed_copy, log_with_snapshots
from tests.support.logs.logs import batch, write_log


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many segments and some snapshots. Not to be changed."""
    return log_with_snapshots(3, tmp_path_factory.mktemp("plain") / "log")


@pytest.fixture(scope="module")
def whole(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, compressed. Not to be changed."""
    return compressed_copy(plain, tmp_path_factory.mktemp("whole") / "log")


def groups_of(path: Path) -> list[tuple[int, groups.GroupHeader]]:
    """Each group of a compressed segment that is whole: where it begins, and its header."""
    data, at, found = path.read_bytes(), 0, list[tuple[int, groups.GroupHeader]]()
    while at < len(data):
        header = parse_group_header(data[at : at + GROUP_HEADER_BYTES])
        assert header is not None
        found.append((at, header))
        at += GROUP_HEADER_BYTES + header.stored
    return found


def test_nothing_of_a_compressed_segment_is_an_interrupted_write(whole: Path, tmp_path: Path) -> None:
    """Where a compressed segment is the last, and damaged, a writer refuses, and cuts nothing off."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    segment_paths(log)[-1].unlink()
    path = segment_paths(log)[-1]
    data = path.read_bytes()
    for changed in (data[:-1], data[:-200], data[:40], b"", data[:150] + b"\0" + data[151:]):
        path.write_bytes(changed)
        with pytest.raises(LogDamaged):
            LogWriter(log, resume=True)
        with pytest.raises(LogDamaged):
            list(LogReader(log))
        assert verify(log).damage
        assert path.read_bytes() == changed


def test_a_damaged_group_loses_its_frames_and_no_more(tmp_path: Path) -> None:
    """With a byte wrong anywhere, all frames outside its group are read, and what is lost is told."""
    with patch.object(compressing, "_GROUP_BYTES", 700):
        log = write_log(tmp_path / "log", [batch(seq) for seq in range(60)], segment_bytes=4000)
        compress(log)
    path = segment_paths(log)[0]
    data, header_bytes = path.read_bytes(), GROUP_HEADER_BYTES
    frames = {
        item.frame.seq: item.offset for item in Scan(log) if isinstance(item, Found) and item.path == path
    }
    found = groups_of(path)
    assert len(found) > 5
    for at, header in found:
        inside = {
            seq for seq, offset in frames.items() if header.begin <= offset < header.begin + header.size
        }
        for place in {
            at,
            at + 9,
            at + header_bytes - 1,
            at + header_bytes,
            at + header_bytes + header.stored - 1,
        }:
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            items = list(Scan(log))
            read = {item.frame.seq for item in items if isinstance(item, Found)}
            assert set(range(61)) - read == inside
            assert sum(isinstance(item, Damage) for item in items) == 1
            with pytest.raises(LogDamaged, match="not intact"):
                list(LogReader(log))
    path.write_bytes(data)
    assert not [item for item in Scan(log) if not isinstance(item, Found)]


def test_a_hole_of_any_size_is_passed_over(whole: Path, tmp_path: Path) -> None:
    """A segment that claims to be enormous is damaged behind what it has; nobody reads what is not there."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    path = segment_paths(log)[0]
    data, claimed = path.read_bytes(), b""
    for at, header in groups_of(path):
        body = data[at + GROUP_HEADER_BYTES :][: header.stored]
        claimed += header._replace(whole=1 << 50).pack() + body
    path.write_bytes(claimed)
    with pytest.raises(LogDamaged, match="a group of compressed frames is not intact"):
        list(LogReader(log))
    read, calls = raw.File.read, [0]

    def counted(file: raw.File, offset: int, count: int) -> bytes:
        calls[0] += 1
        return read(file, offset, count)

    with patch.object(raw.File, "read", counted):
        found = verify(log)
    assert [each.path for each in found.damage] == [path]
    assert found.batches == sum(1 for _ in LogReader(whole))
    assert calls[0] < 20 * found.batches


def test_damaged_segments_are_left_as_they_are(plain: Path, tmp_path: Path) -> None:
    """What is damaged is not made over, and is counted; the rest is compressed."""
    log = Path(shutil.copytree(plain, tmp_path / "log"))
    path = segment_paths(log)[1]
    data = path.read_bytes()
    for changed in (data[:300] + b"\0\0\0\0" + data[304:], data[:-5], b"\0" * len(data), data[:40], b""):
        path.write_bytes(changed)
        copy = Path(shutil.copytree(log, tmp_path / "copy"))
        done = compress(copy)
        assert (done.left, done.segments) == (1, len(segment_paths(log)) - 2)
        assert (copy / path.name).read_bytes() == changed
        assert not compressed_path(copy / path.name).exists()
        shutil.rmtree(copy)


def test_newer_groups_are_refused(whole: Path, tmp_path: Path) -> None:
    """A version that is not known is told as that, and not as damage."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    path = segment_paths(log)[1]
    data = path.read_bytes()
    at, header = groups_of(path)[1]
    newer = header._replace(version=2).pack()
    path.write_bytes(data[:at] + newer + data[at + len(newer) :])
    for read in (
        lambda: list(LogReader(log)),
        lambda: verify(log),
        lambda: prune(log, Limits(segments=1)),
    ):
        with pytest.raises(LogTooNew, match="version 2"):
            read()
