"""What the tests of events share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from events.log import LogWriter
from events.log.output import Record

HoldDisk = Callable[[LogWriter], AbstractContextManager[None]]


@pytest.fixture
def hold_disk(monkeypatch: pytest.MonkeyPatch) -> HoldDisk:
    """Make a writer's disk hang for as long as the context lasts."""

    @contextmanager
    def hold(log: LogWriter) -> Iterator[None]:
        released = threading.Event()
        output = log._recorder.output
        write = output.write

        def write_when_released(content: Sequence[Record]) -> None:
            assert released.wait(60)
            write(content)

        monkeypatch.setattr(output, "write", write_when_released)
        try:
            yield
        finally:
            released.set()

    return hold
