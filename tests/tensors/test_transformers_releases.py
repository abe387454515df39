"""The cache with each release of Transformers that it is said to work with: the same tests, beside another release.

A release is installed into a directory of its own, without torch, and comes first on the import path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvcache.integrations.transformers import OLDEST
from tests.support.places import ROOT

RELEASES = ("4.56.0", "4.57.6", "5.0.0", "5.23.0", "5.24.0")
"""The oldest and the newest, the last and first of two major ones, and the last that knows no `cache=`."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", RELEASES)
def test_release(release: str, tmp_path: Path) -> None:
    """All that is shown for the installed release holds for this one."""
    own = tmp_path / "packages"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
        "--target",
        str(own),
    ]
    subprocess.run([*install, f"transformers=={release}"], check=True)
    path = os.pathsep.join([str(own), str(ROOT)])
    tests = ["tests/tensors/test_transformers.py", "tests/tensors/test_transformers_unusual.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "EXPECTED_TRANSFORMERS": release},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)


def test_releases_are_those_that_are_stated() -> None:
    """The documentation names them, and no older one is accepted or installed."""
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    assert f"Transformers {', '.join(RELEASES[:-1])} and {RELEASES[-1]}" in text
    assert RELEASES[0].startswith(".".join(map(str, OLDEST)))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert f"transformers>={'.'.join(map(str, OLDEST))}" in extras["transformers"]
