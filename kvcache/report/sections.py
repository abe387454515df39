"""The parts of the page, each with its charts: headlines, reasons, time, levels, ages, prefixes, requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from events.structs import LEVEL_NAMES
from kvcache.audit.reasons import IN_WORDS, LOSSES, Reason
from kvcache.audit.totals import Audit, LevelLives, verdict_on
from kvcache.phrases import count, describe_end, duration, is_whole, printable, share, since
from kvcache.report import charts
from kvcache.report.charts import Chart, Clock, level_name
from kvcache.report.gathered import MOST_EVICTIONS, MOST_PREFIXES, Gathered
from kvcache.report.groups import GROUPS
from kvcache.report.markup import facts, figure, folded, legend, paragraph, section, table
from kvcache.report.occupancy import Shelf
from kvcache.report.payers import Bill

_FIRST = 10
"""Evictions that can be seen at once."""
_FEW = 20
"""Rows of a table beside a chart that shows them all."""


@dataclass(slots=True)
class Parts:
    """Sections in order, and the charts in them."""

    sections: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, heading, markup."""
    charts: dict[str, Chart] = field(default_factory=dict)

    def add(self, name: str, heading: str, inner: str) -> None:
        """Add a section."""
        self.sections.append((name, heading, section(name, heading, inner)))

    def figure(self, name: str, chart: Chart, caption: str, summary: str) -> str:
        """Add a chart; returns its place."""
        self.charts[name] = chart
        return figure(name, caption, summary)


def overview_of(found: Gathered) -> Parts:
    """What the log alone says of all requests together."""
    parts, clock = Parts(), Clock(found.first_at, found.last_at)
    parts.add("headlines", "In short", facts(headlines(found)) + "".join(map(paragraph, _warnings(found))))
    _add_misses(parts, found)
    _add_time(parts, found, clock)
    _add_levels(parts, found, clock)
    _add_ages(parts, found)
    _add_prefixes(parts, found)
    _add_settings(parts, found)
    return parts


def _warnings(found: Gathered) -> Iterator[str]:
    """What to know of the log itself."""
    if not is_whole(found.end):
        yield f"The log is {describe_end(found.end)}."
    for batch in found.set_back:
        yield f"The clock begins again in batch {batch:,}: here, the times from there on follow those before."


def _part(tokens: int, of: int) -> str:
    return share(tokens / max(of, 1))


def headlines(found: Gathered) -> list[tuple[str, str, str]]:
    """Label, number, and what to know of it."""
    audit = found.audit
    prompt, reasons = audit.prompt_tokens, audit.reasons
    primary, secondary = int(reasons[Reason.PRIMARY]), int(reasons[Reason.SECONDARY])
    partial, lost = int(reasons[Reason.PARTIAL]), sum(audit.lost_by_priority.values())
    rows = [
        ("requests", f"{audit.requests:,}", f"admitted; {count(audit.refusals, 'refusal')}"),
        ("prompt tokens", f"{prompt:,}", f"over {duration((found.last_at - found.first_at) / 1e9)}"),
        ("reused", _part(audit.reused, prompt), f"{audit.reused:,} tokens"),
        ("from primary", _part(primary, prompt), f"{primary:,} tokens"),
        ("from secondary", _part(secondary, prompt), f"{secondary:,} tokens"),
    ]
    if partial:
        rows.append(("from parts of blocks", _part(partial, prompt), f"{partial:,} tokens, copied"))
    if audit.loaded:
        rows.append(("from outside", _part(audit.loaded, prompt), f"{audit.loaded:,} tokens, loaded"))
    rows.append(("computed again", _part(lost, prompt), f"{lost:,} tokens, because they were evicted"))
    if cleared := int(reasons[list(LOSSES)].sum()):
        said = f"{cleared:,} tokens, because they were cleared or lost"
        rows.append(("computed again", _part(cleared, prompt), said))
    if audit.offloaded:
        came = f"{audit.onboarded:,} of {audit.offloaded:,} offloaded blocks"
        rows.append(("came back from secondary", _part(audit.onboarded, audit.offloaded), came))
    if audit.computed_twice:
        rows.append(
            (
                "computed twice",
                f"{audit.computed_twice:,}",
                "tokens of blocks that were cached already by then",
            )
        )
    return rows


def _add_settings(parts: Parts, found: Gathered) -> None:
    if not found.settings:
        return
    rows = [[printable(name), _value(value)] for name, value in found.settings]
    listed = folded("All settings", table("Settings of the cache", ["setting", "value"], rows))
    parts.add("settings", "Settings of the cache", paragraph(_sizes(found)) + listed)


def _sizes(found: Gathered) -> str:
    """The size of each window in words; of a log that was opened more than once, at its end."""
    known = dict(found.settings)
    sizes = [
        f"{primary:,} primary and {secondary:,} secondary blocks of window {window:,}"
        for window, primary, secondary in known["windows"]
    ]
    return (
        f"At the end of the log: {'; '.join(sizes)}; {known.get('tokens_per_block', '?')} tokens per block."
    )


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return printable(value if isinstance(value, str) else json.dumps(value))


