"""The numbers of a feed: no crash, failure or restart makes one appear twice."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from events.errors import NotARegularFile, UnsafeFile
from sinks import SinkError
from sinks.router.numbers import FeedNumbers
from tests.support.commands import RunPython
from tests.support.logs.planted import as_root
from tests.support.logs.syncs import SYNCS, record_syncs
from tests.support.places import ROOT

STEP = 4


def opened(path: Path, step: int = STEP) -> FeedNumbers:
    numbers = FeedNumbers(path, step)
    numbers.open()
    return numbers


def abandon(numbers: FeedNumbers) -> None:
    """What a crash leaves: the lock is gone, the file is as it is."""
    numbers._file.close()  # type: ignore[union-attr]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "feed.numbers"


def test_are_consecutive_over_a_clean_restart(path: Path) -> None:
    """A closed file is gone on with at the very next number, so that a reader sees no hole."""
    first = opened(path)
    taken = [first.take() for _ in range(10)]
    first.close()
    second = opened(path)
    taken += [second.take() for _ in range(10)]
    second.close()
    assert taken == list(range(20))


def test_removed_lock_lets_no_number_be_used_twice(path: Path) -> None:
    """A second feed that gets in goes on above the first, which gets nothing more before the second has ended."""
    first = opened(path)
    taken = [first.take() for _ in range(2)]
    path.with_name(path.name + ".lock").unlink()
    second = opened(path)
    taken += [first.take() for _ in range(STEP - 2)]  # what it has reserved
    taken += [second.take() for _ in range(STEP + 1)]
    for _ in range(2):
        with pytest.raises(SinkError, match="in use by another sink of this process"):
            first.take()
    second.close()
    taken += [first.take() for _ in range(STEP)]
    first.close()
    assert taken == list(range(len(taken)))


def test_removed_lock_gives_nothing_back(path: Path) -> None:
    """What the first of two feeds has not used stays reserved: the file is the second one's by now."""
    first = opened(path)
    first.take()
    path.with_name(path.name + ".lock").unlink()
    second = opened(path)
    assert second.take() == STEP
    content = path.read_bytes()
    first.close()
    assert path.read_bytes() == content
    second.close()


def test_removed_lock_is_made_anew(path: Path) -> None:
    """Where nobody else has come, the next reservation locks again, and goes on."""
    numbers = opened(path)
    numbers.take()
    path.with_name(path.name + ".lock").unlink()
    assert [numbers.take() for _ in range(2 * STEP)] == list(range(1, 2 * STEP + 1))
    with pytest.raises(SinkError, match="in use"):
        opened(path)
    numbers.close()


def test_go_on_at_the_reservation_after_a_crash(path: Path) -> None:
    """What was reserved counts as used by whoever did not close."""
    numbers = opened(path)
    assert [numbers.take() for _ in range(STEP + 1)] == list(range(STEP + 1))
    abandon(numbers)
    again = opened(path)
    assert again.take() == 2 * STEP
    again.close()


def test_a_file_opened_and_not_used_stays_as_it_is(path: Path) -> None:
    """Opening alone reserves nothing."""
    opened(path).close()
    assert not path.exists()
    numbers = opened(path)
    assert numbers.next == 0
    numbers.close()


def test_without_a_file_they_begin_at_0(tmp_path: Path) -> None:
    """In memory, each instance begins anew, and nothing is written."""
    for _ in range(2):
        numbers = FeedNumbers(None)
        numbers.open()
        assert [numbers.take() for _ in range(3)] == [0, 1, 2]
        numbers.close()
    assert list(tmp_path.iterdir()) == []


