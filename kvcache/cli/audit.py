"""``kvcache audit``: reasons for computed prompt tokens, over all requests of a log, and the cost of evictions.

For a directory of logs, the workers of a fleet are compared. In JSON ages are in seconds, times ISO 8601
and ns, levels by name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from events.log import LogReader
from events.log.segments import is_log
from events.structs import LEVEL_NAMES
from events.types import EventBatch, Namespace, RequestId
from kvcache.audit.explanation import group_in_words, namespace_in_words
from kvcache.audit.fleet import Fleet, LeftOut, WorkerAudit, in_processes, on_ray, together
from kvcache.audit.groups import DIMENSIONS, RequestGroups
from kvcache.audit.memory import Memory
from kvcache.audit.prefill import PrefillSeconds, PrefillTotals, Spending, hours_between
from kvcache.audit.reasons import IN_WORDS, LOSSES, Reason
from kvcache.audit.totals import MOST_USES, Audit, HotPrefix, audit_batches, verdict_on
from kvcache.audit.turns import SessionTurns
from kvcache.cli import feed_log, groups, times
from kvcache.cli.costs import AuditCosts, Costs, memory_facts, memory_json
from kvcache.cli.options import add_cost_options, add_shared, option
from kvcache.cli.output import (
    Facts,
    Output,
    Row,
    ages_in_words,
    ages_json,
    bar,
    end_json,
    pick,
    stamp,
)
from kvcache.cli.times import Times, UpTo, span
from kvcache.cli.traces import Served, add_trace, as_log, reported_json, show_reported
from kvcache.errors import UsageError
from kvcache.phrases import count, iso, later, printable, share

_BARS = 24
"""Maximum number of rows of the chart over time."""
_BAR = 40
_PARTS = "█ reused  ▒ computed again  · other"
_MOST_NAMES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show which prompt tokens of a log were reused, and why the others were computed: each token has exactly one\n"
        "reason. Also show the cost of evictions, the lifetimes of blocks, and the most reused prefixes."
    )
    parser.epilog = (
        "`kvcache docs audit` defines the reasons; `kvcache explain` shows a single request. Ages are medians with "
        "the 10th and 90th percentiles in brackets, accurate to 2.4 %.\n\n" + times.FORMS_HELP
    )
    add_shared(
        parser,
        "time",
        "json",
        log="a log directory, a directory of several workers' logs, or a trace of requests (- for stdin)",
        since="start of the audited part (default: start of the log)",
        until="end of the audited part (default: end of the log)",
    )
    add = partial(option, parser)
    add(
        "--top N",
        "maximum number of evictions and prefixes listed, or of groups with --by (default: 10)",
        default=10,
    )
    add(
        "--by KEY",
        f"group requests by: {', '.join(DIMENSIONS)}; tenant and model are labels of requests (model: by default, that "
        "of the cache)",
        metavar="KEY",
    )
    add = partial(option, parser.add_argument_group("several workers"))
    jobs = os.cpu_count() or 1
    add(
        "--jobs N",
        "number of logs to read in parallel (default: number of cores)",
        default=jobs,
    )
    add(
        "--engine",
        "where to read logs (default: processes)",
        choices=("processes", "ray"),
        default="processes",
    )
    add_cost_options(parser)
    add_trace(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log once (for a trace, that of the cache that served it), and print the audit."""
    costs = Costs.of(args)
    with as_log(args, out) as served:
        if feed_log.is_feed_log(args.log):
            if costs.pricing is not None or costs.model is not None:
                raise UsageError(
                    "--prefill and --model-config do not apply to a log of published events: omit them"
                )
            return feed_log.audit(args, out)
        logs, left_out = logs_in(args.log)
        if logs or left_out:
            if args.by is not None:
                raise UsageError(f"--by requires a single log: give that of one worker ({some_of(logs)})")
            return _audit_fleet(args, logs, left_out, costs, out)
        if args.engine != "processes":
            raise UsageError(f"--engine {args.engine} requires a directory of logs")
        return _audit(served, args, costs, out)


