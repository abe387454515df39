"""Where blocks are, and where the project is: for programs of tests, too, which do not wait for hypothesis to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from events.types import PRIMARY, SECONDARY
from kvcache.fold.prefix_tree import Run
from kvcache.fold.state import CacheState

ROOT = Path(__file__).resolve().parents[2]


def slides(state: CacheState, index: int) -> bool:
    """Whether sequences let go of blocks of a group."""
    assert state.created is not None
    return state.created.groups[index].kind == "sliding"


def landed_level(state: CacheState, index: int, run: Run, at: int) -> int | None:
    """Where one block of a run is; None if it is not cached, or on its way."""
    if not slides(state, index):
        return None if run.transfer else run.level
    group: Any = state.groups[index]
    place = run.slots[at]
    if place < 0 or group.transfers[place]:
        return None
    return PRIMARY if place < group.levels[PRIMARY].size else SECONDARY
