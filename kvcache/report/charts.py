"""Charts of the report as plain JSON for `Plotly.newPlot`. Colours of paper, text and lines are the page's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.audit.groups import TopGroups
from kvcache.audit.histogram import Ages
from kvcache.audit.reasons import EVICTIONS, IN_WORDS, LOSSES, Reason
from kvcache.audit.totals import Audit, HotPrefix
from kvcache.report.data import EvictionCost, ReportData, Sample, Shelf
from kvcache.report.imported import ImportedCurve, Timeout
from kvcache.workload.reported import ReportedHour

Chart = dict[str, Any]
BLUE, SKY, GREEN, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
VERMILION, PURPLE, YELLOW = "#d55e00", "#cc79a7", "#b3a500"
"""Colours after Okabe and Ito, distinguishable for colour-blind readers; the yellow is darker, for contrast."""
GREY, PALE = "#8c8c8c", "#c4c4c4"
COLORS = {
    "primary": BLUE,
    "secondary": SKY,
    "again": VERMILION,
    "lost": PURPLE,
    "computed": GREY,
    "waiting": ORANGE,
    "prefill": GREEN,
    "decode": PALE,
    "away": PURPLE,
}
"""Colours of the bars in a request's lane: kinds of prompt tokens, and phases."""


class ReasonGroup(NamedTuple):
    """Reasons that share a colour and a label."""

    name: str
    color: str
    reasons: tuple[Reason, ...]


_NOT_SERVED = (Reason.NOT_SERVABLE, Reason.LAST_HIT, Reason.NOT_REUSED, Reason.OUT_OF_WINDOW)
GROUPS = (
    ReasonGroup("reused from primary", BLUE, (Reason.PRIMARY, Reason.PARTIAL)),
    ReasonGroup("reused from secondary", SKY, (Reason.SECONDARY,)),
    ReasonGroup("loaded from outside", GREEN, (Reason.EXTERNAL,)),
    ReasonGroup("computed again: evicted", VERMILION, EVICTIONS),
    ReasonGroup("computed again: cleared or lost", PURPLE, LOSSES),
    ReasonGroup("being computed by another", ORANGE, (Reason.SAME_STEP, Reason.BEING_COMPUTED)),
    ReasonGroup(
        "could not be reused",
        YELLOW,
        (*_NOT_SERVED, Reason.OTHER_NAMESPACE, Reason.REUSE_OFF, Reason.NOT_LOOKED_UP, Reason.UNKNOWN),
    ),
    ReasonGroup("never seen before", GREY, (Reason.NEVER_SEEN,)),
    ReasonGroup("end of the prompt", PALE, (Reason.LAST_TOKEN, Reason.UNALIGNED)),
)
"""Groups of reasons. Every reason is in exactly one."""
_DOTTED = {"width": 1, "dash": "dot", "color": "#888888"}
_REUSED = {"tickformat": ".0%", "title": {"text": "share of full blocks reused"}, "rangemode": "tozero"}
_LABEL = 26
"""Maximum number of letters in a line next to a bar; longer labels take several lines, since phones are narrow."""
_UNITS = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (300, 60, "minutes"), (0, 1, "seconds"))


class Clock:
    """Times since the log's first batch, in a unit that suits the log's length."""

    def __init__(self, first_at: int, last_at: int) -> None:
        self._first = first_at
        length = (last_at - first_at) / 1e9
        self._seconds, unit = next((seconds, name) for least, seconds, name in _UNITS if length >= least)
        self.title = f"{unit} since the log's first batch"

    def of(self, at: int) -> float:
        """Convert a wall clock in ns."""
        return round((at - self._first) / 1e9 / self._seconds, 5)


