"""`kvcache publish` as a command: what it says, when it ends, and with which code."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
from pathlib import Path

import pytest

from events.codec import to_json
from events.log import LogReader
from kvcache.cli.publish import _described
from kvcache.cli.publish import to_json as spelled
from kvcache.publish.follower import Progress, State
from kvcache.publish.publisher import PublishStats
from tests.support.commands import Kvcache, Start, segments
from tests.support.forked import DEVNULL, Forked
from tests.support.ports import free_port
from tests.support.waiting import WAIT, wait_until


@pytest.fixture
def copy(log: Path, tmp_path: Path) -> Path:
    """A log that may be written beside."""
    return Path(shutil.copytree(log, tmp_path / "copy"))


def test_once(kvcache: Kvcache, copy: Path, tmp_path: Path) -> None:
    """A sink gets each batch; a second time there is nothing to do; stderr says so."""
    for _ in range(2):
        done = kvcache("publish", copy, "--once", "--sink", f"file:{tmp_path}/e.jsonl?tokens=1")
        assert (done.code, done.out) == (0, "")
        assert done.err.startswith(f"kvcache: publishing {copy}\n")
        assert done.err.endswith(", closed: file://" + f"{tmp_path}/e.jsonl up to date\n")
    lines = (tmp_path / "e.jsonl").read_text().splitlines()
    assert lines == [to_json(batch, 32).decode() for batch in LogReader(copy)]


def test_stdout_and_quiet(kvcache: Kvcache, start: Start, copy: Path) -> None:
    """With -q and a sink stdout: nothing but events comes."""
    process = start("-q", "publish", copy, "--once", "--sink", "stdout:")
    out, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err) == (0, "")
    assert out == "".join(f"{line}\n" for line in out.splitlines())
    assert len(out.splitlines()) == sum(len(batch.events) for batch in LogReader(copy))
    again, _ = start("-q", "publish", copy, "--once", "--sink", "stdout:").communicate(timeout=WAIT)
    assert again == out, "what was printed is not there any more for who looks again"
    assert kvcache("publish", copy, "--json", "--sink", "stdout:").code == 2


def test_a_feed_that_is_open_is_reported(start: Start, copy: Path) -> None:
    """Once, behind what is said while the log is folded."""
    url = f"zmq+pub://127.0.0.1:{free_port()}"
    process = start("publish", copy, "--sink", url, "--every", "0.01")
    assert process.stderr is not None
    said = [process.stderr.readline()]
    while "up to date" not in said[-1] or "left" in said[-1]:
        said.append(process.stderr.readline())
    process.terminate()
    said += process.communicate(timeout=WAIT)[1].splitlines(keepends=True)
    assert said[0] == f"kvcache: publishing {copy}\n"
    assert said.count(f"kvcache: {url} is open\n") == 1
    opened = said.index(f"kvcache: {url} is open\n")
    assert not any("not open yet" in line for line in said[opened + 1 :])


def test_json(kvcache: Kvcache, copy: Path, tmp_path: Path) -> None:
    """One object per report; the last one tells that all is done."""
    done = kvcache("publish", copy, "--once", "--json", "--sink", f"file:{tmp_path}/e.jsonl")
    last = json.loads(done.out.splitlines()[-1])
    batches = list(LogReader(copy))
    assert (last["seq"], last["ts"], last["closed"]) == (batches[-1].seq, batches[-1].ts, True)
    [sink] = last["sinks"]
    assert (sink["seq"], sink["lag_batches"], sink["batches"]) == (batches[-1].seq, 0, len(batches))
    assert spelled(PublishStats(None, ()))["seq"] is None


def _line(
    state: State, batches: int | None, *, waits_for: str | None = None, error: str | None = None
) -> str:
    sink = Progress("x:", state, waits_for, 1, None, 1, 1, 1, error, lag_batches=batches, lag_seconds=None)
    return _described(sink)


def test_nothing_that_is_not_so_is_called_up_to_date() -> None:
    """Only a sink that runs, or has ended, and has had everything."""
    assert _line("running", 0) == "x: up to date"
    assert _line("ended", 0, error="before") == "x: up to date"
    assert _line("running", 3) == "x: 3 batches behind"
    assert _line("waiting", None) == "x: waiting"
    assert _line("waiting", 0, waits_for="no worker") == "x: waiting: no worker"
    assert _line("catching up", 2) == "x: 2 batches behind, catching up"
    assert _line("catching up", 0) == "x: catching up"
    assert _line("failing", 0, error="refused") == "x: failing: refused"
    assert _line("failing", 1, error="refused") == "x: 1 batch behind, failing: refused"
    assert _line("ended", None) == "x: ended"


def test_waits_and_ends_when_the_engine_closes(start: Start, kvcache: Kvcache, tmp_path: Path) -> None:
    """Started first it says that it waits; with --until-closed it ends with the engine, by itself."""
    log = tmp_path / "later"
    process = start("publish", log, "--until-closed", "--sink", "file:e.jsonl")
    assert process.stderr is not None
    assert process.stderr.readline() == f"kvcache: waiting for {log}: no log there yet\n"
    assert kvcache("run", "--no-pools", "--limit", 5, "-q", "--log", log).code == 0
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 0, err
    lines = (tmp_path / "e.jsonl").read_text().splitlines()
    assert len(lines) == len(list(LogReader(log)))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(start: Start, copy: Path, number: int, code: int) -> None:
    """Both end it in good order, also where it waits for more."""
    process = start("publish", copy, "--sink", "file:e.jsonl", "--every", "0.05")
    assert process.stderr is not None
    while "up to date" not in process.stderr.readline():
        pass
    process.send_signal(number)
    _, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err) == (code, "")


def test_a_terminal_has_one_line(copy: Path, tmp_path: Path) -> None:
    """It is drawn anew in its place, and cut to the width; the last one stays."""
    ours, its = pty.openpty()
    command = ["publish", copy, "--sink", f"file:{tmp_path}/e.jsonl"]
    process = Forked("kvcache", *command, stdout=DEVNULL, stderr=its, env={**os.environ, "COLUMNS": "40"})
    os.close(its)
    shown = b""
    while shown.count(b"\x1b[K") < 4:
        shown += os.read(ours, 4096)
    process.terminate()
    assert process.wait(WAIT) == 143
    os.close(ours)
    drawn = [piece for piece in shown.split(b"\x1b[K")[1:-1] if piece.endswith(b"\r")]
    assert all(len(piece) <= 40 for piece in drawn)
    assert any(piece.startswith(b"batch ") for piece in drawn)


def test_errors(kvcache: Kvcache, copy: Path, tmp_path: Path) -> None:
    """Wrong requests exit with 2 before anything is waited for, wrong data with 1."""
    sink = ("--sink", f"file:{tmp_path}/e.jsonl")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y").write_text("z")
    for wrong in (
        ("publish", copy),
        ("publish", tmp_path / "x", *sink),
        ("publish", tmp_path / "missing", "--once", *sink),
        ("publish", copy, "--sink", "nothing:"),
        ("publish", copy, "--once", "--until-closed", *sink),
        ("publish", copy, "--sink", f"file:{tmp_path}/no/e.jsonl"),
    ):
        done = kvcache(*wrong)
        assert (done.code, done.out) == (2, "")
        assert done.err.splitlines()[-1].startswith("kvcache: error: ")
    [path, *_] = segments(copy)
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    done = kvcache("publish", copy, "--once", *sink)
    assert done.code == 1
    assert "is damaged" in done.err


def test_a_port_that_is_taken(start: Start, copy: Path, tmp_path: Path) -> None:
    """The second one of two on a port is told so, and ends; the first one does not notice."""
    url = f"zmq+pub://127.0.0.1:{free_port()}"
    first = start("publish", copy, "--sink", url, "--state", tmp_path / "a", "--every", "0.05")
    assert first.stderr is not None
    while "up to date" not in first.stderr.readline():
        pass
    second = start("publish", copy, "--sink", url, "--state", tmp_path / "b")
    _, err = second.communicate(timeout=WAIT)
    assert second.returncode == 2
    assert "is in use" in err
    wait_until(lambda: first.poll() is None, "the first one has ended")
