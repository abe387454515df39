"""Workers as a table for people, in as much room as there is, and as JSON for programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from events.subscribe.index import GPU, HOST, STORAGE
from kvcache.cli.holders import Held
from kvcache.cli.live import View
from kvcache.cli.messages import printable
from kvcache.cli.output import count
from kvcache.cli.times import iso, span
from kvcache.cli.workers import Row, Workers
from kvcache.prefixes.publisher import RANKS_MAX

_FULL = (
    *("worker", "topic", "rank", "GPU", "host", "storage", "ev/s", "lag"),
    *("lost", "recovered", "restarts", "anew", "heard", "heartbeat", "prefix"),
)
_BRIEF = (
    "worker",
    "rank",
    "GPU",
    "host",
    "storage",
    "ev/s",
    "lag",
    "gaps",
    "restarts",
    "heard",
    "prefix",
)
_SHORTER = ((), ("topic",), ("topic", "heartbeat"), ("topic", "heartbeat", "anew"))
"""What is left out of the full table, one after the other, until it fits."""
_BRIEFER = (
    (),
    ("ev/s",),
    ("ev/s", "restarts"),
    ("ev/s", "restarts", "storage"),
    ("ev/s", "restarts", "storage", "gaps"),
)
"""Likewise of the brief one, until names have room."""
_LEFT = ("worker", "topic")
_SHORTEST_NAME = 8
_WIDE, _NARROW = 2, 1
_NONE = "–"
_MANY = "?"
ROWS_MAX = 100
"""Workers that are shown to people; JSON has all of them."""


class Report(NamedTuple):
    """What is known at one moment."""

    workers: Workers
    connected: Callable[[Row], bool | None]
    """Whether a worker is there; None: that cannot be told."""


def state(row: Row, connected: bool | None, now: float) -> str:
    """``waiting`` (never heard), ``connected`` (and never heard), ``live``, ``silent`` or ``gone``."""
    if row.seq is None:
        return "connected" if connected else "waiting"
    if connected is False:
        return "gone"
    return "silent" if row.silent(now) else "live"


def view(report: Report, width: int | None, height: int = ROWS_MAX) -> View:
    """The table with the first `height` workers, in at most `width` columns (None: any number), if that is possible."""
    workers = report.workers
    longest = workers.longest()
    every = workers.rows()
    shown_rows = every[: min(height, ROWS_MAX)]
    cells = [_cells(row, report) for row in shown_rows]
    styles = [_style(row, report, best=row in longest) for row in shown_rows]
    shown = [_columns(_FULL, cells, without) for without in _SHORTER]
    gap = _WIDE
    columns = next((each for each in shown if width is None or _width(each, cells, gap) <= width), None)
    if columns is None:
        gap = _NARROW
        assert width is not None
        columns, room = _brief(cells, width)
        _shorten(cells, room)
    rows = [tuple(cell[name] for name in columns) for cell in cells]
    below = _omitted(workers, shown_rows, len(every)) + _below(workers, longest)
    heading = f"{iso(time.time_ns())}  {count(len(every), 'worker')}" if width is None else ""
    return View(columns, rows, styles, _LEFT, gap, heading, below)


def _columns(
    names: tuple[str, ...], cells: list[dict[str, str]], without: tuple[str, ...]
) -> tuple[str, ...]:
    """Those that say something."""
    always = ("worker", "GPU", "host", "ev/s", "lag", "lost", "recovered", "gaps", "restarts", "heard")
    return tuple(
        name
        for name in names
        if name not in without and (name in always or any(cell[name] not in ("", _NONE) for cell in cells))
    )


def _brief(cells: list[dict[str, str]], width: int) -> tuple[tuple[str, ...], int]:
    """The columns of a narrow terminal, and how long names can be."""
    columns: tuple[str, ...] = ()
    room = 0
    for without in _BRIEFER:
        columns = _columns(_BRIEF, cells, without)
        room = width - _width(columns[1:], cells, _NARROW) - _NARROW
        if room >= _SHORTEST_NAME:
            return columns, room
    return columns, room


def _width(columns: tuple[str, ...], cells: list[dict[str, str]], gap: int) -> int:
    return sum(gap + max(len(name), *(len(cell[name]) for cell in cells), 0) for name in columns)


def _shorten(cells: list[dict[str, str]], width: int) -> None:
    """Leave out the parts of names by which workers are least told apart."""
    width = max(width, _SHORTEST_NAME)
    names = [cell["worker"] for cell in cells]
    # Ends first: ports and addresses differ there.
    ways = [[_cut(name, width, end) for name in names] for end in (width * 2 // 3, width // 3, 0, width - 1)]
    for cell, short in zip(cells, max(ways, key=lambda way: len(set(way))), strict=True):
        cell["worker"] = short


def _cut(name: str, width: int, end: int) -> str:
    """At most so many letters, of which the last `end` are the name's."""
    if len(name) <= width:
        return name
    return f"{name[: width - end - 1]}…{name[len(name) - end :]}"


