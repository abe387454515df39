"""The table of `events.log.recovery`, row by row: what readers say, and what a writer does.

What is found is made of whole logs; what should become of it stands beside it, written down from the table.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from events.errors import LogDamaged, LogTooNew
from events.log import LogReader, LogWriter, durable, recovery
from events.log import segments as segment_files
from events.log.recovery import execute, plan
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

pytestmark = pytest.mark.usefixtures("form")


def unclosed(log: Path) -> None:
    """Take away the mark of an orderly end."""
    path = segments(log)[-1]
    path.write_bytes(path.read_bytes()[:-36])


def torn(log: Path) -> None:
    unclosed(log)
    path = segments(log)[-1]
    path.write_bytes(path.read_bytes()[:-9])


def flip(position: int) -> Callable[[Path], None]:
    def change(log: Path) -> None:
        path = segments(log)[-1]
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return change


def broken_inside(log: Path) -> None:
    unclosed(log)
    flip(70)(log)


def broken_in_a_group(log: Path) -> None:
    """Three more batches, made durable by one sync, as by a writer that is killed; of these the first is broken."""
    with LogWriter(log, resume=True, fsync="never") as writer:
        for each in batches(4, 8):
            writer.append(each)
            writer.flush()
    unclosed(log)
    path = segments(log)[-1]
    data = path.read_bytes()
    flip(frame_offsets(data)[1] + 40)(log)


def repeated(log: Path) -> None:
    unclosed(log)
    path = segments(log)[-1]
    data = path.read_bytes()
    path.write_bytes(data + data[frame_offsets(data)[-2] :])


def next_segment(size: int) -> Callable[[Path], None]:
    """What a writer began and did not get on with, of the next epoch."""

    def change(log: Path) -> None:
        (log / f"{8:020d}.kvlog").write_bytes(segment_header(LOG_ID, 1, len(segments(log)), 8)[:size])

    return change


def next_segment_after_half_a_frame(log: Path) -> None:
    torn(log)
    next_segment(64)(log)


def swapped(log: Path) -> None:
    one, other = segments(log)[-2:]
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def duplicated(log: Path) -> None:
    shutil.copy(segments(log)[-1], log / f"{8:020d}.kvlog")


def newer(log: Path) -> None:
    next_segment(64)(log)
    segments(log)[-1].write_bytes(segment_header(LOG_ID, 1, 9, 8, version=3))


def foreign(log: Path) -> None:
    write_log(log / "other", batches(8), segment_bytes=600, log_id=bytes(16))
    shutil.move(segments(log / "other")[-1], segments(log)[-1])
    shutil.rmtree(log / "other")


def hole(at: int) -> Callable[[Path], None]:
    return lambda log: segments(log)[at].unlink()


def wrong_further_back(log: Path) -> None:
    path = segments(log)[0]
    path.write_bytes(path.read_bytes()[:-1])


def unfinished(log: Path) -> None:
    (log / f"{8:020d}.kvlog.tmp").write_bytes(b"KVEV")


class Row(NamedTuple):
    """What is found, what readers say (None: damage), and what a writer does: where it goes on (None: it refuses)."""

    found: str
    make: Callable[[Path], None]
    said: str | None
    next_seq: int | None
    clean: bool = False
    quarantined: int = 0
    """Files."""


ROWS = (
    Row("orderly end", lambda _: None, "clean", 8, clean=True),
    Row("end of a frame", unclosed, "open", 8),
    Row("half a frame", torn, "torn", 7, quarantined=1),
    Row("no frame", next_segment(64), "open", 8, quarantined=1),
    Row("half a header", next_segment(40), "torn", 8, quarantined=1),
    Row("empty file", next_segment(0), "torn", 8, quarantined=1),
    Row("broken frame before one that was written behind a sync", broken_inside, None, None),
    Row("broken frame before others of the same sync", broken_in_a_group, "torn", 9, quarantined=1),
    Row("frame twice", repeated, None, None),
    Row("damaged header", flip(20), None, None),
    Row("swapped segments", swapped, None, None),
    Row("duplicated segment", duplicated, None, None),
    Row("newer version", newer, None, None),
    Row("another log's segment", foreign, None, None),
    Row("missing segment before the last", hole(-2), None, None),
    Row("no frame, behind half a frame", next_segment_after_half_a_frame, None, None),
    Row("cut further back", wrong_further_back, None, 8, clean=True),
    Row("missing further back", hole(0), None, 8, clean=True),
    Row("unfinished segment", unfinished, "clean", 8, clean=True),
)
ids = [row.found for row in ROWS]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of eight batches in several segments."""
    directory = write_synced(tmp_path / "log", batches(8), segment_bytes=600)
    assert len(segments(directory)) >= 3
    return directory


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_what_readers_say(log: Path, row: Row) -> None:
    """Up to the end they read what is whole; damage is raised; no byte is changed."""
    row.make(log)
    before = snapshot(log)
    if row.said is None:
        with pytest.raises((LogDamaged, LogTooNew)):
            list(LogReader(log))
    else:
        content, end = read_log(log)
        assert (content, end.kind) == (batches(row.next_seq or 0), row.said)
    assert snapshot(log) == before


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_what_a_writer_does(log: Path, row: Row) -> None:
    """It refuses, and no byte is changed; or keeps all whole batches, and what it cuts is in the quarantine."""
    row.make(log)
    before = snapshot(log)
    if row.next_seq is None:
        with pytest.raises((LogDamaged, LogTooNew)):
            LogWriter(log, resume=True)
        assert snapshot(log) == before
        return
    recovery = plan(log)
    assert snapshot(log) == before
    with LogWriter(log, resume=True) as writer:
        assert (writer.next_seq, writer.epoch_started.clean) == (row.next_seq, row.clean)
        writer.append(batch(row.next_seq))
    assert (
        len(list(log.glob("quarantine/*")))
        == row.quarantined
        == bool(recovery.cut) + len(recovery.quarantined)
    )
    after = snapshot(log)
    for name, data in before.items():
        aside = b"".join(each for place, each in after.items() if place.startswith(f"quarantine/{name}"))
        assert name.endswith(".tmp") or data in (aside, after.get(name, b"") + aside)
    if row.said is not None:
        assert read_log(log)[0] == batches(row.next_seq + 1)


