"""An engine that is killed while it starts can start again, whatever is in the log's directory by then."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from events import NotALog
from events.log import LogWriter
from tests.support.engines.killed_at_start import KEEPERS
from tests.support.places import ROOT

Point = tuple[str, int]


def lives(directory: Path, points: list[Point]) -> list[tuple[int | None, int]]:
    """For each: how many calls there were, None if it was killed, and the batches of the log after another start."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engines.killed_at_start", str(directory)],
        input="".join(f"{json.dumps(point)}\n" for point in points),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [(calls, batches) for calls, batches in map(json.loads, done.stdout.splitlines())]


def points_of(directory: Path) -> list[Point]:
    whole = lives(directory, [(name, 0) for name in KEEPERS])
    return [
        (name, at)
        for name, (calls, _) in zip(KEEPERS, whole, strict=True)
        for at in range(1, (calls or 0) + 1)
    ]


def test_killed_at_some_calls_of_the_start(tmp_path: Path) -> None:
    """A feed's numbers, a sidecar's position, a file of somebody else's sink: before there is a segment, too."""
    every, rng = points_of(tmp_path), random.Random(1)
    points = [
        point for name in KEEPERS for point in rng.sample([each for each in every if each[0] == name], 2)
    ]
    found = lives(tmp_path, points)
    assert all(batches >= 3 for _, batches in found)
    assert sum(calls is None for calls, _ in found) > 3


@pytest.mark.long
def test_killed_at_every_call_of_the_start(tmp_path: Path) -> None:
    """The same at all of them."""
    found = lives(tmp_path, points_of(tmp_path))
    assert all(batches >= 3 for _, batches in found)
    print(f"killed at {sum(calls is None for calls, _ in found)} of {len(found)} calls")


def test_a_lock_of_another_program_is_none_of_ours(tmp_path: Path) -> None:
    """Databases have files of that name, beside which no log belongs."""
    (tmp_path / "LOCK").touch()
    (tmp_path / "CURRENT").touch()
    with pytest.raises(NotALog):
        LogWriter(tmp_path, resume=True)
    assert not (tmp_path / "LOCK").read_bytes()
