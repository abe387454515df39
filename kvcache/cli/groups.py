"""``kvcache audit --by``: a log's requests by tenant, session, adapter or another label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcache.audit.groups import CacheShares, GroupTotals, Key, RequestGroups
from kvcache.audit.reasons import EVICTIONS, LOSSES, Reason
from kvcache.audit.totals import Audit
from kvcache.audit.turns import SessionTurns, TurnKind
from kvcache.cli.costs import AuditCosts
from kvcache.cli.output import Output, Row, stamp
from kvcache.cli.times import Times
from kvcache.phrases import count, printable, share

_NONE = "(none)"
_DIGITS = 16
"""Of a salt's digest."""
_COLUMNS, _ROWS = 6, 12
"""Of the table of shares over time, at most."""
KINDS_IN_WORDS = {
    TurnKind.FIRST: "first turn",
    TurnKind.EXTENDS: "extends the turn before",
    TurnKind.DIVERGES: "diverges from the turn before",
    TurnKind.COMPACTION: "compaction: diverges, and is shorter",
    TurnKind.RESUMED: "goes on after it was preempted",
    TurnKind.UNKNOWN: "not known: the log records no tokens",
}


def _name(groups: RequestGroups, key: Key) -> str:
    if key is None:
        return _NONE
    return printable(key[:_DIGITS] if groups.by == "salt" else key)


def _others(number: int) -> str:
    return f"{number:,} other" + "s" * (number > 1) if number else _NONE


def _lost(totals: GroupTotals) -> tuple[int, int]:
    evicted, lost = (int(totals.reasons[list(reasons)].sum()) for reasons in (EVICTIONS, LOSSES))
    return evicted, lost


def mean_shares(groups: RequestGroups, until: int) -> dict[Key, float]:
    """Which part of what was cached each group had stored, over the time up to `until` (ns)."""
    moments = groups.moments
    areas = Counter[Key]()
    for shares, end in zip(moments, [*(each.at for each in moments[1:]), until], strict=True):
        for key, blocks in shares.blocks.items():
            areas[key] += blocks * max(0, end - shares.at)
    if not (total := areas.total()):
        areas = Counter(moments[-1].blocks) if moments else areas
        total = areas.total()
    return {key: area / total for key, area in areas.items()} if total else {}


class GroupsView:
    """What is shown: the groups with the most prompt tokens, and all others as one."""

    def __init__(self, groups: RequestGroups, audit: Audit, top: int) -> None:
        self.groups, self.audit = groups, audit
        self.named = groups.largest(top)
        self.rest = groups.others(self.named)
        self.shares = mean_shares(groups, audit.last_at)
        self._shown = set(self.named)
        if self.rest is None and None not in self._shown and None in self._without_requests():
            self.rest = GroupTotals()

    def _without_requests(self) -> set[Key]:
        """Groups that have, or have evicted, blocks."""
        return {*self.shares, *(key for pair in self.groups.evicted_blocks for key in pair)}

    def is_named(self, key: Key) -> bool:
        """Whether the group has a row of its own."""
        return key in self._shown

    def part(self, numbers: dict[Key, Any], key: Key | None, *, rest: bool = False) -> Any:
        """The number of one group, or the sum over all without a row."""
        if rest:
            return sum(each for other, each in numbers.items() if other not in self._shown)
        return numbers.get(key, 0)

    def evictions(self) -> tuple[Counter[Key], Counter[Key]]:
        """Blocks by who had stored them, and by who needed their room."""
        suffered, caused = Counter[Key](), Counter[Key]()
        for (whose, needed_by), blocks in self.groups.evicted_blocks.items():
            suffered[whose] += blocks
            caused[needed_by] += blocks
        return suffered, caused

    def pairs(self) -> list[tuple[Key, Key, int, int]]:
        """Whose blocks, for whose room, how many, and how many tokens were computed again: the most costly first."""
        evicted, recomputed = self.groups.evicted_blocks, self.groups.recomputed_tokens
        pairs = [(*pair, evicted[pair], recomputed[pair]) for pair in evicted.keys() | recomputed.keys()]
        return sorted(pairs, key=lambda pair: (-pair[3], -pair[2], str(pair[:2])))


def show(
    log: Path, groups: RequestGroups, audit: Audit, top: int, when: Times, spent: AuditCosts, out: Output
) -> None:
    """For people."""
    view = GroupsView(groups, audit, top)
    out.heading(
        f"{printable(str(log))}: batches {audit.first_batch:,} to {audit.last_batch:,}, by {printable(groups.by)}"
    )
    part = share(audit.reused / max(audit.prompt_tokens, 1))
    out.facts(
        [
            ("requests", f"{audit.requests:,} admitted, in {count(len(groups.totals), 'group')}"),
            ("prompt tokens", f"{audit.prompt_tokens:,}, of which {audit.reused:,} were reused: {part}"),
            *spent.facts(),
        ]
    )
    out.line()
    rows = _rows(view, spent)
    out.table(rows, right=list(rows[0])[1:] if rows else ())
    _show_pairs(view, top, out)
    _show_shares(view, when, out)


def _rows(view: GroupsView, spent: AuditCosts) -> list[Row]:
    suffered, caused = view.evictions()
    groups = [(key, view.groups.totals[key], False) for key in view.named]
    if view.rest is not None:
        groups.append((None, view.rest, True))
    some_lost = any(_lost(totals)[1] for _, totals, _ in groups)
    rows = list[Row]()
    for key, totals, rest in groups:
        again, lost = _lost(totals)
        others = len(view.groups.totals) - len(view.named)
        rows.append(
            {
                printable(view.groups.by): _others(others) if rest else _name(view.groups, key),
                "requests": totals.requests,
                "prompt tokens": totals.prompt_tokens,
                "reused": share(totals.reused / max(totals.prompt_tokens, 1)),
                "evicted, computed again": again,
                **({"cleared or lost": lost} if some_lost else {}),
                "never seen": int(totals.reasons[Reason.NEVER_SEEN]),
                "blocks evicted": view.part(suffered, key, rest=rest),
                "evicted for it": view.part(caused, key, rest=rest),
                "of the cache": share(view.part(view.shares, key, rest=rest)),
                **spent.of_group(totals.spent_seconds, totals.saved_seconds),
            }
        )
    return rows


