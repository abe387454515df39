"""``kvcache audit``: over all requests of a log, why prompt tokens were computed, and what evictions cost."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from events.log import LogReader
from events.structs import LEVEL_NAMES
from events.types import EventBatch, RequestId
from kvcache.audit.explanation import group_in_words, namespace_in_words
from kvcache.audit.reasons import LOSSES, Reason
from kvcache.audit.totals import MOST_USES, Audit, HotPrefix, audit_batches, verdict_on
from kvcache.cli import feed_log, fleet, times
from kvcache.cli.audit_json import ages_in_words, to_json
from kvcache.cli.options import add_shared, option, positive
from kvcache.cli.output import Output, bar, end_json
from kvcache.cli.times import Times, UpTo, span
from kvcache.errors import UsageError
from kvcache.phrases import count, printable, share

_BARS = 24
"""Rows of the picture over time, at most."""
_BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Where the prompt tokens of a log came from, and why the others were computed: each has exactly one reason.\n"
        "Also what evictions cost, how long blocks live, and which prefixes serve most."
    )
    parser.epilog = (
        "`kvcache docs audit` defines the reasons; `kvcache explain` tells of one request. Of ages the median is told, "
        "and in brackets what a tenth lies below and above; they are at most 2.4 % off.\n\n"
        + times.FORMS_HELP
    )
    add_shared(
        parser,
        "time",
        "json",
        log="a log directory, or a directory of the logs of several workers",
        since="count what happens from then on",
        until="stop there",
    )
    add = partial(option, parser)
    add("--top N", "evictions and prefixes to name (10)", type=positive, default=10)
    add = partial(option, parser.add_argument_group("several workers"))
    jobs = os.cpu_count() or 1
    add("--jobs N", "logs to read at once (one per core)", type=positive, default=jobs)
    add("--engine", "where logs are read (processes)", choices=("processes", "ray"), default="processes")


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log once, and tell."""
    if feed_log.is_feed_log(args.log):
        return feed_log.audit(args, out)
    directory = fleet.logs_in(args.log)
    if directory.logs or directory.left_out:
        return fleet.run(args, directory, out)
    if args.engine != "processes":
        raise UsageError(f"--engine {args.engine} is for a directory of logs, each of a worker: leave it out")
    reader = LogReader(args.log)
    batches = UpTo(reader, args.until)

    def watched() -> Iterator[tuple[EventBatch, bool]]:
        with out.progress("reading") as update:
            for batch, counts in span(batches, args.since):
                update(batch.seq)
                yield batch, counts

    audit = audit_batches(watched(), top=args.top)
    if audit.first_batch < 0:
        raise UsageError(f"{printable(str(args.log))} holds no batch yet")
    end = reader.end if batches.ended else None
    out.note_end(end)
    if args.json:
        out.json(to_json(audit) | {"end": end_json(end)})
    else:
        _show(args.log, audit, Times(args.time, batches.first_ts), args.top, out)
    return 0


# -- for people


def _show(log: Path, audit: Audit, when: Times, top: int, out: Output) -> None:
    out.heading(
        f"{printable(str(log))}: batches {audit.first_batch:,} to {audit.last_batch:,}, "
        f"{when.of(audit.first_at)} to {when.of(audit.last_at)}"
    )
    part = audit.reused / max(audit.prompt_tokens, 1)
    reused = f"{audit.prompt_tokens:,}, of which {audit.reused:,} were reused: {share(part)}"
    facts = [
        ("requests", f"{audit.requests:,} admitted, {count(audit.refusals, 'refusal')}"),
        ("prompt tokens", reused),
    ]
    if audit.loaded or audit.not_loaded:
        came = f"{count(audit.loaded, 'token')} loaded, {audit.not_loaded:,} did not come"
        facts.append(("from outside", came))
    if audit.engine:
        facts.append(("decided by", printable(audit.engine)))
    if audit.counts is not None:
        facts.append(("its own count", _compared(*audit.counts)))
    if not audit.tokens_recorded:
        facts.append(("tokens", "not recorded: why the others were computed is not known"))
    out.facts(facts)
    out.line()
    _show_reasons(audit, out)
    _show_time(audit, when, out)
    _show_namespaces(audit, out)
    _show_evictions(audit, when, out)
    _show_lives(audit, out)
    _show_prefixes(audit.prefixes[:top], when, out)


def _compared(ours: tuple[int, int], theirs: tuple[int, int]) -> str:
    if ours == theirs:
        return f"the same, to the token: {theirs[0]:,} looked up, {theirs[1]:,} reused"
    counted = f"{theirs[0]:,} looked up, {theirs[1]:,} reused"
    return f"another: {counted}; the log has {ours[0]:,} and {ours[1]:,}"


def _show_reasons(audit: Audit, out: Output) -> None:
    fleet.show_reasons("prompt tokens", audit.reasons, out)
    for (group, kind), tokens in sorted(audit.lost_by_group.items()):
        out.line(
            f"  lost in {group_in_words(group, kind)}: {count(tokens, 'token')} that full attention had cached"
        )


