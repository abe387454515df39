"""The table of ``kvcache subscribe``: when it is shown, and its options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from kvcache.cli.hearing import Heard, Source
from kvcache.cli.holders import Prompt
from kvcache.cli.live import Paced, View, display
from kvcache.cli.output import Output
from kvcache.cli.parser import integer, seconds
from kvcache.cli.prompts import read_tokens
from kvcache.cli.worker_table import Report, to_json, view
from kvcache.cli.workers import Workers
from kvcache.errors import UsageError

_LIVE_SECONDS = 0.5
_EVERY_SECONDS = 10.0
_AROUND_ROWS = 7
"""Lines of a terminal that the table needs besides its rows: its head, and what is said below."""


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

    def views(width: int | None, height: int | None) -> list[View]:
        workers.look()
        return [view(report, width) if height is None else view(report, width, max(height - _AROUND_ROWS, 1))]

    def as_json() -> dict[str, Any]:
        workers.look()
        return to_json(report, lambda endpoint: _about(listening, endpoint))

    with display(views, as_json if args.json else None, out) as (show, in_place):
        every = _LIVE_SECONDS if in_place else _EVERY_SECONDS if args.every is None else args.every
        paced = Paced(show, every, first=0.0 if in_place else every)
        for each in reports:
            if each is None:
                paced.show_if_due()
            else:
                workers.fold(*each)
        show()


def _about(listening: Source, endpoint: str) -> dict[str, int]:
    """What is known of an endpoint as a whole."""
    counts = (listening.refused, listening.malformed, listening.ignored)
    return {count.__name__: count(endpoint) for count in counts}
