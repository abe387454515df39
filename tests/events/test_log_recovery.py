"""Continuing a log: after a close, a crash, a torn tail, and not after damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from events import EpochStarted, LogDamaged, LogTooNew
from events.log import LogWriter
from events.log.recovery import recover
from tests.oracles.packer import segment_header
from tests.support.logs.logs import (
    LOG_ID,
    batch,
    batches,
    form,
    frame_offsets,
    read_log,
    segments,
    write_log,
    write_synced,
)
from tests.support.logs.snapshots import snapshot
from tests.support.seeds import seeds

__all__ = ["form"]


def test_first_epoch(tmp_path: Path) -> None:
    """A new log begins with epoch 0 and batch 0, after nothing."""
    with LogWriter(tmp_path, log_id=LOG_ID, software="engine 3", record_tokens=False) as log:
        assert log.epoch_started == EpochStarted(0, LOG_ID, None, None, True, False, "engine 3")
        assert log.next_seq == 0


def test_continues_after_a_close(tmp_path: Path) -> None:
    """Numbers go on, the epoch rises, in a segment of its own, and the first epoch is known to be whole."""
    write_log(tmp_path, batches(3))
    for epoch in (1, 2):
        with LogWriter(tmp_path, resume=True) as log:
            assert log.next_seq == 2 + epoch
            assert log.epoch_started == EpochStarted(
                epoch, LOG_ID, epoch - 1, 1 + epoch, True, True, "kvcache"
            )
            log.append(batch(log.next_seq))
    content, end = read_log(tmp_path)
    assert content == batches(5)
    assert (end.kind, end.last_seq) == ("clean", 4)
    assert [path.name for path in segments(tmp_path)] == [f"{seq:020d}.kvlog" for seq in (0, 3, 4)]
    assert not (tmp_path / "quarantine").exists()


def test_epochs_without_batches_leave_no_trace(tmp_path: Path) -> None:
    """Opening and closing without writing changes no file."""
    write_log(tmp_path, batches(3))
    before = snapshot(tmp_path)
    for _ in range(2):
        with LogWriter(tmp_path, resume=True) as log:
            assert log.epoch_started.epoch == 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("part", seeds(range(4), quick=1))
@pytest.mark.parametrize("segment_bytes", [600, 1 << 20])
@pytest.mark.usefixtures("form")
def test_continues_after_a_cut_anywhere(tmp_path: Path, segment_bytes: int, part: int) -> None:
    """Wherever writing stopped in the last segment, whole frames stay, the rest is put aside, and writing goes on."""
    write_synced(tmp_path / "log", batches(4), segment_bytes=segment_bytes, fsync="never")
    last = segments(tmp_path / "log")[-1]
    data, base = last.read_bytes(), int(last.stem)
    offsets = frame_offsets(data)
    for size in range(5 * part, len(data), 20):
        last.write_bytes(data[:size])
        whole = sum(offset <= size for offset in offsets[1:])
        with LogWriter(tmp_path / "log", resume=True, fsync="never", log_id=LOG_ID) as log:
            started, next_seq = log.epoch_started, base + whole
            assert log.next_seq == next_seq
            assert (started.clean, started.log_id) == (False, LOG_ID)
            assert started.previous_last_seq == (next_seq - 1 if next_seq else None)
            assert started.previous_epoch == (0 if next_seq else None)
            log.append(batch(next_seq))
        content, end = read_log(tmp_path / "log")
        assert (content, end.kind) == (batches(next_seq + 1), "clean")
        aside = (
            b"".join(snapshot(tmp_path / "log" / "quarantine").values()) if size not in offsets[1:] else b""
        )
        assert aside == (data[:size] if not whole else data[offsets[whole] : size])
        for path in (*segments(tmp_path / "log"), *(tmp_path / "log").glob("quarantine/*")):
            if path.name > last.name or path.parent.name == "quarantine":
                path.unlink()
    assert last.read_bytes() != data


def test_recovery_that_was_interrupted_is_done_again(tmp_path: Path) -> None:
    """Recovering a second time, or over the leftovers of a first try, comes to the same state."""
    write_log(tmp_path, batches(3))
    (path,) = segments(tmp_path)
    torn = path.read_bytes()[: frame_offsets(path.read_bytes())[2] + 50]
    path.write_bytes(torn)
    first = recover(tmp_path)
    after = snapshot(tmp_path)
    path.write_bytes(torn)
    (tmp_path / f"{7:020d}.kvlog.tmp").write_bytes(b"half a header")
    assert recover(tmp_path) == first
    assert snapshot(tmp_path) == after
    assert recover(tmp_path) == (first[0], False)


@pytest.mark.parametrize("place", ["header", "frame", "successor"])
def test_damage_is_refused_and_nothing_touched(tmp_path: Path, place: str) -> None:
    """A damaged last segment is not continued, and every byte stays as evidence."""
    write_synced(tmp_path, batches(4), segment_bytes=600 if place == "successor" else 1 << 20)
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[20 if place == "header" else 150] ^= 1
    if place == "frame":
        del data[-36:]  # the mark of an orderly end
    path.write_bytes(data)
    if place == "successor":
        segments(tmp_path)[1].write_bytes(b"half a header")
        path.write_bytes(data[:-1])
    before = snapshot(tmp_path)
    for _ in range(2):
        with pytest.raises(LogDamaged) as raised:
            LogWriter(tmp_path, resume=True)
        assert raised.value.path == path
        assert snapshot(tmp_path) == before


def test_a_log_that_was_closed_is_continued_unread(tmp_path: Path) -> None:
    """Of a log that ended in order, opening looks at the end alone; damage before it stays for readers to tell."""
    write_log(tmp_path, batches(4))
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[150] ^= 1
    path.write_bytes(data)
    with LogWriter(tmp_path, resume=True) as log:
        assert (log.next_seq, log.epoch_started.clean) == (4, True)
        log.append(batch(4))
    assert path.read_bytes() == data
    with pytest.raises(LogDamaged) as raised:
        read_log(tmp_path)
    assert raised.value.path == path


@pytest.mark.parametrize("cut", range(1, 37))
def test_half_a_closing_mark_is_none(tmp_path: Path, cut: int) -> None:
    """A mark that was not written to its end is put aside, and the epoch is not called clean."""
    write_log(tmp_path, batches(2))
    (path,) = segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    with LogWriter(tmp_path, resume=True) as log:
        assert (log.next_seq, log.epoch_started.clean) == (2, False)


def test_newer_log_is_refused(tmp_path: Path) -> None:
    """A log of a newer version is not continued, and unlocked again."""
    (tmp_path / f"{0:020d}.kvlog").write_bytes(segment_header(LOG_ID, 0, 0, 0, version=3))
    for _ in range(2):
        with pytest.raises(LogTooNew):
            LogWriter(tmp_path, resume=True)


def test_new_log_in_the_place_of_a_lost_beginning(tmp_path: Path) -> None:
    """Where not even one whole batch was ever written, a new log begins, which is not called clean."""
    (tmp_path / f"{0:020d}.kvlog").write_bytes(segment_header(LOG_ID, 0, 0, 0)[:40])
    with LogWriter(tmp_path, resume=True) as log:
        assert (log.epoch_started.epoch, log.epoch_started.previous_epoch) == (0, None)
        assert log.epoch_started.clean is False
        log.append(batch(0))
    assert read_log(tmp_path)[0] == batches(1)