def charts_of(
    found: ReportData, curve: ImportedCurve | None, reported: Sequence[ReportedHour] = ()
) -> dict[str, Chart]:
    """Return all charts of a page, by the names of their places."""
    audit, clock = found.audit, Clock(found.first_at, found.last_at)
    drawn = {"misses": misses(audit), **dict(_over_time(found, clock))}
    for number, shelf in enumerate(found.shelves):
        drawn[f"level-{number}"] = occupancy(found.samples, shelf, found.bills, clock)
    for level, lives in enumerate(audit.levels):
        if lives.hit_ages.total or lives.eviction_ages.total:
            drawn[f"ages-{level}"] = ages(lives.hit_ages, lives.eviction_ages)
    for groups in found.groups:
        by = groups.groups.by
        if is_scattered(groups):
            drawn[f"groups-{by}"] = largest_groups(groups)
            drawn[f"rates-{by}"] = groups_by_hit_rate(groups)
        else:
            drawn[f"groups-{by}"] = cache_shares(groups, clock)
    if len(reported) > 1:
        drawn["reported"] = reported_by_hour(reported)
    if audit.prefixes:
        drawn["prefixes"] = prefixes(audit.prefixes)
    if curve is not None:
        drawn["curve"] = curve_by_size(curve)
        if len(curve.timeouts) > 1:
            drawn["timeouts"] = hit_rates_by_timeout(curve.timeouts)
    return drawn


def chart(data: Sequence[Chart], x: Any, y: Any, **layout: Any) -> Chart:
    """Return a chart of traces between two axes; an axis is a title or a Plotly layout."""
    axes = {
        name: {"automargin": True, **({"title": {"text": given}} if isinstance(given, str) else given)}
        for name, given in (("xaxis", x), ("yaxis", y))
    }
    return {"data": list(data), "layout": {"height": 340, **axes, **layout}}


def _percent(title: str) -> Chart:
    """Return an axis from 0 to 100 %."""
    return {"tickformat": ".0%", "range": [0, 1.02], "title": {"text": title}}


def _line(name: str, x: Sequence[float], y: Sequence[Any], hover: str, **more: Any) -> Chart:
    return {"type": "scatter", "name": name, "x": list(x), "y": list(y), "hovertemplate": hover, **more}


def _area(name: str, x: Sequence[float], y: Sequence[int], color: str, hover: str, **more: Any) -> Chart:
    """Return blocks over time as an area on top of the previous ones."""
    line = {"width": 0.5, "color": color, "shape": "hv"}
    look = {"mode": "lines", "stackgroup": "blocks", "line": line, "fillcolor": color}
    return _line(name, x, y, hover, **look, **more)


def _bars(rows: npt.NDArray[np.int64], axis: str, **more: Any) -> list[Chart]:
    """Return the tokens by reason of each row as bars along an axis, stacked by the groups that occur."""
    return [
        {
            "type": "bar",
            "name": group.name,
            axis: tokens.tolist(),
            "marker": {"color": group.color, "line": {"width": 0}},
            "hovertemplate": f"%{{{axis}:,}}<extra>{group.name}</extra>",
            **more,
        }
        for group in GROUPS
        if (tokens := rows[:, list(group.reasons)].sum(axis=1)).any()
    ]


def _over_time(found: ReportData, clock: Clock) -> Iterator[tuple[str, Chart]]:
    """Yield the reused share of prompt tokens as a line, with gaps without admissions, and tokens by reason as bars."""
    timeline = found.audit.over_time
    if timeline.start is None:
        return
    start, rows = timeline.start, timeline.rows
    middles = [clock.of(start + int((part + 0.5) * timeline.width)) for part in range(len(rows))]
    totals = rows.sum(axis=1)
    reused = rows[:, [reason for reason in Reason if reason.is_reuse]].sum(axis=1)
    rates = [
        round(int(part) / int(total), 5) if total else None
        for part, total in zip(reused, totals, strict=True)
    ]
    look = {"mode": "lines+markers", "line": {"color": BLUE}, "marker": {"color": BLUE, "size": 4}}
    line = _line("hit rate", middles, rates, "%{y:.1%} reused<extra></extra>", **look)
    whole = {"title": {"text": clock.title}, "range": [0, clock.of(start + len(rows) * timeline.width)]}
    yield "rate", chart([line], whole, _percent("token hit rate"), height=240, showlegend=False)
    bars = _bars(rows, "y", x=middles, width=clock.of(start + timeline.width) - clock.of(start))
    yield "time", chart(bars, clock.title, "prompt tokens", barmode="stack", hovermode="x unified")


