"""A log whose directory or segment is moved, replaced or cut under its writer: it says so, and claims nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from events import LogWriteFailed
from events.log import LogWriter
from events.log import writer as recorder
from events.log.output import LogOutput, Record
from tests.support.logs.logs import batch, batches, form, read_log, segments, settle, write_log
from tests.support.waiting import wait_until

__all__ = ["form"]

pytestmark = pytest.mark.usefixtures("form")

Change = Callable[[Path, Path], None]


def remove_directory(log: Path, _: Path) -> None:
    shutil.rmtree(log)


def move_directory(log: Path, aside: Path) -> None:
    log.rename(aside)


def swap_directory(log: Path, aside: Path) -> None:
    log.rename(aside)
    write_log(log, batches(2))


def remove_segment(log: Path, aside: Path) -> None:
    segments(log)[-1].rename(aside)


def replace_segment(log: Path, aside: Path) -> None:
    place = segments(log)[-1]
    place.rename(aside)
    place.write_bytes(bytes(aside.stat().st_size))


def empty_segment(log: Path, aside: Path) -> None:
    shutil.copy(segments(log)[-1], aside)
    os.truncate(segments(log)[-1], 0)


def cut_segment(log: Path, aside: Path) -> None:
    shutil.copy(segments(log)[-1], aside)
    os.truncate(segments(log)[-1], aside.stat().st_size - 1)


CHANGES = [
    remove_directory,
    move_directory,
    swap_directory,
    remove_segment,
    replace_segment,
    empty_segment,
    cut_segment,
]


def content(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*.kvlog") if path.is_file()}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in its place is looked for again at once."""
    monkeypatch.setattr(recorder, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(recorder, "_LONGEST_PAUSE_SECONDS", 0.002)


@pytest.mark.parametrize("fsync", ["group", "never"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_idle_log_notices_within_a_second_of_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, fsync: Any
) -> None:
    """It is suspended with the reason, and what comes is neither durable nor written into what has the name now."""
    monkeypatch.setattr(recorder, "_LOOK_SECONDS", 0)
    place, aside = tmp_path / "log", tmp_path / "aside"
    log = LogWriter(place, fsync=fsync, segment_bytes=900)
    for item in batches(8):
        log.append(item)
    log.flush()
    durable = log.durable_seq
    with capture_logs() as said:
        change(place, aside)
        before = content(tmp_path)
        wait_until(lambda: log.stats().state == "suspended", "it is not noticed")
    [line] = said
    assert (line["event"], line["log"]) == ("log_suspended", str(place))
    assert line["reason"]
    assert log.stats().last_error
    for seq in range(8, 20):
        log.append(batch(seq))
        with pytest.raises(LogWriteFailed, match="restore what was there") as raised:
            log.flush()
        assert raised.value.errno == errno.ESTALE
    assert log.durable_seq == durable
    assert content(tmp_path) == before
    with pytest.raises(LogWriteFailed):
        log.close()
    assert (log.durable_seq, content(tmp_path)) == (durable, before)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_synced_elsewhere_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    """Nor does a busy log wait for its next look: each sync asks where the files are."""
    monkeypatch.setattr(recorder, "_LOOK_SECONDS", 1e6)
    log = LogWriter(tmp_path / "log")
    log.append(batch(0))
    log.flush()
    change(tmp_path / "log", tmp_path / "aside")
    log.append(batch(1))
    with pytest.raises(LogWriteFailed, match="restore what was there"):
        log.flush()
    assert log.durable_seq == 0
    assert log.stats().state == "suspended"
    with pytest.raises(LogWriteFailed):
        log.close()


@pytest.mark.parametrize("fsync", ["group", "never"])
@pytest.mark.parametrize("change", CHANGES[1:], ids=lambda change: change.__name__)
def test_what_is_put_back_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, fsync: Any
) -> None:
    """Be it the file itself or a copy of it: nothing is lost, and a log that waits is told by itself."""
    monkeypatch.setattr(recorder, "_LOOK_SECONDS", 0)
    place, aside = tmp_path / "log", tmp_path / "aside"
    log = LogWriter(place, fsync=fsync, segment_bytes=900)
    for item in batches(8):
        log.append(item)
    log.flush()
    last = segments(place)[-1]
    change(place, aside)
    wait_until(lambda: log.stats().state == "suspended", "it is not noticed")
    if aside.is_dir():
        if place.exists():
            place.rename(tmp_path / "other")
        aside.rename(place)
    else:
        shutil.copy(aside, tmp_path / "copy")
        (tmp_path / "copy").rename(last)
    wait_until(lambda: log.stats().state == "running", "it does not go on")
    log.append(batch(8))
    log.close()
    assert log.durable_seq == 8
    assert read_log(place)[0] == batches(9)


@pytest.mark.parametrize("change", CHANGES[1:3], ids=lambda change: change.__name__)
def test_what_is_not_synced_yet_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    """Batches that were written when a look failed, and would be synced much later, are all in what is put back."""
    monkeypatch.setattr(recorder, "_LOOK_SECONDS", 0)
    place, aside = tmp_path / "log", tmp_path / "aside"
    log = LogWriter(place, fsync="interval", fsync_seconds=1e6)
    for item in batches(8):
        log.append(item)
    wait_until(lambda: b"".join(content(tmp_path).values())[64:] != b"", "nothing is written")
    change(place, aside)
    wait_until(lambda: log.stats().state == "suspended", "it is not noticed")
    assert log.stats().batches == 0
    if place.exists():
        place.rename(tmp_path / "other")
    aside.rename(place)
    wait_until(lambda: log.durable_seq == 7, "what was written is not written again")
    log.append(batch(8))
    log.close()
    assert read_log(place)[0] == batches(9)


def test_a_log_that_never_catches_up_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its groups a log looks where its files are, though there is always another one, and nothing is synced."""
    monkeypatch.setattr(recorder, "_LOOK_SECONDS", 0)
    log = LogWriter(tmp_path / "log", fsync="never")
    log.append(batch(0))
    log.flush()
    write, written = LogOutput.write, list[int]()

    def write_and_queue(output: LogOutput, records: Sequence[Record]) -> None:
        if len(written) < 50:
            written.append(log.next_seq)
            if len(written) == 1:
                move_directory(tmp_path / "log", tmp_path / "aside")
            log.append(batch(len(written) + 1))
        write(output, records)

    monkeypatch.setattr(LogOutput, "write", write_and_queue)
    log.append(batch(1))
    wait_until(lambda: log.stats().state == "suspended", "it is not noticed")
    assert len(written) < 50
    with pytest.raises(LogWriteFailed):
        log.close()


def test_what_others_append_is_cut_off(tmp_path: Path) -> None:
    """Bytes behind the last frame are noticed by the next sync, and what was written behind them is written again."""
    log = LogWriter(tmp_path, fsync="group", clock=lambda: 0.0)
    log.append(batch(0))
    log.flush()
    with segments(tmp_path)[0].open("ab") as file:
        file.write(b"not ours")
    with capture_logs() as said:
        log.append(batch(1))
        settle(log)
    assert [line["event"] for line in said] == ["log_suspended", "log_continues"]
    assert "its size has changed" in said[0]["reason"]
    log.close()
    assert log.durable_seq == 1
    assert read_log(tmp_path)[0] == batches(2)


def test_what_others_append_to_a_full_segment_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all of it was synced before, the next segment does not begin before it is looked at."""
    monkeypatch.setattr(recorder, "_LOOK_SECONDS", 1e6)
    log = LogWriter(tmp_path / "log", segment_bytes=1)
    log.append(batch(0))
    log.flush()
    with segments(tmp_path / "log")[-1].open("ab") as file:
        file.write(b"junk")
    log.append(batch(1))
    log.close()
    assert read_log(tmp_path / "log")[0] == batches(2)


def test_another_file_while_the_disk_is_full_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has taken the segment's name while the log was suspended for another reason is looked into, too."""
    log = LogWriter(tmp_path / "log")
    log.append(batch(0))
    log.flush()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        log.append(batch(1))
        with pytest.raises(LogWriteFailed, match="free some space"):
            log.flush()
        replace_segment(tmp_path / "log", tmp_path / "aside")
        before = content(tmp_path)
        wait_until(lambda: "its data is missing" in str(log.stats().last_error))
    with pytest.raises(LogWriteFailed, match="its data is missing"):
        log.flush()
    assert (log.durable_seq, content(tmp_path)) == (0, before)
    (tmp_path / "aside").rename(segments(tmp_path / "log")[0])
    log.close()
    assert read_log(tmp_path / "log")[0] == batches(2)


def test_an_idle_log_looks_once_a_second_of_its_clock(tmp_path: Path) -> None:
    """While the clock stands still, what is written does not show that the directory is elsewhere."""
    now = [0.0]
    log = LogWriter(tmp_path / "log", fsync="never", clock=lambda: now[0])
    log.append(batch(0))
    log.flush()
    move_directory(tmp_path / "log", tmp_path / "aside")
    log.append(batch(1))
    log.flush()
    assert log.stats().state == "running"
    now[0] += 1
    wait_until(lambda: log.stats().state == "suspended", "it is not noticed")
    (tmp_path / "aside").rename(tmp_path / "log")
    log.close()
    assert read_log(tmp_path / "log")[0] == batches(2)