def _show_pairs(view: GroupsView, top: int, out: Output) -> None:
    pairs = view.pairs()
    if not pairs:
        return
    title = f"evicted: of {printable(view.groups.by)}"
    rows: list[Row] = [
        {title: _name(view.groups, whose), "for": _name(view.groups, needed_by)}
        | {"blocks": blocks, "tokens computed again": tokens}
        for whose, needed_by, blocks, tokens in pairs[:top]
    ]
    if rest := pairs[top:]:
        sums = {
            "blocks": sum(each[2] for each in rest),
            "tokens computed again": sum(each[3] for each in rest),
        }
        rows.append({title: _others(len(rest)), "for": ""} | sums)
    out.line()
    out.table(rows)


def _show_shares(view: GroupsView, when: Times, out: Output) -> None:
    moments = [each for each in view.groups.moments if each.blocks]
    named = [key for key in view.named if any(key in each.blocks for each in moments)][:_COLUMNS]
    if len(moments) < 2 or not named:
        return
    rows = []
    for shares in moments[:: -(-len(moments) // _ROWS)]:
        total = sum(shares.blocks.values())
        row: dict[str, Any] = {"cached at": when.of(shares.at), "blocks": total}
        row |= {_name(view.groups, key): share(shares.blocks.get(key, 0) / total) for key in named}
        others = total - sum(shares.blocks.get(key, 0) for key in named)
        rows.append(row | {"others": share(others / total)})
    if all(row["others"] == share(0) for row in rows):
        rows = [{name: cell for name, cell in row.items() if name != "others"} for row in rows]
    out.line()
    out.table(rows, right=list(rows[0]))


def show_turns(turns: SessionTurns, out: Output) -> None:
    """What prompts of sessions are to those before them."""
    rows = [
        {"turn": KINDS_IN_WORDS[kind], "requests": totals.requests, "prompt tokens": totals.prompt_tokens}
        | {"reused": share(totals.reused / max(totals.prompt_tokens, 1))}
        for kind in TurnKind
        if (totals := turns.by_kind.get(kind)) is not None
    ]
    if rows:
        out.line()
        out.table(rows, right=["reused"])


# -- for programs


def to_json(groups: RequestGroups, audit: Audit, top: int, spent: AuditCosts) -> dict[str, Any]:
    """The groups with the most prompt tokens, those others as one, and evictions between all of these."""
    view = GroupsView(groups, audit, top)
    suffered, caused = view.evictions()

    def numbers(totals: GroupTotals, key: Key, *, rest: bool) -> dict[str, Any]:
        return {
            **totals_json(totals),
            "evicted_blocks": view.part(suffered, key, rest=rest),
            "evicted_for_it_blocks": view.part(caused, key, rest=rest),
            "cache_share": view.part(view.shares, key, rest=rest),
            "prefill": spent.of_group_json(totals.spent_seconds, totals.saved_seconds),
        }

    others = len(groups.totals) - len(view.named)
    return {
        "by": groups.by,
        "groups": [{"name": key, **numbers(groups.totals[key], key, rest=False)} for key in view.named],
        "others": None if view.rest is None else {"groups": others, **numbers(view.rest, None, rest=True)},
        "evictions": _pairs_json(view),
        "over_time": [_shares_json(view, shares) for shares in groups.moments],
    }


def totals_json(totals: GroupTotals) -> dict[str, Any]:
    """Counts of requests."""
    return {
        "requests": totals.requests,
        "prompt_tokens": totals.prompt_tokens,
        "reused_tokens": totals.reused,
        "reasons": {reason.label: int(totals.reasons[reason]) for reason in Reason},
    }


def turns_json(turns: SessionTurns) -> list[dict[str, Any]]:
    """What prompts of sessions are to those before them."""
    return [{"kind": kind, **totals_json(turns.by_kind[kind])} for kind in TurnKind if kind in turns.by_kind]


def _pairs_json(view: GroupsView) -> list[dict[str, Any]]:
    """Between groups that are named; what concerns any other is with `others` in place of its name."""
    blocks, tokens = Counter[_Pair](), Counter[_Pair]()
    for whose, needed_by, evicted, recomputed in view.pairs():
        ends = [(key, False) if view.is_named(key) else (None, True) for key in (whose, needed_by)]
        blocks[ends[0], ends[1]] += evicted
        tokens[ends[0], ends[1]] += recomputed
    return [
        {
            "of": dict(zip(("name", "others"), whose, strict=True)),
            "for": dict(zip(("name", "others"), needed_by, strict=True)),
            "blocks": blocks[whose, needed_by],
            "recomputed_tokens": recomputed,
        }
        for (whose, needed_by), recomputed in tokens.items()
    ]


_Pair = tuple[tuple[Key, bool], tuple[Key, bool]]
"""Two groups: a name, and whether it stands for all others."""


def _shares_json(view: GroupsView, shares: CacheShares) -> dict[str, Any]:
    named: Sequence[Key] = view.named
    return {
        **stamp(shares.batch, shares.at),
        "blocks": [shares.blocks.get(key, 0) for key in named],
        "others_blocks": view.part(shares.blocks, None, rest=True),
    }
