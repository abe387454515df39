"""What is drawn: each chart as plain JSON for `Plotly.newPlot`. Colours of paper, text and lines are the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import Any

import numpy as np

from events.structs import LEVEL_NAMES
from kvcache.audit.histogram import Ages
from kvcache.audit.reasons import IN_WORDS, Reason
from kvcache.audit.totals import Audit, HotPrefix
from kvcache.phrases import printable
from kvcache.report.groups import BLUE, GREY, GROUPS, ORANGE, PALE, SKY, VERMILION, color_of
from kvcache.report.occupancy import Sample, Shelf
from kvcache.report.payers import Bill

Chart = dict[str, Any]
_LABEL = 26
"""Letters beside a bar; longer labels take several lines, since phones are narrow."""
_UNITS = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (300, 60, "minutes"), (0, 1, "seconds"))


class Clock:
    """Times since the log's first batch, in a unit that suits the log's length."""

    def __init__(self, first_at: int, last_at: int) -> None:
        self._first = first_at
        length = (last_at - first_at) / 1e9
        self._seconds, unit = next((seconds, name) for least, seconds, name in _UNITS if length >= least)
        self.title = f"{unit} since the log's first batch"
        self.end = self.of(last_at)

    def of(self, at: int) -> float:
        """A wall clock in ns."""
        return round((at - self._first) / 1e9 / self._seconds, 5)


def chart(data: Sequence[Chart], x: Any, y: Any, **layout: Any) -> Chart:
    """Traces between two axes; an axis is a title or what Plotly takes."""
    axes = {
        name: {"automargin": True, **({"title": {"text": given}} if isinstance(given, str) else given)}
        for name, given in (("xaxis", x), ("yaxis", y))
    }
    return {"data": list(data), "layout": {"height": 340, **axes, **layout}}


def text(said: str) -> str:
    """Text that Plotly, which knows some tags, shows as it is."""
    return escape(printable(said), quote=False)


def reuse_over_time(audit: Audit, clock: Clock) -> Chart:
    """Prompt tokens by groups of reasons, as bars over time."""
    timeline = audit.over_time
    start = timeline.start or 0
    middles = [clock.of(start + int((part + 0.5) * timeline.width)) for part in range(len(timeline.rows))]
    width = clock.of(start + timeline.width) - clock.of(start)
    data = [
        {
            "type": "bar",
            "name": group.name,
            "x": middles,
            "y": tokens.tolist(),
            "width": width,
            "marker": {"color": group.color, "line": {"width": 0}},
            "hovertemplate": "%{y:,}<extra>" + group.name + "</extra>",
        }
        for group in GROUPS
        if (tokens := timeline.rows[:, list(group.reasons)].sum(axis=1)).any()
    ]
    return chart(data, clock.title, "prompt tokens", barmode="stack", hovermode="x unified")


def hit_rate_over_time(audit: Audit, clock: Clock) -> Chart:
    """The reused share of the prompt tokens, as a line over time; a gap where nothing was admitted."""
    timeline = audit.over_time
    start = timeline.start or 0
    totals = timeline.rows.sum(axis=1)
    reused = timeline.rows[:, [reason for reason in Reason if reason.is_reuse]].sum(axis=1)
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "hit rate",
        "x": [clock.of(start + int((part + 0.5) * timeline.width)) for part in range(len(totals))],
        "y": [
            round(int(part) / int(total), 5) if total else None
            for part, total in zip(reused, totals, strict=True)
        ],
        "line": {"color": BLUE},
        "marker": {"color": BLUE, "size": 4},
        "hovertemplate": "%{y:.1%} reused<extra></extra>",
    }
    percent = {"tickformat": ".0%", "title": {"text": "token hit rate"}, "range": [0, 1.02]}
    return chart([line], clock.title, percent, height=240, showlegend=False)


def occupancy(samples: Sequence[Sample], shelf: Shelf, bills: Sequence[Bill], clock: Clock) -> Chart:
    """Blocks of one level of one window, as areas over time, and the evictions that cost most."""
    there = [sample for sample in samples if shelf in sample.filled]
    times = [clock.of(sample.at) for sample in there]
    data = [
        _area(name, color, times, blocks)
        for at, (name, color) in enumerate(
            (("held by requests", BLUE), ("cached, free to evict", SKY), ("blank", PALE))
        )
        if any(blocks := [sample.filled[shelf][at] for sample in there])
    ]
    top = max((sum(sample.filled[shelf]) for sample in there), default=0)
    marked = [
        (number, bill)
        for number, bill in enumerate(bills)
        if (bill.eviction.window, bill.level) == shelf and bill.eviction.tokens
    ]
    if marked:
        data.append(_markers(marked, top, clock))
    # A click must mean the marker under it, and none beside it.
    return chart(data, clock.title, "blocks", hovermode="closest")


def _area(name: str, color: str, times: list[float], blocks: list[int]) -> Chart:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": times,
        "y": blocks,
        "stackgroup": "blocks",
        "line": {"width": 0.5, "color": color},
        "fillcolor": color,
        "hovertemplate": "%{y:,} " + name + "<extra></extra>",
    }


def _markers(marked: Sequence[tuple[int, Bill]], top: int, clock: Clock) -> Chart:
    most = max(bill.eviction.tokens for _, bill in marked)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "evictions that cost most",
        "x": [clock.of(bill.eviction.at) for _, bill in marked],
        "y": [round(top * 1.04)] * len(marked),
        "customdata": [number for number, _ in marked],
        "marker": {
            "symbol": "triangle-down",
            "color": VERMILION,
            "size": [8 + round(8 * bill.eviction.tokens / most) for _, bill in marked],
        },
        "text": [f"{bill.eviction.tokens:,} tokens computed again" for _, bill in marked],
        "hovertemplate": "%{text}<extra></extra>",
    }


def misses(audit: Audit) -> Chart:
    """Computed prompt tokens by reason, the most on top."""
    reasons = sorted(
        (reason for reason in Reason if reason.is_computed and audit.reasons[reason]),
        key=lambda reason: int(audit.reasons[reason]),
    )
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": [int(audit.reasons[reason]) for reason in reasons],
        "y": ["<br>".join(wrap(IN_WORDS[reason], _LABEL)) for reason in reasons],
        "marker": {"color": [color_of(reason) for reason in reasons]},
        "hovertemplate": "%{x:,} tokens<extra></extra>",
    }
    return chart([bar], {}, {}, height=60 + 40 * len(reasons), showlegend=False)


def ages(hits: Ages, evictions: Ages) -> Chart:
    """How much of the hits, and of the evictions, comes up to an age."""
    data = [
        _shares(each, name, color, dash)
        for each, name, color, dash in (
            (hits, "hits", BLUE, "solid"),
            (evictions, "evictions", VERMILION, "dash"),
        )
        if each.total
    ]
    ticks = _ticks([edge for each in data for edge in each["x"]])
    return chart(
        data,
        {"type": "log", "title": {"text": "time since the block's last use, seconds"}, **ticks},
        {"tickformat": ".0%", "title": {"text": "share up to that age"}, "range": [0, 1.02]},
        hovermode="x unified",
    )


def _ticks(values: Sequence[float]) -> Chart:
    """1, 2, 5, 10 and so on, or powers of ten, written out, as far as the values go."""
    if not values:
        return {}
    low, high = (math.floor(math.log10(end)) for end in (min(values), max(values)))
    # More would not fit on a phone.
    steps = (1, 2, 5) if high - low < 3 else (1,)
    marks = [step * 10.0**decade for decade in range(low, high + 1) for step in steps]
    shown = [mark for mark in marks if min(values) <= mark <= max(values)]
    return {"tickmode": "array", "tickvals": shown, "ticktext": [f"{mark:,.12g}" for mark in shown]}


def _shares(counted: Ages, name: str, color: str, dash: str) -> Chart:
    rows = list(counted.rows())
    # They begin at nothing, so that where a curve starts can be seen.
    rows.insert(0, (rows[0][0] * 0.8, 0))
    shares = np.cumsum([blocks for _, blocks in rows]) / counted.total
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [float(f"{edge:.4g}") for edge, _ in rows],
        "y": [round(float(each), 5) for each in shares],
        "line": {"color": color, "dash": dash, "shape": "hv"},
        "hovertemplate": "%{y:.1%}<extra>" + name + "</extra>",
    }


def prefixes(found: Sequence[HotPrefix]) -> Chart:
    """The tree of prefixes, each as wide as the tokens that it, and what continues it, served."""
    cached = [each.cached for each in found]
    tree = {
        "type": "icicle",
        "ids": ["all", *(str(each.number) for each in found)],
        "parents": ["", *("all" if each.parent is None else str(each.parent) for each in found)],
        "labels": ["all that are shown", *map(_prefix_label, found)],
        "values": [0, *(each.tokens_served for each in found)],
        "text": ["", *(f"{each.times:,} times, {each.tokens_served:,} tokens" for each in found)],
        "branchvalues": "remainder",
        "tiling": {"orientation": "v"},
        "textinfo": "label+text",
        "marker": {
            "colors": ["rgba(0,0,0,0)", *(SKY if each else PALE for each in cached)],
            "line": {"width": 1},
        },
        "insidetextfont": {"color": [GREY, *["#111111"] * len(found)]},
        "maxdepth": 5,
        "hovertemplate": "%{label}<br>%{text}<br>%{value:,} tokens served, with what continues it<extra></extra>",
    }
    layout = {"uniformtext": {"minsize": 11, "mode": "hide"}, "height": 360}
    return {"data": [tree], "layout": {**layout, "margin": {"l": 4, "r": 4, "t": 4, "b": 4}}}


def _prefix_label(prefix: HotPrefix) -> str:
    """Positions in the prompt and the start of the last block's name, which differs where positions do not."""
    named = f"<br>block {prefix.name[:8]}…" if prefix.name else ""
    return f"tokens {prefix.first:,}–{prefix.stop - 1:,}{named}"


