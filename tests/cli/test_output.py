"""How output looks: plain in pipes, drawn on terminals, with and without rich."""

from __future__ import annotations

import os
import pty
import re
from pathlib import Path

import pytest

from kvcache.phrases import batches, count, duration, later, printable, share, size, span
from tests.support.commands import TRACE, Kvcache
from tests.support.forked import Forked


def on_terminal(code: str, **environment: str) -> str:
    """What the code prints when stdout and stderr are a terminal."""
    master, slave = pty.openpty()
    settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **environment}
    process = Forked(code, stdout=slave, stderr=slave, env=settings)
    os.close(slave)
    shown = b""
    try:
        while data := os.read(master, 65536):
            shown += data
    except OSError:
        pass  # how Linux says that nobody writes any more
    os.close(master)
    assert process.wait() == 0
    return shown.decode()


def calling(*args: object) -> str:
    return f"from kvcache.cli import main; main({[str(arg) for arg in args]})"


NO_RICH = "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"


class TestTerminal:
    """What a terminal gets."""

    def test_rich_draws_tables(self, log: Path) -> None:
        """With rich a table has a rule below its head."""
        assert "─────" in on_terminal(calling("replay", log))

    def test_without_rich(self, log: Path) -> None:
        """Without rich the same numbers are there as aligned text."""
        shown = on_terminal(NO_RICH + calling("replay", log))
        assert "─" not in shown
        assert "  level      blocks  held  cached, free to evict  blank\r\n" in shown

    @pytest.mark.parametrize("command", [("replay",), ("match", "--request", 12)])
    def test_narrow(self, log: Path, command: tuple[object, ...]) -> None:
        """Where a table does not fit its cells take several lines, and nothing is cut off."""
        name, *options = command
        code = calling(name, log, "-q", *options)
        narrow = on_terminal(code, COLUMNS="40")
        letters = [sorted(re.sub(r"[\s─]|\x1b\[[0-9;]*m", "", text)) for text in (narrow, on_terminal(code))]
        assert letters[0] == letters[1]

    def test_colors_can_be_turned_off(self, log: Path) -> None:
        """Events are colored on a terminal, unless NO_COLOR is set."""
        code = calling("events", log, "--type", "BlocksMoved")
        assert "\x1b[33mBlocksMoved\x1b[0m" in on_terminal(code)
        assert "\x1b[33m" not in on_terminal(code, NO_COLOR="1")

    def test_progress(self) -> None:
        """A run shows how far it is, unless it is to be quiet."""
        args = ("run", TRACE, "--no-pools", "--limit", 20, "--tokens-per-block", 16)
        assert "playing" in on_terminal(calling(*args))
        assert "playing" not in on_terminal(calling(*args, "-q"))


def test_pipe_is_plain(kvcache: Kvcache, log: Path) -> None:
    """In a pipe there are no colors, no rules, no progress, and nothing on stderr."""
    done = kvcache("replay", log, "--verify")
    assert "\x1b" not in done.out
    assert "─" not in done.out
    assert done.err == ""


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (count(1, "block"), "1 block"),
        (count(2004, "batch", "batches"), "2,004 batches"),
        (size(512), "512 B"),
        (size(1536), "1.5 KiB"),
        (size(3 << 30), "3.0 GiB"),
        (size(2912 << 30), "2.8 TiB"),
        (duration(2.5), "2.50 s"),
        (duration(119.99), "119.99 s"),
        (duration(124.6), "2 min 5 s"),
        (duration(7110.12), "1 h 58 min"),
        (duration(3599.7), "1 h 0 min"),
        (duration(266_400), "3 d 2 h"),
        (later(54_857 * 10**6, 0), "+54.857s"),
        (later(6_606_496 * 10**6, 0), "+1 h 50 min 6 s"),
        (later(0, 200 * 10**9), "-3 min 20 s"),
        (duration(0.0125), "12.5 ms"),
        (duration(0.0000125), "12 µs"),
        (share(0.804), "80.4 %"),
        (printable("a\x1b[0m\nä"), "a\\x1b[0m\\nä"),
    ],
)
def test_numbers_for_people(found: str, expected: str) -> None:
    """Numbers have their unit and thousands are set apart."""
    assert found == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0124, "12 ms"),
        (-0.2, "-200 ms"),
        (1.24, "1.2 s"),
        (59.6, "60 s"),
        (300, "5 min"),
        (9000, "2 h"),
        (864_000, "10 d"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    """Times in few letters."""
    assert span(seconds) == text


def test_batches_are_one_or_several() -> None:
    """One has its number and the singular."""
    assert batches(1386, 1386, "was", "were") == "batch 1,386 was"
    assert batches(1386, 1390, "was", "were") == "batches 1,386 to 1,390 were"
    assert batches(0, 0) == "batch 0"