def occupancy(samples: Sequence[Sample], shelf: Shelf, bills: Sequence[EvictionCost], clock: Clock) -> Chart:
    """Return the blocks of one level of one window, as areas over time, with the evictions that cost most."""
    there = [sample for sample in samples if shelf in sample.filled]
    times = [clock.of(sample.at) for sample in there]
    areas = enumerate((("held by requests", BLUE), ("cached, free to evict", SKY), ("blank", PALE)))
    data = []
    for at, (name, color) in areas:
        if any(blocks := [sample.filled[shelf][at] for sample in there]):
            data.append(_area(name, times, blocks, color, "%{y:,} " + name + "<extra></extra>"))
    top = max((sum(sample.filled[shelf]) for sample in there), default=0)
    marked = [
        (number, bill)
        for number, bill in enumerate(bills)
        if (bill.eviction.window, bill.level) == shelf and bill.eviction.tokens
    ]
    if marked:
        data.append(_markers(marked, top, clock))
    # A click must select the marker under it, and no other.
    return chart(data, clock.title, "blocks", hovermode="closest")


_MOST_AREAS = 7
_LONGEST_NAME = 28
_NO_MARKUP = str.maketrans("<>&", "‹›+")


def cache_shares(groups: TopGroups, clock: Clock) -> Chart:
    """Return the shares of cached blocks over time by the group of the storing request."""
    moments = [each for each in groups.groups.moments if each.blocks]
    times = [clock.of(each.at) for each in moments]
    named = [key for key in groups.named if any(key in each.blocks for each in moments)][:_MOST_AREAS]
    colors = (BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, YELLOW)
    named_blocks = [[each.blocks.get(key, 0) for each in moments] for key in named]
    rest = [sum(each.blocks.values()) - sum(own) for each, *own in zip(moments, *named_blocks, strict=True)]
    # Plotly would interpret it as markup.
    names = [groups.name_of(key)[:_LONGEST_NAME].translate(_NO_MARKUP) for key in named]
    areas = list(zip(names, colors, named_blocks, strict=False))
    if any(rest):
        areas.append(("others", GREY, rest))
    hover = "%{y:.1%}<extra>%{fullData.name}</extra>"
    data = [_area(name, times, blocks, color, hover, groupnorm="fraction") for name, color, blocks in areas]
    return chart(data, clock.title, _percent("share of the cached blocks"), hovermode="x unified")


def is_scattered(groups: TopGroups) -> bool:
    """Return True if the groups that an area each could show have less than half of the cached blocks."""
    drawn = groups.named[:_MOST_AREAS]
    return len(groups.groups.totals) > len(drawn) and sum(groups.shares.get(key, 0) for key in drawn) < 0.5


def hit_rates_of(groups: TopGroups) -> list[float]:
    """Return the token hit rates of all groups with prompt tokens, in ascending order."""
    totals = groups.groups.totals.values()
    return sorted(each.reused / each.prompt_tokens for each in totals if each.prompt_tokens)


def largest_groups(groups: TopGroups) -> Chart:
    """Return the prompt tokens of the named groups by what became of them, the most on top."""
    named = groups.named[::-1]
    names = [groups.name_of(key)[:_LONGEST_NAME].translate(_NO_MARKUP) for key in named]
    rows = np.array([groups.groups.totals[key].reasons for key in named])
    bars = _bars(rows, "x", y=names, orientation="h")
    # A name may look like a number or a date.
    names_axis = {"type": "category"}
    return chart(bars, "prompt tokens", names_axis, barmode="stack", height=120 + 24 * len(named))


