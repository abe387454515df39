"""The file sink when its file grows too large, is moved or removed, or is to be opened again; on real files."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sinks import SinkContext, SinkError, SinkOpenError, SinkRunner, SinkURLError, open_sink
from sinks.file import FileSink
from tests.oracles.json_reader import from_json
from tests.support.feeds.sinks import check_stream, make_batch
from tests.support.places import ROOT
from tests.support.waiting import WAIT, wait_until

CONTEXT = SinkContext(32, 4)


def opened(path: Path, options: str) -> FileSink:
    sink = open_sink(f"file://{path}{options}", CONTEXT)
    assert isinstance(sink, FileSink)
    sink.open()
    return sink


def seqs(path: Path) -> list[int]:
    """The batches in a file, each line of which is whole."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [from_json(line).seq for line in data.splitlines()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the sink's clock on."""
    now = [0.0]
    monkeypatch.setattr("sinks.file.time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.append(now.pop() + seconds)


class TestSize:
    """?max_bytes= and &keep=."""

    @pytest.mark.parametrize("keep", [0, 1, 3])
    def test_older_files_are_kept(self, tmp_path: Path, keep: int) -> None:
        """Files hold whole lines up to the size, the newest older one is .1, and what is too old is gone."""
        path = tmp_path / "events.jsonl"
        sink = opened(path, f"?max_bytes=1KiB&keep={keep}")
        for seq in range(60):
            sink.write(make_batch(seq))
        sink.close()
        files = [path, *(tmp_path / f"events.jsonl.{number}" for number in range(1, keep + 1))]
        assert sorted(tmp_path.iterdir()) == sorted(files)
        kept = [seq for file in reversed(files) for seq in seqs(file)]
        assert kept == list(range(60))[-len(kept) :]
        sizes = [file.stat().st_size for file in files]
        assert max(sizes) <= 1024
        assert all(size > 800 for size in sizes[1:])
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}

    def test_five_are_kept_by_default(self, tmp_path: Path) -> None:
        """Without keep= there are five older files."""
        sink = opened(tmp_path / "e.jsonl", "?max_bytes=200B")
        for seq in range(60):
            sink.write(make_batch(seq))
        sink.close()
        assert len(list(tmp_path.iterdir())) == 6

    def test_a_long_line_has_a_file_of_its_own(self, tmp_path: Path) -> None:
        """A batch larger than the size is neither cut nor refused, and no empty file is kept."""
        path = tmp_path / "e.jsonl"
        sink = opened(path, "?max_bytes=300B")
        for seq, events in enumerate((1, 100, 100, 1)):
            sink.write(make_batch(seq, events=events))
        sink.close()
        kept = [seqs(tmp_path / name) for name in ("e.jsonl.3", "e.jsonl.2", "e.jsonl.1", "e.jsonl")]
        assert kept == [[0], [1], [2], [3]]

    def test_continuing_counts_what_is_there(self, tmp_path: Path) -> None:
        """With append=1 the size of the file and the older ones of the run before are respected."""
        path = tmp_path / "e.jsonl"
        for first in (0, 7):
            sink = opened(path, "?max_bytes=1KiB&append=1")
            for seq in range(first, first + 7):
                sink.write(make_batch(seq))
            sink.close()
        assert seqs(tmp_path / "e.jsonl.1") + seqs(path) == list(range(14))
        assert (tmp_path / "e.jsonl.1").stat().st_size > 800

    def test_another_runs_older_files_are_not_taken(self, tmp_path: Path) -> None:
        """Without append=1 a file that rotation would move and finally remove is refused, and named."""
        (tmp_path / "e.jsonl.2").write_text("kept\n")
        with pytest.raises(SinkError, match=r"e\.jsonl\.2 would be mistaken.*append=1"):
            opened(tmp_path / "e.jsonl", "?max_bytes=1KiB&keep=2")
        opened(tmp_path / "other.jsonl", "?max_bytes=1KiB&keep=2").close()
        opened(tmp_path / "e.jsonl", "").close()
        assert (tmp_path / "e.jsonl.2").read_text() == "kept\n"

    def test_a_directory_among_older_files_is_refused(self, tmp_path: Path) -> None:
        """With append=1, too: no file could take its place, and it would be moved along."""
        (tmp_path / "e.jsonl.2").mkdir()
        with pytest.raises(SinkError, match=r"e\.jsonl\.2 is a directory.*move it"):
            opened(tmp_path / "e.jsonl", "?max_bytes=1KiB&keep=2&append=1")
        opened(tmp_path / "e.jsonl", "?max_bytes=1KiB&keep=1&append=1").close()

    def test_what_fails_moves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where no new file can be made, batches are lost one by one, older files stay, and it goes on afterwards."""
        path = tmp_path / "e.jsonl"
        sink = opened(path, "?max_bytes=150B&keep=2")
        for seq in range(6):
            sink.write(make_batch(seq))
        before = {file.name: seqs(file) for file in tmp_path.iterdir()}
        really = os.open

        def refuse(name: str | Path, *rest: int) -> int:
            if str(name).endswith(".new"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return really(name, *rest)

        with monkeypatch.context() as full:
            full.setattr(os, "open", refuse)
            for seq in range(7, 12):
                with pytest.raises(OSError, match="No space left"):
                    sink.write(make_batch(seq))
        assert {file.name for file in tmp_path.iterdir()} == set(before)
        assert seqs(tmp_path / "e.jsonl.1") == before["e.jsonl.1"]
        sink.write(make_batch(12))
        sink.close()
        assert seqs(path) == [12]

    def test_a_pipe_cannot_be_rotated(self, tmp_path: Path) -> None:
        """max_bytes= for what is no regular file is refused when it is opened."""
        os.mkfifo(tmp_path / "pipe")
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        runner = SinkRunner(open_sink(f"file://{tmp_path}/pipe?max_bytes=1KiB", CONTEXT), "pipe")
        with pytest.raises(SinkOpenError, match="not a regular file"):
            runner.start()
        os.close(reader)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ("?max_bytes=100", "needs a number .*64MiB"),
            ("?max_bytes=1KiB&keep=-1", "keep must be from 0"),
            ("?max_bytes=1KiB&keep=1001", "keep must be from 0 to 1000"),
            ("?keep=3", "keep= requires max_bytes="),
            ("?max_bytes=0&keep=3", "keep= requires max_bytes="),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, options: str, reason: str) -> None:
        """Each error names the option and what it should be."""
        with pytest.raises(SinkURLError, match=reason):
            open_sink(f"file:///tmp/e.jsonl{options}", CONTEXT)


class TestMoved:
    """Files that others move, remove or cut."""

    @pytest.mark.parametrize("idle", [False, True])
    def test_the_path_is_opened_again(
        self, tmp_path: Path, clock: Callable[[float], None], idle: bool
    ) -> None:
        """After a second the sink writes to a new file at its path, with the next line or while it is idle."""
        path, moved = tmp_path / "e.jsonl", tmp_path / "old"
        sink = opened(path, "")
        sink.write(make_batch(0))
        path.rename(moved)
        clock(0.5)
        sink.write(make_batch(1))
        assert seqs(moved) == [0, 1]
        clock(0.6)
        if idle:
            sink.tick()
            assert seqs(path) == []
        sink.write(make_batch(2))
        path.unlink()
        clock(1.1)
        sink.write(make_batch(3))
        sink.close()
        assert (seqs(moved), seqs(path)) == ([0, 1], [3])

    def test_the_path_is_looked_at_once_a_second(
        self, tmp_path: Path, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A million lines a second cost no million looks."""
        looks: list[bool] = []
        sink = opened(tmp_path / "e.jsonl", "")
        same = os.path.samestat

        def look(there: os.stat_result, here: os.stat_result) -> bool:
            looks.append(same(there, here))
            return looks[-1]

        monkeypatch.setattr(os.path, "samestat", look)
        for seq in range(100):
            clock(0.04)
            sink.write(make_batch(seq))
            sink.tick()
        sink.close()
        assert 3 <= len(looks) <= 4

    def test_another_file_there_is_continued(self, tmp_path: Path, clock: Callable[[float], None]) -> None:
        """What a rotation has put at the path is written to, whatever it holds, from a new line on."""
        path = tmp_path / "e.jsonl"
        sink = opened(path, "")
        sink.write(make_batch(0))
        path.rename(tmp_path / "old")
        path.write_text("a header")
        clock(2)
        sink.write(make_batch(1))
        sink.close()
        header, line = path.read_bytes().splitlines()
        assert (header, from_json(line).seq) == (b"a header", 1)

    def test_only_its_own_file_is_rotated(self, tmp_path: Path, clock: Callable[[float], None]) -> None:
        """A file put at the path since the last look is continued, not moved for the size of the one before it."""
        path, moved = tmp_path / "e.jsonl", tmp_path / "old"
        sink = opened(path, "?max_bytes=1KiB&keep=1")
        for seq in range(7):
            sink.write(make_batch(seq))
        path.rename(moved)
        path.write_text("a header\n")
        for seq in range(7, 12):
            sink.write(make_batch(seq))
        sink.close()
        assert path.read_text().startswith("a header\n")
        assert sorted(tmp_path.iterdir()) == [path, moved]
        lines = [*moved.read_bytes().splitlines(), *path.read_bytes().splitlines()[1:]]
        assert [from_json(line).seq for line in lines] == list(range(12))

    def test_a_directory_at_the_path_stays(self, tmp_path: Path, clock: Callable[[float], None]) -> None:
        """A directory put at the path is not taken for an older file: batches are lost until it is gone."""
        path = tmp_path / "e.jsonl"
        sink = opened(path, "?max_bytes=150B&keep=2")
        sink.write(make_batch(0))
        path.rename(tmp_path / "old")
        path.mkdir()
        with pytest.raises(IsADirectoryError):
            sink.write(make_batch(1))
        assert path.is_dir()
        path.rmdir()
        sink.write(make_batch(2))
        sink.close()
        assert seqs(path) == [2]

    def test_a_file_that_was_cut_counts_from_there(
        self, tmp_path: Path, clock: Callable[[float], None]
    ) -> None:
        """Whoever copies and truncates has made room: the file is not rotated for what it held before."""
        path = tmp_path / "e.jsonl"
        sink = opened(path, "?max_bytes=1KiB")
        for seq in range(8):
            sink.write(make_batch(seq))
        os.truncate(path, 0)
        clock(2)
        for seq in range(8, 14):
            sink.write(make_batch(seq))
        sink.close()
        assert seqs(path) == list(range(8, 14))
        assert not (tmp_path / "e.jsonl.1").exists()

    def test_a_directory_that_was_away_costs_a_gap(self, tmp_path: Path) -> None:
        """While the file's directory is missing batches are lost; when it is there again the sink goes on."""
        home = tmp_path / "home"
        home.mkdir()
        sink = open_sink(f"file://{home}/e.jsonl", CONTEXT)
        assert isinstance(sink, FileSink)
        runner = SinkRunner(sink, "file", max_errors=2, backoff_seconds=0.001, retry_seconds=0.01)
        runner.start()
        runner.put(make_batch(0))
        wait_until(lambda: runner.stats().batches == 1)
        home.rename(tmp_path / "away")
        runner.reopen()
        wait_until(lambda: runner.stats().state == "quarantined")
        runner.put(make_batch(1))
        home.mkdir()
        wait_until(lambda: runner.stats().state == "running")
        runner.put(make_batch(2))
        runner.close()
        stream = [from_json(line) for line in (home / "e.jsonl").read_bytes().splitlines()]
        assert [batch.seq for batch in stream] == [1, 2]
        assert seqs(tmp_path / "away" / "e.jsonl") == [0]

    def test_nothing_is_lost_while_files_are_moved(self, tmp_path: Path) -> None:
        """Moves from outside at any moment, and asked for again: all lines of all files together are the stream."""
        path = tmp_path / "e.jsonl"
        runner = SinkRunner(open_sink(f"file://{path}?max_bytes=64KiB&keep=99", CONTEXT), "file")
        runner.start()
        for seq in range(2000):
            runner.put(make_batch(seq))
            if seq % 100 == 0:
                wait_until(path.exists)
                path.rename(tmp_path / f"moved.{seq:04}")
                runner.reopen()
        runner.close()
        stream = [from_json(line) for file in tmp_path.iterdir() for line in file.read_bytes().splitlines()]
        check_stream(sorted(stream, key=lambda batch: batch.seq), 2000)


def test_sighup_has_the_command_open_its_files_again(tmp_path: Path) -> None:
    """`kvcache run` without a terminal goes on in a new file at SIGHUP, at once, and ends as ever."""
    path = tmp_path / "e.jsonl"
    run = [sys.executable, "-m", "kvcache", "run", "--no-pools", "--limit", "3", "--hold", "60"]
    process = subprocess.Popen(
        [*run, "--sink", f"file:{path}", "--log", str(tmp_path / "log")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert "keeping the sinks open" in process.stderr.readline()
        path.rename(tmp_path / "old")
        process.send_signal(signal.SIGHUP)
        wait_until(path.exists)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=WAIT)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "summary (ended by SIGTERM)" in out
    assert seqs(tmp_path / "old")[0] == 0
    assert seqs(path) != []  # the checkpoint at the end
