"""``kvcache audit --by``: a log's requests by tenant, session, adapter or another label."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kvcache.audit.groups import (
    GroupTotals,
    Key,
    RequestGroups,
    TopGroups,
    others,
)
from kvcache.audit.reasons import Reason
from kvcache.audit.totals import Audit
from kvcache.audit.turns import KINDS_IN_WORDS, SessionTurns, TurnKind
from kvcache.cli.costs import AuditCosts
from kvcache.cli.output import Facts, Output, Row, pick, stamp
from kvcache.cli.times import Times
from kvcache.phrases import count, printable, share

_COLUMNS, _ROWS = 6, 12
"""Maximum numbers of columns and rows of the table of shares over time."""


def show(
    log: Path,
    groups: RequestGroups,
    audit: Audit,
    top: int,
    when: Times,
    spent: AuditCosts,
    out: Output,
    origin: Facts = (),
) -> None:
    """Print the groups for people; `origin` are facts on how a trace was played."""
    view = TopGroups(groups, audit.last_at, top)
    out.heading(
        f"{printable(str(log))}: batches {audit.first_batch:,} to {audit.last_batch:,}, by {printable(groups.by)}"
    )
    part = share(audit.reused / max(audit.prompt_tokens, 1))
    out.facts(
        [
            *origin,
            ("requests", f"{audit.requests:,} admitted, in {count(len(groups.totals), 'group')}"),
            ("prompt tokens", f"{audit.prompt_tokens:,}, of which {audit.reused:,} were reused: {part}"),
            *spent.facts(),
        ]
    )
    rows = _rows(view, spent)
    out.table(rows, right=list(rows[0])[1:] if rows else (), gap=True)
    _show_pairs(view, top, out)
    _show_shares(view, when, out)


def _rows(view: TopGroups, spent: AuditCosts) -> list[Row]:
    groups = view.rows()
    some_lost = any(each.totals.lost for each in groups)
    return [
        {
            printable(view.groups.by): each.name,
            "requests": each.totals.requests,
            "prompt tokens": each.totals.prompt_tokens,
            "reused": share(each.totals.reused / max(each.totals.prompt_tokens, 1)),
            "evicted, computed again": each.totals.evicted,
            **({"cleared or lost": each.totals.lost} if some_lost else {}),
            "never seen": int(each.totals.reasons[Reason.NEVER_SEEN]),
            "blocks evicted": each.evicted,
            "evicted for it": each.evicted_for_it,
            "share of cache": share(each.share),
            **spent.cells(each.totals.spent_seconds, each.totals.saved_seconds),
        }
        for each in groups
    ]


def _show_pairs(view: TopGroups, top: int, out: Output) -> None:
    pairs = view.pairs()
    title = f"evicted from {printable(view.groups.by)}"
    rows: list[Row] = [
        {title: view.name_of(owner), "for": view.name_of(needed_by)}
        | {"blocks": blocks, "tokens computed again": tokens}
        for owner, needed_by, blocks, tokens in pairs[:top]
    ]
    if rest := pairs[top:]:
        sums = {
            "blocks": sum(each[2] for each in rest),
            "tokens computed again": sum(each[3] for each in rest),
        }
        rows.append({title: others(len(rest)), "for": ""} | sums)
    out.table(rows, gap=True)


def _show_shares(view: TopGroups, when: Times, out: Output) -> None:
    moments = [each for each in view.groups.moments if each.blocks]
    named = [key for key in view.named if any(key in each.blocks for each in moments)][:_COLUMNS]
    if len(moments) < 2 or not named:
        return
    rows = []
    for shares in moments[:: -(-len(moments) // _ROWS)]:
        total = sum(shares.blocks.values())
        row: dict[str, Any] = {"cached at": when.of(shares.at), "blocks": total}
        row |= {view.name_of(key): share(shares.blocks.get(key, 0) / total) for key in named}
        unnamed = total - sum(shares.blocks.get(key, 0) for key in named)
        rows.append(row | {"others": share(unnamed / total)})
    if all(row["others"] == share(0) for row in rows):
        rows = [{name: cell for name, cell in row.items() if name != "others"} for row in rows]
    out.table(rows, right=list(rows[0]), gap=True)


def show_turns(turns: SessionTurns, out: Output) -> None:
    """Print the relations of sessions' prompts to the previous ones."""
    rows = [
        {"turn": KINDS_IN_WORDS[kind], "requests": totals.requests, "prompt tokens": totals.prompt_tokens}
        | {"reused": share(totals.reused / max(totals.prompt_tokens, 1))}
        for kind in TurnKind
        if (totals := turns.by_kind.get(kind)) is not None
    ]
    out.table(rows, right=["reused"], gap=True)


# -- for programs


def to_json(groups: RequestGroups, audit: Audit, top: int, spent: AuditCosts) -> dict[str, Any]:
    """Return the groups with the most prompt tokens, the others as one, and evictions between all of these."""
    view = TopGroups(groups, audit.last_at, top)
    named: list[dict[str, Any]] = [
        {
            **totals_json(each.totals),
            **pick(
                each, evicted_blocks="evicted", evicted_for_it_blocks="evicted_for_it", cache_share="share"
            ),
            "prefill": spent.of_group_json(each.totals.spent_seconds, each.totals.saved_seconds),
        }
        for each in view.rows()
    ]
    rest = None if view.rest is None else {"groups": len(groups.totals) - len(view.named), **named.pop()}
    return {
        "by": groups.by,
        "groups": [{"name": key, **each} for key, each in zip(view.named, named, strict=True)],
        "others": rest,
        "evictions": _pairs_json(view),
        "over_time": [
            stamp(each.batch, each.at)
            | {"blocks": [each.blocks.get(key, 0) for key in view.named]}
            | {"others_blocks": view.unnamed(each.blocks)}
            for each in groups.moments
        ],
    }


def totals_json(totals: GroupTotals) -> dict[str, Any]:
    """Return the counts of requests."""
    reasons = {reason.label: int(totals.reasons[reason]) for reason in Reason}
    return pick(totals, "requests", "prompt_tokens", reused_tokens="reused") | {"reasons": reasons}


def turns_json(turns: SessionTurns) -> list[dict[str, Any]]:
    """Return the relations of sessions' prompts to the previous ones."""
    return [{"kind": kind, **totals_json(turns.by_kind[kind])} for kind in TurnKind if kind in turns.by_kind]


def _pairs_json(view: TopGroups) -> list[dict[str, Any]]:
    """Return pairs of named groups; other groups have `others` in place of a name."""
    blocks, tokens = Counter[_Pair](), Counter[_Pair]()
    for owner, needed_by, evicted, recomputed in view.pairs():
        ends = [(key, False) if view.is_named(key) else (None, True) for key in (owner, needed_by)]
        blocks[ends[0], ends[1]] += evicted
        tokens[ends[0], ends[1]] += recomputed
    return [
        {
            "of": dict(zip(("name", "others"), owner, strict=True)),
            "for": dict(zip(("name", "others"), needed_by, strict=True)),
            "blocks": blocks[owner, needed_by],
            "recomputed_tokens": recomputed,
        }
        for (owner, needed_by), recomputed in tokens.items()
    ]


_Pair = tuple[tuple[Key, bool], tuple[Key, bool]]
"""Two groups: a name, and True if it stands for all others."""
