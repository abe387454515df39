"""What all tests share: how hypothesis runs, and fresh interpreters to import things in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.accounting import accounted
from tests.places import ROOT

# Machines that run tests are slow at times, which is no fault of the code: pytest-timeout stops what hangs.
# A failure prints the line that repeats it.
settings.register_profile("kvcache", deadline=None, print_blob=True)
settings.load_profile("kvcache")

# What differs is said as in tests themselves.
pytest.register_assert_rewrite("tests.agreement")

WAITING = 2
"""Workers more than there are cores: tests of processes and servers wait for most of their time."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """What `-n auto` means."""
    return (yield) + WAITING


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code in a fresh interpreter, in an empty directory, with `path` before the project on the import path."""

    def run(
        code: str, path: Sequence[Path] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        import_path = os.pathsep.join(str(entry) for entry in (*path, ROOT))
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": import_path, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


@pytest.fixture(autouse=True)
def no_logging_left() -> Iterator[None]:
    """What a command has set up for its messages does not reach the next test, nor what a log of its run has."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors: their sums are not worth dividing, and other tests run at the same time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def every_batch_is_accounted_for() -> Iterator[None]:
    """Of each log that is written in this process: appended = durable + in flight + dropped."""
    with accounted():
        yield
