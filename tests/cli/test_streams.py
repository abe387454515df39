"""Whether anybody reads what a command writes, as far as systems tell."""

from __future__ import annotations

import io
import os
import select
from contextlib import suppress
from pathlib import Path

import pytest

from kvcache.cli.streams import nobody_reads


class MacPoll:
    """How macOS answers: about what was asked for only, POLLHUP for POLLERR, and POLLNVAL for most devices."""

    def __init__(self) -> None:
        self._real = REAL_POLL()
        self._watched: dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        self._watched[descriptor] = events
        self._real.register(descriptor, events)

    def poll(self, timeout: int) -> list[tuple[int, int]]:
        [(descriptor, events)] = self._watched.items()
        if os.path.samestat(os.fstat(descriptor), Path(os.devnull).stat()):
            return [(descriptor, select.POLLNVAL)] if events else []
        [state] = [state for _, state in self._real.poll(timeout)] or [0]
        if state & (select.POLLERR | select.POLLHUP):
            state = select.POLLHUP
        return [(descriptor, state)] if events and state else []


REAL_POLL = select.poll


@pytest.fixture(params=["as it is", "macOS"], autouse=True)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "macOS":
        monkeypatch.setattr(select, "poll", MacPoll)


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
        assert not nobody_reads(stream)
        os.close(reader)
        assert nobody_reads(stream)


def test_files_and_devices_need_no_reader(tmp_path: Path) -> None:
    """What goes to a file or to /dev/null is not written in vain."""
    for path in (tmp_path / "file", Path(os.devnull)):
        with path.open("w") as stream:
            assert not nobody_reads(stream)


def test_a_stream_without_a_descriptor_is_left_alone() -> None:
    """Whether a stream is closed, or none of the system's, is found out by whoever writes."""
    with Path(os.devnull).open("w") as closed:
        pass
    assert not nobody_reads(closed)
    assert not nobody_reads(io.StringIO())