def _audit(served: Served, args: argparse.Namespace, costs: Costs, out: Output) -> int:
    """Audit one log."""
    reader = LogReader(served.log)
    batches = UpTo(reader, args.until)

    def watched() -> Iterator[tuple[EventBatch, bool]]:
        with out.progress("reading") as update:
            for batch, counts in span(batches, args.since):
                update(batch.seq)
                yield batch, counts

    model = None if costs.pricing is None else costs.pricing.model
    by = None if args.by is None else RequestGroups(args.by, model)
    turns = SessionTurns() if args.by == "session" else None
    totals = [] if model is None else [PrefillTotals(model)]
    others = [each for each in (by, turns) if each is not None]
    audit = audit_batches(watched(), *totals, top=args.top, others=others)
    if audit.first_batch < 0:
        raise UsageError(f"{printable(str(args.log))} has no batches yet")
    end = reader.end if batches.ended else None
    out.note_end(end)
    when, hours = Times(args.time, batches.first_ts, later), hours_between(audit.first_at, audit.last_at)
    pricing = costs.pricing
    spent = AuditCosts(costs, None if pricing is None else Spending(pricing, totals[0].finish(), hours))
    if args.json and by is not None:
        sums = pick(audit, "requests", "prompt_tokens", reused_tokens="reused")
        sums |= {"reasons": reasons_json(audit.reasons)} | groups.to_json(by, audit, args.top, spent)
        sums |= {} if turns is None else {"turns": groups.turns_json(turns)}
        out.json(sums | spent.to_json() | served.to_json() | {"end": end_json(end)})
    elif args.json:
        memory = memory_json(Memory.of(audit, costs.model))
        own = {**spent.to_json(), "memory": memory, **served.to_json(), **reported_json(served.reported)}
        out.json({**to_json(audit), **own, "end": end_json(end)})
    elif by is not None:
        groups.show(args.log, by, audit, args.top, when, spent, out, served.facts())
        if turns is not None:
            groups.show_turns(turns, out)
    else:
        _show(args.log, audit, spent, when, args.top, out, served.facts())
        show_reported(served.reported, out)
    return 0


# -- for people


def _show(
    log: Path, audit: Audit, spent: AuditCosts, when: Times, top: int, out: Output, origin: Facts = ()
) -> None:
    out.heading(
        f"{printable(str(log))}: batches {audit.first_batch:,} to {audit.last_batch:,}, "
        f"{when.of(audit.first_at)} to {when.of(audit.last_at)}"
    )
    memory = Memory.of(audit, spent.costs.model)
    out.facts([*origin, *_admitted(audit), *spent.facts(), *spent.costs.model_facts(), *memory_facts(memory)])
    out.line()
    show_reasons("prompt tokens", audit.reasons, out, spent.of_reason)
    for (group, kind), tokens in sorted(audit.lost_by_group.items()):
        lost = count(tokens, "token")
        out.line(f"  lost in {group_in_words(group, kind)}: {lost} that full attention had cached")
    _show_time(audit, when, out)
    _show_namespaces(audit, out)
    out.line()
    out.facts(_evicted(audit))
    worst = [
        {"evicted in batch": each.batch, "time": when.of(each.at)}
        | {"for request": _request(each.for_request), "tokens computed again": each.tokens}
        for each in audit.worst
    ]
    out.table(worst, gap=True)
    out.line()
    out.facts(_lives(audit))
    _show_prefixes(audit.prefixes[:top], when, out)


def _admitted(audit: Audit) -> Facts:
    yield "requests", f"{audit.requests:,} admitted, {count(audit.refusals, 'refusal')}"
    part = audit.reused / max(audit.prompt_tokens, 1)
    yield "prompt tokens", f"{audit.prompt_tokens:,}, of which {audit.reused:,} were reused: {share(part)}"
    if audit.loaded or audit.not_loaded:
        yield "from outside", f"{count(audit.loaded, 'token')} loaded, {audit.not_loaded:,} failed to load"
    if audit.engine:
        yield "decided by", printable(audit.engine)
    if audit.counts is not None:
        ours, theirs = audit.counts
        counted = f"{theirs[0]:,} looked up, {theirs[1]:,} reused"
        different = f"differs: {counted}; the log has {ours[0]:,} and {ours[1]:,}"
        yield "engine count", f"identical: {counted}" if ours == theirs else different
    if not audit.tokens_recorded:
        yield "tokens", "not recorded, so the reasons for computed tokens are unknown"


def show_reasons(
    title: str,
    counts: npt.NDArray[np.int64],
    out: Output,
    cells: Callable[[Reason], Row] = lambda _: {},
    *,
    most_first: bool = False,
) -> None:
    """Print prompt tokens by reason as a table, with further `cells`; the most frequent first with colors."""
    shown, total = [reason for reason in Reason if counts[reason]], int(counts.sum())
    if most_first:
        shown.sort(key=lambda reason: -int(counts[reason]))
    rows = [
        {title: IN_WORDS[reason], "count": int(counts[reason]), "share": share(int(counts[reason]) / total)}
        | dict(cells(reason))
        for reason in shown
    ]
    styles = ["green" if reason.is_reuse else "yellow" if reason.is_lost else "" for reason in shown]
    out.table(rows, right=list(rows[0])[2:] if rows else (), styles=styles if most_first else ())


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
        row: Row = {"from": at, "tokens": total, "reused": hits, _PARTS: bar(reused, lost, total, _BAR)}
        rows.append(row)
    out.table(rows, right=["reused"], gap=True)
    for batch in audit.set_back:
        out.line(
            f"  the clock was set back in batch {batch:,}: later times are shifted to follow the earlier ones"
        )


