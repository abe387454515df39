"""``kvcache docs``: the documentation that belongs to this version, as text.

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
_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:|#)([^)#\s]*)[^)]*\)")


def directory() -> Path:
    """Return the directory of the pages: the wheel's, or the checkout's."""
    inside = _PACKAGE / "docs"
    return inside if inside.is_dir() else _PACKAGE.parent / "docs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    pages = sorted(page.stem for page in directory().glob("*.md"))
    parser.description = "Print a page of the documentation, in Markdown; without PAGE, list the pages."
    parser.epilog = "As in: kvcache docs audit | less"
    option(parser, "PAGE", ", ".join(pages), nargs="?", choices=pages)


def run(args: argparse.Namespace, out: Output) -> int:
    """Print a page, or the list of pages with their titles."""
    if args.page is None:
        pages = sorted(directory().glob("*.md"))
        out.facts(
            (page.stem, page.read_text(encoding="utf-8").split("\n", 1)[0].strip("# ")) for page in pages
        )
    else:
        out.line(_readable((directory() / f"{args.page}.md").read_text(encoding="utf-8").rstrip("\n")))
    return 0


def _readable(text: str) -> str:
    """Replace each link to a file that is not installed by its text."""
    return _LINK.sub(lambda link: link[0] if (directory() / link[2]).exists() else link[1], text)