def hit_rates(sizes: Sequence[tuple[int, float, float | None]], marks: Sequence[tuple[int, str]]) -> Chart:
    """Hit rate by size of the cache: (blocks, rate, best rate or None); and sizes with a name."""
    data: list[Chart] = [_rates([(blocks, rate) for blocks, rate, _ in sizes], "block hit rate", BLUE)]
    best = [(blocks, rate) for blocks, _, rate in sizes if rate is not None]
    if best:
        data.append({**_rates(best, "at best, if the future were known", ORANGE), "mode": "markers"})
    lines = [
        {
            "type": "line",
            "yref": "paper",
            "x0": blocks,
            "x1": blocks,
            "y0": 0,
            "y1": 1,
            "line": {"width": 1, "dash": "dot", "color": "#888888"},
        }
        for blocks, _ in marks
    ]
    return chart(
        data,
        {"type": "log", "title": {"text": "blocks"}, **_ticks([blocks for blocks, *_ in sizes])},
        {"tickformat": ".0%", "title": {"text": "share of full blocks reused"}, "rangemode": "tozero"},
        shapes=lines,
        annotations=_labels(sorted(marks), [blocks for blocks, *_ in sizes]),
    )


def _labels(marks: Sequence[tuple[int, str]], sizes: Sequence[int]) -> list[Chart]:
    """A name beside each line, each lower than the one before: sizes may be near each other. Under the legend, and on
    the side where there is room.
    """
    middle = math.sqrt(max(min(sizes, default=1), 1) * max(sizes, default=1))
    return [
        {
            "text": text(name),
            "x": round(math.log10(blocks), 5),
            "xanchor": "left" if blocks <= middle else "right",
            "yref": "paper",
            "y": round(0.04 + 0.08 * (len(marks) - number), 2),
            "showarrow": False,
            "font": {"size": 11},
        }
        for number, (blocks, name) in enumerate(marks)
    ]


def _rates(points: Sequence[tuple[int, float]], name: str, color: str) -> Chart:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [blocks for blocks, _ in points],
        "y": [round(rate, 5) for _, rate in points],
        "line": {"color": color},
        "marker": {"color": color, "symbol": "circle" if color == BLUE else "diamond"},
        "hovertemplate": "%{x:,} blocks: %{y:.1%}<extra></extra>",
    }


def level_name(shelf: Shelf, windows: int) -> str:
    """A level, and of which window where there are several."""
    window, level = shelf
    return f"{LEVEL_NAMES[level]}, window of {window:,} tokens" if windows > 1 else LEVEL_NAMES[level]
