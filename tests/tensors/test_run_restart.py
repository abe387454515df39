"""``kvcache run --secondary-path``: killed at any moment, it goes on warm, and compares every byte that it reuses."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Kvcache, Start
from tests.support.waiting import WAIT, wait_until


def arguments(directory: Path, *more: str) -> list[str]:
    place = ["--log", str(directory / "log"), "--secondary-path", str(directory / "secondary"), "--continue"]
    sizes = ["--primary-blocks", "200", "--secondary-blocks", "1500", "--concurrency", "8"]
    return ["run", "-q", "--json", *sizes, *place, *more]


def summary(kvcache: Kvcache, directory: Path) -> dict[str, Any]:
    done = kvcache(*arguments(directory, "--limit", "100"))
    assert done.code == 0, done.err
    reported: dict[str, Any] = json.loads(done.out)
    return reported


def killed(start: Start, directory: Path, more_bytes: int) -> None:
    """Begin a run and kill it when its log has grown so far, or a little later."""
    goal = size(directory) + more_bytes
    running = start(*arguments(directory, "--speed", "1", "--limit", "100"))
    wait_until(lambda: size(directory) > goal or running.poll() is not None, seconds=10 * WAIT)
    running.kill()
    _, errors = running.communicate()
    assert running.returncode == -signal.SIGKILL, errors


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "log").glob("*.kvlog"))


def judge(reported: dict[str, Any]) -> None:
    blocks = reported["restored"]["blocks"]
    dropped = blocks["changed"] + blocks["in_flight"] + blocks["unreachable"]
    assert blocks["found"] == blocks["verified"] + dropped
    assert reported["fingerprint"] == reported["replay_fingerprint"]
    assert reported["checked_blocks"] > 0


def test_a_run_goes_on_warm_with_what_an_earlier_one_has_left(kvcache: Kvcache, tmp_path: Path) -> None:
    """The same chats again find nearly everything, in secondary and behind what is computed again."""
    first = summary(kvcache, tmp_path)
    assert first["restored"] is None
    second = summary(kvcache, tmp_path)
    judge(second)
    assert second["restored"]["blocks"]["verified"] > 100
    assert second["restored"]["verified_bytes"] > 0
    assert second["hit_rate"] > first["hit_rate"]


def test_a_killed_run_goes_on(kvcache: Kvcache, start: Start, tmp_path: Path) -> None:
    """What was written and landed before the kill is compared with its checksums, and what is reused byte by byte."""
    killed(start, tmp_path, 50_000)
    judge(summary(kvcache, tmp_path))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_goes_on_for_long(kvcache: Kvcache, start: Start, tmp_path: Path, seed: int) -> None:
    """The same for 200 kills at random places of the log, 10 of each run."""
    r = random.Random(seed)
    for _ in range(10):
        killed(start, tmp_path, r.randrange(100_000))
        judge(summary(kvcache, tmp_path))


def test_without_pools_nothing_can_lie_in_a_file(kvcache: Kvcache, tmp_path: Path) -> None:
    """Bookkeeping alone has no bytes to find again, and says so."""
    done = kvcache(*arguments(tmp_path, "--no-pools"))
    assert done.code == 2
    assert "pools are required" in done.err