def _show_time(audit: Audit, when: Times, out: Output) -> None:
    sums, start = audit.over_time.rows, audit.over_time.start
    if start is None or len(sums) < 2:
        return
    together = -(-len(sums) // _BARS)
    rows = []
    for first in range(0, len(sums), together):
        tokens = sums[first : first + together].sum(axis=0)
        total, reused = int(tokens.sum()), _reused(tokens)
        lost = int(tokens[Reason.COMPUTING_AGAIN : Reason.RESTARTED + 1].sum())
        at = when.of(start + first * audit.over_time.width)
        hits = share(reused / total) if total else ""
        rows.append([at, f"{total:,}", hits, bar(reused, lost, total, _BAR)])
    out.line()
    columns = ["from", "tokens", "reused", "█ reused  ▒ computed again  · others"]
    out.table(columns, rows, right=["tokens", "reused"])
    for batch in audit.set_back:
        out.line(f"  the clock begins again in batch {batch:,}: the times from there on follow those before")


def _reused(tokens: npt.NDArray[np.int64]) -> int:
    return int(tokens[: Reason.PARTIAL + 1].sum())


def _show_namespaces(audit: Audit, out: Output) -> None:
    if len(audit.by_namespace) < 2:
        return
    most = sorted(audit.by_namespace.items(), key=lambda item: -int(item[1].sum()))[:10]
    rows = [
        [
            namespace_in_words(namespace) or "none",
            f"{(total := int(tokens.sum())):,}",
            share(_reused(tokens) / total),
        ]
        for namespace, tokens in most
    ]
    out.line()
    columns = [f"namespace (of {len(audit.by_namespace):,})", "tokens", "reused"]
    out.table(columns, rows, right=columns[1:])


def _show_evictions(audit: Audit, when: Times, out: Output) -> None:
    out.line()
    lost, cleared = sum(audit.lost_by_priority.values()), int(audit.reasons[list(LOSSES)].sum())
    facts = [("computed again", f"{count(lost, 'token')}, because {_were(lost)} evicted")]
    if cleared:
        facts.append(("", f"{count(cleared, 'token')}, because {_were(cleared)} cleared or lost"))
    if len(audit.lost_by_priority) > 1:
        by = (f"{tokens:,} at {priority}" for priority, tokens in sorted(audit.lost_by_priority.items()))
        facts.append(("by priority", ", ".join(by)))
    if lost:
        facts.append(("gone for", ages_in_words(audit.lost_ages) + " when they were asked for"))
    for level in range(len(LEVEL_NAMES)):
        facts += _level_facts(audit, level)
    out.facts(facts)
    if audit.worst:
        out.line()
        rows = [
            [f"{each.batch:,}", when.of(each.at), _request(each.for_request), f"{each.tokens:,}"]
            for each in audit.worst
        ]
        columns = ["evicted in batch", "time", "for request", "tokens computed again"]
        out.table(columns, rows, right=[columns[0], columns[3]])


def _were(tokens: int) -> str:
    return "it was" if tokens == 1 else "they were"


def _request(name: RequestId | None) -> str:
    return "" if name is None else printable(str(name))


def _level_facts(audit: Audit, level: int) -> list[tuple[str, str]]:
    lives, said = audit.levels[level], []
    if hits := lives.hit_ages.total:
        said.append(
            f"{count(hits, 'hit')} of idle blocks {ages_in_words(lives.hit_ages)} after their last use"
        )
    if lives.eviction_ages.total:
        said.append(
            f"{count(lives.evicted, 'block')} evicted {ages_in_words(lives.eviction_ages)} after the last use"
        )
    if verdict := verdict_on(audit, level):
        said += verdict.in_words()
    return [(LEVEL_NAMES[level] if number == 0 else "", text) for number, text in enumerate(said)]


def _often(times: int) -> str:
    if times == MOST_USES:
        return f"at least {times} times"
    return {0: "never", 1: "once", 2: "twice"}.get(times, f"{times} times")


def _show_lives(audit: Audit, out: Output) -> None:
    facts = [("stored", f"{count(audit.stored, 'full block')}, {audit.never_reused:,} of them never reused")]
    gone = int(audit.uses.sum())
    if gone:
        uses = ", ".join(
            f"{int(blocks):,} {_often(times_used)}" for times_used, blocks in enumerate(audit.uses) if blocks
        )
        facts.append(
            ("gone", f"{count(gone, 'block')} after {ages_in_words(audit.lifetimes)}; reused: {uses}")
        )
    if audit.offloaded:
        paid = share(audit.onboarded / audit.offloaded)
        facts.append(
            ("offload", f"{audit.offloaded:,} blocks to secondary, {audit.onboarded:,} back: {paid}")
        )
    if audit.computed_twice:
        facts.append(
            (
                "twice",
                f"{audit.computed_twice:,} tokens of blocks that were cached already when they had been computed",
            )
        )
    out.line()
    out.facts(facts)


def _show_prefixes(prefixes: list[HotPrefix], when: Times, out: Output) -> None:
    if not prefixes:
        return
    rows = [
        [
            f"{each.first:,}–{each.stop - 1:,}",
            *(f"{each.tokens_served:,}", f"{each.times:,}", each.name or "", when.of(each.last_used)),
            *(_request(each.stored_by), "yes" if each.cached else "no"),
        ]
        for each in prefixes
    ]
    columns = ["prefixes that served most", "tokens served", "times", "last block"]
    out.line()
    columns += ["last use", "stored by request", "cached at the end"]
    out.table(columns, rows, right=["tokens served", "times"])
