"""The table of ``kvcache subscribe``: drawn again and again on a terminal, otherwise printed from time to time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcache.cli.hearing import Heard, Source
from kvcache.cli.holders import Prompt
from kvcache.cli.output import Output, count, rich_console
from kvcache.cli.parser import integer, seconds
from kvcache.cli.prompts import read_tokens
from kvcache.cli.times import iso
from kvcache.cli.worker_table import LEFT, Report, View, to_json, view
from kvcache.cli.workers import Workers
from kvcache.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Group

_LIVE_SECONDS = 0.5
_EVERY_SECONDS = 10.0
_AROUND_ROWS = 7
"""Lines of a terminal that the table needs besides its rows: its head, and what is said below."""
_IDLE = 10
"""Looking at all blocks, and drawing, may take this part of the time, and no more."""
Show = Callable[[Report], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what is about the table."""
    add = parser.add_argument_group("table of workers").add_argument
    add("--table", action="store_true", help="also for one ENDPOINT; for several there is no other form")
    add(
        "--every",
        type=seconds,
        metavar="SECONDS",
        help=f"between two reports where stdout is no terminal ({_EVERY_SECONDS:.0f})",
    )
    add(
        "--prompt",
        metavar="FILE",
        help="show how much of this prompt each worker holds, and who most; token ids: a JSON list, or numbers "
        "between spaces; - for stdin",
    )
    add("--lora-id", type=integer, metavar="N", help="with --prompt: the adapter's number")
    add("--lora-name", metavar="NAME", help="with --prompt: the adapter's name")
    add("--cache-salt", metavar="SALT", help="with --prompt: its salt")


def wanted(args: argparse.Namespace) -> bool:
    """Whether a table is asked for."""
    return args.table or args.prompt is not None or len(args.endpoint) > 1


def check(args: argparse.Namespace) -> None:
    """Raise `UsageError` for options that do not go together."""
    if args.prompt is None and (args.lora_id, args.lora_name, args.cache_salt) != (None, None, None):
        raise UsageError("--lora-id, --lora-name and --cache-salt go with --prompt")
    if args.every is not None and not wanted(args):
        raise UsageError("--every goes with --table: events are printed as they come")


def read_prompt(args: argparse.Namespace) -> Prompt | None:
    """What `--prompt` says, if it is given. Raises `UsageError` and `InvalidTokens`."""
    # Not at the top: listening needs no numpy.
    from kvcache.inputs.tokens import pack_tokens

    if args.prompt is None:
        return None
    tokens = memoryview(pack_tokens(read_tokens(args.prompt))).cast("i").tolist()
    adapter = args.lora_id if args.lora_name is None else args.lora_name
    return Prompt(tuple(tokens), adapter, args.cache_salt)


def watch(listening: Source, reports: Iterator[Heard | None], args: argparse.Namespace, out: Output) -> None:
    """Show what is reported until there is no more, and at the end once again."""
    workers = Workers(read_prompt(args))
    workers.expect(listening.expected)
    report = Report(workers, lambda row: listening.connected(row.speaker))
    with _display(listening, args, out) as (every, show):
        due = time.monotonic() + (0 if every == _LIVE_SECONDS else every)
        for each in reports:
            if each is not None:
                workers.fold(*each)
                continue
            begun = time.monotonic()
            if begun >= due:
                _show(report, show)
                ended = time.monotonic()
                due = ended + max(every, _IDLE * (ended - begun))
        _show(report, show)


def _show(report: Report, show: Show) -> None:
    report.workers.look()
    show(report)


@contextmanager
def _display(listening: Source, args: argparse.Namespace, out: Output) -> Iterator[tuple[float, Show]]:
    """Seconds between two reports, and what shows one."""
    every = _EVERY_SECONDS if args.every is None else args.every
    console = None if args.json else rich_console(sys.stdout)
    if args.json:

        def of(endpoint: str) -> dict[str, int]:
            counts = (listening.refused, listening.malformed, listening.ignored)
            return {count.__name__: count(endpoint) for count in counts}

        yield every, lambda report: print(json.dumps(to_json(report, of)), flush=True)
    elif console is None:
        yield every, lambda report: _print(view(report, None), out)
    else:
        from rich.live import Live

        # No thread of its own: a report is drawn between two batches, never in the middle of one.
        with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:

            def draw(report: Report) -> None:
                room = max(console.height - _AROUND_ROWS, 1)
                live.update(drawn(view(report, console.width, room)), refresh=True)

            yield _LIVE_SECONDS, draw


def _print(shown: View, out: Output) -> None:
    out.heading(f"{iso(time.time_ns())}  {count(shown.workers, 'worker')}")
    out.table(shown.columns, shown.rows, right=[name for name in shown.columns if name not in LEFT])
    for line in shown.below:
        out.line(line)
    sys.stdout.flush()


def drawn(shown: View) -> Group:
    """A table for rich."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=(0, shown.gap - 1, 0, 0))
    for name in shown.columns:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for row, style in zip(shown.rows, shown.styles, strict=True):
        table.add_row(*map(Text, row), style=style)
    return Group(table, *map(Text, shown.below))
