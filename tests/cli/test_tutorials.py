"""Tutorials show what their commands and programs print.

`python -m tests.cli.test_tutorials` writes it anew.
"""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.examples import played
from tests.support.places import ROOT

PAGES = [
    ROOT / page
    for page in ("README.md", "docs/tutorials/router.md", "docs/tutorials/why.md", "docs/how-to/operators.md")
]
COLUMNS = "120"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_output_is_what_is_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands and programs of the page, one after the other, print what stands there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    text = page.read_text(encoding="utf-8")
    assert played(text) == text


if __name__ == "__main__":
    os.environ["COLUMNS"] = COLUMNS
    for each in PAGES:
        with TemporaryDirectory() as directory, chdir(directory):
            each.write_text(played(each.read_text(encoding="utf-8")), encoding="utf-8")
