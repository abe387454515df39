"""``kvcache subscribe --format native``: all events of caches, live, as `kvcache events` shows those of a log."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from events.codec import json_line, to_dict
from events.subscribe.continuity import NativeReport, ReceivedBatch
from kvcache.cli import watching
from kvcache.cli.event_lines import event_lines
from kvcache.cli.hearing import Heard, heard
from kvcache.cli.output import Output, count, paint
from kvcache.cli.subscribed_lines import interruption, json_interruption
from kvcache.cli.times import iso
from kvcache.errors import UsageError
from sinks.render import Known, text

if TYPE_CHECKING:
    from events.subscribe.gathering import Worker
    from kvcache.cli.hearing import Source
    from kvcache.cli.process import StopSignals


def refuse_table(args: argparse.Namespace) -> None:
    """Raise `UsageError` for what needs the blocks of routers."""
    if watching.wanted(args):
        raise UsageError(
            "--format native prints the events of one ENDPOINT: leave --table, --prompt and others out"
        )


def print_events(listening: Source, stop: StopSignals, args: argparse.Namespace, out: Output) -> None:
    """Print what comes, until there was enough, or a signal comes."""
    known: dict[Worker | None, Known] = {}
    batches = events = 0
    for each in heard(listening, stop, args, out):
        if each is None:
            continue
        worker, report = _reported(each)
        names = known.setdefault(worker, Known())
        for line in (_json_lines if args.json else _lines)(report, worker, names):
            print(line, flush=True)
        if isinstance(report, ReceivedBatch):
            batches, events = batches + 1, events + len(report.batch.events)
    out.note(f"{count(batches, 'batch', 'batches')}, {count(events, 'event')}")


def _reported(each: Heard) -> tuple[Worker | None, NativeReport]:
    # What listens gives reports of the format that it was asked for.
    (_, worker), report = each
    return worker, cast("NativeReport", report)


def _lines(report: NativeReport, worker: Worker | None, known: Known) -> Iterator[str]:
    said_by = "" if worker is None else f" from={text(worker.topic)}"
    if not isinstance(report, ReceivedBatch):
        yield paint(f"{'':>9}  {interruption(report)}{said_by}", "yellow")
        return
    for line in event_lines(report.batch, known):
        yield line + said_by


def _json_lines(report: NativeReport, worker: Worker | None, known: Known) -> Iterator[str]:
    said_by = {} if worker is None else {"topic": worker.topic}
    if not isinstance(report, ReceivedBatch):
        address = dict.fromkeys(("seq", "index", "ts", "time", "message", "topic", "replayed"))
        yield _json({**address, **said_by, **json_interruption(report)})
        return
    batch = report.batch
    for index, event in enumerate(batch.events):
        known.see(event)
        address = {"seq": batch.seq, "index": index, "ts": batch.ts, "time": iso(batch.ts)}
        of = {"message": report.seq, "topic": report.topic, "replayed": report.replayed}
        yield _json({**address, **of, **to_dict(event, known.key_bytes)})


def _json(value: dict[str, object]) -> str:
    return json_line(value).decode()
