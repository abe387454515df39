"""``kvcache diff``: where two logs first say something else, and how the reuse of their requests differs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from events.log import LogReader
from events.types import CacheCreated, EventBatch
from kvcache.cli import times
from kvcache.cli.event_lines import event_line
from kvcache.cli.log_end import note_end
from kvcache.cli.messages import printable
from kvcache.cli.output import Output, count, share
from kvcache.cli.parser import positive
from kvcache.cli.progress import Update, progress
from kvcache.cli.times import Times, iso
from kvcache.diff import (
    Admitted,
    Change,
    ChangedSetting,
    Divergence,
    Only,
    Place,
    ReuseDifference,
    changed_settings,
    compare_reuse,
    first_divergence,
)
from kvcache.diff.reuse import Totals
from sinks.render import Known, render_event, text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Compare two logs: where they first diverge, and how much each request reused."
    parser.epilog = (
        "Batches are compared in their order. Log ids, epochs, software, settings and times may differ. Requests are "
        "told\napart by their ids. The exit code is 0 if the logs say the same, 1 if they differ (or are damaged)."
    )
    add = parser.add_argument
    add("log_a", type=Path, metavar="LOG_A", help="a log directory")
    add("log_b", type=Path, metavar="LOG_B", help="another one")
    add(
        "--top", type=positive, default=10, metavar="N", help="how many requests are listed of each kind (10)"
    )
    times.add_option(parser)
    add("--json", action="store_true", help="the result as JSON")


def run(args: argparse.Namespace, out: Output) -> int:
    """Compare the events up to the first difference, then the requests of both logs."""
    a, b = _Side(args.log_a, args.time), _Side(args.log_b, args.time)
    with progress("comparing events", None, shown=not out.quiet) as update:
        divergence = first_divergence(a.batches(update), b.batches(update))
    with progress("comparing requests", None, shown=not out.quiet) as update:
        reuse = compare_reuse(a.read(update), b.read(update), args.top)
    for side in (a, b):
        note_end(out, side.reader.end, side.log)
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
        """Its first cache."""
        self._known, self._times = Known(), Times(form)
        self._last_seq = -1

    def read(self, update: Update) -> Iterator[EventBatch]:
        """All batches."""
        for batch in self.reader:
            update(batch.seq)
            yield batch

    def batches(self, update: Update) -> Iterator[EventBatch]:
        """The same; of each that is done with it is kept what later lines need."""
        for number, batch in enumerate(self.read(update)):
            if number == 0:
                self._times.first_ts = batch.ts if self.reader.first_ts is None else self.reader.first_ts
            if self.created is None:
                self.created = next((each for each in batch.events if isinstance(each, CacheCreated)), None)
            yield batch
            for event in batch.events:
                self._known.see(event)
            self._last_seq = batch.seq

    def line(self, place: Place | None) -> str:
        """What the log says at the place where the other one says something else."""
        if place is None:
            return f"ends after batch {self._last_seq:,}" if self._last_seq >= 0 else "holds no batch"
        time = self._times.of(place.batch.ts)
        if place.event is None:
            return f"{f'{place.batch.seq}.{place.index}':>9}  {time:>9}  (the batch has no further event)"
        return event_line(place.batch, place.index, place.event, self._known_at(place), time)

    def place_json(self, place: Place | None) -> dict[str, Any] | None:
        """The same for programs."""
        if place is None:
            return None
        batch, event = place.batch, place.event
        return {
            "seq": batch.seq,
            "index": place.index,
            "ts": batch.ts,
            "time": iso(batch.ts),
            "type": None if event is None else type(event).__name__,
            "line": None if event is None else render_event(event, self._known_at(place)),
        }

    def _known_at(self, place: Place) -> Known:
        """To be asked for once: the place is the last that is looked at."""
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
    """All of the comparison."""
    return {
        "equal": divergence is None,
        "settings": [{"name": each.name, "a": each.a, "b": each.b} for each in settings],
        "divergence": None
        if divergence is None
        else {
            "a": a.place_json(divergence.a),
            "b": b.place_json(divergence.b),
            "fields": list(divergence.fields),
        },
        "requests": reuse.a.requests,
        "changed_requests": reuse.changed,
        "other_prompts": reuse.other_prompts,
        "changes": [
            {"request_id": each.request_id, "a": _admitted_json(each.a), "b": _admitted_json(each.b)}
            for each in reuse.largest
        ],
        "a": _side_json(a.log, reuse.a, reuse.only_a),
        "b": _side_json(b.log, reuse.b, reuse.only_b),
    }


def _side_json(log: Path, both: Totals, only: Only) -> dict[str, Any]:
    return {
        "log": str(log),
        "prompt_tokens": both.prompt_tokens,
        "reused_tokens": both.reused_tokens,
        "only": {
            "requests": only.requests,
            "prompt_tokens": only.prompt_tokens,
            "reused_tokens": only.reused_tokens,
            "first": [{"request_id": name, **_admitted_json(each)} for name, each in only.first],
        },
    }


def _admitted_json(admitted: Admitted) -> dict[str, int]:
    return {
        "seq": admitted.seq,
        "prompt_tokens": admitted.prompt_tokens,
        "reused_tokens": admitted.reused_tokens,
    }


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
        out.line("  they say the same")
    else:
        out.line("  first divergence")
        out.line(f"  A  {a.line(divergence.a)}")
        out.line(f"  B  {b.line(divergence.b)}")
        if divergence.fields:
            out.line(f"  they differ in {', '.join(divergence.fields)}")
    if settings:
        out.line()
        out.table(
            ("setting", "A", "B"),
            [(printable(each.name), _spelled(each.a), _spelled(each.b)) for each in settings],
        )
    out.line()
    _show_reuse(reuse, out)


def _spelled(value: Any) -> str:
    return printable(json.dumps(value))


def _show_reuse(reuse: ReuseDifference, out: Output) -> None:
    facts = [("requests", f"{reuse.a.requests:,} in both logs, of which {reuse.changed:,} reused otherwise")]
    if reuse.other_prompts:
        having = count(reuse.other_prompts, "of them has", "of them have")
        facts.append(("", f"{having} a prompt of another length"))
    if reuse.a.requests:
        facts += [("reused in A", _reused(reuse.a)), ("reused in B", _reused(reuse.b))]
    onlys = ("only in A", reuse.only_a), ("only in B", reuse.only_b)
    facts += [(label, _only(only)) for label, only in onlys if only.requests]
    out.facts(facts)
    if reuse.largest:
        out.line()
        columns = ("request", "prompt", "reused in A", "reused in B", "difference", "batch in A", "in B")
        out.table(columns, [_row(each) for each in reuse.largest], right=columns[1:])


def _reused(totals: Totals) -> str:
    part = totals.reused_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0
    return f"{totals.reused_tokens:,} of {count(totals.prompt_tokens, 'prompt token')}: {share(part)}"


def _only(only: Only) -> str:
    named = ", ".join(text(request_id) for request_id, _ in only.first)
    more = ", ..." if only.requests > len(only.first) else ""
    listed = f" ({named}{more})" if named else ""
    return f"{count(only.requests, 'request')}{listed}, reused {_reused(only)}"


def _row(change: Change) -> tuple[str, ...]:
    a, b = change.a, change.b
    prompt = f"{a.prompt_tokens:,}" + (
        "" if a.prompt_tokens == b.prompt_tokens else f" / {b.prompt_tokens:,}"
    )
    reused = f"{a.reused_tokens:,}", f"{b.reused_tokens:,}", f"{change.reused_tokens:+,}"
    return (text(change.request_id), prompt, *reused, f"{a.seq}", f"{b.seq}")