def _reused(tokens: npt.NDArray[np.int64]) -> int:
    return int(tokens[: Reason.PARTIAL + 1].sum())


def _show_namespaces(audit: Audit, out: Output) -> None:
    if len(audit.by_namespace) < 2:
        return
    most = sorted(audit.by_namespace.items(), key=lambda item: -int(item[1].sum()))[:10]
    title = f"namespace (of {len(audit.by_namespace):,})"
    rows = [
        {title: namespace_in_words(namespace) or "none", "tokens": (total := int(tokens.sum()))}
        | {"reused": share(_reused(tokens) / total)}
        for namespace, tokens in most
    ]
    out.table(rows, right=["reused"], gap=True)


def _evicted(audit: Audit) -> Facts:
    lost, cleared = sum(audit.lost_by_priority.values()), int(audit.reasons[list(LOSSES)].sum())
    yield "computed again", f"{count(lost, 'token')}, because {_were(lost)} evicted"
    if cleared:
        yield "", f"{count(cleared, 'token')}, because {_were(cleared)} cleared or lost"
    if len(audit.lost_by_priority) > 1:
        by = (f"{tokens:,} at {priority}" for priority, tokens in sorted(audit.lost_by_priority.items()))
        yield "by priority", ", ".join(by)
    if lost:
        yield "gone for", f"{ages_in_words(audit.lost_ages)} when they were requested again"
    for level, name in enumerate(LEVEL_NAMES):
        for number, said in enumerate(_level_facts(audit, level)):
            yield "" if number else name, said


def _were(tokens: int) -> str:
    return "it was" if tokens == 1 else "they were"


def _request(name: RequestId | None) -> str:
    return "" if name is None else printable(str(name))


def _level_facts(audit: Audit, level: int) -> Iterator[str]:
    lives = audit.levels[level]
    if hits := lives.hit_ages.total:
        yield f"{count(hits, 'hit')} of idle blocks {ages_in_words(lives.hit_ages)} after their last use"
    if lives.eviction_ages.total:
        evicted = count(lives.evicted, "block")
        yield f"{evicted} evicted {ages_in_words(lives.eviction_ages)} after the last use"
    if verdict := verdict_on(audit, level):
        yield from verdict.in_words()


def _often(times: int) -> str:
    if times == MOST_USES:
        return f"at least {times} times"
    return {0: "never", 1: "once", 2: "twice"}.get(times, f"{times} times")


def _lives(audit: Audit) -> Facts:
    yield "stored", f"{count(audit.stored, 'full block')}, {audit.never_reused:,} of them never reused"
    if gone := int(audit.uses.sum()):
        uses = ", ".join(
            f"{int(blocks):,} {_often(times)}" for times, blocks in enumerate(audit.uses) if blocks
        )
        yield "removed", f"{count(gone, 'block')} after {ages_in_words(audit.lifetimes)}; reused: {uses}"
    if audit.offloaded:
        paid = share(audit.onboarded / audit.offloaded)
        yield "offload", f"{audit.offloaded:,} blocks to secondary, {audit.onboarded:,} back: {paid}"
    if twice := audit.computed_twice:
        yield "computed twice", f"{twice:,} tokens of blocks that another request had cached meanwhile"


def _show_prefixes(prefixes: list[HotPrefix], when: Times, out: Output) -> None:
    rows = [
        {
            "most reused prefixes": f"{each.first:,}–{each.stop - 1:,}",
            "tokens served": each.tokens_served,
            "times": each.times,
            "last block": each.name or "",
            "last use": when.of(each.last_used),
            "stored by request": _request(each.stored_by),
            "cached at the end": "yes" if each.cached else "no",
        }
        for each in prefixes
    ]
    out.table(rows, gap=True)


# -- for programs