def test_a_clock_that_went_back_is_no_matter(tmp_path: Path) -> None:
    """Batches that are older than those before them are written, read and continued."""
    content = [replace(each, ts=10**18 - each.seq) for each in batches(6)]
    write_log(tmp_path, content[:3])
    with LogWriter(tmp_path, resume=True) as writer:
        assert writer.epoch_started.clean
        for each in content[3:]:
            writer.append(each)
            writer.flush()
    assert read_log(tmp_path)[0] == content


class Crash(BaseException):
    """The process is killed."""


class Dying:
    """Lets recovery die before one of its operations on files; of what is not synced, names may be taken back."""

    def __init__(self, at: int, rng: random.Random) -> None:
        self.operations, self._at, self._rng = 0, at, rng
        self._undo: list[Callable[[], object]] = []

    def step(self) -> None:
        self.operations += 1
        if self.operations == self._at:
            for undo in reversed(self._undo):
                if self._rng.random() < 0.5:
                    undo()
            raise Crash

    @contextmanager
    def in_use(self) -> Iterator[None]:
        rename, unlink, mkdir = Path.rename, Path.unlink, Path.mkdir
        truncate, sync = os.ftruncate, durable.sync_directory

        def dying(do: Callable[..., Any], undo: Callable[..., object] | None = None) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.step()
                result = do(*args, **options)
                if undo is not None:
                    self._undo.append(lambda: undo(*args))
                return result

            return call

        def forget(directory: Path) -> None:
            self.step()
            sync(directory)
            self._undo.clear()

        with (
            patch.object(Path, "rename", dying(rename, lambda one, other: rename(other, one))),
            patch.object(Path, "unlink", dying(unlink)),
            patch.object(Path, "mkdir", dying(mkdir)),
            patch.object(os, "ftruncate", dying(truncate)),
            patch.object(recovery, "sync_file", dying(durable.sync_file)),
            patch.object(recovery, "sync_directory", forget),
            patch.object(segment_files, "sync_file", dying(durable.sync_file)),
            patch.object(segment_files, "sync_directory", forget),
        ):
            yield


@pytest.mark.parametrize("part", seeds(range(5), quick=1))
@pytest.mark.parametrize("row", [row for row in ROWS if row.next_seq is not None], ids=lambda row: row.found)
def test_recovery_survives_dying_in_itself(log: Path, tmp_path: Path, row: Row, part: int) -> None:
    """Killed before any of its steps, and again in the next go, it ends as if it had not been."""
    row.make(log)
    undisturbed = Path(shutil.copytree(log, tmp_path / "undisturbed"))
    execute(undisturbed, plan(undisturbed))
    expected = snapshot(undisturbed)
    tries = [Dying(0, random.Random(0))]
    for first in range(1, 40):
        for second in range(1 + part, 40, 5):
            copy = Path(shutil.copytree(log, tmp_path / "copy"))
            tries = [Dying(at, random.Random(at)) for at in (first, second)]
            for dying in tries:
                with suppress(Crash), dying.in_use():
                    execute(copy, plan(copy))
            execute(copy, plan(copy))
            assert without_unfinished(snapshot(copy)) == expected
            shutil.rmtree(copy)
        if tries[0].operations < first:
            break
    assert (first > 3) or not row.quarantined


def without_unfinished(files: dict[str, bytes]) -> dict[str, bytes]:
    """Of a copy that was begun in the quarantine, something may be left."""
    return {name: data for name, data in files.items() if not name.endswith(".tmp")}
