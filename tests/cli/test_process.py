"""What signals do to a command, and streams that nobody reads."""

from __future__ import annotations

import io
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from events.log import LogReader
from events.types import EventBatch
from kvcache.cli.process import StopSignals, reader_is_gone
from kvcache.replay import replay
from kvcache.workload.traces import TraceRequest
from tests.support.commands import Kvcache, RunPython, Start
from tests.support.forked import Forked
from tests.support.traces import write_trace
from tests.support.waiting import WAIT, wait_until

OUTPUTS = 2_000_000
"""Steps of the endless request: nobody waits for its end."""
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A trace whose first request ends soon and whose second does not."""
    path = tmp_path / "endless.jsonl"
    write_trace(path, [TraceRequest(0, 600, 2, (0, 1)), TraceRequest(0, 600, OUTPUTS, (0, 2))])
    return path


@pytest.fixture
def paced(tmp_path: Path) -> Path:
    """A trace whose second request comes after an hour."""
    path = tmp_path / "paced.jsonl"
    write_trace(path, [TraceRequest(0, 600, 2, (0, 1)), TraceRequest(3_600_000, 600, 2, (0, 2))])
    return path


def wait_for_batches(log: Path, count: int) -> None:
    """Wait until so many batches are on disk."""
    wait_until(lambda: any(log.glob("*.kvlog")), "there is no log")
    deadline = time.monotonic() + WAIT
    for batch in LogReader(log, follow=True, stop=lambda: time.monotonic() > deadline):
        if batch.seq + 1 >= count:
            return
    raise AssertionError("the log did not grow")


def ended(process: Forked) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.wait(), out, err


@pytest.mark.parametrize(
    "command",
    [
        ("audit", "LOG"),
        ("curve", "LOG", "--json"),
        ("diff", "LOG", "LOG"),
        ("events", "LOG"),
        ("explain", "LOG", "--request", "3", "--json"),
        ("export", "LOG", "--to", "csv", "-o", "tables"),
        ("replay", "LOG"),
        ("whatif", "LOG", "--set", "primary_blocks=100"),
    ],
    ids=lambda command: command[0],
)
def test_a_reader_that_has_gone(start: Start, log: Path, command: tuple[str, ...]) -> None:
    """Commands that read logs end as shells expect it, and say nothing, when nobody reads what they print."""
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*(log if each == "LOG" else each for each in command), "-q", stdout=writer)
    os.close(writer)
    assert ended(process) == (141, "", "")


class TestSignals:
    """Ctrl-C and SIGTERM end a run in good order."""

    @pytest.mark.parametrize("number", CODES)
    def test_between_steps(self, start: Start, endless: Path, tmp_path: Path, number: signal.Signals) -> None:
        """The log ends with a checkpoint and a close, is verified, and the summary says what was served."""
        log = tmp_path / "log"
        process = start("run", endless, "--no-pools", "--log", log, "--json")
        wait_for_batches(log, 50)
        process.send_signal(number)
        code, out, err = ended(process)
        summary = json.loads(out)
        assert (code, err) == (CODES[number], "")
        assert (summary["interrupted"], summary["signal"], summary["requests"]) == (True, number.name, 1)
        replayed = replay(log, verify=True)
        assert replayed.end is not None
        assert replayed.end.kind == "clean"
        assert replayed.checkpoints_verified >= 1
        assert replayed.state.sequences == {}
        assert replayed.fingerprint.hex() == summary["fingerprint"] == summary["replay_fingerprint"]

    def test_while_waiting_for_a_request(self, start: Start, paced: Path, tmp_path: Path) -> None:
        """A paced run does not wait for the next request before it ends."""
        log = tmp_path / "log"
        process = start("run", paced, "--no-pools", "--speed", "real", "--log", log)
        wait_for_batches(log, 3)
        process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
        assert (code, err) == (130, "")
        assert "summary (ended early by SIGINT)" in out
        assert "agrees: same fingerprint" in out

    def test_while_sinks_are_held_open(self, start: Start, paced: Path, tmp_path: Path) -> None:
        """--hold ends at once, and the run is complete."""
        process = start("run", paced, "--limit", 1, "--no-pools", "--hold", 3600)
        assert process.stderr is not None
        assert "keeping the sinks open for 3600 s" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        code, out, err = ended(process)
        assert (code, err) == (143, "")
        assert "summary (ended by SIGTERM)\n" in out
        assert "1 served" in out
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_during_the_final_replay(
        self, kvcache: Kvcache, endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A signal while the log is being verified ends that, without a traceback, and says so."""
        from kvcache.cli import verification

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        class SignalledReader(LogReader):
            """Reader of a log during which a signal comes after each batch."""

            def __iter__(self) -> Iterator[EventBatch]:
                for batch in super().__iter__():
                    yield batch
                    signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(verification, "LogReader", SignalledReader)
        done = kvcache("run", endless, "--limit", 1, "--no-pools")
        assert done.code == 130
        assert "not verified: interrupted" in done.out
        assert list(tmp_path.glob("kvcache-run-*")) == []
        assert done.err == ""

    def test_reading_commands_end_silently(self, start: Start, log: Path) -> None:
        """Ctrl-C ends `events --follow`, which never ends by itself, without a traceback."""
        process = start("events", log, "--follow", "--type", "EpochStarted")
        assert process.stdout is not None
        assert "EpochStarted" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
        assert (code, err) == (130, "")