def to_json(audit: Audit) -> dict[str, Any]:
    """Return a whole audit."""
    return {
        **stamp(audit.first_batch, audit.first_at, "first_"),
        **stamp(audit.last_batch, audit.last_at, "last_"),
        **pick(audit, "tokens_recorded", "requests", "refusals", "prompt_tokens", reused_tokens="reused"),
        **pick(
            audit, loaded_tokens="loaded", not_loaded_tokens="not_loaded", duplicated_tokens="computed_twice"
        ),
        "engine_counts": _counts_json(audit),
        "reasons": reasons_json(audit.reasons),
        "namespaces": [
            {**namespace_json(namespace), "reasons": reasons_json(tokens)}
            for namespace, tokens in audit.by_namespace.items()
        ],
        "lost_by_group": [
            {"group": group, "kind": kind, "tokens": tokens}
            for (group, kind), tokens in sorted(audit.lost_by_group.items())
        ],
        "over_time": _time_json(audit),
        "evictions": {
            "recomputed_tokens": sum(audit.lost_by_priority.values()),
            "by_priority": dict(sorted(audit.lost_by_priority.items())),
            "ages": ages_json(audit.lost_ages),
            "worst": [
                stamp(each.batch, each.at) | pick(each, "window", "for_request", recomputed_tokens="tokens")
                for each in audit.worst
            ],
        },
        "levels": {name: _level_json(audit, level) for level, name in enumerate(LEVEL_NAMES)},
        "blocks": {
            **pick(
                audit, "stored", "never_reused", "offloaded", "onboarded", "taken_over", uses_when_gone="uses"
            ),
            "lifetimes": ages_json(audit.lifetimes),
        },
        "prefixes": [
            pick(each, "number", "first", "stop", "times", "stored_by", "name", continues="parent")
            | pick(each, served_tokens="tokens_served", cached_at_end="cached")
            | {"last_used": {"ts": each.last_used, "time": iso(each.last_used)}}
            for each in audit.prefixes
        ],
    }


def _level_json(audit: Audit, level: int) -> dict[str, Any]:
    lives, verdict = audit.levels[level], verdict_on(audit, level)
    return {
        "hit_ages": ages_json(lives.hit_ages),
        "eviction_ages": ages_json(lives.eviction_ages),
        **pick(lives, "evicted", recomputed_tokens="recomputed"),
        "verdict": None if verdict is None else verdict.size,
        "curves_cross": None if verdict is None else verdict.crosses,
    }


def reasons_json(tokens: npt.NDArray[np.int64]) -> dict[str, int]:
    """Return prompt tokens by reason."""
    return {reason.label: int(tokens[reason]) for reason in Reason}


def namespace_json(namespace: Namespace) -> dict[str, Any]:
    """Return the namespace, which separates equal prompts."""
    salt = namespace.salt_digest
    return pick(namespace, "lora_id", "lora_name") | {"salt_digest": None if salt is None else salt.hex()}


def _counts_json(audit: Audit) -> dict[str, Any] | None:
    if audit.counts is None:
        return None
    ours, theirs = (dict(zip(("prompt_tokens", "reused_tokens"), each, strict=True)) for each in audit.counts)
    return {**theirs, "in_log": ours}


def _time_json(audit: Audit) -> dict[str, Any]:
    start, width, rows = audit.over_time.start, audit.over_time.width, audit.over_time.rows
    return {
        "ts": start,
        "time": None if start is None else iso(start),
        "seconds": None if start is None else width / 1e9,
        "parts": [] if start is None else [reasons_json(row) for row in rows],
        "clock_set_back": [] if start is None else audit.set_back,
    }


# -- several workers


def logs_in(directory: Path) -> tuple[list[Path], list[LeftOut]]:
    """Return the logs directly in a directory, and entries that may be logs but cannot be read.

    There are none if it is a log itself, or no directory.
    """
    logs, left_out = list[Path](), list[LeftOut]()
    if not is_log(directory) and directory.is_dir():
        for path in sorted(directory.iterdir()):
            try:
                if is_log(path):
                    logs.append(path)
            except OSError as error:
                left_out.append(LeftOut.of(path, error))
    return logs, left_out


def _audit_fleet(
    args: argparse.Namespace, logs: list[Path], left_out: list[LeftOut], costs: Costs, out: Output
) -> int:
    """Audit each log, and compare them."""
    if args.since is not None or args.until is not None:
        raise UsageError(
            f"--since and --until require a single log: give that of one worker ({some_of(logs)})"
        )
    model, workers = None if costs.pricing is None else costs.pricing.model, list[WorkerAudit]()
    with out.progress("reading logs", len(logs)) as update:
        of_ray = args.engine == "ray"
        audits = on_ray(logs, args.top, model) if of_ray else in_processes(logs, args.jobs, args.top, model)
        for number, worker in enumerate(audits):
            if isinstance(worker, LeftOut):
                left_out.append(worker)
            else:
                workers.append(worker)
            update(number + 1)
    left_out.sort(key=lambda each: each.path)
    skipped = [f"{printable(str(each.path))}: {each.reason}" for each in left_out]
    if not workers:
        raise UsageError(f"none of the logs can be read: {'; '.join(skipped)}")
    for each in skipped:
        out.warning(f"skipped {each}")
    fleet = together(workers, args.top)
    for worker in fleet.workers:
        out.note_end(worker.end, args.log / worker.name)
    if args.json:
        out.json(_fleet_json(fleet, costs, left_out))
    else:
        _show_fleet(args.log, fleet, costs, out)
    return 0


