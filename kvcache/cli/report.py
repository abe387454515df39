"""``kvcache report``: a page for a browser about what a log's cache did."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvcache.cli.output import Output, size
from kvcache.cli.process import leaving_at_sigterm
from kvcache.cli.progress import progress
from kvcache.errors import UsageError
from kvcache.export.target import replacing
from kvcache.report.report import report

PAGE_HEADER = b"<!doctype html>"
"""How a page begins: nothing else is overwritten."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Write one HTML page about what a log's cache did: reuse and its losses over time, how full each level was, "
        "which evictions cost most and whom, and a lane per request with its explanation. It needs no network."
    )
    parser.epilog = (
        "The page names requests, but no tokens and no salts. It needs plotly: pip install 'kvcache[report]'"
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="a log directory")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (report.html)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the page if it exists")
    parser.add_argument(
        "--curve",
        type=Path,
        metavar="FILE",
        help="what `kvcache curve LOG --json` printed, as a section more",
    )
    parser.add_argument(
        "--whatif",
        type=Path,
        metavar="FILE",
        help="what `kvcache whatif LOG --json` printed, as a section more",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log twice, and write the page."""
    curve, whatif = _json(args.curve), _json(args.whatif)
    # What is wrong with the place is said before a long log is read.
    with (
        leaving_at_sigterm(),
        replacing(args.output, force=args.force, header=PAGE_HEADER) as new,
        progress("reading", None, shown=not out.quiet) as update,
    ):
        page = report(args.log, curve=curve, whatif=whatif, progress=update)
        new.write_text(page, encoding="utf-8", newline="\n")
    out.note(f"{args.output}: {size(len(page.encode()))}")
    return 0


def _json(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UsageError(f"{path} holds no JSON") from None
