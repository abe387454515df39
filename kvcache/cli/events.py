"""``kvcache events``: the events of a log, one line each, all or filtered."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from events import types as ev
from events.codec import json_line, to_dict
from events.log import LogReader
from kvcache.cli import times
from kvcache.cli.filters import NamingBlock, OfSequences, add_filters, conditions_of
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Output, paint, stamp
from kvcache.cli.process import reader_is_gone
from kvcache.cli.times import Times, UpTo
from kvcache.errors import UsageError
from sinks.render import StreamNames, render_event

_COLORS = {
    "SequenceAdded": "bold",
    "SequenceRemoved": "bold",
    "EncoderAdded": "bold",
    "EncoderRemoved": "bold",
    "BlocksReused": "green",
    "BlocksStored": "green",
    "BlocksFilled": "green",
    "BlocksCopied": "green",
    "BlocksUpdated": "yellow",
    "BlocksMoved": "yellow",
    "BlocksRemoved": "red",
    "TransferFailed": "red",
    "AdmissionRefused": "red",
    "LoadFailed": "red",
    "Gap": "red",
    "CacheCleared": "red",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Print the events of a log. Filters can be combined; an event must match all of them."
    )
    parser.epilog = (
        "Each line begins with the event's address, BATCH.INDEX, and the time of its batch. Text lines contain no "
        "token ids;\n--json does. If an event concerns several sequences, --request and --handle show only their part "
        "of it, and --block\nonly the block's part of a BlocksFilled. Exits with 2 if no event matches.\n\n"
        + times.FORMS_HELP
        + " --since begins with the first batch at or after its MOMENT."
    )
    add_shared(parser, "log")
    add_filters(parser)
    add_shared(
        parser,
        "time",
        since="first batch to print (default: the first one)",
        until="last batch to print (default: the last one)",
        at="only this batch",
        json="print one JSON object per line and event: seq, index, ts, time, type, and the event's fields",
    )
    option(parser, "--follow", "wait for further events at the end, until Ctrl-C")
    option(parser, "--no-tokens", "omit token ids from the JSON")


def run(args: argparse.Namespace, out: Output) -> int:
    """Stream the log through the filters."""
    known, when = StreamNames(), Times(args.time)
    asked = conditions_of(args, known)
    column_filters = [each for each in asked if isinstance(each, OfSequences | NamingBlock)]
    reader = LogReader(args.log, follow=args.follow, stop=_end_with_the_reader, kind=None)
    batches = UpTo(reader, args.until if args.at is None else args.at)
    lines = 0
    for batch, within in _chosen(args, batches):
        when.first_ts = batches.first_ts
        for index, event in enumerate(batch.events):
            known.see(event)
            # All conditions see every event: a later one may refer to it.
            wanted = [condition(event) for condition in asked]
            if within and all(wanted) and (part := _narrowed(event, column_filters)) is not None:
                lines += 1
                if args.json:
                    print(_json(batch, index, part, known, tokens=not args.no_tokens))
                else:
                    print(event_line(batch, index, part, known, when.of(batch.ts)))
        if args.follow:
            sys.stdout.flush()
    if batches.ended:
        out.note_end(reader.end)
    if asked and not lines:
        raise UsageError(f"no matching event{_of_sequences(args)}")
    return 0


def _chosen(args: argparse.Namespace, batches: UpTo) -> Iterator[tuple[ev.EventBatch, bool]]:
    """Yield the batches, each with True if its events are requested."""
    if args.at is None:
        return times.span(batches, args.since)
    if args.since is not None or args.until is not None or args.follow:
        raise UsageError("--at selects one batch and cannot be combined with --since, --until or --follow")
    return times.at(batches)


def _of_sequences(args: argparse.Namespace) -> str:
    if args.request is not None:
        return f" for request {args.request!r}"
    return "" if args.handle is None else f" for sequence {args.handle}"


def _end_with_the_reader() -> bool:
    """Return True if the reader of stdout is gone. Called while there are no new events."""
    if reader_is_gone(sys.stdout):
        raise BrokenPipeError
    return False


def _narrowed(event: ev.AnyEvent, column_filters: list[OfSequences | NamingBlock]) -> ev.AnyEvent | None:
    """Return the requested part of an event; None if one row of it belongs to the request, and another to the block."""
    for condition in column_filters:
        event = condition.part(event)
        if isinstance(event, ev.BlocksFilled) and not event.handles:
            return None
    return event


def _json(batch: ev.EventBatch, index: int, event: ev.AnyEvent, known: StreamNames, *, tokens: bool) -> str:
    fields = {"seq": batch.seq, "index": index} | stamp(batch.seq, batch.ts)
    fields |= to_dict(event, known.key_bytes, tokens)
    worker = getattr(event, "worker", None)
    return json_line(fields | ({} if worker is None else {"worker_name": known.workers.get(worker)})).decode()


def event_lines(batch: ev.EventBatch, known: StreamNames, *without: type[ev.AnyEvent]) -> Iterator[str]:
    """Yield one line per event, except for the types `without`; `known` has seen all earlier batches."""
    for index, event in enumerate(batch.events):
        known.see(event)
        if not isinstance(event, without):
            yield event_line(batch, index, event, known)


def event_line(
    batch: ev.EventBatch, index: int, event: ev.AnyEvent, known: StreamNames, time: str | None = None
) -> str:
    """Format an event: its address and time (None: without), dimmed, its type in a color by meaning, its details."""
    address = f"{f'{batch.seq}.{index}':>9}" + ("" if time is None else f"  {time:>9}")
    kind = type(event).__name__
    details = render_event(event, known).removeprefix(kind)
    return f"{paint(address, 'dim')}  {paint(kind, _COLORS.get(kind))}{details}"
