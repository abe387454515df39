"""Fingerprints: what they tell apart, and when one is recorded."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from events.types import Checkpoint
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.full_group import FullGroup
from kvcache.fold.prefix_tree import Run
from kvcache.fold.state import CacheState
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies


def cache() -> KVCacheManager:
    """Holds one running sequence of four blocks, and a released one with a partial block of its own."""
    manager = KVCacheManager(strategies.config(primary_blocks=12, secondary_blocks=2))
    manager.add_sequence("ended", [1, 2, 3, 4, 5, 6, 9])
    manager.store_context_blocks("ended", 7)
    manager.remove_sequence("ended")
    manager.add_sequence("runs", [1, 2, 3, 4, 7, 8, 9])
    manager.store_context_blocks("runs", 7)
    return manager


def one(state: CacheState, refs: int) -> Run:
    """The deepest run with so many holders."""
    runs = [run for run in state.groups[0].tree.runs.values() if run.refs == refs]
    return max(runs, key=lambda run: run.end)


def _swap(slots: array[int]) -> None:
    slots[0], slots[1] = slots[1], slots[0]


CHANGES: dict[str, Callable[[CacheState], object]] = {
    "priority": lambda state: setattr(one(state, 0), "priority", 36),
    "expiry": lambda state: setattr(one(state, 0), "expiry", 1),
    "stamp": lambda state: setattr(one(state, 0), "released_at", 9),
    "references": lambda state: setattr(one(state, 1), "refs", 2),
    "copy on its way": lambda state: setattr(one(state, 1), "transfer", 1),
    "tokens in the last block": lambda state: setattr(one(state, 0), "partial", 0),
    "name": lambda state: one(state, 1).keys.__setitem__(0, one(state, 1).keys[0] ^ 1),
    "place": lambda state: _swap(one(state, 0).slots),
    "order of blank slots": lambda state: _swap(state.groups[0].levels[0].blank),
    "order of blank secondary slots": lambda state: _swap(state.groups[0].levels[1].blank),
    "slots held twice": lambda state: state.groups[0].shared.__setitem__(1, 2),
    "block table": lambda state: _swap(state.sequences[2].tables[0]),
    "computed tokens": lambda state: setattr(state.sequences[2], "computed", 1),
    "next release": lambda state: setattr(state, "releases", 9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_depends_on(change: str) -> None:
    """Two states that differ in this alone have two fingerprints."""
    state = cache().state
    before = fingerprint(state)
    assert before == fingerprint(cache().state)
    CHANGES[change](state)
    assert fingerprint(state) != before


def test_fingerprint_does_not_depend_on_where_runs_begin() -> None:
    """The same blocks have the same fingerprint if one run holds them or several."""
    state = cache().state
    before, runs = fingerprint(state), len(state.groups[0].tree.runs)
    group = state.groups[0]
    assert isinstance(group, FullGroup)
    for run in [run for run in group.tree.runs.values() if len(run.slots) > 1]:
        group.split(run, 1)
    assert len(group.tree.runs) > runs
    assert fingerprint(state) == before


def checkpoints(manager: KVCacheManager) -> tuple[int, int]:
    """How many are recorded while blocks of a cache of 8 slots change, at 8 changes or more each, and at the end."""
    found: list[Checkpoint] = []
    manager.bus.subscribe(found.append, Checkpoint)
    for number in range(20):
        manager.add_sequence("a", [number] * 6)
        manager.store_context_blocks("a", 6)
        manager.remove_sequence("a")
        manager.flush()
    on_the_way = len(found)
    manager.close()
    return on_the_way, len(found) - on_the_way


def test_log_gets_checkpoints_on_the_way(tmp_path: Path) -> None:
    """A fingerprint is recorded each time as many blocks have changed as are asked for, and at the end."""
    # Each prompt stores 3 blocks, and all but the first two make another one's 3 go.
    assert checkpoints(KVCacheManager(strategies.config(), log=tmp_path / "log")) == (9, 1)


def test_without_a_log_there_is_a_checkpoint_at_the_end_only(tmp_path: Path) -> None:
    """Nothing could be compared with it, and in a cache of a million slots it takes as long as many steps."""
    assert checkpoints(KVCacheManager(strategies.config(), sinks=[f"file:{tmp_path}/events"])) == (0, 1)