def _add_misses(parts: Parts, found: Gathered) -> None:
    audit = found.audit
    rows = [
        [
            IN_WORDS[reason],
            f"{int(audit.reasons[reason]):,}",
            _part(int(audit.reasons[reason]), audit.prompt_tokens),
        ]
        for reason in Reason
        if audit.reasons[reason]
    ]
    all_reasons = table(
        "Prompt tokens by what became of them", ["prompt tokens", "count", "share"], rows, ("count", "share")
    )
    computed = audit.prompt_tokens - audit.reused - audit.loaded
    summary = f"{computed:,} of {audit.prompt_tokens:,} prompt tokens were computed."
    misses = [reason for reason in Reason if reason.is_computed and audit.reasons[reason]]
    if misses:
        most = max(misses, key=lambda reason: int(audit.reasons[reason]))
        summary += f" Most often: {IN_WORDS[most]} ({_part(int(audit.reasons[most]), computed)} of them)."
    drawn = parts.figure("misses", charts.misses(audit), "Computed prompt tokens by reason", summary)
    parts.add(
        "misses", "Why tokens were computed", drawn + folded("All prompt tokens as a table", all_reasons)
    )


def _add_time(parts: Parts, found: Gathered, clock: Clock) -> None:
    timeline = found.audit.over_time
    if timeline.start is None:
        return
    names = [group.name for group in GROUPS]
    rows = []
    for number, row in enumerate(timeline.rows):
        tokens = [int(row[list(group.reasons)].sum()) for group in GROUPS]
        if sum(tokens):
            at = since(timeline.start + number * timeline.width, found.first_at)
            rows.append([at, f"{sum(tokens):,}", *(_part(each, sum(tokens)) for each in tokens)])
    drawn = parts.figure(
        "time",
        charts.reuse_over_time(found.audit, clock),
        "Prompt tokens over time, by what became of them",
        f"Each bar is {duration(timeline.width / 1e9)} of admissions: reused at the bottom, all above it computed.",
    )
    columns = ["from", "tokens", *names]
    listed = table("Prompt tokens over time", columns, rows, columns)
    audit = found.audit
    rate = parts.figure(
        "rate",
        charts.hit_rate_over_time(audit, clock),
        "Token hit rate over time",
        "The reused share of the prompt tokens admitted in each bar's time; over the whole log "
        f"{_part(audit.reused, audit.prompt_tokens)}.",
    )
    parts.add("time", "Reuse over time", rate + drawn + folded("As a table", listed))


def _add_levels(parts: Parts, found: Gathered, clock: Clock) -> None:
    samples, shelves = found.occupancy.samples, found.occupancy.shelves
    windows = len({window for window, _ in shelves})
    drawn = [
        parts.figure(
            f"level-{number}",
            charts.occupancy(samples, shelf, found.bills, clock),
            f"Blocks of {level_name(shelf, windows)}",
            _said_of(found, shelf),
        )
        for number, shelf in enumerate(shelves)
    ]
    note = paragraph(
        "Each point is the moment, in its part of the time, at which requests held most. Triangles are the "
        f"evictions that cost most computation ({MOST_EVICTIONS} at most); choose one to see what it cost, and whom."
    )
    parts.add("levels", "How full the cache was", note + "".join(drawn) + _evictions(found, windows))


def _said_of(found: Gathered, shelf: Shelf) -> str:
    filled = [sample.filled[shelf] for sample in found.occupancy.samples if shelf in sample.filled]
    total, held = max(map(sum, filled)), max(each.held for each in filled)
    used = max(each.held + each.free for each in filled)
    by_requests = f", and at most {held:,} held by requests" if held else ""
    return f"Of {count(total, 'block')} at most {used:,} were in use{by_requests}."


def _evictions(found: Gathered, windows: int) -> str:
    if not found.bills:
        return ""
    listed = [_bill(number, bill, found, windows) for number, bill in enumerate(found.bills)]
    first, rest = "".join(listed[:_FIRST]), "".join(listed[_FIRST:])
    more = folded(f"{len(listed) - _FIRST} more", rest) if rest else ""
    return f'<h3>Evictions that cost most</h3><div class="bills">{first}{more}</div>'


def _bill(number: int, bill: Bill, found: Gathered, windows: int) -> str:
    each = bill.eviction
    level = level_name((each.window, bill.level), windows)
    made_for = f" for request {printable(str(each.for_request))}" if each.for_request is not None else ""
    said = (
        f"{count(each.tokens, 'token')} computed again: evicted from {level} in batch {each.batch:,} "
        f"({since(each.at, found.first_at)}){made_for}"
    )
    rows = [[printable(str(payer)), f"{tokens:,}"] for payer, tokens in bill.payers.most_common(_FEW)]
    if len(bill.payers) > _FEW:
        rest = bill.payers.total() - sum(tokens for _, tokens in bill.payers.most_common(_FEW))
        rows.append([f"{len(bill.payers) - _FEW:,} others", f"{rest:,}"])
    whom = table("Computed again by", ["request", "tokens"], rows, ("tokens",))
    return folded(said, whom, f"eviction-{number}")


