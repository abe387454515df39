"""The file sink, on real files."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from events.errors import UnsafeFile
from events.types import EventBatch
from sinks import Sink, SinkContext, SinkError, SinkOpenError, SinkRunner, SinkURLError, open_sink
from sinks.file import FileOptions, FileSink
from tests.oracles.json_reader import from_json
from tests.support.feeds.sinks import KEY_BYTES, PLANTED, SAMPLES, make_batch
from tests.support.logs.planted import as_root, plant

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = SinkContext(KEY_BYTES, 4)
BATCH = EventBatch(3, 4, SAMPLES)


def opened(path: Path, options: str = "") -> Sink:
    sink = open_sink(f"file://{path}{options}", CONTEXT)
    sink.open()
    return sink


def write(path: Path, *batches: EventBatch, options: str = "") -> None:
    sink = opened(path, options)
    for batch in batches:
        sink.write(batch)
    sink.close()


def read(path: Path) -> list[EventBatch]:
    return [from_json(line) for line in path.read_bytes().splitlines()]


def test_keeps_whole_batches_with_tokens(tmp_path: Path) -> None:
    """With tokens=1 what is read back equals what was written, event for event."""
    path = tmp_path / "events.jsonl"
    write(path, BATCH, make_batch(4), options="?tokens=1")
    assert read(path) == [BATCH, make_batch(4)]


@pytest.mark.parametrize("path", ["a%00b", "\ud800"])
def test_what_is_no_name_of_a_file_is_refused(path: str) -> None:
    """A path that no system has is told with the URL, not when it is opened, and so is that of a feed's numbers."""
    for url in (f"file:{path}", f"zmq+pub://127.0.0.1:5557?state={path}"):
        with pytest.raises(SinkURLError, match=r"the path (is not valid Unicode|contains a NUL)"):
            open_sink(url, CONTEXT)


def test_leaves_tokens_out_by_default(tmp_path: Path) -> None:
    """Token ids reach the disk only if asked for."""
    path = tmp_path / "events.jsonl"
    write(path, BATCH)
    assert str(PLANTED) not in path.read_text()
    assert PLANTED.to_bytes(4, "little").hex() not in path.read_text()
    assert len(read(path)[0].events) == len(SAMPLES)


def test_a_batch_is_there_when_write_returns(tmp_path: Path) -> None:
    """Nothing waits in a buffer that a killed process would lose."""
    path = tmp_path / "events.jsonl"
    sink = opened(path)
    sink.write(make_batch(0))
    assert [batch.seq for batch in read(path)] == [0]
    sink.close()