def _cells(row: Row, report: Report) -> dict[str, str]:
    workers, index = report.workers, row.index
    now = workers.now()
    known = row.seq is not None
    lost = _MANY if row.partial and not index.missed_batches else _number(index.missed_batches)
    gaps = f"{lost}/{index.recovered_batches:,}"
    return {
        "worker": name(row),
        "topic": printable(row.topic) if row.speaker.worker is None else "",
        "rank": _NONE if row.rank is None else str(row.rank),
        "GPU": _number(index.count(GPU)) if known else _NONE,
        "host": _number(index.count(HOST)) if known else _NONE,
        "storage": _number(index.count(STORAGE)) if index.count(STORAGE) else _NONE,
        "ev/s": _number(round(row.rate.per_second(now))),
        "lag": _NONE if row.lag is None else span(row.lag),
        "lost": lost,
        "recovered": _number(index.recovered_batches),
        "gaps": _NONE if gaps == "0/0" else gaps,
        "restarts": _number(index.restarts),
        "anew": _number(index.restated) if index.restated else _NONE,
        "heard": _heard(row, report),
        "heartbeat": _NONE if row.heartbeat_at is None else span(now - row.heartbeat_at),
        "prefix": "" if workers.prompt is None else _levels(workers.held(row)) if known else _NONE,
    }


def name(row: Row) -> str:
    """What a worker is called: where it is, or the topic by which it is known where many connect."""
    worker = row.speaker.worker
    if worker is None:
        return printable(row.speaker.endpoint.removeprefix("tcp://"))
    return printable(worker.topic) + (f" {printable(worker.key[:6])}" if worker.key else "")


def _heard(row: Row, report: Report) -> str:
    now = report.workers.now()
    its = state(row, report.connected(row), now)
    age = "" if row.heard_at is None else span(now - row.heard_at)
    return age or its if its == "live" else f"{its} {age}".rstrip()


def _style(row: Row, report: Report, *, best: bool) -> str:
    its = state(row, report.connected(row), report.workers.now())
    color = {"gone": "red", "silent": "red", "waiting": "dim", "connected": "dim"}.get(its, "")
    if not color and (row.partial or row.index.missed_batches):
        color = "yellow"
    return f"{'bold ' if best else ''}{color}".strip()


def _omitted(workers: Workers, shown: list[Row], count_of_all: int) -> list[str]:
    """What the rows do not say."""
    lines = []
    if count_of_all > len(shown):
        lines.append(f"… and {count(count_of_all - len(shown), 'more worker')}: --json has all")
    if workers.ignored_batches:
        lines.append(
            f"{count(workers.ignored_batches, 'batch', 'batches')} of ranks above {RANKS_MAX - 1:,} ignored"
        )
    partial = sum(row.partial for row in shown)
    if partial:
        lines.append(
            f"only a part is known of {count(partial, 'worker')}: first heard in the middle (lost: {_MANY}), or "
            "batches are lost; ENDPOINT?replay=PORT asks a replay for them"
        )
    return lines


def _below(workers: Workers, longest: list[Row]) -> list[str]:
    if workers.prompt is None:
        return []
    prompt = count(len(workers.prompt.tokens), "token")
    if not longest:
        return [f"longest prefix: nobody holds a block of the prompt ({prompt})"]
    held = workers.held(longest[0])
    more = f", and {count(len(longest) - 1, 'other')}" if len(longest) > 1 else ""
    rank = "" if longest[0].rank is None else f" rank {longest[0].rank}"
    where = f"{name(longest[0])}{rank}{more}"
    return [f"longest prefix: {sum(held):,} of {prompt} ({_levels(held)} on GPU+host+storage) at {where}"]


def _levels(held: Held) -> str:
    return "+".join(f"{tokens:,}" for tokens in held)


def _number(number: int) -> str:
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.2f}M"


def to_json(report: Report, endpoints: Callable[[str], dict[str, int]]) -> dict[str, Any]:
    """For programs; `endpoints` says what is known of an endpoint as a whole."""
    workers = report.workers
    longest, now, ts = workers.longest(), workers.now(), time.time_ns()
    return {
        "ts": ts,
        "time": iso(ts),
        "prompt_tokens": None if workers.prompt is None else len(workers.prompt.tokens),
        "workers": [
            {
                **_who(row, report, now),
                **_what(row, now),
                **endpoints(row.speaker.endpoint),
                "prefix_tokens": None if workers.prompt is None else _by_level(workers.held(row)),
                "longest": None if workers.prompt is None else row in longest,
            }
            for row in workers.rows()
        ],
    }


def _who(row: Row, report: Report, now: float) -> dict[str, Any]:
    worker = row.speaker.worker
    return {
        "endpoint": row.speaker.endpoint,
        "topic": row.topic,
        "key": worker.key if worker is not None and worker.key else None,
        "rank": row.rank,
        "state": state(row, report.connected(row), now),
        "seq": row.seq,
        "partial": row.partial,
    }


def _what(row: Row, now: float) -> dict[str, Any]:
    index = row.index
    return {
        "blocks": _by_level((index.count(GPU), index.count(HOST), index.count(STORAGE))),
        "batches": index.batches,
        "events": index.events,
        "events_per_second": round(row.rate.per_second(now), 3),
        "lag_seconds": row.lag,
        "heard_seconds": None if row.heard_at is None else now - row.heard_at,
        "heartbeat_seconds": None if row.heartbeat_at is None else now - row.heartbeat_at,
        "missed_batches": index.missed_batches,
        "recovered_batches": index.recovered_batches,
        "restated": index.restated,
        "restarts": index.restarts,
        "orphans": index.orphans,
        "unknown_removals": index.unknown_removals,
    }


def _by_level(values: Held) -> dict[str, int]:
    return dict(zip(("gpu", "host", "storage"), values, strict=True))
