"""Which tests run which lines: the quick tests are run once under coverage.py, and what that says is kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from coverage import Coverage, CoverageData

from tests.mutants import recorder
from tests.mutants.mutations import Mutation

PACKAGES = ("kvcache", "events", "sinks", "cuda_ops")
QUICK = "not long and not realtime"
SETTINGS = """\
[run]
source =
    {sources}
data_file = {directory}/.coverage
parallel = true
core = ctrace
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, trace-changed, module-not-measured, module-not-imported, couldnt-parse
"""
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info"
)


class Test(NamedTuple):
    """What is known of a test from the run that was measured."""

    passed: bool
    seconds: float
    fixtures: frozenset[str]


class Lines(NamedTuple):
    """Lines of files that can be run, and those of them that were."""

    there: int
    run: int

    def __str__(self) -> str:
        return f"{self.run:,} of {self.there:,} lines, {self.run / max(self.there, 1):.2%}"


def copy(tree: Path, place: Path) -> Path:
    """Copy what the tests of a tree need; its `.venv` is shared."""
    shutil.copytree(tree, place, symlinks=True, ignore=LEFT_OUT)
    if (tree / ".venv").exists():
        (place / ".venv").symlink_to((tree / ".venv").resolve())
    return place


def measure(tree: Path, directory: Path, workers: int, tests: Sequence[str] = ()) -> None:
    """Run quick tests of a tree, in a copy, under coverage.py; the directory has what that says in the end."""
    directory.mkdir(parents=True)
    copied = copy(tree, directory / "tree")
    settings = directory / "coveragerc"
    sources = "\n    ".join(str(copied / package) for package in PACKAGES)
    settings.write_text(SETTINGS.format(sources=sources, directory=directory))
    shutil.copy(recorder.__file__, copied / "coverage_recorder.py")
    (copied / "sitecustomize.py").write_text(recorder.EVERYWHERE)
    environment = {
        **os.environ,
        "PYTHONPATH": str(copied),
        "COVERAGE_PROCESS_START": str(settings),
        recorder.DIRECTORY: str(directory),
    }
    options = ["-q", "-p", "coverage_recorder", "-n", str(workers), "--dist", "loadscope", "-m", QUICK]
    command = [sys.executable, "-m", "pytest", *options, "--timeout=600", "--tb=no", "-r", "N", *tests]
    subprocess.run(command, cwd=copied, env=environment, stdout=sys.stderr, check=False)
    combine(directory)


def combine(directory: Path) -> None:
    """Make one file of those that the processes have written; a process that was killed may have left a broken one."""
    for path in directory.glob(".coverage.*"):
        try:
            with contextlib.closing(sqlite3.connect(path)) as file:
                whole = file.execute("PRAGMA quick_check").fetchall() == [("ok",)]
                whole &= bool(
                    file.execute("SELECT name FROM sqlite_master WHERE name = 'line_bits'").fetchall()
                )
        except sqlite3.DatabaseError:
            whole = False
        if not whole:
            path.unlink()
    coverage = Coverage(str(directory / ".coverage"), config_file=False, messages=False)
    coverage.combine([str(directory)])
    coverage.save()


class Map:
    """What `measure` has left in a directory."""

    def __init__(self, directory: Path) -> None:
        self.tree = directory / "tree"
        self._data = CoverageData(str(directory / ".coverage"))
        self._data.read()
        self.tests: dict[str, Test] = {}
        for path in directory.glob("tests.*.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines():
                nodeid, passed, seconds, fixtures = json.loads(line)
                self.tests[nodeid] = Test(passed, seconds, frozenset(fixtures))
        killed = {_test_of(path.read_text()) for path in directory.glob("unseen.*")}
        self.unseen = sorted(nodeid for nodeid in killed & self.tests.keys() if self.tests[nodeid].passed)
        """Tests that have killed or forked a process, so that what it ran is not known."""

    def lines(self) -> dict[str, Lines]:
        """Return how many lines of each file of the product there are, and how many were run."""
        coverage = Coverage(str(self._data.data_filename()), config_file=False)
        coverage.load()
        found = {}
        for package in PACKAGES:
            for path in sorted((self.tree / package).rglob("*.py")):
                _, there, _, missing, _ = coverage.analysis2(str(path))
                found[path.relative_to(self.tree).as_posix()] = Lines(len(there), len(there) - len(missing))
        return found

    def covering(self, mutation: Mutation) -> set[str]:
        """Return the tests that run the lines of a mutation and have passed."""
        by_line = self._contexts(mutation.file)
        contexts = {context for line in mutation.lines for context in by_line.get(line, ())}
        if contexts == {""}:
            # It runs at import or collection only, so it concerns whoever uses the file.
            contexts = {context for each in by_line.values() for context in each}
        found = {test for context in contexts for test in self._tests_of(context)}
        return {test for test in found if self.tests[test].passed}

    @cache  # noqa: B019 - there is one map
    def _contexts(self, file: str) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(str(self.tree / file))

    @cache  # noqa: B019
    def _tests_of(self, context: str) -> Iterable[str]:
        """The tests of a context: itself, who uses a fixture, or all of a module whose fixture started a process."""
        if context.startswith("fixture "):
            base, _, name = context.removeprefix("fixture ").rpartition("::")
            return [
                each for each, test in self.tests.items() if name in test.fixtures and each.startswith(base)
            ]
        test = _test_of(context)
        if context.endswith(" (setup)"):
            module = test.partition("::")[0]
            return [each for each in self.tests if each.partition("::")[0] == module]
        return [test] if test in self.tests else []


def _test_of(context: str) -> str:
    return re.sub(r" \((setup|call|teardown)\)$", "", context)
