"""One file with everything in it: markup, styles, data, and the library that draws. It asks the network for nothing."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from kvcache.audit.explanation import tell
from kvcache.errors import UsageError
from kvcache.phrases import count, printable, since
from kvcache.report.gathered import Gathered
from kvcache.report.groups import BLUE, GREEN, GREY, ORANGE, PALE, PURPLE, SKY, VERMILION
from kvcache.report.markup import data_block
from kvcache.report.sections import Parts

_HOME = Path(__file__).parent
_COLORS = {
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


def plotly_js() -> str:
    """The library that draws, from its Python package. Raises `UsageError` where that is not installed."""
    spec = find_spec("plotly")
    file = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if file is None or not file.is_file():
        raise UsageError("a report needs plotly: pip install 'kvcache[report]'")
    return _script(file.read_text(encoding="utf-8"))


def _script(source: str) -> str:
    """A script as a browser sees it inside a page: the policy names its digest."""
    return source.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def page(name: str, found: Gathered, parts: Parts, plotly: str) -> str:
    """The page of a log of this name."""
    own = _script((_HOME / "page.js").read_text(encoding="utf-8"))
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in (plotly, own))
    template = Template((_HOME / "page.html").read_text(encoding="utf-8"))
    audit = found.audit
    return template.substitute(
        policy=f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:",
        title=escape(f"{printable(name)}: what its cache did"),
        heading=escape(printable(name)),
        subtitle=escape(
            f"batches {audit.first_batch:,} to {audit.last_batch:,}, {count(audit.requests, 'admission')}, "
            f"{_utc(found.first_at)} to {_utc(found.last_at)}"
        ),
        style=(_HOME / "page.css").read_text(encoding="utf-8") + _colors(),
        links="".join(
            f'<li><a href="#{escape(link)}">{escape(heading)}</a></li>' for link, heading, _ in parts.sections
        ),
        sections="\n".join(markup for _, _, markup in parts.sections),
        data="\n".join(data_block(block, value) for block, value in _data(found, parts).items()),
        plotly=plotly,
        script=own,
    )


def _utc(at: int) -> str:
    return datetime.fromtimestamp(at // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _colors() -> str:
    return "\n".join(f"i.{kind} {{ background: {color}; }}" for kind, color in _COLORS.items())


def _data(found: Gathered, parts: Parts) -> dict[str, Any]:
    return {
        "facts": facts(found),
        "charts": parts.charts,
        "lanes-data": lanes(found),
        "explanations": explanations(found),
    }


def facts(found: Gathered) -> dict[str, Any]:
    """The headline numbers for programs."""
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


def lanes(found: Gathered) -> dict[str, Any]:
    """All lanes in columns: ids as text, marks as (phase, ms since the log's first batch) one behind the other."""
    return {
        "ids": [printable(str(lane.request_id)) for lane in found.lanes],
        "marks": [
            [
                number
                for phase, at in lane.marks
                for number in (int(phase), (at - found.first_at) // 1_000_000)
            ]
            for lane in found.lanes
        ],
        "tokens": [lane.by_kind for lane in found.lanes],
        "stays": [lane.stays for lane in found.lanes],
        "end": (found.last_at - found.first_at) // 1_000_000,
    }


def explanations(found: Gathered) -> dict[str, Any]:
    """What `kvcache explain` says, by the number of the lane: heading, facts, columns, rows."""
    return {
        str(number): [
            [told.heading, told.facts, told.columns, told.rows]
            for told in tell(explained, lambda at: since(at, found.first_at))
        ]
        for number, lane in enumerate(found.lanes)
        if (explained := found.explanations.get(lane.request_id)) is not None
    }
