"""A disk that is full for a while."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

FullDisk = Callable[[], AbstractContextManager[None]]


@pytest.fixture(params=["refused writes", "refused syncs", "limited file size"])
def full_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FullDisk:
    """While it is entered, the log's disk takes no more."""

    @contextmanager
    def limited() -> Iterator[None]:
        before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = max(path.stat().st_size for path in tmp_path.glob("log/*.kvlog"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)

    @contextmanager
    def refused(name: str) -> Iterator[None]:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(name, refuse)
            yield

    names = {"refused writes": "os.writev", "refused syncs": "events.log.output.sync_file"}
    return limited if request.param == "limited file size" else lambda: refused(names[request.param])
