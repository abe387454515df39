"""``kvcache audit`` of a log of kind `feed`: what engines tell of the life of blocks, and what they cannot tell."""

from __future__ import annotations

import argparse
from typing import Any

from events.log import LogReader
from kvcache.audit.histogram import Ages
from kvcache.cli.audit_json import ages_json
from kvcache.cli.messages import printable
from kvcache.cli.moments import UpTo, span
from kvcache.cli.output import Output, count, duration
from kvcache.cli.progress import progress
from kvcache.cli.times import Times, iso
from kvcache.cli.told import show_workers, worker_json
from kvcache.errors import UsageError
from kvcache.tap.history import FeedHistory

_UNTOLD = "engines tell nothing of requests: neither what was reused nor why tokens were computed"


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log once, and tell."""
    batches, history = UpTo(LogReader(args.log, kind="feed"), args.until), FeedHistory()
    with progress("reading", None, shown=not out.quiet) as update:
        for batch, within in span(batches, args.since):
            history.fold(batch, counts=within)
            update(batch.seq)
    batches.check()
    if history.first is None or history.last is None:
        raise UsageError(f"{printable(str(args.log))} holds no batch yet")
    if args.json:
        out.json(_to_json(history))
        return 0
    times = Times(args.time, batches.first_ts)
    ends = f"batches {history.first.seq:,} to {history.last.seq:,}"
    out.heading(
        f"{printable(str(args.log))}: {ends} ({times.of(history.first.ts)} to {times.of(history.last.ts)})"
    )
    show_workers(history, out)
    out.line()
    out.facts(list(_facts(history)))
    out.line()
    out.line(_UNTOLD)
    return 0


def _facts(history: FeedHistory) -> list[tuple[str, str]]:
    facts = [
        (
            "stored",
            f"{count(history.stored, 'block')}, {history.stored_elsewhere:,} while another worker had them",
        ),
        ("removed", f"{count(history.removed, 'block')}{_spread(history.lifetimes, ' after ')}"),
        ("moved", f"{count(history.moved, 'block')} from one level to another"),
        ("came back", f"{count(history.stored_again, 'block')}{_spread(history.gone_ages, ' gone for ')}"),
        ("forgotten", f"{count(history.forgotten, 'block')} by clearing, restarts and losses"),
    ]
    held = ", ".join(
        f"{count(blocks, 'block')} by {'one worker' if workers == 1 else f'{workers:,} workers'} each"
        for workers, blocks in history.held_by.items()
    )
    return [*facts, ("held now", held or "nothing")]


def _spread(ages: Ages, before: str) -> str:
    if not ages.total:
        return ""
    low, middle, high = (duration(ages.quantile(part) or 0.0) for part in (0.1, 0.5, 0.9))
    return f"{before}{middle} ({low} to {high})"


def _to_json(history: FeedHistory) -> dict[str, Any]:
    first, last = history.first, history.last
    assert first is not None
    assert last is not None
    return {
        "kind": "feed",
        "first_seq": first.seq,
        "first_ts": first.ts,
        "first_time": iso(first.ts),
        "last_seq": last.seq,
        "last_ts": last.ts,
        "last_time": iso(last.ts),
        "tokens_recorded": history.tokens_recorded,
        "workers": [worker_json(worker) for worker in history.workers.values()],
        "blocks": {
            "stored": history.stored,
            "stored_elsewhere": history.stored_elsewhere,
            "stored_again": history.stored_again,
            "removed": history.removed,
            "moved": history.moved,
            "forgotten": history.forgotten,
            "lifetimes": ages_json(history.lifetimes),
            "gone_ages": ages_json(history.gone_ages),
            "held_by": {str(workers): blocks for workers, blocks in history.held_by.items()},
        },
    }
