"""``kvcache docs``: the pages, and that help names only those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcache.cli import docs
from kvcache.cli.parser import COMMANDS
from tests.support.commands import Kvcache
from tests.support.places import ROOT


def test_all_pages_are_listed_with_their_titles(kvcache: Kvcache) -> None:
    """Each Markdown file of docs/ has a line, under its part."""
    done = kvcache("docs")
    listed = [line.split()[0] for line in done.out.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs").rglob("*.md"))
    assert re.search(r"how-to guides\n(  .*\n)*  audit +Why", done.out)


def test_a_page_is_printed(kvcache: Kvcache) -> None:
    """In a checkout it is the file as it is."""
    text = (ROOT / "docs" / "how-to" / "curve.md").read_text(encoding="utf-8")
    assert kvcache("docs", "curve").out == text


def test_links_to_what_is_not_installed_are_text(
    kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the pages are, links to tests and examples become their text, and others stay."""
    (tmp_path / "a.md").write_text("# A\n[b](b.md#x) [t](../tests/t.py) [w](https://w.example) ![p](p.png)\n")
    (tmp_path / "b.md").write_text("# B\n")
    monkeypatch.setattr(docs, "directory", lambda: tmp_path)
    assert kvcache("docs", "a").out == "# A\n[b](b.md#x) t [w](https://w.example) p\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_pages_that_there_are(kvcache: Kvcache, command: str) -> None:
    """Help names a page as a command, never as a file of the repository."""
    said = " ".join(kvcache(command, "--help").out.split())
    assert re.findall(r"docs/\S+\.md", said) == []
    for page in re.findall(r"`kvcache docs (\w+)`", said):
        assert len([*(ROOT / "docs").rglob(f"{page}.md")]) == 1


def test_an_unknown_page_is_refused(kvcache: Kvcache) -> None:
    """The message lists the pages."""
    done = kvcache("docs", "nothing")
    assert done.code == 2
    assert "audit" in done.err