def test_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """A new file can be read by its owner only."""
    path = tmp_path / "events.jsonl"
    before = os.umask(0)
    try:
        write(path, BATCH)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_refuses_a_file_that_holds_something(tmp_path: Path) -> None:
    """An older run's file is not touched unless append=1 says so."""
    path = tmp_path / "events.jsonl"
    write(path, make_batch(0))
    before = path.read_bytes()
    with pytest.raises(SinkError, match=r"not empty.*append=1"):
        opened(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("other", ["{0}", "{0.parent}/./{0.name}", "{0.parent}/link"])
def test_a_file_has_one_writer(tmp_path: Path, other: str) -> None:
    """By whatever name it goes; when that one is closed it can be had again, also while a forked child lives."""
    path = tmp_path / "e.jsonl"
    first = opened(path)
    (tmp_path / "link").symlink_to(path)
    second = open_sink(f"file:{other.format(path)}?append=1", CONTEXT)
    with pytest.raises(SinkError, match="another sink writes to this file"):
        second.open()
    first.write(make_batch(0))
    assert isinstance(first, FileSink)
    first.reopen()
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        first.close()
        second.open()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    second.write(make_batch(1))
    second.close()
    assert read(path) == [make_batch(0), make_batch(1)]


@as_root
@pytest.mark.parametrize("options", ["", "?append=1&tokens=1"])
def test_planted_files_and_links_get_nothing(tmp_path: Path, options: str) -> None:
    """His file would be his to read, and his link to a file of ours would let us spoil that."""
    plant(tmp_path / "file")
    (tmp_path / "precious").touch()
    plant(tmp_path / "link", tmp_path / "precious")
    for name in ("file", "link"):
        with pytest.raises(UnsafeFile, match="another user"):
            opened(tmp_path / name, options)
    runner = SinkRunner(open_sink(f"file:{tmp_path}/file", CONTEXT), "file")
    with pytest.raises(SinkOpenError, match=r"another user.*run this as that user"):
        runner.start()
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {0}


def test_a_file_that_others_may_read_gets_no_tokens(tmp_path: Path) -> None:
    """What is no prompt it may get; a second name, by which others may have it, is refused."""
    path = tmp_path / "e.jsonl"
    write(path, make_batch(0))
    path.chmod(0o644)
    opened(path, "?append=1").close()
    with pytest.raises(UnsafeFile, match="others can read it; chmod 600 it"):
        opened(path, "?append=1&tokens=1")
    (tmp_path / "hard").hardlink_to(path)
    with pytest.raises(UnsafeFile, match="hard links"):
        opened(path, "?append=1")
    assert read(path) == [make_batch(0)]


def test_rotated_files_have_one_writer_too(tmp_path: Path) -> None:
    """The lock goes with the file that is written to."""
    path = tmp_path / "e.jsonl"
    first = opened(path, "?max_bytes=100B&keep=1")
    for seq in range(5):
        first.write(make_batch(seq))
    with pytest.raises(SinkError, match="another sink writes to this file"):
        opened(path, "?append=1")
    opened(tmp_path / "e.jsonl.1", "?append=1").close()
    first.close()


def test_appends_if_asked(tmp_path: Path) -> None:
    """With append=1 the new batches follow the old ones."""
    path = tmp_path / "events.jsonl"
    write(path, make_batch(0))
    write(path, make_batch(1), options="?append=1&tokens=1")
    assert [batch.seq for batch in read(path)] == [0, 1]


def test_appends_after_a_torn_line_on_a_new_one(tmp_path: Path) -> None:
    """What a killed writer left does not spoil the first new line."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"seq":0,"ts"')
    write(path, make_batch(1), options="?append=1")
    assert path.read_bytes().splitlines()[0] == b'{"seq":0,"ts"'
    assert from_json(path.read_bytes().splitlines()[1]).seq == 1


def test_writes_to_a_pipe(tmp_path: Path) -> None:
    """A named pipe is as good as a file; it is never "not empty", and its mode is left alone."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o640)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write(path, make_batch(7))
    line = os.read(reader, 1 << 16)
    os.close(reader)
    assert from_json(line).seq == 7
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_goes_on_in_a_pipe_without_waiting_for_it(tmp_path: Path) -> None:
    """Nothing can be read of what an earlier process has written there."""
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    assert FileSink(path, FileOptions(), KEY_BYTES).resume(7) == 7


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call that takes only a piece is followed by others for the rest."""
    path = tmp_path / "events.jsonl"
    whole_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole_write(fd, data[:7]))
    monkeypatch.setattr(os, "writev", lambda fd, parts: os.write(fd, parts[0]))
    write(path, BATCH, options="?tokens=1")
    assert read(path) == [BATCH]


FULL_DISK = """
import resource, sys
from sinks import SinkContext, open_sink
from tests.support.feeds.sinks import make_batch

sink = open_sink("file://" + sys.argv[1], SinkContext(32, 4))
sink.open()
sink.write(make_batch(0))
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (150, limit[1]))  # in the middle of the next line
for _ in range(2):
    try:
        sink.write(make_batch(1, events=50))
        sys.exit("the disk was not full")
    except OSError as error:
        print(type(error).__name__, error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
sink.write(make_batch(2))
sink.close()
"""


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path) -> None:
    """A line that fits in part is cut off again, the error is raised, and writing goes on when there is room."""
    path = tmp_path / "events.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["OSError", "27"] * 2
    assert [batch.seq for batch in read(path)] == [0, 2]


def test_a_missing_directory_is_known_at_start(tmp_path: Path) -> None:
    """The engine learns at once that a directory is missing, and which."""
    path = tmp_path / "missing" / "events.jsonl"
    runner = SinkRunner(open_sink(f"file://{path}", CONTEXT), "file")
    with pytest.raises(SinkOpenError) as caught:
        runner.start()
    assert str(caught.value) == f"sink file could not be opened: directory {path.parent} does not exist"
    runner.close()


def test_runs_after_a_runner(tmp_path: Path) -> None:
    """Everything put is in the file after close."""
    path = tmp_path / "events.jsonl"
    runner = SinkRunner(open_sink(f"file://{path}", CONTEXT), "file")
    runner.start()
    for seq in range(1000):
        runner.put(make_batch(seq))
    runner.close()
    assert [batch.seq for batch in read(path)] == list(range(1000))


def test_takes_relative_paths_and_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """file:name is relative to the working directory; %20 is a space."""
    monkeypatch.chdir(tmp_path)
    sink = open_sink("file:my%20events.jsonl", CONTEXT)
    sink.open()
    sink.close()
    assert (tmp_path / "my events.jsonl").exists()


@pytest.mark.parametrize(
    "url",
    [
        "file:",
        "file:///",
        "file:///tmp/",
        "file://tmp/events.jsonl",
        "file://localhost:80/tmp/e.jsonl",
        "file://:80/tmp/e.jsonl",
        "file://me@/tmp/e.jsonl",
        "file://me:secret@localhost/tmp/e.jsonl",
        "file:///tmp/e.jsonl?token=1",
        "file:///tmp/e.jsonl#1",
    ],
)
def test_refuses_what_names_no_file(url: str) -> None:
    """A directory, an address, a login, nothing at all, and unknown options are errors."""
    with pytest.raises(SinkURLError):
        open_sink(url, CONTEXT)
