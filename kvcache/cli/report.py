"""``kvcache report``: a page for a browser about a log's cache."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvcache.audit import open_log
from kvcache.audit.export import replacing
from kvcache.cli.costs import Costs
from kvcache.cli.options import add_cost_options, add_shared, option
from kvcache.cli.output import Output
from kvcache.cli.process import leaving_at_sigterm
from kvcache.cli.traces import LOG_OR_TRACE, add_trace, as_log
from kvcache.phrases import size
from kvcache.report.given import GivenCurve, WhatIf, refuse_other, understood
from kvcache.report.page import report

PAGE_HEADER = b"<!doctype html>"
"""Beginning of a page: no other file is overwritten."""

_Form = TypeVar("_Form", GivenCurve, WhatIf)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Write one HTML page about what a log's cache did: reuse and its losses over time, how full each level was, "
        "which evictions cost most and whom, and a lane per request with its explanation. It needs no network."
    )
    parser.epilog = (
        "The page names requests, tenants and sessions, but no tokens and no salts. "
        "Needed: pip install 'kvcache[report]'"
    )
    add_shared(parser, log=LOG_OR_TRACE)
    add = partial(option, parser)
    default = Path("report.html")
    add("-o --output FILE", f"the page ({default})", type=Path, default=default)
    add("--force", "overwrite the page if it exists")
    for name in ("curve", "whatif"):
        add(f"--{name} FILE", f"what `kvcache {name} LOG --json` printed, as a section more", type=Path)
    add_trace(parser)
    add_cost_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log, or that of the trace, twice, and write the page."""
    costs = Costs.of(args)
    with as_log(args, out) as served:
        return _write(served.log, costs, args, out)


def _write(log: Path, costs: Costs, args: argparse.Namespace, out: Output) -> int:
    curve = _given(log, args.curve, GivenCurve, out)
    whatif = _given(log, args.whatif, WhatIf, out)
    # Errors of the target are reported before a long log is read.
    with (
        leaving_at_sigterm(),
        replacing(args.output, force=args.force, header=PAGE_HEADER) as new,
        out.progress("reading") as update,
    ):
        page = report(
            log,
            curve=curve,
            whatif=whatif,
            pricing=costs.pricing,
            model=costs.model,
            progress=update,
            ended=out.note_end,
        )
        new.write_text(page, encoding="utf-8", newline="\n")
    for label, said in (*costs.prefill_facts(), *costs.model_facts()):
        out.note(f"{label}: {said}" if label else said)
    out.note(f"{args.output}: {size(len(page.encode()))}")
    return 0


def _given(log: Path, path: Path | None, form: type[_Form], out: Output) -> _Form | None:
    """Return the content of a file if it is about this log."""
    if path is None:
        return None
    given = understood(path.read_bytes(), form, str(path))
    if given.log_id is None:
        out.warning(f"{path} does not say of which log it is: taken as of this one")
    refuse_other(open_log(log).log_id, given, str(path))
    return given
