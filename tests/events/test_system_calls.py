"""kill -9, EIO and ENOSPC at each call to the system that a log makes, and full disks."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from events import EventBatch, LogWriteFailed
from events.log import LogReader, LogWriter
from events.log.writer import Compression
from tests.support.logs.interrupted import CONTENT, judge, make_torn
from tests.support.logs.logs import batch
from tests.support.places import ROOT
from tests.support.seeds import seeds

POLICIES = ("always", "group", "interval", "never")
KILLS = ("before", "middle", "after")
REFUSALS = ("EIO", "ENOSPC")
Point = dict[str, Any]


def run(directory: Path, points: list[Point]) -> list[Point]:
    """What has become of the log at each."""
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.logs.interrupted", str(directory)],
        input="".join(f"{json.dumps(point)}\n" for point in points),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many calls an undisturbed run makes, by policy."""
    directory = tmp_path_factory.mktemp("calls") / "sound"
    sound = run(directory, [{"fsync": fsync, "at": 0, "how": "before"} for fsync in POLICIES])
    for each in sound:
        assert (each["status"], each["end"], each["read"]) == (0, "clean", len(CONTENT))
    return {each["fsync"]: each["final"][-1] for each in sound}


def kills(counts: dict[str, int]) -> list[Point]:
    return [
        {"fsync": fsync, "at": at, "how": how}
        for fsync, count in counts.items()
        for at in range(1, count + 1)
        for how in KILLS
    ]


def refusals(counts: dict[str, int]) -> list[Point]:
    return [
        {"fsync": fsync, "at": at, "how": how, "times": times}
        for fsync, count in counts.items()
        for at in range(1, count + 1)
        for how in REFUSALS
        for times in (1, 4)
    ]


def survived_kills(found: list[Point]) -> None:
    """All that was told to be durable was read, and most were killed before the end."""
    killed = [each for each in found if each["status"] == -9]
    assert len(killed) > 0.5 * len(found)  # the number of calls differs a little from run to run
    print(f"{len(found)} points, {len(killed)} killed, 0 losses; ends: {ends(found)}")


def survived_refusals(found: list[Point]) -> None:
    """The run has gone on: nothing is lost, all is counted, and the log has its orderly end."""
    for each in found:
        written, dropped, lag, durable, _ = each["final"]
        appended = len(CONTENT) - 3
        assert (each["status"], written + dropped, lag) == (0, appended, 0), each
        # Where closing is refused twice, or a log is never synced and then refuses to be, there is no orderly end.
        if each["end"] == "clean":
            assert (dropped, durable, each["read"]) == (0, len(CONTENT) - 1, len(CONTENT)), each
        else:
            assert each["read"] >= durable + 1, each
    clean = sum(each["end"] == "clean" for each in found)
    assert clean > 0.5 * len(found)
    print(f"{len(found)} points, {clean} with an orderly end, 0 losses; ends: {ends(found)}")


def ends(found: list[Point]) -> dict[str, int]:
    return {kind: sum(each["end"] == kind for each in found) for kind in ("clean", "open", "torn")}


@pytest.mark.parametrize("seed", seeds(range(20), quick=1))
def test_killed_at_some_calls(tmp_path: Path, calls: dict[str, int], seed: int) -> None:
    """At 20 of all points: before a call, after it, or in the middle of a write."""
    survived_kills(run(tmp_path / "killed", random.Random(seed).sample(kills(calls), 20)))


@pytest.mark.parametrize("seed", seeds(range(20), quick=1))
def test_refused_some_calls(tmp_path: Path, calls: dict[str, int], seed: int) -> None:
    """At 20 of all points: a call fails, once or four times, with half of what was to be written."""
    survived_refusals(run(tmp_path / "refused", random.Random(seed).sample(refusals(calls), 20)))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_killed_at_every_call(tmp_path: Path, calls: dict[str, int]) -> None:
    """The same at all of them."""
    survived_kills(run(tmp_path / "killed", kills(calls)))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_refused_every_call(tmp_path: Path, calls: dict[str, int]) -> None:
    """The same at all of them."""
    survived_refusals(run(tmp_path / "refused", refusals(calls)))


SYSTEM_CALLS = "writev,fdatasync,fsync,ftruncate,rename,unlink,pwrite64,mkdir"
"""Which starting Python does not make."""


def traced(log: Path, fsync: str, inject: str) -> tuple[int, list[Any]]:
    """A run of its own under strace, which interrupts it."""
    make_torn(log)
    command = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        f"trace={SYSTEM_CALLS}",
        "-e",
        f"inject={inject}",
    ]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.support.logs.interrupted", str(log), fsync],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def strace(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if traced(tmp_path / "sound", "group", "writev:error=EIO:when=10000")[0] != 0:
        pytest.skip("strace may not trace here")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("fsync", ["group", "interval"])
def test_killed_by_strace(tmp_path: Path, fsync: str) -> None:
    """The system itself kills it at the nth call of each kind that a thread makes: nothing durable is lost."""
    killed: dict[str, int] = {}
    for call in SYSTEM_CALLS.split(","):
        for at in range(1, 100):
            log = tmp_path / f"{call}{at}"
            status, reported = traced(log, fsync, f"{call}:signal=KILL:when={at}")
            judge(log, reported)
            if status == 0:
                break
            killed[call] = at
    print(f"{fsync}: killed at {sum(killed.values())} calls, 0 losses: {killed}")
    assert sum(killed.values()) > 20


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("error", REFUSALS)
@pytest.mark.parametrize("call", ["writev", "fdatasync", "fsync", "ftruncate", "rename", "openat"])
def test_refused_by_strace(tmp_path: Path, call: str, error: str) -> None:
    """The system itself refuses the nth call of a kind: the run goes on, counts right and ends in order."""
    refused = 0
    for at in range(1, 12):
        log = tmp_path / f"{at}"
        # Python opens some hundred files as it starts.
        status, reported = traced(
            log, "group", f"{call}:error={error}:when={at if call != 'openat' else 1000 + at}"
        )
        found = judge(log, reported)
        refused += status == 0 and found["end"] == "clean" and reported[-1][:2] == [len(CONTENT) - 3, 0]
    print(f"{call} {error}: {refused} of 11 runs whole")
    assert refused >= 10


@pytest.mark.long
@pytest.mark.parametrize(("compression", "count"), [("none", 300), ("zstd", 1500)])
def test_a_disk_of_64_kib(tmp_path: Path, compression: Compression, count: int) -> None:
    """It fills, the log is suspended and loses batches; with room again, a gap tells which, and all else is read."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        (place / "ballast").write_bytes(bytes(40_000))
        with LogWriter(
            place / "log", overflow="drop", max_queued_batches=20, segment_bytes=4096, compression=compression
        ) as log:
            for seq in range(count):
                if log.append(batch(seq)) and log.stats().state == "running":
                    with suppress(LogWriteFailed):
                        log.flush()
            stats = log.stats()
            assert stats.last_error == os.strerror(errno.ENOSPC)
            assert stats.dropped_batches > 100
            (place / "ballast").unlink()
            while log.stats().state == "suspended":
                with suppress(LogWriteFailed):
                    log.flush()
            gap = log.pop_gap()
            assert gap is not None
            assert gap.reason.endswith(os.strerror(errno.ENOSPC))
            assert log.append(EventBatch(count, 0, (gap,)))
        content = list(LogReader(place / "log"))
        assert content[:-1] == [batch(seq) for seq in range(gap.first_seq)]
        assert (gap.last_seq, content[-1].seq) == (count - 1, count)
    finally:
        subprocess.run(["umount", str(place)], check=False)