def test_killed_run_leaves_a_log_that_replays(
    start: Start, kvcache: Kvcache, endless: Path, tmp_path: Path
) -> None:
    """After SIGKILL the log tells its end, replays up to it, and can be continued."""
    log = tmp_path / "log"
    process = start("run", endless, "--no-pools", "--log", log)
    wait_for_batches(log, 50)
    process.kill()
    process.wait()
    done = kvcache("replay", log, "--verify", "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert found["seq"] >= 49
    assert found["num_sequences"] == 1
    assert found["end"]["kind"] in ("open", "torn")
    assert kvcache("run", endless, "--limit", 1, "--no-pools", "--log", log, "--continue").code == 0
    assert replay(log, verify=True).state.epoch == 1


class TestStopSignals:
    """The flag itself."""

    def test_waiting_ends_with_the_signal(self) -> None:
        """A signal ends the wait at once, and the first one is remembered."""
        with StopSignals() as stop:
            assert stop.wait(0.001) is False
            threading.Timer(0.05, signal.raise_signal, [signal.SIGTERM]).start()
            assert stop.wait() is True
            signal.raise_signal(signal.SIGINT)
            assert (stop.first, stop.received, stop.exit_code) == (signal.SIGTERM, 2, 143)
            assert stop.is_set()

    def test_handlers_are_restored(self) -> None:
        """What handled the signals before does so afterwards."""
        before = [signal.getsignal(number) for number in CODES]
        with StopSignals():
            assert [signal.getsignal(number) for number in CODES] != before
        assert [signal.getsignal(number) for number in CODES] == before

    def test_lost_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A signal that nobody looks at can be followed by one that ends the work; at once, launchers send two."""
        now = 100.0
        monkeypatch.setattr("kvcache.cli.process.time.monotonic", lambda: now)
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGINT)
            now += 0.9
            signal.raise_signal(signal.SIGTERM)
            now += 0.1
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert stop.is_set()
            now += 60
            signal.raise_signal(signal.SIGINT)
            assert (stop.first, stop.received) == (signal.SIGINT, 4)


def test_stuck_run_can_be_ended(tmp_path: Path) -> None:
    """Ctrl-C twice ends even a run that never looks at its signals, without a traceback."""
    code = (
        "import os, signal, sys; from kvcache.cli import main, process, run\n"
        # Otherwise two within a second would be taken for one that was passed on.
        "process.PATIENCE_SECONDS = 0\n"
        "reader, writer = os.pipe(); os.set_blocking(writer, False); signal.set_wakeup_fd(writer)\n"
        "def hang(*_, **__):\n    while True: print('stuck', flush=True); os.read(reader, 1)\n"
        "run.Engine.run = hang\n"
        f"sys.exit(main(['run', '--no-pools', '--limit', '1', '-q', '--log', {str(tmp_path / 'log')!r}]))"
    )
    process = Forked(code)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "", "")


def test_signal_while_loading(run_python: RunPython, tmp_path: Path) -> None:
    """Ctrl-C before the command has loaded what it needs ends it without a traceback."""
    (tmp_path / "pydantic.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    done = run_python("import sys; from kvcache.cli import main; sys.exit(main(['config']))", [tmp_path])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("library", ["argparse", "pydantic"])
def test_ctrl_c_that_a_library_would_swallow(run_python: RunPython, tmp_path: Path, library: str) -> None:
    """While libraries are loaded Ctrl-C ends the process at once, whatever they would make of an exception."""
    swallow = "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept BaseException: pass\n"
    (tmp_path / f"{library}.py").write_text(swallow)
    code = "import sys; sys.argv[1:] = ['config']; from kvcache.cli import console; sys.exit(console())"
    done = run_python(code, [tmp_path])
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ignored_ctrl_c_stays_ignored(run_python: RunPython) -> None:
    """A command that was started with SIGINT ignored, as behind `nohup`, goes on."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv[1:] = ['--version']\n"
        "from kvcache.cli import console\ncode = console(); signal.raise_signal(signal.SIGINT); sys.exit(code)"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("full", [False, True])
def test_a_pipe_is_read_as_long_as_its_other_end_is_open(full: bool) -> None:
    """Also one that is full: its reader is slow and not gone."""
    reader, writer = os.pipe()
    if full:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
    with os.fdopen(writer, "w") as stream:
        assert not reader_is_gone(stream)
        os.close(reader)
        assert reader_is_gone(stream)


def test_what_has_no_reader_is_not_written_in_vain() -> None:
    """Devices need none; whether a stream is closed, or none of the system's, is found out by whoever writes."""
    with Path(os.devnull).open("w") as stream:
        assert not reader_is_gone(stream)
    assert not reader_is_gone(stream)
    assert not reader_is_gone(io.StringIO())
