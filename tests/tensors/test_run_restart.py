"""``kvcache run --secondary-path``: killed at any moment, it goes on warm, and compares every byte that it reuses."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT


def command(directory: Path, *more: str) -> list[str]:
    place = ["--log", str(directory / "log"), "--secondary-path", str(directory / "secondary"), "--continue"]
    sizes = ["--primary-blocks", "200", "--secondary-blocks", "1500", "--concurrency", "8"]
    return [sys.executable, "-m", "kvcache", "run", "-q", "--json", *sizes, *place, *more]


def summary(directory: Path, *more: str) -> dict[str, Any]:
    done = subprocess.run(
        command(directory, *more), capture_output=True, text=True, cwd=ROOT, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def killed(directory: Path, seconds: float) -> None:
    """Begin a run and kill it so long after it has begun to write."""
    before = size(directory)
    running = subprocess.Popen(
        command(directory, "--speed", "1", "--limit", "150"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        while size(directory) == before and running.poll() is None:
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(seconds)
    finally:
        running.kill()
        _, errors = running.communicate()
    assert running.returncode == -signal.SIGKILL, errors


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "log").glob("*.kvlog"))


def judge(told: dict[str, Any]) -> None:
    blocks = told["restored"]["blocks"]
    dropped = blocks["changed"] + blocks["in_flight"] + blocks["unreachable"]
    assert blocks["found"] == blocks["verified"] + dropped
    assert told["fingerprint"] == told["replay_fingerprint"]
    assert told["checked_blocks"] > 0


def test_a_run_goes_on_warm_with_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    """The same chats again find nearly everything, in secondary and behind what is computed again."""
    first = summary(tmp_path, "--limit", "150")
    assert first["restored"] is None
    second = summary(tmp_path, "--limit", "150")
    judge(second)
    assert second["restored"]["blocks"]["verified"] > 100
    assert second["restored"]["verified_bytes"] > 0
    assert second["hit_rate"] > first["hit_rate"]


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """What was written and landed before the kill is compared with its checksums, and what is reused byte by byte."""
    killed(tmp_path, 1.5)
    judge(summary(tmp_path, "--limit", "150"))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_goes_on_for_long(tmp_path: Path, seed: int) -> None:
    """The same for 200 kills at random moments, 10 of each run."""
    r = random.Random(seed)
    for _ in range(10):
        killed(tmp_path, r.random() * 3)
        judge(summary(tmp_path, "--limit", "150"))


def test_without_pools_nothing_can_lie_in_a_file(tmp_path: Path) -> None:
    """Bookkeeping alone has no bytes to find again, and says so."""
    done = subprocess.run(
        command(tmp_path, "--no-pools"), capture_output=True, text=True, cwd=ROOT, check=False, timeout=100
    )
    assert done.returncode == 2
    assert "pools are needed" in done.stderr
