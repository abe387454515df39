"""``kvcache report``: a page for a browser about what a log's cache did."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvcache.audit import open_log
from kvcache.cli.log_end import note_end
from kvcache.cli.output import Output, size
from kvcache.cli.process import leaving_at_sigterm
from kvcache.cli.progress import progress
from kvcache.export.export import replacing
from kvcache.report.given import Curve, WhatIf, read, refuse_other
from kvcache.report.report import report

PAGE_HEADER = b"<!doctype html>"
"""How a page begins: nothing else is overwritten."""

_Form = TypeVar("_Form", Curve, WhatIf)


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
    curve = _given(args.log, args.curve, Curve, out)
    whatif = _given(args.log, args.whatif, WhatIf, out)
    # What is wrong with the place is said before a long log is read.
    with (
        leaving_at_sigterm(),
        replacing(args.output, force=args.force, header=PAGE_HEADER) as new,
        progress("reading", None, shown=not out.quiet) as update,
    ):
        page = report(args.log, curve=curve, whatif=whatif, progress=update, ended=partial(note_end, out))
        new.write_text(page, encoding="utf-8", newline="\n")
    out.note(f"{args.output}: {size(len(page.encode()))}")
    return 0


def _given(log: Path, path: Path | None, form: type[_Form], out: Output) -> _Form | None:
    """What a file says, if it is about this log."""
    if path is None:
        return None
    given = read(path, form)
    if given.log_id is None:
        out.warning(f"{path} does not say of which log it is: taken as of this one")
    refuse_other(open_log(log).log_id, given, str(path))
    return given
