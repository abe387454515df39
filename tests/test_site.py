"""The documentation as a site: each link and anchor of a page leads somewhere, and generated pages are made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` builds it, but as text, which is quicker. Each command's help and the docstrings are on it."""
    pages = shutil.copytree(ROOT / "docs", tmp_path / "pages")  # others are written beside them
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "text"]
    built = subprocess.run(
        [*command, pages, tmp_path / "site"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    assert "--secondary-blocks" in (tmp_path / "site" / "reference" / "commands.txt").read_text()
    assert "store_context_blocks" in (tmp_path / "site" / "reference" / "python.txt").read_text()
