"""``kvcache report``: a page for a browser about what a log's cache did."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from kvcache.cli.output import Output, size
from kvcache.cli.progress import progress
from kvcache.errors import UsageError
from kvcache.report.report import report


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
    # Said before a long log is read.
    if not args.force and os.path.lexists(args.output):
        raise _exists(args.output)
    curve, whatif = _json(args.curve), _json(args.whatif)
    with progress("reading", None, shown=not out.quiet) as update:
        page = report(args.log, curve=curve, whatif=whatif, progress=update)
    try:
        with args.output.open("w" if args.force else "x", encoding="utf-8", newline="\n") as file:
            file.write(page)
    except FileExistsError:
        raise _exists(args.output) from None
    out.note(f"{args.output}: {size(len(page.encode()))}")
    return 0


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path} exists: choose another file, or add --force to overwrite it")


def _json(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UsageError(f"{path} holds no JSON") from None
