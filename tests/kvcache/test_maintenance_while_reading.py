"""Whoever reads a log while its keeper is at work finds no damage in it: names are listed again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from events.log import LogReader
from events.log.reader import beginnings
from events.log.retention import Limits
from events.log.segments import first_seq, segment_paths
from kvcache.maintenance.prune import make_snapshot, prune
from kvcache.maintenance.salvage import salvage
from kvcache.maintenance.verify import verify
from kvcache.replay import replay
from tests.support.logs.damaging import compressed_copy
from tests.support.logs.random_logs import random_log


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A log, and what becomes of it when it is compressed, and when it is then cut, once and twice."""
    root = tmp_path_factory.mktemp("stages")
    log = root / "whole"
    random_log(1, log, branches=True, segment_bytes=4000)
    make_snapshot(log, first_seq(segment_paths(log)[2]))
    found = {"whole": log, "compressed": compressed_copy(log, root / "compressed")}
    for before, name, segments in (("compressed", "cut", 5), ("cut", "cut again", 2)):
        found[name] = link(found[before], root / name)
        assert prune(found[name], Limits(segments=segments)).removed.segments > 1
    return found


def link(log: Path, to: Path) -> Path:
    """A copy of a log, which is not written to: its files are the same."""
    to.mkdir()
    for path in log.iterdir():
        if path.is_file() and path.suffix:  # LOCK and KEEPER are each directory's own
            os.link(path, to / path.name)
    return to


def become(log: Path, stage: Path) -> None:
    """What the keeper does: first what is new appears, then what is old goes, the oldest first."""
    there, wanted = ({path.name for path in each.iterdir() if path.is_file()} for each in (log, stage))
    for name in sorted(wanted):
        if name not in there or (name.endswith(".kvlog") and not (log / name).samefile(stage / name)):
            os.link(stage / name, log / "new")
            (log / "new").replace(log / name)
    for name in sorted(there - wanted, key=lambda name: (name.endswith(".kvsnap"), name)):
        (log / name).unlink()


@contextmanager
def meanwhile(log: Path, at: int, stages: list[Path]) -> Iterator[list[int]]:
    """From call `at` on that opens or lists something, each makes the log the next stage before it is done."""
    calls = [0]

    def through(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(path: Any, *args: Any, **options: Any) -> Any:
            calls[0] += 1
            place = calls[0] - at
            if 0 <= place < len(stages):
                with patch.object(os, "open", opens), patch.object(os, "listdir", lists):
                    become(log, stages[place])
            return call(path, *args, **options)

        return instead

    opens, lists = os.open, os.listdir
    with patch.object(os, "open", through(opens)), patch.object(os, "listdir", through(lists)):
        yield calls


def check_reader(log: Path, last: int) -> None:
    """Batches come in order, up to the last."""
    seqs = [batch.seq for batch in LogReader(log)]
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == last


def check_late_reader(log: Path, last: int) -> None:
    """So they do from one on that may be gone."""
    seqs = [batch.seq for batch in LogReader(log, start=20)]
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == last


def check_verify(log: Path, last: int) -> None:
    """Nothing is wrong."""
    found = verify(log)
    assert (found.damage, found.problems, found.unused) == ([], [], [])
    assert found.end is not None
    assert found.end.last_seq == last


def check_salvage(log: Path, last: int) -> None:
    """The copy goes on to the last batch, and what was removed before it was copied is no damage."""
    done = salvage(log, log.with_name("new"))
    assert (done.damage, done.last_seq) == ([], last)
    assert verify(log.with_name("new")).damage == []


def check_state(log: Path, last: int) -> None:
    """A replay comes to the end; beginnings are found."""
    assert replay(log).last_seq == last
    assert beginnings(log)


READS = (check_reader, check_late_reader, check_verify, check_salvage, check_state)


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
@pytest.mark.parametrize(
    "names", [("compressed",), ("cut",), ("compressed", "cut", "cut again")], ids="-".join
)
def test_names_are_listed_again(
    stages: dict[str, Path], tmp_path: Path, read: Callable[[Path, int], None], names: tuple[str, ...]
) -> None:
    """Wherever in its reading a log is compressed, cut, or all of that one after the other."""
    last, at, calls = list(LogReader(stages["whole"]))[-1].seq, 1, [1]
    while at <= calls[0]:
        (tmp_path / f"{at}").mkdir()
        log = link(stages["whole"], tmp_path / f"{at}" / "log")
        with meanwhile(log, at, [stages[name] for name in names]) as calls:
            read(log, last)
        at += 5
    assert at > 10
