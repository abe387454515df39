"""Pieces of HTML. Everything that comes from a log goes through `escape` here, or into JSON that no tag can end."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> str:
    """Rows under a heading; `right` names the columns of numbers."""
    kinds = [' class="n"' if name in right else "" for name in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, inner: str, name: str = "") -> str:
    """Markup behind a line that opens it."""
    named = f' id="{escape(name)}"' if name else ""
    return f"<details{named}><summary>{escape(summary)}</summary>{inner}</details>"


def figure(name: str, caption: str, summary: str) -> str:
    """The place of a chart; `summary` says in words what it shows."""
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption><div class="chart" data-chart="{escape(name)}" role="img" '
        f'aria-label="{escape(f"{caption}. {summary}")}"></div><p class="said">{escape(summary)}</p></figure>'
    )


def section(name: str, heading: str, inner: str) -> str:
    """A part of the page."""
    return (
        f'<section id="{escape(name)}" aria-labelledby="{escape(name)}-heading">'
        f'<h2 id="{escape(name)}-heading">{escape(heading)}</h2>\n{inner}\n</section>'
    )


def paragraph(said: str) -> str:
    """Text."""
    return f"<p>{escape(said)}</p>"


def facts(rows: Sequence[tuple[str, str, str]]) -> str:
    """Numbers with a label before and a note behind."""
    return (
        '<dl class="facts">'
        + "".join(
            f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
            for label, value, note in rows
        )
        + "</dl>"
    )


def legend(rows: Sequence[tuple[str, str]]) -> str:
    """Classes of colours, and what each colour means."""
    return (
        '<ul class="legend">'
        + "".join(f'<li><i class="{escape(kind)}"></i>{escape(name)}</li>' for kind, name in rows)
        + "</ul>"
    )


def data_block(name: str, value: Any) -> str:
    """JSON for scripts, in which nothing can end the block."""
    said = json.dumps(value, separators=(",", ":")).translate(_UNSAFE)
    return f'<script type="application/json" id="{escape(name)}">{said}</script>'
