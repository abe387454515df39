"""``kvcache diff``: the first difference of two logs, and the difference in reuse of their requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from events.log import LogReader
from events.types import CacheCreated, EventBatch
from kvcache.audit.diff import (
    ChangedSetting,
    Divergence,
    EventPlace,
    ReuseChange,
    ReuseDifference,
    ReuseTotals,
    changed_settings,
    compare_reuse,
    first_divergence,
)
from kvcache.cli.events import event_line
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Facts, Output, Row, Update, pick, stamp, updating
from kvcache.cli.times import Times
from kvcache.phrases import count, printable, share
from sinks.render import StreamNames, render_event, text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Compare two logs: where they first diverge, and how much each request reused."
    parser.epilog = (
        "Batches are compared in order; log ids, epochs, software, settings and times may differ. Requests are matched "
        "by\ntheir ids. Exits with 0 if the logs agree, 1 if they differ or are damaged."
    )
    add = partial(option, parser)
    add("LOG_A", "a log directory")
    add("LOG_B", "another log directory")
    add("--top N", "maximum number of requests listed of each kind (default: 10)", default=10)
    add_shared(parser, "time", "json")


def run(args: argparse.Namespace, out: Output) -> int:
    """Compare the events up to the first difference, then the requests of both logs."""
    a, b = _Side(args.log_a, args.time), _Side(args.log_b, args.time)
    with out.progress("comparing events") as update:
        divergence = first_divergence(a.batches(update), b.batches(update))
    with out.progress("comparing requests") as update:
        reuse = compare_reuse(updating(a.reader, update), updating(b.reader, update), args.top)
    for side in (a, b):
        out.note_end(side.reader.end, side.log)
    settings = changed_settings(a.created, b.created) if a.created and b.created else []
    if args.json:
        out.json(to_json(a, b, settings, divergence, reuse))
    else:
        _show(a, b, settings, divergence, reuse, out)
    return 0 if divergence is None else 1


class _Side:
    """One of the two logs."""

    def __init__(self, log: Path, form: str) -> None:
        self.log = log
        self.reader = LogReader(log)
        self.created: CacheCreated | None = None
        """First cache of the log."""
        self._known, self._times = StreamNames(), Times(form)
        self._last_seq = -1

    def batches(self, update: Update) -> Iterator[EventBatch]:
        """Yield all batches; keep what later lines need of each one done."""
        for number, batch in enumerate(updating(self.reader, update)):
            if number == 0:
                self._times.first_ts = batch.ts if self.reader.first_ts is None else self.reader.first_ts
            if self.created is None:
                self.created = next((each for each in batch.events if isinstance(each, CacheCreated)), None)
            yield batch
            for event in batch.events:
                self._known.see(event)
            self._last_seq = batch.seq

    def line(self, place: EventPlace | None) -> str:
        """Format the event at the place where the logs differ."""
        if place is None:
            return f"ends after batch {self._last_seq:,}" if self._last_seq >= 0 else "holds no batch"
        time = self._times.of(place.batch.ts)
        if place.event is None:
            return f"{f'{place.batch.seq}.{place.index}':>9}  {time:>9}  (the batch has no further event)"
        return event_line(place.batch, place.index, place.event, self._known_at(place), time)

    def place_json(self, place: EventPlace | None) -> dict[str, Any] | None:
        """Return the event at a place for programs."""
        if place is None:
            return None
        batch, event = place.batch, place.event
        line = None if event is None else render_event(event, self._known_at(place))
        kind = None if event is None else type(event).__name__
        return stamp(batch.seq, batch.ts) | {"index": place.index, "type": kind, "line": line}

    def _known_at(self, place: EventPlace) -> StreamNames:
        """Return what is known at a place. Call once: the place is the last that is read."""
        for event in place.batch.events[: place.index + 1]:
            self._known.see(event)
        return self._known


def to_json(
    a: _Side,
    b: _Side,
    settings: list[ChangedSetting],
    divergence: Divergence | None,
    reuse: ReuseDifference,
) -> dict[str, Any]:
    """Return the whole comparison."""
    return {
        "equal": divergence is None,
        "settings": settings,
        "divergence": divergence
        and {
            "a": a.place_json(divergence.a),
            "b": b.place_json(divergence.b),
            "fields": divergence.fields,
        },
        **pick(reuse, "other_prompts", changed_requests="changed", changes="largest"),
        "requests": reuse.a.requests,
        "a": _side_json(a.log, reuse.a, reuse.only_a),
        "b": _side_json(b.log, reuse.b, reuse.only_b),
    }


def _side_json(log: Path, both: ReuseTotals, only: ReuseTotals) -> dict[str, Any]:
    tokens = ("prompt_tokens", "reused_tokens")
    first = [pick(each, "seq", *tokens) | {"request_id": name} for name, each in only.first]
    alone = pick(only, "requests", *tokens) | {"first": first}
    return {"log": log, **pick(both, *tokens), "only": alone}


def _show(
    a: _Side,
    b: _Side,
    settings: list[ChangedSetting],
    divergence: Divergence | None,
    reuse: ReuseDifference,
    out: Output,
) -> None:
    out.heading(f"A: {printable(str(a.log))}, B: {printable(str(b.log))}")
    if divergence is None:
        out.line("  no difference")
    else:
        out.line("  first divergence")
        out.line(f"  A  {a.line(divergence.a)}")
        out.line(f"  B  {b.line(divergence.b)}")
        if divergence.fields:
            out.line(f"  they differ in {', '.join(divergence.fields)}")
    rows: list[Row] = [
        {"setting": printable(each.name)}
        | {side: printable(json.dumps(value)) for side, value in (("A", each.a), ("B", each.b))}
        for each in settings
    ]
    out.table(rows, gap=True)
    out.line()
    out.facts(_facts(reuse))
    rows = [_row(each) for each in reuse.largest]
    out.table(rows, right=("prompt", "difference", "batch in A", "in B"), gap=True)


def _facts(reuse: ReuseDifference) -> Facts:
    yield "requests", f"{reuse.a.requests:,} in both logs, of which {reuse.changed:,} reused more or less"
    if reuse.other_prompts:
        yield "", f"{count(reuse.other_prompts, 'of them has', 'of them have')} prompts of different lengths"
    if reuse.a.requests:
        yield "reused in A", _reused(reuse.a)
        yield "reused in B", _reused(reuse.b)
    for label, only in (("only in A", reuse.only_a), ("only in B", reuse.only_b)):
        if only.requests:
            yield label, _only(only)


def _reused(totals: ReuseTotals) -> str:
    part = totals.reused_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0
    return f"{totals.reused_tokens:,} of {count(totals.prompt_tokens, 'prompt token')}: {share(part)}"


def _only(only: ReuseTotals) -> str:
    named = ", ".join(text(request_id) for request_id, _ in only.first)
    more = ", ..." if only.requests > len(only.first) else ""
    listed = f" ({named}{more})" if named else ""
    return f"{count(only.requests, 'request')}{listed}, reused {_reused(only)}"


def _row(change: ReuseChange) -> Row:
    a, b = change.a, change.b
    other = "" if a.prompt_tokens == b.prompt_tokens else f" / {b.prompt_tokens:,}"
    return {
        "request": text(change.request_id),
        "prompt": f"{a.prompt_tokens:,}{other}",
        "reused in A": a.reused_tokens,
        "reused in B": b.reused_tokens,
        "difference": f"{change.reused_tokens:+,}",
        "batch in A": str(a.seq),
        "in B": str(b.seq),
    }