def test_reservation_is_durable_before_its_first_number_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content is synced before it gets its name, and the name before `take` returns."""
    calls: list[str] = []
    replace = Path.replace
    synced = record_syncs(monkeypatch)

    def note_syncs() -> None:
        calls.extend("sync directory" if stat.S_ISDIR(each.st_mode) else "sync file" for each in synced)
        synced.clear()

    def note_replace(self: Path, target: Path) -> Path:
        note_syncs()
        calls.append("replace")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", note_replace)
    numbers = opened(path)
    numbers.take()
    note_syncs()
    assert calls == ["sync file", "replace", "sync directory"]
    assert b"reserved 4\n" in path.read_bytes()
    numbers.close()


class Crash(BaseException):
    """The process ends here."""


def crash_at(step: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the `step`-th call that touches the disk raise, before or after it has done its work."""
    left = [step]

    def wrap(owner: Any, attribute: str) -> None:
        original: Callable[..., Any] | None = getattr(owner, attribute, None)
        if original is None:
            return

        def call(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                raise Crash
            result = original(*arguments)
            if left[0] == 0:
                raise Crash
            return result

        monkeypatch.setattr(owner, attribute, call)

    for owner, attribute in ((os, "open"), (os, "write"), *SYNCS, (Path, "replace")):
        wrap(owner, attribute)


@pytest.mark.parametrize("after", [False, True])
def test_no_crash_point_makes_a_number_appear_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Whichever system call is the last of a life, in `open`, `take` or `close`, the next life uses new numbers."""
    taken: list[int] = []
    crashes = 0
    for step in range(1, 40):
        with monkeypatch.context() as patch:
            crash_at(step, after, patch)
            numbers = FeedNumbers(path, STEP)
            try:
                numbers.open()
                taken += (numbers.take() for _ in range(STEP + 2))
                numbers.close()
            except Crash:
                crashes += 1
        if numbers._file is not None and numbers._file.is_open:
            abandon(numbers)
    assert crashes > 10
    assert taken == sorted(set(taken))


def test_a_killed_process_leaves_no_number_to_be_used_again(path: Path) -> None:
    """Two processes are killed while they take numbers; all that either has shown rise."""
    code = (
        "import sys; from pathlib import Path; from sinks.router.numbers import FeedNumbers\n"
        "numbers = FeedNumbers(Path(sys.argv[1]), 8); numbers.open()\n"
        "while True: print(numbers.take(), flush=True)"
    )
    shown: list[int] = []
    for life in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert child.stdout is not None
        for _ in range(50 + life):
            shown.append(int(child.stdout.readline()))
        child.send_signal(signal.SIGKILL)
        # It has gone on meanwhile.
        shown += (int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n"))
        child.wait()
        child.stdout.close()
    assert len(shown) >= 100
    assert shown == sorted(set(shown))


def test_a_reservation_that_fails_uses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk `take` raises; once there is room it goes on where it was."""
    numbers = opened(path)
    taken = [numbers.take() for _ in range(STEP)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda *_: 1)
        patch.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            numbers.take()
    taken += [numbers.take() for _ in range(STEP)]
    numbers.close()
    assert taken == list(range(2 * STEP))


def test_a_damaged_file_is_refused_by_name(path: Path) -> None:
    """Any byte changed, cut off or added is found, and the error says which file it is and what to do."""
    numbers = opened(path)
    numbers.take()
    numbers.close()
    good = path.read_bytes()
    flipped = [good[:at] + bytes((good[at] ^ 1,)) + good[at + 1 :] for at in range(len(good))]
    cut = [good[:length] for length in range(len(good))]
    for bad in [*flipped, *cut, good + b"\n"]:
        path.write_bytes(bad)
        with pytest.raises(SinkError, match=r"feed\.numbers is damaged.*restore it, or remove it"):
            opened(path)
    path.write_bytes(good)
    opened(path).close()


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_pipe_is_no_file_of_numbers(path: Path, unfinished: bool) -> None:
    """Nobody waits for the other end of a pipe that has the name of the file, or of the one that replaces it."""
    pipe = path.with_name(path.name + ".new") if unfinished else path
    os.mkfifo(pipe)

    def too_long(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    try:
        with pytest.raises(NotARegularFile):
            opened(path).take()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_link_is_no_file_of_numbers(path: Path) -> None:
    """It would be replaced by the first reservation, and a feed that opens what it points to would begin again."""
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(UnsafeFile, match="symbolic link; give the path of the file itself"):
        opened(path)


@as_root
@pytest.mark.parametrize("planted", ["feed.numbers", "feed.numbers.lock", "directory"])
def test_numbers_of_another_user_are_not_believed(path: Path, planted: str) -> None:
    """He could let them begin again, and routers would drop all of it."""
    directory = path.parent / "made"
    numbers = opened(directory / path.name)
    numbers.take()
    numbers.close()
    os.chown(directory if planted == "directory" else directory / planted, 65534, 65534)
    with pytest.raises(UnsafeFile, match="another user"):
        opened(directory / path.name)


def test_two_feeds_cannot_share_a_file(path: Path) -> None:
    """The second one is refused and told who has it, until the first one closes."""
    first = opened(path)
    with pytest.raises(SinkError, match=r"feed\.numbers is in use by another sink of this process: .*state="):
        opened(path)
    first.close()
    opened(path).close()


def test_a_forked_child_does_not_keep_the_file_locked(path: Path, run_python: RunPython) -> None:
    """After a close the file can be opened again, though a child that was forked before is still there."""
    # In a process without threads, which alone may fork wherever it is.
    code = (
        "import os; from pathlib import Path; from sinks.router.numbers import FeedNumbers\n"
        f"path = Path({str(path)!r})\n"
        "numbers = FeedNumbers(path); numbers.open()\n"
        "reader, writer = os.pipe()\n"
        "if not (child := os.fork()):\n"
        "    os.close(writer); os.read(reader, 1); os._exit(0)\n"
        "numbers.close()\n"
        "again = FeedNumbers(path); again.open(); again.close()\n"
        "os.close(writer); os.waitpid(child, 0); print('opened again')"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("opened again\n", "")


def test_a_lock_that_is_no_file_is_refused(path: Path) -> None:
    """A pipe in the place of the lock is named."""
    os.mkfifo(path.with_name("feed.numbers.lock"))
    with pytest.raises(SinkError, match=r"feed\.numbers\.lock is not a regular file: .*state="):
        opened(path)


def test_files_are_private(path: Path) -> None:
    """Only the owner can read the file and its directory."""
    numbers = opened(path.parent / "made" / "feed.numbers")
    numbers.take()
    made = path.parent / "made"
    assert made.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in made.iterdir()} == {0o600}
    numbers.close()
