"""`replay`, `match` and `audit` for logs of kind `feed`: workers, their parts of a prompt, and lives of blocks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from events.errors import LogError
from events.log import LogEnd, LogReader
from events.log.reader import kind_of
from events.packed import TOKEN_BYTES
from events.subscribe.workers import FeedState, WorkerState, longest_prefixes
from events.tokens.rich import RichTokens
from events.types import EventBatch, Gap, Namespace
from kvcache.cli.options import origin
from kvcache.cli.output import Output, ages_in_words, ages_json, end_json, pick, stamp
from kvcache.cli.times import Times, UpTo, span
from kvcache.errors import UsageError
from kvcache.phrases import batches, count, describe_end, printable
from kvcache.replay import fold_feed_batch, known_events
from kvcache.tap.history import FeedHistory


def is_feed_log(log: Path) -> bool:
    """Return True if a log is one of engines' events; False for one that cannot be read, which its reader reports."""
    try:
        return kind_of(log) == "feed"
    except (LogError, OSError):
        return False


class _Folded:
    """State of such a log up to a moment."""

    def __init__(self, args: argparse.Namespace, out: Output) -> None:
        self.state = FeedState()
        self.batches = self.events = 0
        self.last: EventBatch | None = None
        self.gaps: list[Gap] = []
        reader = LogReader(args.log, kind="feed")
        batches = UpTo(reader, args.at)
        for batch in out.watched(batches, "replaying"):
            fold_feed_batch(self.state, batch)
            self.gaps += [event for event in known_events(batch) if isinstance(event, Gap)]
            self.last = batch
            self.batches += 1
            self.events += len(batch.events)
        batches.check()
        self.end: LogEnd | None = reader.end if batches.ended else None
        self.when = "no batch"
        """Last batch and its time."""
        if self.last is not None:
            self.when = f"batch {self.last.seq:,} ({Times(args.time, batches.first_ts).of(self.last.ts)})"

    def envelope(self) -> dict[str, Any]:
        """Return the beginning of its JSON."""
        return {
            "kind": "feed",
            **(stamp(-1, None) if self.last is None else stamp(self.last.seq, self.last.ts)),
        }


def worker_json(worker: WorkerState) -> dict[str, Any]:
    """Return the counts of a worker."""
    places = [
        {"medium": place.medium, "group": place.group, "blocks": len(blocks)}
        for place, blocks in worker.blocks.items()
        if blocks
    ]
    return (
        pick(worker, "complete", "number", "batches", "unknown_removals", "clears", "restarts")
        | pick(worker, "unknown_events")
        | pick(worker, worker="name", losses="gaps", lost_batches="lost")
        | pick(worker, blocks_stored="stored", blocks_removed="removed", blocks_repeated="repeated")
        | pick(worker.seen, "topic", "rank")
        | {"places": places}
    )


def replay(args: argparse.Namespace, out: Output) -> int:
    """Run ``kvcache replay`` on such a log."""
    folded = _Folded(args, out)
    state, end = folded.state, folded.end
    if args.json:
        rest = {
            **pick(state, "epoch", "tokens_recorded"),
            **pick(folded, "batches", "events"),
            "workers": [worker_json(worker) for worker in state.workers.values()],
            "gaps": [asdict(gap) for gap in folded.gaps],
            "end": end_json(end),
        }
        out.json(folded.envelope() | rest)
        return 0
    title = f"{printable(str(args.log))}: events published by engines (kind feed), after {folded.when}"
    out.heading(f"{title}, epoch {state.epoch}")
    _show_workers(state, out)
    out.line()
    missing = [
        f"{batches(gap.first_seq, gap.last_seq, 'of the log is', 'of the log are')} missing: {printable(gap.reason)}"
        for gap in folded.gaps
    ]
    replayed = f"{count(folded.events, 'event')} in {count(folded.batches, 'batch')}"
    ended = "not reached" if end is None else describe_end(end)
    out.facts([("replayed", replayed), *(("gap", each) for each in missing), ("end of the log", ended)])
    return 0


def _show_workers(state: FeedState, out: Output) -> None:
    """Print a row for each worker and place."""
    rows = [
        {"worker": printable(worker.name), "medium": medium, "group": group, "blocks": blocks}
        | {"last seq": "" if worker.number is None else str(worker.number), "losses": worker.gaps}
        | {"restarts": worker.restarts, "known": _completeness(worker)}
        for worker in state.workers.values()
        for medium, group, blocks in _places(worker) or [("", "", 0)]
    ]
    out.table(rows, right=("group", "last seq"))
    if not rows:
        out.line("no worker has published yet")


