"""A disk that hangs for a while, under each log that is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from events.log.output import LogOutput, Record
from tests.support.waiting import WAIT

HoldDisk = Callable[[], AbstractContextManager[threading.Event]]


@pytest.fixture
def hold_disk(monkeypatch: pytest.MonkeyPatch) -> HoldDisk:
    """Make the disk of all logs hang for as long as the context lasts; its event is set once one hangs."""

    @contextmanager
    def hold() -> Iterator[threading.Event]:
        hangs, released = threading.Event(), threading.Event()
        write = LogOutput.write

        def write_when_released(self: LogOutput, records: Sequence[Record]) -> None:
            hangs.set()
            assert released.wait(WAIT)
            write(self, records)

        with monkeypatch.context() as patch:
            patch.setattr(LogOutput, "write", write_when_released)
            try:
                yield hangs
            finally:
                released.set()

    return hold
