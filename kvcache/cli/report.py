"""``kvcache report``: a page for a browser about a log's cache."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvcache.audit import open_log
from kvcache.audit.advice import advise, observe_log
from kvcache.audit.export import replacing
from kvcache.cli.advise import MINUTES, Page, unanswered
from kvcache.cli.costs import Costs
from kvcache.cli.options import add_cost_options, add_shared, option
from kvcache.cli.output import Output
from kvcache.cli.process import leaving_at_sigterm
from kvcache.cli.traces import LOG_OR_TRACE, Served, add_trace, as_log, is_trace
from kvcache.errors import Unsupported, UsageError
from kvcache.phrases import printable, size
from kvcache.report.imported import ImportedCurve, Supplements, WhatIf, refuse_other, understood
from kvcache.report.page import report

PAGE_HEADER = b"<!doctype html>"
"""Beginning of a page: no other file is overwritten."""

_Form = TypeVar("_Form", ImportedCurve, WhatIf)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Write a self-contained HTML page about the cache of a log: reuse and losses over time, occupancy of each "
        "level, the costliest evictions and who paid for them, advice, and a lane per request with its explanation."
    )
    parser.epilog = (
        "The page names requests, tenants and sessions, but contains no tokens and no salts. "
        "Requires: pip install 'kvcache[report]'"
    )
    add_shared(parser, log=LOG_OR_TRACE)
    add = partial(option, parser)
    default = Path("report.html")
    add("-o --output FILE", f"output file (default: {default})", default=default)
    add("--force", "overwrite an existing page")
    for name in ("curve", "whatif"):
        add(
            f"--{name} FILE",
            f"output of `kvcache {name} LOG --json` for the same log or trace, added as a section",
        )
    add_trace(parser)
    add_cost_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log, or that of the trace, four times or more, and write the page."""
    costs = Costs.of(args)
    curve = _given(args.log, args.curve, ImportedCurve, out)
    whatif = _given(args.log, args.whatif, WhatIf, out)
    with as_log(args, out) as served:
        for path, given in ((args.curve, curve), (args.whatif, whatif)):
            if given is not None:
                refuse_other(open_log(served.log).log_id, given, str(path))
        return _write(served, curve, whatif, costs, args, out)


def _supplements(served: Served, args: argparse.Namespace, costs: Costs, out: Output) -> Supplements:
    """Return further sections: advice, and how a trace was played."""
    reported = () if served.reported is None else served.reported.hours
    origin = tuple(served.facts())
    try:
        with out.progress("reading") as update:
            found = observe_log(served.log, update)
    except (UsageError, Unsupported):  # too few requests, no token ids, or no full attention
        return Supplements(origin, reported=reported)
    advised = advise(found, 60.0 * MINUTES)
    lines = tuple(Page(args, found, costs).lines(advised))
    return Supplements(origin, lines, tuple(unanswered(advised)), reported)


def _write(
    served: Served,
    curve: ImportedCurve | None,
    whatif: WhatIf | None,
    costs: Costs,
    args: argparse.Namespace,
    out: Output,
) -> int:
    # Errors about the output file are reported before a long log is read.
    with leaving_at_sigterm(), replacing(args.output, force=args.force, header=PAGE_HEADER) as new:
        supplements = _supplements(served, args, costs, out)
        with out.progress("reading") as update:
            page = report(
                served.log,
                curve=curve,
                whatif=whatif,
                pricing=costs.pricing,
                model=costs.model,
                supplements=supplements,
                progress=update,
                ended=out.note_end,
            )
        new.write_text(page, encoding="utf-8", newline="\n")
    for label, said in (*costs.prefill_facts(), *costs.model_facts()):
        out.note(f"{label}: {said}" if label else said)
    out.note(f"{args.output}: {size(len(page.encode()))}")
    return 0


def _given(log: Path, path: Path | None, form: type[_Form], out: Output) -> _Form | None:
    """Read a file of results. If it names a trace, that must be `log`: the path given, before a trace is played."""
    if path is None:
        return None
    given = understood(path.read_bytes(), form, str(path))
    if given.trace is not None:
        if not is_trace(log) or Path(given.trace).resolve() != log.resolve():
            raise UsageError(
                f"{path} is about the trace {printable(given.trace)}: give the output of `kvcache curve {log} --json`"
            )
        out.note(f"{path} is about the trace itself: its blocks are those of the trace, not of the cache")
        given.trace = None
    elif given.log_id is None:
        out.warning(f"{path} does not name its log; assuming it is this one")
    return given