def _costs_of(workers: Sequence[WorkerAudit], costs: Costs) -> AuditCosts:
    """Return the costs of all of these together, from the first batch that counts to the last."""
    if costs.pricing is None:
        return AuditCosts(costs, None)
    seconds = PrefillSeconds()
    for worker in workers:
        if worker.prefill is not None:
            seconds += worker.prefill
    known = [each.audit for each in workers if each.audit.first_batch >= 0]
    first = min((each.first_at for each in known), default=0)
    hours = hours_between(first, max((each.last_at for each in known), default=0))
    return AuditCosts(costs, Spending(costs.pricing, seconds, hours))


def _show_fleet(directory: Path, fleet: Fleet, costs: Costs, out: Output) -> None:
    out.heading(f"{printable(str(directory))}: {count(len(fleet.workers), 'worker')}")
    prompt, elsewhere = int(fleet.reasons.sum()), sum(fleet.elsewhere)
    reused = _reused(fleet.reasons)
    part, other = share(reused / max(prompt, 1)), share(elsewhere / max(prompt, 1))
    blocks = sum(fleet.computed_on.values())
    several, spent = blocks - fleet.computed_on.get(1, 0), _costs_of(fleet.workers, costs)
    out.facts(
        [
            ("requests", f"{sum(each.audit.requests for each in fleet.workers):,} admitted"),
            ("prompt tokens", f"{prompt:,}, of which {reused:,} were reused: {part}"),
            ("elsewhere", f"{elsewhere:,} were computed although another worker had them cached: {other}"),
            (
                "blocks",
                f"{blocks:,} distinct prompt blocks were computed, {several:,} of them on several workers",
            ),
            *spent.facts(),
            *costs.model_facts(),
        ]
    )
    rows = [
        _worker_row(each, tokens, costs) for each, tokens in zip(fleet.workers, fleet.elsewhere, strict=True)
    ]
    out.table(rows, right=list(rows[0])[3:], gap=True)
    out.line()
    show_reasons("prompt tokens of all workers", fleet.reasons, out, spent.of_reason)
    spread = [
        {"prefixes computed by several workers": f"{each.first:,}–{each.stop - 1:,}", "last block": each.name}
        | {"computed repeatedly": each.duplicated_tokens}
        | {"workers": _first_of(list(map(printable, each.workers)))}
        for each in fleet.spread
    ]
    out.table(spread, gap=True)


def _first_of(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def some_of(logs: list[Path]) -> str:
    """Format the first of them by name."""
    return _first_of([printable(path.name) for path in logs])


def _worker_row(worker: WorkerAudit, elsewhere: int, costs: Costs) -> Row:
    audit, spent = worker.audit, _costs_of([worker], costs)
    total = max(audit.prompt_tokens, 1)
    return {
        "worker": printable(worker.name),
        "requests": audit.requests,
        "prompt tokens": audit.prompt_tokens,
        "reused": share(audit.reused / total),
        "cached elsewhere": share(elsewhere / total),
        "refusals": audit.refusals,
        **costs.cost_cells(spent.cost),
    }


def _fleet_json(fleet: Fleet, costs: Costs, left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """Return a whole fleet."""
    return {
        **_costs_of(fleet.workers, costs).to_json(),
        "prompt_tokens": int(fleet.reasons.sum()),
        "reused_tokens": _reused(fleet.reasons),
        "elsewhere_tokens": sum(fleet.elsewhere),
        "reasons": reasons_json(fleet.reasons),
        "blocks_computed_on": fleet.computed_on,
        "left_out": [{"name": each.path.name, "reason": each.reason} for each in left_out],
        "prefixes": fleet.spread,
        "workers": [
            {
                "name": worker.name,
                "elsewhere_tokens": tokens,
                "audit": {
                    **to_json(worker.audit),
                    **_costs_of([worker], costs).to_json(),
                    "memory": memory_json(Memory.of(worker.audit, costs.model)),
                    "end": end_json(worker.end),
                },
            }
            for worker, tokens in zip(fleet.workers, fleet.elsewhere, strict=True)
        ],
    }
