"""``kvcache export``: a log as tables for DuckDB, pandas, spreadsheets and whatever else reads such files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from events.log import LogReader
from events.types import EventBatch
from kvcache.audit import open_log
from kvcache.cli.log_end import note_end
from kvcache.cli.messages import printable
from kvcache.cli.output import Output, count
from kvcache.cli.process import leaving_at_sigterm
from kvcache.cli.progress import Update, progress
from kvcache.export.export import FORMATS, export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Write what a log tells as tables: requests, blocks (their lives), evictions, steps, occupancy."
    )
    parser.epilog = (
        "`kvcache docs export` has every column, and queries. Nothing is at PATH until all is written."
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="a log directory")
    parser.add_argument("--to", required=True, choices=sorted(FORMATS), help="the format")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="PATH",
        help="where to: a database (sqlite), or a directory with a file for each table",
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export at PATH")


def run(args: argparse.Namespace, out: Output) -> int:
    """Read once, write all tables, tell their rows."""
    reader = LogReader(open_log(args.log).path)
    with leaving_at_sigterm(), progress("exporting", None, shown=not out.quiet) as update:
        rows = export(_watched(reader, update), args.to, args.output, force=args.force)
    note_end(out, reader.end)
    out.heading(f"{printable(str(args.log))} -> {printable(str(args.output))} ({args.to})")
    out.facts([(table, count(number, "row")) for table, number in rows.items()])
    return 0


def _watched(reader: LogReader, update: Update) -> Iterator[EventBatch]:
    for batch in reader:
        update(batch.seq)
        yield batch
