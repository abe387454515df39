"""A plugin of pytest that runs given tests in a given order and writes down, for each, that it begins or has failed.

It is copied into the tree that is changed, so it imports nothing of it.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

TESTS = "PICKED_TESTS"
"""The variable that names a file with the list of ids; what happens is written beside it, with the suffix `.jsonl`."""
MEMORY = 8 << 30
"""Bytes that a process may have: a loop that does not end may fill a list."""


def pytest_configure(config: pytest.Config) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    config.pluginmanager.register(Picker(Path(os.environ[TESTS])))


class Picker:
    """The given tests, and what becomes of them."""

    def __init__(self, path: Path) -> None:
        self._order = {nodeid: place for place, nodeid in enumerate(json.loads(path.read_text()))}
        self._path = path.with_suffix(".jsonl")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        picked = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(picked, key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note("failed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note("failed", report.nodeid)

    def _note(self, what: str, nodeid: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([what, nodeid]) + "\n")
