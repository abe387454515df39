"""A log of kind `feed` for people: its workers as a table, and how much of a prompt each has."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from events.log import LogEnd, LogReader
from events.packed import TOKEN_BYTES
from events.subscribe.workers import FeedState, Prefix, WorkerState, longest_prefixes
from events.types import EventBatch, Gap
from kvcache.cli.log_end import end_json
from kvcache.cli.messages import printable
from kvcache.cli.moments import UpTo
from kvcache.cli.output import Output, count
from kvcache.cli.progress import progress
from kvcache.cli.times import Times, iso
from kvcache.replay import fold_told, known_events


class Folded:
    """What such a log knows up to a moment."""

    def __init__(self, args: argparse.Namespace, out: Output) -> None:
        self.state = FeedState()
        self.batches = self.events = 0
        self.last: EventBatch | None = None
        self.gaps: list[Gap] = []
        reader = LogReader(args.log, kind="feed")
        batches = UpTo(reader, args.at)
        with progress("replaying", None, shown=not out.quiet) as update:
            for batch in batches:
                self._take(batch)
                update(batch.seq)
        batches.check()
        self.first_ts = batches.first_ts
        self.end: LogEnd | None = reader.end if batches.ended else None

    def _take(self, batch: EventBatch) -> None:
        fold_told(self.state, batch)
        self.gaps += [event for event in known_events(batch) if isinstance(event, Gap)]
        self.last = batch
        self.batches += 1
        self.events += len(batch.events)

    def when(self, args: argparse.Namespace) -> str:
        """The last batch, and when it was made."""
        if self.last is None:
            return "no batch"
        return f"batch {self.last.seq:,} ({Times(args.time, self.first_ts).of(self.last.ts)})"

    def envelope(self) -> dict[str, Any]:
        """How JSON about it begins."""
        last = self.last
        return {
            "kind": "feed",
            "seq": -1 if last is None else last.seq,
            "ts": None if last is None else last.ts,
            "time": None if last is None else iso(last.ts),
        }


def worker_json(worker: WorkerState) -> dict[str, Any]:
    """What is known of a worker, in numbers."""
    return {
        "worker": worker.name,
        "topic": worker.seen.topic,
        "rank": worker.seen.rank,
        "complete": worker.complete,
        "number": worker.number,
        "places": [
            {"medium": place.medium, "group": place.group, "blocks": len(blocks)}
            for place, blocks in worker.blocks.items()
            if blocks
        ],
        "batches": worker.batches,
        "blocks_stored": worker.stored,
        "blocks_removed": worker.removed,
        "blocks_repeated": worker.repeated,
        "unknown_removals": worker.unknown_removals,
        "clears": worker.clears,
        "restarts": worker.restarts,
        "losses": worker.gaps,
        "lost_batches": worker.lost,
        "unknown_events": worker.unknown_events,
    }


def replay(args: argparse.Namespace, out: Output, describe_end: Any) -> int:
    """``kvcache replay`` of such a log."""
    folded = Folded(args, out)
    state = folded.state
    if args.json:
        end = folded.end
        out.json(
            {
                **folded.envelope(),
                "epoch": state.epoch,
                "batches": folded.batches,
                "events": folded.events,
                "tokens_recorded": state.tokens_recorded,
                "workers": [worker_json(worker) for worker in state.workers.values()],
                "gaps": [
                    {"first_seq": g.first_seq, "last_seq": g.last_seq, "reason": g.reason}
                    for g in folded.gaps
                ],
                "end": end_json(end),
            }
        )
        return 0
    title = f"{printable(str(args.log))}: what engines told (kind feed), after {folded.when(args)}"
    out.heading(f"{title}, epoch {state.epoch}")
    show_workers(state, out)
    out.line()
    replayed = f"{count(folded.events, 'event')} in {count(folded.batches, 'batch', 'batches')}"
    facts = [("replayed", replayed)]
    facts += [
        (
            "gap",
            f"batches {gap.first_seq:,} to {gap.last_seq:,} of the log are missing: {printable(gap.reason)}",
        )
        for gap in folded.gaps
    ]
    facts.append(("end of the log", "not reached" if folded.end is None else describe_end(folded.end)))
    out.facts(facts)
    return 0


def show_workers(state: FeedState, out: Output) -> None:
    """A row for each worker and place."""
    columns = ("worker", "medium", "group", "blocks", "last number", "losses", "restarts", "known")
    rows = []
    for worker in state.workers.values():
        places = [(place, len(blocks)) for place, blocks in worker.blocks.items() if blocks]
        number = "" if worker.number is None else str(worker.number)
        rest = (number, f"{worker.gaps:,}", f"{worker.restarts:,}", _completeness(worker))
        for place, blocks in places:
            rows.append(
                (printable(worker.name), printable(place.medium), str(place.group), f"{blocks:,}", *rest)
            )
        if not places:
            rows.append((printable(worker.name), "", "", "0", *rest))
    if rows:
        out.table(columns, rows, right=("group", "blocks", "last number", "losses", "restarts"))
    else:
        out.line("no worker was heard yet")


def _completeness(worker: WorkerState) -> str:
    return "all" if worker.complete else "since its last loss"


def match(args: argparse.Namespace, out: Output, prompt: Any) -> int:
    """``kvcache match`` of such a log: how much of a prompt each worker has."""
    namespace, rich = prompt
    folded = Folded(args, out)
    found = longest_prefixes(
        folded.state.workers.values(), rich.tokens, lora=_adapter(namespace), salt=args.cache_salt
    )
    total = len(rich.tokens) // TOKEN_BYTES
    if args.json:
        out.json({**folded.envelope(), "prompt_tokens": total, "workers": list(map(_prefix_json, found))})
        return 0
    title = "stdin" if args.tokens == "-" else args.tokens
    out.heading(f"{printable(title)}: {count(total, 'prompt token')}, looked up after {folded.when(args)}")
    rows = [
        (
            printable(prefix.worker.name),
            f"{prefix.tokens:,}",
            f"{prefix.blocks:,}",
            ", ".join(f"{printable(medium)} {blocks:,}" for medium, blocks in prefix.media.items()),
            _completeness(prefix.worker),
        )
        for prefix in found
    ]
    columns = ("worker", "tokens", "blocks", "where", "known")
    if rows:
        out.table(columns, rows, right=("tokens", "blocks"))
    else:
        out.line("no worker was heard yet")
    if not folded.state.tokens_recorded:
        out.warning("the log records no token ids, so nothing can be found in it")
    return 0


def _adapter(namespace: Any) -> str | None:
    if namespace.lora_name is None and namespace.lora_id is not None:
        return str(namespace.lora_id)
    return str(namespace.lora_name) if namespace.lora_name is not None else None


def _prefix_json(prefix: Prefix) -> dict[str, Any]:
    return {
        "worker": prefix.worker.name,
        "complete": prefix.worker.complete,
        "resident_tokens": prefix.tokens,
        "resident_blocks": prefix.blocks,
        "media": prefix.media,
    }


def is_told(log: Path) -> bool:
    """Whether a log is of what engines told; one that cannot be read is not, and its reader says why."""
    from events.errors import LogError
    from events.log.reader import kind_of

    try:
        return kind_of(log) == "feed"
    except (LogError, OSError):
        return False
