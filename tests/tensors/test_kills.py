"""kill -9 at any moment: the next process finds in secondary whatever had landed there, and not a wrong byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT


def lives(directory: Path, seed: int, kills: int) -> list[dict[str, Any]]:
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engines.killed", str(directory), str(seed), str(kills)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(reported: list[dict[str, Any]]) -> None:
    assert {life["signal"] for life in reported} == {9}, "a life ended by itself: it has found a wrong byte"
    served = [life for life in reported if "verified" in life]
    assert all(life["verified"] == life["expected"] for life in served)
    assert all(life["found"] >= life["verified"] for life in served)
    sequence = [life["last_seq"] for life in reported]
    assert sequence == sorted(sequence), "something that was durable is lost"
    warm = [life for life in served if life["verified"]]
    assert len(warm) >= len(reported) // 3
    assert sum(life["checked"] for life in warm)


def test_a_killed_cache_is_warm_again(tmp_path: Path) -> None:
    """Kills at random moments: each restart finds just what had landed, and every reused byte is right."""
    judge(lives(tmp_path / "lives", 1, 10))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 14))
def test_a_killed_cache_is_warm_again_for_long(tmp_path: Path, seed: int) -> None:
    """The same for 200 kills, of 4 caches."""
    judge(lives(tmp_path / "lives", seed, 50))
