"""``kvcache export``: a log as tables for DuckDB, pandas, spreadsheets and whatever else reads such files."""

from __future__ import annotations

import argparse
from pathlib import Path

from events.log import LogReader
from kvcache.audit import open_log
from kvcache.audit.export import FORMATS, export
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Output
from kvcache.cli.process import leaving_at_sigterm
from kvcache.phrases import count, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Write what a log tells as tables: requests, blocks (their lives), evictions, steps, occupancy."
    )
    parser.epilog = (
        "`kvcache docs export` has every column, and queries. Nothing is at PATH until all is written."
    )
    add_shared(parser, "log")
    option(parser, "--to", "the format", required=True, choices=sorted(FORMATS))
    option(
        parser,
        "-o --output PATH",
        "where to: a database (sqlite), or a directory with a file for each table",
        required=True,
        type=Path,
    )
    option(parser, "--force", "replace an earlier export at PATH")


def run(args: argparse.Namespace, out: Output) -> int:
    """Read once, write all tables, tell their rows."""
    reader = LogReader(open_log(args.log).path)
    with leaving_at_sigterm():
        rows = export(out.watched(reader, "exporting"), args.to, args.output, force=args.force)
    out.note_end(reader.end)
    out.heading(f"{printable(str(args.log))} -> {printable(str(args.output))} ({args.to})")
    out.facts([(table, count(number, "row")) for table, number in rows.items()])
    return 0