def groups_by_hit_rate(groups: TopGroups) -> Chart:
    """Return how many groups have a token hit rate in each tenth."""
    totals = [each for each in groups.groups.totals.values() if each.prompt_tokens]
    tenths = [min(10 * each.reused // each.prompt_tokens, 9) for each in totals]
    bar = {
        "type": "bar",
        "x": [round(0.1 * tenth + 0.05, 2) for tenth in range(10)],
        "y": [tenths.count(tenth) for tenth in range(10)],
        "text": [f"{10 * tenth} to {10 * tenth + 10} %" for tenth in range(10)],
        "textposition": "none",
        "width": 0.09,
        "marker": {"color": BLUE},
        "hovertemplate": "%{y:,} with %{text}<extra></extra>",
    }
    return chart([bar], _percent("token hit rate"), f"{groups.groups.by}s", height=240, showlegend=False)


def reported_by_hour(hours: Sequence[ReportedHour]) -> Chart:
    """Return the cached share of the prompt tokens by hour: as reported, in this cache, and in an unlimited one."""
    data = []
    for name, tokens, color, dash in (
        ("reported by the service", [each.reported for each in hours], ORANGE, "solid"),
        ("this cache", [each.played for each in hours], BLUE, "solid"),
        ("an unlimited cache", [each.unlimited for each in hours], GREY, "dot"),
    ):
        shares = [round(part / each.prompt_tokens, 5) for part, each in zip(tokens, hours, strict=True)]
        look = {"mode": "lines+markers", "line": {"color": color, "dash": dash}}
        hover = "%{y:.1%}<extra>" + name + "</extra>"
        data.append(_line(name, [each.hour for each in hours], shares, hover, **look))
    hour = {"title": {"text": "hours since the trace began"}, "dtick": math.ceil((hours[-1].hour + 1) / 12)}
    return chart(data, hour, _percent("cached share"), height=280, hovermode="x unified")


def _markers(marked: Sequence[tuple[int, EvictionCost]], top: int, clock: Clock) -> Chart:
    evictions = [bill.eviction for _, bill in marked]
    most = max(each.tokens for each in evictions)
    sizes = [8 + round(8 * each.tokens / most) for each in evictions]
    return _line(
        "costliest evictions",
        [clock.of(each.at) for each in evictions],
        [round(top * 1.04)] * len(marked),
        "%{text}<extra></extra>",
        mode="markers",
        customdata=[number for number, _ in marked],
        marker={"symbol": "triangle-down", "color": VERMILION, "size": sizes},
        text=[f"{each.tokens:,} tokens computed again" for each in evictions],
    )


def misses(audit: Audit) -> Chart:
    """Return computed prompt tokens by reason, the most on top."""
    reasons = sorted(
        (reason for reason in Reason if reason.is_computed and audit.reasons[reason]),
        key=lambda reason: int(audit.reasons[reason]),
    )
    colors = [group.color for reason in reasons for group in GROUPS if reason in group.reasons]
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": [int(audit.reasons[reason]) for reason in reasons],
        "y": ["<br>".join(wrap(IN_WORDS[reason], _LABEL)) for reason in reasons],
        "marker": {"color": colors},
        "hovertemplate": "%{x:,} tokens<extra></extra>",
    }
    return chart([bar], {}, {}, height=60 + 40 * len(reasons), showlegend=False)


def ages(hits: Ages, evictions: Ages) -> Chart:
    """Return the cumulative shares of hits and of evictions by age."""
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
        _percent("share up to that age"),
        hovermode="x unified",
    )


def _ticks(values: Sequence[float]) -> Chart:
    """Return ticks 1, 2, 5, 10 and so on, or powers of ten, written out, over the range of the values."""
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
    # Curves begin at 0, so that their start is visible.
    rows.insert(0, (rows[0][0] * 0.8, 0))
    shares = np.cumsum([blocks for _, blocks in rows]) / counted.total
    edges = [float(f"{edge:.4g}") for edge, _ in rows]
    look = {"mode": "lines", "line": {"color": color, "dash": dash, "shape": "hv"}}
    return _line(name, edges, shares.round(5).tolist(), "%{y:.1%}<extra>" + name + "</extra>", **look)


def prefixes(found: Sequence[HotPrefix]) -> Chart:
    """Return the tree of prefixes, each as wide as the tokens served by it and its continuations."""
    tree = {
        "type": "icicle",
        "ids": ["all", *(str(each.number) for each in found)],
        "parents": ["", *("all" if each.parent is None else str(each.parent) for each in found)],
        "labels": ["all prefixes shown", *map(_prefix_label, found)],
        "values": [0, *(each.tokens_served for each in found)],
        "text": ["", *(f"{each.times:,} times, {each.tokens_served:,} tokens" for each in found)],
        "branchvalues": "remainder",
        "tiling": {"orientation": "v"},
        "textinfo": "label+text",
        "marker": {
            "colors": ["rgba(0,0,0,0)", *(SKY if each.cached else PALE for each in found)],
            "line": {"width": 1},
        },
        "insidetextfont": {"color": [GREY, *["#111111"] * len(found)]},
        "maxdepth": 5,
        "hovertemplate": "%{label}<br>%{text}<br>%{value:,} tokens served, including continuations<extra></extra>",
    }
    layout = {"uniformtext": {"minsize": 11, "mode": "hide"}, "height": 360}
    return {"data": [tree], "layout": {**layout, "margin": {"l": 4, "r": 4, "t": 4, "b": 4}}}


