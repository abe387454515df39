"""How `make docs` builds the site: Markdown by MyST, the commands' help and the Python API from the code itself."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

project = "kvcache"
copyright = "the kvcache authors"  # noqa: A001
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = "kvcache"
exclude_patterns = ["deploy", "monitoring"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Fields of several events have one name.
suppress_warnings = ["ref.python"]
myst_fence_as_directive = ["mermaid"]
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False}


def _help_of_commands() -> str:
    from kvcache.cli import main
    from kvcache.cli.parser import COMMANDS

    os.environ["COLUMNS"] = "100"
    pages = ["# Commands\n\n`kvcache COMMAND --help` prints the same.\n"]
    for command in COMMANDS:
        said = io.StringIO()
        with redirect_stdout(said), suppress(SystemExit):
            main([command, "--help"])
        pages.append(f"## {command}\n\n```text\n{said.getvalue().rstrip()}\n```\n")
    return "\n".join(pages)


LINK = re.compile(r"!?\[([^\]]*)\]\((?!\w+:|#)([^)#\s]*)[^)]*\)")


def _without_links_to_code(app: Any, page: str, source: list[str]) -> None:
    """Replace links to files of the checkout, which the site does not have, by their text."""
    here, docs = (Path(app.srcdir) / page).parent, Path(app.srcdir)

    def readable(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        on_site = target.is_relative_to(docs) and target.suffix in {".md", ".png"}
        return link[0] if on_site else link[1]

    source[0] = LINK.sub(readable, source[0])


def setup(app: Any) -> None:
    """Write the pages that are generated before any is read."""
    reference = Path(app.srcdir) / "reference"
    (reference / "commands.md").write_text(_help_of_commands(), encoding="utf-8")
    app.connect("source-read", _without_links_to_code)
