"""How full a cache is: the slots of each level by what they are."""

from __future__ import annotations

from typing import Any

from events.structs import LEVEL_NAMES
from kvcache.audit.tables import OccupancyRow, occupancy
from kvcache.fold.state import CacheState


def levels_table(state: CacheState) -> tuple[list[str], list[list[str]]]:
    """Columns, and a row for each level of each window; of the only window there is the name says nothing."""
    levels = occupancy(state)
    several = len(state.groups) > 1
    rows = [
        [
            *([f"{each.window:,}"] * several),
            each.level,
            *(f"{number:,}" for number in (each.blocks, each.held, each.unreferenced, each.blank)),
        ]
        for each in levels
    ]
    return [*(["window"] * several), "level", "blocks", "held", "cached, free to evict", "blank"], rows


def levels_json(state: CacheState) -> list[dict[str, Any]]:
    """For each window its levels. Blocks: all, held by sequences, cached and held by nobody, blank."""
    levels = occupancy(state)
    windows = [levels[at : at + len(LEVEL_NAMES)] for at in range(0, len(levels), len(LEVEL_NAMES))]
    return [{"window": of[0].window, **{each.level: _level_json(each) for each in of}} for of in windows]


def _level_json(row: OccupancyRow) -> dict[str, int]:
    return {name: getattr(row, name) for name in ("blocks", "held", "unreferenced", "blank")}
