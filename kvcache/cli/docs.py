"""``kvcache docs``: the documentation of this version, as text.

A wheel carries the pages as ``kvcache/docs``; in a checkout they are in ``docs/``. Help and messages name a page as
``kvcache docs PAGE``, which works wherever the command does.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import kvcache
from kvcache.cli.options import option
from kvcache.cli.output import Output

_PACKAGE = Path(kvcache.__file__).parent
_PARTS = {
    "tutorials": "tutorials",
    "how-to": "how-to guides",
    "reference": "reference",
    "explanation": "explanation",
    "decisions": "design decisions",
    "docs": "about",
}
"""Headings of the list of pages, by directory."""
_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:|#)([^)#\s]*)[^)]*\)")


def directory() -> Path:
    """Return the directory of the pages: the wheel's, or the checkout's."""
    inside = _PACKAGE / "docs"
    return inside if inside.is_dir() else _PACKAGE.parent / "docs"


def pages() -> dict[str, Path]:
    """Return the pages by name, in order."""
    return dict(sorted((page.stem, page) for page in directory().rglob("*.md")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Print a page of the documentation, in Markdown; without PAGE, list the pages."
    parser.epilog = "Example: kvcache docs audit | less"
    option(parser, "PAGE", ", ".join(pages()), nargs="?", choices=[*pages()])


def run(args: argparse.Namespace, out: Output) -> int:
    """Print a page, or the list of pages with their titles."""
    if args.page is None:
        out.line("kvcache docs PAGE prints a page; begin with the tour.")
        for part, titles in _PARTS.items():
            of = {name: page for name, page in pages().items() if page.parent.name == part}
            if of:
                out.line()
                out.heading(titles)
                out.facts(
                    (name, page.read_text(encoding="utf-8").split("\n", 1)[0].strip("# "))
                    for name, page in of.items()
                )
    else:
        page = pages()[args.page]
        out.line(_readable(page.read_text(encoding="utf-8").rstrip("\n"), page.parent))
    return 0


def _readable(text: str, place: Path) -> str:
    """Replace links of a page in `place` to files that are not installed by their text."""
    return _LINK.sub(lambda link: link[0] if (place / link[2]).exists() else link[1], text)
