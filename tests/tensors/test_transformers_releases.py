"""The cache with each release of Transformers that it is said to work with: the same tests, beside another release.

A release is installed into a directory of its own (`tests.support.releases`), and comes first on the import path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.needs import program
from tests.support.places import ROOT
from tests.support.releases import OTHERS

FILES = ["tests/tensors/test_transformers.py", "tests/tensors/test_transformers_unusual.py"]
WHAT_DIFFERS = (
    "test_release or conversations and (llama or gemma3) or unequal_reuse or several_answers and llama"
    " or chunked_prefill or failing_forward or calls_that_are_not or passes_of_ones_own or windows_smaller"
    " or rotary or window_of_no_token or falcon"
)
"""Tests of what releases do each in their own way: masks, positions, beams, chunks, hooks, and settings of models."""
EACH = [pytest.param(release, marks=pytest.mark.needs(f"transformers-{release}")) for release in OTHERS]


def run_tests(release: str, *options: str) -> None:
    """Run the tests of the cache with a release; whatever this one has set for its own tests is not theirs."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TESTS"))
    }
    path = os.pathsep.join([program(f"transformers-{release}"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options, *FILES],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": path, "EXPECTED_TRANSFORMERS": release},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", EACH)
def test_release(release: str) -> None:
    """What differs between releases works with this one."""
    run_tests(release, "-k", WHAT_DIFFERS)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", EACH)
def test_all_with_release(release: str) -> None:
    """All that is shown for the installed release holds for this one."""
    run_tests(release)
