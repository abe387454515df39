"""What the tests say of a mutation."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants import picker
from tests.mutants.covering import Map, copy
from tests.mutants.mutations import Mutation

STEPS = ((6, 10.0), (25, 60.0), (10**9, float("inf")))
"""The quickest tests of so many modules, for so many seconds, come first."""
UNSEEN = 60.0
"""Seconds of tests with processes of which nothing is recorded, for a line that no test is known to run."""
NONE_COLLECTED = 5
TIMEOUT = 60
"""Seconds after which a test that does not end has failed."""


class Outcome(NamedTuple):
    """What has become of a mutation."""

    verdict: str
    """`killed`, `survived`, `not covered`, or `not imported`."""
    by: str
    """The test that has failed."""
    ran: int
    tests: int
    """That run the line."""
    seconds: float


class Place:
    """A copy of the tree in which one mutation at a time is tried."""

    def __init__(self, tree: Path, directory: Path) -> None:
        directory.mkdir()
        self._tree, self._directory = copy(tree, directory / "tree"), directory
        shutil.copy(picker.__file__, self._tree / "picker.py")
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self._tree),
            picker.TESTS: str(directory / "picked.json"),
        }
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def tried(self, mutation: Mutation, known: Map, limit: float) -> Outcome:
        """Run the tests that may notice a mutation until one does, for as long as `limit` says they take."""
        began = time.monotonic()
        covering = known.covering(mutation)
        # Where no test is known to run it, a process may have done so of which nothing is recorded.
        verdict, by, ran = self._judged(mutation, known, covering, limit if covering else min(limit, UNSEEN))
        if not covering and verdict == "survived":
            verdict = "not covered"
        return Outcome(verdict, by, ran, len(covering), time.monotonic() - began)

    def _judged(
        self, mutation: Mutation, known: Map, covering: set[str], limit: float
    ) -> tuple[str, str, int]:
        with self._changed(mutation):
            if self._python("-c", f"import {_module(mutation.file)}", seconds=TIMEOUT):
                return "not imported", "", 0
        ran = 0
        for tests in chunks(known, covering, limit):
            rest = list(tests)
            while rest:
                with self._changed(mutation):
                    failed, begun = self._failing(known, rest)
                    # A test may fail once by itself, and then it says nothing.
                    again = failed is not None and self._failing(known, [failed])[0]
                ran += len(begun)
                if failed is None:
                    break
                if again and self._failing(known, [failed])[0] is None:
                    return "killed", failed, ran
                rest = [test for test in rest if test not in begun and failed not in (test, _file(test))]
        return "survived", "", ran

    @contextlib.contextmanager
    def _changed(self, mutation: Mutation) -> Iterator[None]:
        path = self._tree / mutation.file
        before = path.read_bytes()
        self._write(path, mutation.applied(before))
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, source: bytes) -> None:
        """Write a module. What it was compiled to goes by seconds and size, which may be the same."""
        path.write_bytes(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _failing(self, known: Map, tests: Sequence[str]) -> tuple[str | None, set[str]]:
        """Run tests. Returns the first one that fails, or the module that cannot be collected; and those begun."""
        picked, reported = self._directory / "picked.json", self._directory / "picked.jsonl"
        reported.unlink(missing_ok=True)
        picked.write_text(json.dumps(tests))
        shutil.rmtree(self._tree / ".hypothesis", ignore_errors=True)
        temporary = self._directory / "t"
        modules = dict.fromkeys(map(_file, tests))
        # Which seeds are for the long run changes with the day; these tests were quick when they were measured.
        options = [
            "-x",
            "-q",
            "-n",
            "0",
            "-p",
            "picker",
            "-m",
            "",
            "--hypothesis-seed=0",
            f"--timeout={TIMEOUT}",
        ]
        seconds = 2 * TIMEOUT + 5 * sum(known.tests[test].seconds for test in tests if test in known.tests)
        code = self._python("-m", "pytest", *options, f"--basetemp={temporary}", *modules, seconds=seconds)
        shutil.rmtree(temporary, ignore_errors=True)
        lines = [json.loads(line) for line in reported.read_text().splitlines()] if reported.exists() else []
        begun = [nodeid for what, nodeid in lines if what == "began"]
        failed = [nodeid for what, nodeid in lines if what == "failed"]
        if code not in (0, NONE_COLLECTED) and not failed:
            # It has ended the process, or kept it from ending; or pytest could not even begin.
            failed = begun[-1:] or list(modules)
        return (failed[0] if failed else None), set(begun)

    def _python(self, *arguments: str, seconds: float) -> int:
        """Run Python in the tree, and end all that it has started. Returns the exit status; -9 if it took too long."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self._tree,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def chunks(known: Map, covering: set[str], limit: float) -> Iterator[list[str]]:
    """Yield the tests to run after each other, the quickest first: those that run the line, then those that may.

    These are the tests that have killed or forked a process, and the other tests of the modules in which one runs the
    line: what a test keeps for others is counted as run by the first one only.
    """
    modules = set(map(_file, covering))
    alongside = {name for name, test in known.tests.items() if test.passed and _file(name) in modules}
    left, spent = sorted(covering, key=lambda test: known.tests[test].seconds), 0.0
    for most_modules, most_seconds in STEPS:
        step, left = _step(known, left, most_modules, min(most_seconds, limit - spent))
        spent += sum(known.tests[test].seconds for test in step)
        if step:
            yield _by_module(step)
    if left:
        return  # Too many to run all.
    for more in (set(known.unseen) - covering, alongside - covering - set(known.unseen)):
        rest = sorted(more, key=lambda test: known.tests[test].seconds)
        step, _ = _step(known, rest, 10**9, limit - spent)
        spent += sum(known.tests[test].seconds for test in step)
        if step:
            yield _by_module(step)


def _step(
    known: Map, tests: Sequence[str], most_modules: int, most_seconds: float
) -> tuple[list[str], list[str]]:
    """Divide tests, the quickest first, into those that are within the bounds and the rest."""
    modules: set[str] = set()
    taken, left, seconds = [], [], 0.0
    for test in tests:
        module, takes = _file(test), known.tests[test].seconds
        if (module in modules or len(modules) < most_modules) and seconds + takes <= most_seconds:
            modules.add(module)
            seconds += takes
            taken.append(test)
        else:
            left.append(test)
    return taken, left


def _by_module(tests: Sequence[str]) -> list[str]:
    """Tests of a module one behind the other, so that its fixtures are made once."""
    by_module = defaultdict(list)
    for test in tests:
        by_module[_file(test)].append(test)
    return [test for each in by_module.values() for test in each]


def _file(test: str) -> str:
    return test.partition("::")[0]


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
