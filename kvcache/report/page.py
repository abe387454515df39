"""Self-contained HTML page: markup, styles, data, and the plotting library. It makes no network requests."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from events.log import LogEnd
from events.structs import LEVEL_NAMES
from kvcache.audit import open_log
from kvcache.audit.explanation import views_of
from kvcache.audit.kv_shape import KVShape
from kvcache.audit.memory import Memory
from kvcache.audit.prefill import PrefillTotals, Pricing, Spending, hours_between
from kvcache.audit.reasons import IN_WORDS, LOSSES, Reason
from kvcache.audit.totals import Audit, verdict_on
from kvcache.audit.turns import KINDS_IN_WORDS
from kvcache.errors import UsageError
from kvcache.phrases import count, describe_end, duration, few, is_whole, later, printable, share, size
from kvcache.report.charts import COLORS, GROUPS, charts_of, hit_rates_of, is_scattered
from kvcache.report.data import MOST_EVICTIONS, MOST_PREFIXES, Progress, ReportData, read_report_data
from kvcache.report.imported import ImportedCurve, Supplements, WhatIf, refuse_other, understood

if TYPE_CHECKING:
    from jinja2 import Environment

HOME = Path(__file__).parent
_FEW = 20
"""Rows of a table next to a chart that shows all of them."""
_Form = TypeVar("_Form", ImportedCurve, WhatIf)


def report(
    log: str | PathLike[str],
    *,
    curve: Mapping[str, Any] | ImportedCurve | None = None,
    whatif: Mapping[str, Any] | WhatIf | None = None,
    pricing: Pricing | None = None,
    model: KVShape | None = None,
    supplements: Supplements | None = None,
    progress: Progress = lambda _: None,
    ended: Callable[[LogEnd], None] = lambda _: None,
) -> str:
    """Return an HTML page about a log's cache. It needs no network, and contains no tokens and no salts.

    `curve` and `whatif` are the output of `kvcache curve LOG --json` and `kvcache whatif LOG --json`, and add a section
    each. `pricing` determines the time and cost of prefills, `model` the bytes of blocks; `supplements` has further
    sections. The log is read twice; `progress` is called with the batches read, `ended` with the end of the log. Raises
    `UsageError` if plotly or jinja2 is not installed, or if an input is something else or about another log, and what
    reading and replaying a log raise.
    """
    plotly_js()
    templates(HOME)
    directory = Path(log)
    own_curve = _own(directory, curve, ImportedCurve)
    own_whatif = _own(directory, whatif, WhatIf)
    prefills = [] if pricing is None else [PrefillTotals(pricing.model)]
    found = read_report_data(directory, progress, *prefills)
    ended(found.end)
    extra = supplements or Supplements()
    charts = charts_of(found, own_curve, extra.reported)
    hours = hours_between(found.audit.first_at, found.audit.last_at)
    return standalone(
        HOME,
        name=directory.resolve().name,
        found=found,
        explanations={
            number: views_of(found.explanations[lane.request_id], lambda at: later(at, found.first_at))
            for number, lane in enumerate(found.lanes)
            if lane.request_id in found.explanations
        },
        curve=own_curve,
        whatif=own_whatif,
        spending=None if pricing is None else Spending(pricing, prefills[0].finish(), hours),
        memory=Memory.of(found.audit, model),
        supplements=extra,
        data={"facts": facts(found), "charts": charts, "lanes-data": lanes(found)},
        colors=COLORS,
    )


def _own(log: Path, given: object, form: type[_Form]) -> _Form | None:
    """Return the parsed input if it is about this log."""
    if given is None:
        return None
    own = understood(given, form, f"{form.command}=")
    refuse_other(open_log(log).log_id, own, f"{form.command}=")
    return own


# -- from templates


def standalone(home: Path, **shown: Any) -> str:
    """Render `home`/page.html with page.css and page.js from there and plotly.js inside.

    The template gets them as `style`, `script` and `plotly`, and as `digests` the hashes for a content security policy.
    Raises `UsageError` if plotly or jinja2 is not installed.
    """
    style = (home / "page.css").read_text(encoding="utf-8")
    plotly, script = scripts = plotly_js(), _script((home / "page.js").read_text(encoding="utf-8"))
    digests = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts)
    page = templates(home).get_template("page.html")
    return page.render(style=style, plotly=plotly, script=script, digests=digests, **shown).lstrip()


def plotly_js() -> str:
    """Return the plotting library from its Python package. Raises `UsageError` if that is not installed."""
    spec = find_spec("plotly")
    file = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if file is None or not file.is_file():
        raise UsageError("a report requires plotly: pip install 'kvcache[report]'")
    return _script(file.read_text(encoding="utf-8"))


def _script(source: str) -> str:
    """Return a script as a browser parses it inside a page: the policy has its digest."""
    return source.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


@cache
def templates(home: Path) -> Environment:
    """Return the environment for the templates of a directory, with the report's filters. Raises `UsageError` without
    jinja2.

    SECURITY: data of a log is text in them: it is escaped, in JSON too, and cannot control a terminal.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup, escape
    except ImportError as error:
        raise UsageError("a report requires jinja2: pip install 'kvcache[report]'") from error
    own = Environment(
        loader=FileSystemLoader(home),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    own.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    own.globals |= {
        "FEW": _FEW,
        "GROUPS": GROUPS,
        "IN_WORDS": IN_WORDS,
        "KINDS_IN_WORDS": KINDS_IN_WORDS,
        "LEVEL_NAMES": LEVEL_NAMES,
        "LOSSES": list(LOSSES),
        "MOST_EVICTIONS": MOST_EVICTIONS,
        "MOST_PREFIXES": MOST_PREFIXES,
        "Reason": Reason,
    }
    prose = {"prose": lambda text: escape(printable(text)).replace(" %", Markup("&nbsp;%"))}
    own.filters |= _filters() | prose
    return own


def _filters() -> dict[str, Callable[..., object]]:
    """Return the report's filters."""
    return {
        "ages_in_words": ages_in_words,
        "count": count,
        "describe_end": describe_end,
        "duration": duration,
        "few": few,
        "hit_rates_of": hit_rates_of,
        "is_scattered": is_scattered,
        "is_whole": is_whole,
        "most_computed": most_computed,
        "n": lambda number: f"{number:,}",
        "part": lambda tokens, of: share(tokens / max(of, 1)),
        "setting": _setting,
        "since": later,
        "size": size,
        "utc": lambda at: datetime.fromtimestamp(at // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def most_computed(audit: Audit) -> Reason | None:
    """Return the most frequent reason of computed tokens; None if there are none."""
    reasons = (reason for reason in Reason if reason.is_computed and audit.reasons[reason])
    return max(reasons, key=lambda reason: int(audit.reasons[reason]), default=None)


def ages_in_words(audit: Audit, level: int) -> str:
    """Return quantiles of the ages of one level, and the resulting verdict on its size."""
    lives, said = audit.levels[level], []
    for each, noun in ((lives.hit_ages, "hit"), (lives.eviction_ages, "eviction")):
        if each.total:
            half, most = (duration(each.quantile(part) or 0.0) for part in (0.5, 0.9))
            said.append(f"{count(each.total, noun)}: 50 % within {half}, 90 % within {most}.")
    verdict = verdict_on(audit, level)
    return " ".join(
        said + [f"{each[0].upper()}{each[1:]}." for each in (verdict.in_words() if verdict else ())]
    )


def _setting(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


# -- for scripts and programs


def facts(found: ReportData) -> dict[str, Any]:
    """Return the headline numbers for programs."""
    audit = found.audit
    return {
        "requests": audit.requests,
        "refusals": audit.refusals,
        "prompt_tokens": audit.prompt_tokens,
        "reused_tokens": audit.reused,
        "tokens_computed_again": sum(audit.lost_by_priority.values()),
        "offloaded_blocks": audit.offloaded,
        "onboarded_blocks": audit.onboarded,
        "end": found.end.kind,
    }


def lanes(found: ReportData) -> dict[str, Any]:
    """Return all lanes in columns: ids as text, marks as consecutive (phase, ms since the log's first batch)."""
    ms = 1_000_000
    return {
        "ids": [printable(str(lane.request_id)) for lane in found.lanes],
        "marks": [
            [number for phase, at in lane.marks for number in (int(phase), (at - found.first_at) // ms)]
            for lane in found.lanes
        ],
        "tokens": [lane.by_kind for lane in found.lanes],
        "stays": [lane.stays for lane in found.lanes],
        "end": (found.last_at - found.first_at) // ms,
    }
