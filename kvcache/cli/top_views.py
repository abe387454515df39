"""What ``kvcache top`` shows, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events.structs import LEVEL_NAMES
from kvcache.audit.reasons import IN_WORDS, Reason
from kvcache.audit.recent import Lately
from kvcache.cli.audit_json import reasons_json
from kvcache.cli.followed import Followed
from kvcache.cli.levels import levels_json, levels_table
from kvcache.cli.live import View
from kvcache.cli.messages import printable
from kvcache.cli.output import bar, share
from kvcache.cli.progress import left_of_log
from kvcache.cli.times import iso, span

NOW_NS = 10 * 10**9
"""What "now" means of a rate."""
_AROUND_ROWS = 3
"""Lines of a terminal that are needed besides the rows of reasons: above, below, and for the cursor."""
_NONE = "–"
_BAR = 30
_BAR_COLUMN = "█ held  ▒ cached  · blank"
_WIDE = 90
"""Columns of a terminal in which there is room for bars."""


def views(log: Followed, width: int | None, height: int | None) -> list[View]:
    """All that is known now."""
    top = View((), (), (), heading=_title(log), below=_status(log))
    if log.state.created is None:
        return [top]
    levels, notes = _levels(log, bars=width is None or width >= _WIDE), View((), (), (), below=_notes(log))
    others = [top, _rates(log), levels, notes]
    room = None if height is None else max(height - sum(each.height for each in others) - _AROUND_ROWS, 1)
    return [*others[:-1], _reasons(log.lately(log.window), room), notes]


def _title(log: Followed) -> str:
    state = log.state
    if state.created is None:
        return printable(str(log.log))
    engine = printable(state.created.engine or "kvcache")
    return f"{printable(str(log.log))}: epoch {state.epoch}, decided by {engine}"


def _status(log: Followed) -> list[str]:
    replayed = log.history.replayed
    if replayed.last_ts is None:
        return ["no batch is written yet"]
    last = f"batch {replayed.last_seq:,}, {span(log.age)} ago"
    if log.closed:
        last += "; its writer has closed the log in good order"
    elif log.end is not None and log.end.kind == "torn":
        last += "; after it the log is torn: its writer was killed, or is at work"
    lines = [last]
    if (catch_up := log.catch_up()) is not None:
        lines.append(left_of_log(catch_up))
    since = f"refused or preempted in the last {span(log.window / 1e9)}"
    lines.append(f"{len(log.state.sequences):,} running, {log.waiting:,} waiting ({since})")
    return lines


def _rates(log: Followed) -> View:
    """Two times side by side: now, and in the window."""
    times = [log.lately(min(NOW_NS, log.window)), log.lately(log.window)]
    rows = [("token hit rate", *map(_hit_rate, times))]
    counted: list[tuple[str, Callable[[Lately], int]]] = [
        ("prompt tokens/s", lambda lately: lately.prompt_tokens),
        ("requests/s", lambda lately: lately.admitted),
        ("refusals/s", lambda lately: lately.refused),
        ("preemptions/s", lambda lately: lately.preempted),
        *[
            (f"evictions/s from {name}", lambda lately, at=at: lately.evicted[at])
            for at, name in enumerate(LEVEL_NAMES)
        ],
    ]
    rows += [(name, *(_per_second(of(each), each.seconds) for each in times)) for name, of in counted]
    columns = ("", *(f"last {span(each.seconds)}" for each in times))
    if columns[1] == columns[2]:
        rows, columns = [row[:2] for row in rows], columns[:2]
    return View(columns, rows, [""] * len(rows), left=("",), below=[""], rule=False)


def _hit_rate(lately: Lately) -> str:
    return share(lately.reused_tokens / lately.prompt_tokens) if lately.prompt_tokens else _NONE


def _per_second(number: int, seconds: float) -> str:
    rate = _rate(number, seconds)
    return _NONE if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _rate(number: int, seconds: float) -> float | None:
    return number / seconds if seconds else None


def _levels(log: Followed, *, bars: bool) -> View:
    columns, rows = levels_table(log.state)
    styles = []
    for row in rows:
        blocks, held, unreferenced, _ = (int(cell.replace(",", "")) for cell in row[-4:])
        styles.append("yellow" if blocks and held == blocks else "")
        if bars:
            row.append(bar(held, unreferenced, blocks, _BAR))
    left = ("level", _BAR_COLUMN)
    return View([*columns, _BAR_COLUMN] if bars else columns, rows, styles, left=left, below=[""], rule=False)


def _reasons(lately: Lately, room: int | None) -> View:
    """Where prompt tokens came from; without room for all reasons, those why most were computed."""
    counts = {reason: int(lately.reasons[reason]) for reason in Reason if lately.reasons[reason]}
    shown = list(counts)
    if room is not None and len(shown) > room:
        most = sorted(shown, key=lambda reason: (reason.is_reuse, -counts[reason]))[: room - 1]
        shown = [reason for reason in shown if reason in most]
    rows = [_reason(IN_WORDS[reason], counts[reason], lately) for reason in shown]
    styles = ["green" if reason.is_reuse else "yellow" if reason.is_lost else "" for reason in shown]
    if len(shown) < len(counts):
        rest = sum(counts.values()) - sum(counts[reason] for reason in shown)
        rows.append(_reason(f"{len(counts) - len(shown)} others", rest, lately))
        styles.append("")
    title = f"prompt tokens of the last {span(lately.seconds)}"
    below = [""] if rows else ["no request was admitted in this time", ""]
    return View((title, "count", "share"), rows, styles, left=(title,), below=below, rule=False)


def _reason(words: str, tokens: int, lately: Lately) -> tuple[str, str, str]:
    return words, f"{tokens:,}", share(tokens / lately.prompt_tokens)


def _notes(log: Followed) -> list[str]:
    """What is not known."""
    notes = []
    if log.known_since is not None:
        seq, ts = log.known_since
        notes.append(
            f"known from batch {seq:,} ({iso(ts)}) on: what was evicted or lost before counts as never seen"
        )
    notes += [
        f"batches {gap.first_seq:,} to {gap.last_seq:,} are missing: nothing in them is counted"
        for gap in log.history.replayed.gaps[-1:]
    ]
    if log.state.created is not None and not log.history.tokens_recorded:
        notes.append("the log records no tokens: why prompt tokens were computed is not known")
    return notes


def to_json(log: Followed) -> dict[str, Any]:
    """The same for programs."""
    replayed, state, since = log.history.replayed, log.state, log.known_since
    ts = replayed.last_ts
    return {
        "seq": None if ts is None else replayed.last_seq,
        "ts": ts,
        "time": None if ts is None else iso(ts),
        "epoch": None if ts is None else state.epoch,
        "engine": log.history.engine or None,
        "closed": log.closed,
        "last_batch_age_seconds": None if ts is None else log.age,
        "caught_up": log.catch_up() is None,
        "known_since_seq": None if since is None else since[0],
        "tokens_recorded": log.history.tokens_recorded,
        "running": len(state.sequences),
        "waiting": log.waiting,
        "groups": levels_json(state),
        "now": _lately_json(log.lately(min(NOW_NS, log.window))),
        "recent": _lately_json(log.lately(log.window)),
    }


def _lately_json(lately: Lately) -> dict[str, Any]:
    return {
        "seconds": lately.seconds,
        "first_seq": lately.first_seq,
        "batches": lately.steps,
        "requests": lately.admitted,
        "refusals": lately.refused,
        "preempted": lately.preempted,
        "prompt_tokens": lately.prompt_tokens,
        "reused_tokens": lately.reused_tokens,
        "hit_rate": lately.reused_tokens / lately.prompt_tokens if lately.prompt_tokens else None,
        "evicted": dict(zip(LEVEL_NAMES, lately.evicted, strict=True)),
        "reasons": reasons_json(lately.reasons),
    }
