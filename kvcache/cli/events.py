"""``kvcache events``: the events of a log, one line each, all or those that concern something."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from events import types as ev
from events.codec import json_line, to_dict
from events.log import LogReader
from kvcache.cli import conditions, moments, times
from kvcache.cli.conditions import NamingBlock, OfSequences, conditions_of
from kvcache.cli.event_lines import event_line
from kvcache.cli.log_end import note_end
from kvcache.cli.moments import UpTo
from kvcache.cli.output import Output
from kvcache.cli.process import nobody_reads
from kvcache.cli.times import Times, iso
from kvcache.errors import UsageError
from sinks.render import Known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Print the events of a log. With several conditions, events that meet all of them."
    parser.epilog = (
        "An event's address is BATCH.INDEX, and after it stands when its batch was made. Lines for people hold no "
        "token\nids; --json does. Of an event that concerns several sequences, --request and --handle show only their "
        "own part; of a\nBlocksFilled, --block that of the block. The exit code is 2 if there is no such event.\n\n"
        + moments.FORMS_HELP
        + " --since begins with the first batch at its moment or later."
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="a log directory")
    conditions.add_options(parser)
    _add_moments(parser)
    add = parser.add_argument
    add("--follow", action="store_true", help="wait for more at the end, until Ctrl-C")
    times.add_option(parser)
    add("--no-tokens", action="store_true", help="leave token ids out of the JSON")
    add(
        "--json",
        action="store_true",
        help="one JSON object per event and line: seq, index, ts, time, type and its fields",
    )


def _add_moments(parser: argparse.ArgumentParser) -> None:
    for name, purpose in (
        ("--since", "from this batch on (the first one)"),
        ("--until", "up to this batch (the last one)"),
        ("--at", "this batch alone"),
    ):
        parser.add_argument(name, type=moments.argument, metavar=moments.METAVAR, help=purpose)


def run(args: argparse.Namespace, out: Output) -> int:
    """Stream the log through the conditions."""
    known = Known()
    asked = conditions_of(args, known)
    reader = LogReader(args.log, follow=args.follow, stop=_end_with_the_reader, kind=None)
    batches = UpTo(reader, args.until if args.at is None else args.at)
    printer = _Printer(args, known, [each for each in asked if isinstance(each, OfSequences | NamingBlock)])
    for batch, within in _chosen(args, batches):
        printer.times.first_ts = batches.first_ts
        for index, event in enumerate(batch.events):
            known.see(event)
            # All of them see every event: one that comes later may refer to it.
            wanted = [condition(event) for condition in asked]
            if within and all(wanted):
                printer.print(batch, index, event)
        if args.follow:
            sys.stdout.flush()
    if batches.ended:
        note_end(out, reader.end)
    if asked and not printer.lines:
        raise UsageError(f"the log has no such event{_whose(args)}")
    return 0


def _chosen(args: argparse.Namespace, batches: UpTo) -> Iterator[tuple[ev.EventBatch, bool]]:
    """The batches, and of each whether its events are asked for."""
    if args.at is None:
        return moments.span(batches, args.since)
    if args.since is not None or args.until is not None or args.follow:
        raise UsageError("--at is one batch: it does not go with --since, --until and --follow")
    return moments.at(batches)


def _whose(args: argparse.Namespace) -> str:
    if args.request is not None:
        return f" of request {args.request!r}"
    return "" if args.handle is None else f" of sequence {args.handle}"


def _end_with_the_reader() -> bool:
    """Asked while there is nothing new: never to stop, unless nobody would see what comes."""
    if nobody_reads(sys.stdout):
        raise BrokenPipeError
    return False


class _Printer:
    """Writes events in the form that was asked for."""

    def __init__(
        self, args: argparse.Namespace, known: Known, narrowing: list[OfSequences | NamingBlock]
    ) -> None:
        self._known, self._narrowing = known, narrowing
        self._as_json, self._tokens = args.json, not args.no_tokens
        self.times = Times(args.time)
        self.lines = 0

    def print(self, batch: ev.EventBatch, index: int, event: ev.AnyEvent) -> None:
        """Write one event, or the part of it that was asked for."""
        for condition in self._narrowing:
            event = condition.part(event)
            if isinstance(event, ev.BlocksFilled) and not event.handles:
                return  # one row is the request's, and another one the block's
        self.lines += 1
        if self._as_json:
            address = {"seq": batch.seq, "index": index, "ts": batch.ts, "time": iso(batch.ts)}
            fields = to_dict(event, self._known.key_bytes, self._tokens)
            worker = getattr(event, "worker", None)
            more = {} if worker is None else {"worker_name": self._known.worker(worker)}
            print(json_line(address | fields | more).decode())
        else:
            print(event_line(batch, index, event, self._known, self.times.of(batch.ts)))
