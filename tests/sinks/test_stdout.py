"""The stdout sink."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from events.types import EventBatch
from sinks import SinkContext, SinkError, SinkURLError, open_sink
from sinks.render import StreamNames, render_batch
from tests.oracles.json_reader import from_json
from tests.support.feeds.sinks import KEY_BYTES, PLANTED, SAMPLES

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = SinkContext(KEY_BYTES, 4)
BATCH = EventBatch(3, 4, SAMPLES)


def printed(url: str, capfd: pytest.CaptureFixture[str]) -> str:
    sink = open_sink(url, CONTEXT)
    sink.open()
    sink.write(BATCH)
    sink.close()
    return capfd.readouterr().out


def test_prints_a_line_per_event(capfd: pytest.CaptureFixture[str]) -> None:
    """Without options it shows what people read."""
    assert printed("stdout:", capfd).splitlines() == list(render_batch(BATCH, StreamNames(KEY_BYTES)))


def test_prints_json_without_tokens(capfd: pytest.CaptureFixture[str]) -> None:
    """As JSON it is one line per batch, and token ids are left out unless asked for."""
    line = printed("stdout:?format=jsonl", capfd)
    assert line.count("\n") == 1
    assert str(PLANTED) not in line
    assert from_json(line).seq == 3


def test_prints_json_with_tokens(capfd: pytest.CaptureFixture[str]) -> None:
    """With tokens=1 the line holds the whole batch."""
    assert from_json(printed("stdout:?format=jsonl&tokens=1", capfd)) == BATCH


def test_keeps_its_place_among_prints() -> None:
    """What was printed before the sink opened comes first, also where Python buffers it."""
    script = (
        "from events.types import EventBatch\n"
        "from sinks import SinkContext, open_sink\n"
        "from tests.support.feeds.sinks import KEY_BYTES, SAMPLES\n"
        "print('before')\n"
        "sink = open_sink('stdout:', SinkContext(KEY_BYTES, 4))\n"
        "sink.open(); sink.write(EventBatch(3, 4, SAMPLES)); sink.close()\n"
        "print('after')\n"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=buffered,
    )
    lines = done.stdout.splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("before", len(SAMPLES) + 2, "after")


def test_leaves_stdout_open(capfd: pytest.CaptureFixture[str]) -> None:
    """Closing the sink does not close the process's output."""
    printed("stdout:", capfd)
    sys.stdout.write("after\n")
    sys.stdout.flush()
    assert capfd.readouterr().out == "after\n"


def test_says_so_where_stdout_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the sink says what to use instead."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    sink = open_sink("stdout:", CONTEXT)
    with pytest.raises(SinkError, match="file:///"):
        sink.open()


@pytest.mark.parametrize(
    "url",
    [
        "stdout:/x",
        "stdout:text",
        "stdout://host",
        "stdout://:80",
        "stdout://me@",
        "stdout://:secret@",
        "stdout:?format=xml",
        "stdout:?tokens=1",
        "stdout:#jsonl",
    ],
)
def test_refuses_what_makes_no_sense(url: str) -> None:
    """A path, an address, a login, an unknown format, and tokens in lines for people are errors."""
    with pytest.raises(SinkURLError):
        open_sink(url, CONTEXT)