def _prefix_label(prefix: HotPrefix) -> str:
    """Return a label with positions in the prompt and the start of the last block's name, which is unique."""
    named = f"<br>block {prefix.name[:8]}…" if prefix.name else ""
    return f"tokens {prefix.first:,}–{prefix.stop - 1:,}{named}"


def curve_by_size(curve: ImportedCurve) -> Chart:
    """Return hit rates by cache size, with the named sizes, at best, and with other eviction orders."""
    sizes = [size.blocks for size in curve.sizes]
    rates = [(size.blocks, size.hit_rate) for size in curve.sizes]
    data = [_rates(rates, "block hit rate", BLUE, "circle", "lines+markers")]
    best = [(size.blocks, rate) for size in curve.sizes if (rate := curve.best_rate(size)) is not None]
    if best:
        data.append(_rates(best, "at best (clairvoyant)", ORANGE, "diamond", "markers"))
    colors = cycle((GREEN, VERMILION, PURPLE, SKY, YELLOW, GREY))
    for (name, points), color in zip(curve.policy_rates().items(), colors, strict=False):
        data.append(_rates(points, name, color, "square", "lines+markers"))
    lines = [
        {"type": "line", "yref": "paper", "x0": blocks, "x1": blocks, "y0": 0, "y1": 1, "line": _DOTTED}
        for blocks, _ in curve.marks
    ]
    by_size = {"type": "log", "title": {"text": "blocks"}, **_ticks(sizes)}
    return chart(data, by_size, _REUSED, shapes=lines, annotations=_labels(sorted(curve.marks), sizes))


def hit_rates_by_timeout(timeouts: Sequence[Timeout]) -> Chart:
    """Return hit rates by retention time of idle blocks, with the rate without a timeout as a line."""
    points = sorted((each.seconds, round(each.hit_rate, 5)) for each in timeouts if each.seconds is not None)
    seconds = [point[0] for point in points]
    look = {"mode": "lines+markers", "line": {"color": BLUE}, "marker": {"color": BLUE}}
    drawn = _line(
        "block hit rate", seconds, [rate for _, rate in points], "%{x:,} s: %{y:.1%}<extra></extra>", **look
    )
    most = max((each.hit_rate for each in timeouts), default=0.0)
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": most, "y1": most, "line": _DOTTED}
    return chart(
        [drawn],
        {"type": "log", "title": {"text": "idle timeout, seconds"}, **_ticks(seconds)},
        _REUSED,
        height=240,
        shapes=[line],
    )


def _labels(marks: Sequence[tuple[int, str]], sizes: Sequence[int]) -> list[Chart]:
    """Return a name next to each line, each lower than the previous one, because sizes may be close. They are below the
    legend, on the side with room.
    """
    middle = math.sqrt(max(min(sizes, default=1), 1) * max(sizes, default=1))
    return [
        {
            "text": name,
            "x": round(math.log10(blocks), 5),
            "xanchor": "left" if blocks <= middle else "right",
            "yref": "paper",
            "y": round(0.04 + 0.08 * (len(marks) - number), 2),
            "showarrow": False,
            "font": {"size": 11},
        }
        for number, (blocks, name) in enumerate(marks)
    ]


def _rates(points: Sequence[tuple[int, float]], name: str, color: str, symbol: str, mode: str) -> Chart:
    blocks, rates = [point[0] for point in points], [round(point[1], 5) for point in points]
    look = {"mode": mode, "line": {"color": color}, "marker": {"color": color, "symbol": symbol}}
    return _line(name, blocks, rates, "%{x:,} blocks: %{y:.1%}<extra></extra>", **look)
