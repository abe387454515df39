"""``kvcache export``: a log as tables for DuckDB, pandas and spreadsheets, or as a trace for other tools.

There are two kinds of traces: of requests, which can be replayed, and of events over time, for viewers.
"""

from __future__ import annotations

import argparse
import secrets
import typing
from pathlib import Path

from events.log import LogReader
from kvcache.audit import open_log
from kvcache.audit.curve import LoggedPrompts
from kvcache.audit.export import FORMATS, export
from kvcache.audit.perfetto import PerfettoWriter
from kvcache.audit.trace import KEY_BYTES, TraceForm, TraceWriter
from kvcache.cli.curve import names_facts
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Facts, Output
from kvcache.cli.process import leaving_at_sigterm
from kvcache.cli.traces import LOG_OR_TRACE, add_trace, as_log
from kvcache.errors import UsageError
from kvcache.phrases import count, printable

_TRACES = typing.get_args(TraceForm)
_PICTURE = "perfetto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Export a log as tables (requests, block lifetimes, evictions, steps, occupancy), as a trace of its requests "
        "that can be shared (mooncake, bailian: prompts are replaced by keyed numbers), or as a timeline for "
        "ui.perfetto.dev (perfetto: requests, steps, occupancy)."
    )
    parser.epilog = (
        "`kvcache docs export` describes all columns, with example queries; `kvcache docs traces` describes the trace "
        "formats. PATH appears only when the export is complete."
    )
    add_shared(parser, log=LOG_OR_TRACE)
    option(parser, "--to", "output format", required=True, choices=[*sorted(FORMATS), *_TRACES, _PICTURE])
    option(
        parser,
        "-o --output PATH",
        "output: a database (sqlite), a trace file (perfetto, compressed if the name ends in .gz), or a directory with "
        "one file per table",
        required=True,
    )
    option(parser, "--force", "replace an earlier export at PATH")
    option(
        parser,
        "--key FILE",
        "for a trace: key of its numbers, at least 16 bytes; traces with the same key can be joined (default: a new "
        "key)",
    )
    add_trace(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log once (for a trace, that of the cache that served it), write the export, and print the row counts."""
    if args.key is not None and args.to not in _TRACES:
        raise UsageError(f"--key works with traces only: --to {' or '.join(_TRACES)}")
    with as_log(args, out) as served, leaving_at_sigterm():
        reader, facts = (_write_trace if args.to in _TRACES else _export)(served.log, args, out)
        out.note_end(reader.end)
        out.heading(f"{printable(str(args.log))} -> {printable(str(args.output))} ({args.to})")
        out.facts(facts)
    return 0


def _export(log: Path, args: argparse.Namespace, out: Output) -> tuple[LogReader, Facts]:
    """Write tables, or a timeline; return the reader of the log at its end, and what was written."""
    reader = LogReader(open_log(log).path)
    batches = out.watched(reader, "exporting")
    if args.to == _PICTURE:
        writer = PerfettoWriter(batches)
        writer.write(args.output, force=args.force)
        where = "open the file at https://ui.perfetto.dev (nothing is uploaded)"
        return reader, [("trace events", f"{writer.events:,}; {where}")]
    rows = export(batches, args.to, args.output, force=args.force)
    return reader, [(table, count(number, "row")) for table, number in rows.items()]


def _write_trace(log: Path, args: argparse.Namespace, out: Output) -> tuple[LogReader, Facts]:
    """Write a trace of requests; return the reader of the log at its end, and what was written."""
    key = secrets.token_bytes(KEY_BYTES) if args.key is None else args.key.read_bytes()
    with out.progress("exporting") as update:
        prompts = LoggedPrompts(log, update)
        writer = TraceWriter(prompts, args.to, key)
        writer.write(args.output, force=args.force)
    blocks = f"{prompts.tokens_per_block:,} tokens each"
    return prompts.reader, [
        ("requests", count(writer.lines, "line")),
        ("blocks", blocks),
        *names_facts(prompts),
    ]