def _places(worker: WorkerState) -> list[tuple[str, str, int]]:
    filled = ((place, len(blocks)) for place, blocks in worker.blocks.items() if blocks)
    return [(printable(place.medium), str(place.group), blocks) for place, blocks in filled]


def _completeness(worker: WorkerState) -> str:
    return "all" if worker.complete else "since its last loss"


def match(args: argparse.Namespace, out: Output, namespace: Namespace, prompt: RichTokens) -> int:
    """Run ``kvcache match`` on such a log: how much of a prompt each worker has."""
    folded = _Folded(args, out)
    lora = namespace.lora_id if namespace.lora_name is None else namespace.lora_name
    adapter = None if lora is None else str(lora)
    workers = folded.state.workers.values()
    found = longest_prefixes(workers, prompt.tokens, lora=adapter, salt=args.cache_salt)
    total = len(prompt.tokens) // TOKEN_BYTES
    if args.json:
        rows = [
            pick(each.worker, "complete", worker="name")
            | pick(each, "media", resident_tokens="tokens", resident_blocks="blocks")
            for each in found
        ]
        out.json({**folded.envelope(), "prompt_tokens": total, "workers": rows})
        return 0
    prompt_tokens = count(total, "prompt token")
    out.heading(f"{printable(origin(args.tokens))}: {prompt_tokens}, looked up after {folded.when}")
    rows = [
        {"worker": printable(each.worker.name), "tokens": each.tokens, "blocks": each.blocks}
        | {"where": ", ".join(f"{printable(medium)} {blocks:,}" for medium, blocks in each.media.items())}
        | {"known": _completeness(each.worker)}
        for each in found
    ]
    out.table(rows)
    if not rows:
        out.line("no worker has published yet")
    if not folded.state.tokens_recorded:
        out.warning("the log does not record token ids, so no prompt can be looked up in it")
    return 0


def audit(args: argparse.Namespace, out: Output) -> int:
    """Run ``kvcache audit`` on such a log: lives of blocks, and what engines do not report."""
    batches, history = UpTo(LogReader(args.log, kind="feed"), args.until), FeedHistory()
    with out.progress("reading") as update:
        for batch, within in span(batches, args.since):
            history.fold(batch, counts=within)
            update(batch.seq)
    batches.check()
    first, last = history.first, history.last
    if first is None or last is None:
        raise UsageError(f"{printable(str(args.log))} has no batches yet")
    if args.json:
        out.json(
            {
                "kind": "feed",
                **stamp(first.seq, first.ts, "first_"),
                **stamp(last.seq, last.ts, "last_"),
                "tokens_recorded": history.state.tokens_recorded,
                "workers": [worker_json(worker) for worker in history.state.workers.values()],
                "blocks": pick(history, "stored", "stored_elsewhere", "stored_again", "removed", "moved")
                | pick(history, "forgotten", "held_by")
                | {"lifetimes": ages_json(history.lifetimes), "gone_ages": ages_json(history.gone_ages)},
            }
        )
        return 0
    times = Times(args.time, batches.first_ts)
    ends = f"batches {first.seq:,} to {last.seq:,} ({times.of(first.ts)} to {times.of(last.ts)})"
    out.heading(f"{printable(str(args.log))}: {ends}")
    _show_workers(history.state, out)
    out.line()
    out.facts(_facts(history))
    out.line()
    out.line("engines publish no requests, so neither reuse nor the reasons for computed tokens are known")
    return 0


def _facts(history: FeedHistory) -> Iterator[tuple[str, str]]:
    blocks = count(history.stored, "block")
    yield "stored", f"{blocks}, {history.stored_elsewhere:,} while another worker had them"
    ages = f" after {ages_in_words(history.lifetimes)}" if history.lifetimes.total else ""
    yield "removed", f"{count(history.removed, 'block')}{ages}"
    yield "moved", f"{count(history.moved, 'block')} from one level to another"
    ages = f" gone for {ages_in_words(history.gone_ages)}" if history.gone_ages.total else ""
    yield "stored again", f"{count(history.stored_again, 'block')}{ages}"
    yield "forgotten", f"{count(history.forgotten, 'block')} by clearing, restarts and losses"
    held = (
        f"{count(blocks, 'block')} in {'one worker' if workers == 1 else f'{workers:,} workers'} each"
        for workers, blocks in history.held_by.items()
    )
    yield "cached now", ", ".join(held) or "nothing"
