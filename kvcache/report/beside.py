"""Sections that appear if somebody gives what they show: hits by size, and other settings tried on the same log."""

from __future__ import annotations

from kvcache.phrases import count, share
from kvcache.report.charts import hit_rates
from kvcache.report.given import GivenCurve, GivenTrial, WhatIf, setting
from kvcache.report.markup import folded, paragraph, table
from kvcache.report.sections import Parts


def add_curve(parts: Parts, curve: GivenCurve) -> None:
    """Hit rates by size of the cache."""
    sizes = sorted(curve.sizes, key=lambda size: size.blocks)
    best = [
        None if size.best_hits is None else size.best_hits / max(curve.block_requests, 1) for size in sizes
    ]
    primary, both = curve.num_blocks.get("primary", 0), sum(curve.num_blocks.values())
    marks = {curve.knee: "knee", primary: "primary", both: "both levels" if both > primary else "primary"}
    named = [(blocks, name) for blocks, name in marks.items() if blocks]
    rows = [
        [
            f"{size.blocks:,}",
            share(size.hit_rate),
            "" if bound is None else share(bound),
            marks.get(size.blocks, ""),
        ]
        for size, bound in zip(sizes, best, strict=True)
    ]
    chart = hit_rates(
        [(size.blocks, size.hit_rate, bound) for size, bound in zip(sizes, best, strict=True)], named
    )
    said = "; ".join(f"{name}: {blocks:,} blocks" for blocks, name in named)
    drawn = parts.figure("curve", chart, "Block hit rate by size of the cache", f"{said}.")
    columns = ["blocks", "block hit rate", "at best", ""]
    listed = table("Block hit rate by size", columns, rows, columns[:3])
    note = paragraph(
        "What this log's prompts would reuse in a cache of any size that evicts what was used longest ago: a part of "
        "their full blocks. At best: of a cache that knows the prompts to come, with all its blocks in one level."
    )
    parts.add("curve", "A larger or a smaller cache", note + drawn + folded("As a table", listed))


def add_whatif(parts: Parts, whatif: WhatIf) -> None:
    """Other settings tried on this log."""
    settings = whatif.differing()
    refused = whatif.refused()
    columns = [
        "cache",
        *settings,
        "token hit rate",
        "of belady",
        "computed",
        "after preemption",
        "onboarded",
        "preempted",
        *(name.replace("_", " ") for name in refused),
    ]
    rows = [_row("recorded", whatif.recorded, settings, refused)]
    rows += [_row(trial.policy or "same policy", trial, settings, refused) for trial in whatif.trials]
    note = paragraph(
        f"The log's requests, played again: {count(len(whatif.trials), 'cache')}, beside what was recorded. The token "
        "hit rate is the reused part of all prompt tokens, those of requests that could not be served included."
    )
    parts.add(
        "whatif", "Other settings", note + table("Other settings on this log", columns, rows, columns[1:])
    )


def _row(name: str, trial: GivenTrial, settings: list[str], refused: list[str]) -> list[str]:
    return [
        name,
        *(setting(trial, each) for each in settings),
        share(trial.hit_rate),
        "" if trial.of_bound is None else share(trial.of_bound),
        f"{trial.computed_tokens:,}",
        f"{trial.recomputed_tokens:,}",
        f"{trial.blocks_onboarded:,}",
        f"{trial.preempted:,}",
        *(f"{getattr(trial, each):,}" for each in refused),
    ]