def _add_ages(parts: Parts, found: Gathered) -> None:
    drawn = [
        parts.figure(
            f"ages-{level}",
            charts.ages(lives.hit_ages, lives.eviction_ages),
            f"Blocks of {name}: age at hit and at eviction",
            " ".join([*_quantiles(lives), *_verdict(found.audit, level)]),
        )
        for level, (name, lives) in enumerate(zip(LEVEL_NAMES, found.audit.levels, strict=True))
        if lives.hit_ages.total or lives.eviction_ages.total
    ]
    if drawn:
        note = paragraph(
            "Time since a block's last use, when it was reused and when it was evicted, to 2.4 % and in the chart to a "
            "quarter. Whether a level is too small is told by what was computed again because it had evicted it."
        )
        parts.add("ages", "Age at hit and at eviction", note + "".join(drawn))


def _quantiles(lives: LevelLives) -> Iterator[str]:
    for each, noun in ((lives.hit_ages, "hit"), (lives.eviction_ages, "eviction")):
        if each.total:
            half, most = (duration(each.quantile(part) or 0.0) for part in (0.5, 0.9))
            yield f"Half of the {count(each.total, noun)} come within {half}, nine tenths within {most}."


def _verdict(audit: Audit, level: int) -> Iterator[str]:
    verdict = verdict_on(audit, level)
    for said in verdict.in_words() if verdict is not None else ():
        yield f"{said[0].upper()}{said[1:]}."


def _add_prefixes(parts: Parts, found: Gathered) -> None:
    prefixes = found.audit.prefixes
    if not prefixes:
        return
    rows = [
        [
            f"{each.first:,}–{each.stop - 1:,}",
            f"{each.tokens_served:,}",
            f"{each.times:,}",
            each.name or "",
            since(each.last_used, found.first_at),
            printable(str(each.stored_by)) if each.stored_by is not None else "",
            "yes" if each.cached else "no",
        ]
        for each in prefixes[:_FEW]
    ]
    columns = [
        "tokens of the prompt",
        "tokens served",
        "times",
        "last block",
        "last use",
        "stored by request",
        "cached at the end",
    ]
    listed = table("Prefixes that served most", columns, rows, columns[:3])
    first = prefixes[0]
    summary = (
        f"The {MOST_PREFIXES} that served most, with those that they continue. The first: tokens {first.first:,} to "
        f"{first.stop - 1:,}, reused {count(first.times, 'time')}, served {first.tokens_served:,} tokens."
    )
    drawn = parts.figure(
        "prefixes", charts.prefixes(prefixes), "Prefixes by the tokens that they served", summary
    )
    note = paragraph("Blue ones are still cached at the end of the log. Choose one to look into it.")
    parts.add("prefixes", "Prefixes that served", note + drawn + folded("The first ones as a table", listed))


_PHASES = (
    ("waiting", "waiting"),
    ("prefill", "computing the prompt"),
    ("decode", "decoding"),
    ("away", "preempted"),
)
_KINDS = (
    ("primary", "reused from primary"),
    ("secondary", "reused from secondary"),
    ("again", "computed again: evicted"),
    ("lost", "computed again: cleared or lost"),
    ("computed", "computed"),
)


def add_requests(parts: Parts, found: Gathered) -> None:
    """A lane for each request, and the first of them as a table."""
    if not found.lanes:
        return
    left_out = found.num_lanes - len(found.lanes)
    note = f"{count(found.num_lanes, 'request')}."
    if left_out:
        note += f" {left_out:,} that computed less are left out."
    note += (
        " The upper bar of each is its prompt, the lower one its time. A log tells of waiting only where a request was "
        "refused. Choose a request to see why it computed what it did."
    )
    legends = legend(_KINDS) + legend(_PHASES)
    rows = [
        [
            printable(str(lane.request_id)),
            f"{int(lane.tokens.sum()):,}",
            *(f"{tokens:,}" for tokens in lane.by_kind),
            f"{lane.stays:,}",
        ]
        for lane in found.lanes[:_FEW]
    ]
    columns = ["request", "prompt tokens", *(name for _, name in _KINDS), "stays"]
    listed = table("Requests that computed most", columns, rows, columns[1:])
    controls = '<div id="controls" hidden></div><p id="shown" role="status"></p>'
    lanes = '<ol id="lanes" aria-label="Requests"></ol><noscript><p>The lanes need JavaScript.</p></noscript>'
    parts.add(
        "requests",
        "Requests",
        paragraph(note) + legends + controls + lanes + folded("The first ones as a table", listed),
    )
