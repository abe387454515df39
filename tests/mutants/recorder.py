"""A plugin of pytest that tells coverage.py which test, or which fixture of several tests, is running.

It is copied into the tree that is measured, so it imports nothing of it. For each test it writes a line of JSON:
its id, whether it passed, how long it took, and the names of its fixtures. Processes that a test starts need no
plugin: coverage.py takes their context from the environment.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from coverage import Coverage

DIRECTORY = "RECORDER_DIRECTORY"
"""The variable that names the directory to write to."""
EVERYWHERE = """\
import atexit, contextlib, os, pathlib, uuid, zlib

def note(name):
    with contextlib.suppress(OSError):
        path = pathlib.Path(os.environ["RECORDER_DIRECTORY"], f"unseen.{name}")
        path.write_text(os.environ["PYTEST_CURRENT_TEST"])
        return path

def forked():
    if "PYTEST_CURRENT_TEST" in os.environ:
        note(zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].encode()))

if "RECORDER_DIRECTORY" in os.environ:
    import coverage
    coverage.process_startup()
    os.register_at_fork(after_in_child=forked)
    if "PYTEST_CURRENT_TEST" in os.environ:
        began = note(uuid.uuid4())
        if began is not None:
            atexit.register(began.unlink, missing_ok=True)
"""
"""`sitecustomize.py` of the tree. A process that is killed leaves a file, as does one that was forked: nothing of what
they ran is recorded."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "realtime: older trees have no such tests")
    config.pluginmanager.register(Recorder(Path(os.environ[DIRECTORY])))


class Recorder:
    """Records what is known of each test when it is over."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"tests.{os.getpid()}.jsonl"
        self._passed, self._context = True, ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._passed, began = True, time.monotonic()
        with self._switched(item.nodeid):
            result = yield
        line = json.dumps(
            [item.nodeid, self._passed, time.monotonic() - began, getattr(item, "fixturenames", [])]
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with self._switched(f"fixture {fixturedef.baseid}::{fixturedef.argname}"):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed &= not report.failed

    @contextmanager
    def _switched(self, context: str) -> Iterator[None]:
        before, self._context = self._context, context
        _switch(context)
        try:
            yield
        finally:
            self._context = before
            _switch(before)


def _switch(context: str) -> None:
    coverage = Coverage.current()
    if coverage is not None:
        coverage.switch_context(context)
