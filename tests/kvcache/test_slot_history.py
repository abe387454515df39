"""Who has a slot of a recorded cache, and how that came about."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from events.log import LogReader
from events.types import PRIMARY
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit.slots import SlotChange, SlotHistory, SlotWatch
from kvcache.errors import CapacityError
from kvcache.fold.state import resident_names
from kvcache.replay import replay

PROMPT = list(range(8))


def watched(log: Path, slot: int, level: int = PRIMARY, last: int | None = None) -> list[SlotHistory]:
    """What is known of a slot after the batch `last`, or at the log's end."""
    watch = SlotWatch(level, slot)
    replayed = watch.fold(batch for batch in LogReader(log) if last is None or batch.seq <= last)
    return watch.histories(replayed.state)


def said(change: SlotChange) -> tuple[str, str | None, tuple[object, ...], int | None, bool]:
    occupant = change.occupant
    return change.type, change.why, occupant.requests, occupant.block, occupant.cached


def test_a_slot_from_owner_to_owner(tmp_path: Path) -> None:
    """Allocated, cached, shared, held by nobody, evicted, and another request's: each by the event that did it."""
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=4)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for request in ("a", "b"):
            manager.add_sequence(request, [*PROMPT, 99])
            manager.store_context_blocks(request, 8)
            manager.flush()
        for request in ("a", "b"):
            manager.remove_sequence(request)
        manager.add_sequence("c", range(20, 35))
    (history,) = watched(tmp_path / "log", 1)
    assert [said(change) for change in history.changes] == [
        ("BlocksAllocated", "prompt", ("a",), 1, False),
        ("BlocksStored", None, ("a",), 1, True),
        ("BlocksReused", None, ("a", "b"), 1, True),
        ("SequenceRemoved", "finished", ("b",), 1, True),
        ("SequenceRemoved", "finished", (), 1, True),
        ("BlocksRemoved", "capacity", (), None, False),
        ("BlocksAllocated", "prompt", ("c",), history.now.block, False),
    ]
    events = {
        (batch.seq, index): (batch.ts, type(event).__name__)
        for batch in LogReader(tmp_path / "log")
        for index, event in enumerate(batch.events)
    }
    assert all(events[each.seq, each.index] == (each.ts, each.type) for each in history.changes)
    assert [change.occupant.name for change in history.changes if change.occupant.cached] == [
        history.changes[1].occupant.name
    ] * 4


@pytest.mark.parametrize("windows", [None, (8, 64)])
def test_it_says_what_the_live_cache_had(tmp_path: Path, windows: tuple[int, ...] | None) -> None:
    """After batches of a random run, of each slot: the requests in whose live block table it stood, and all names."""
    rng, config = (
        random.Random(1),
        KVCacheConfig(
            max_sequence_length=64,
            tokens_per_block=4,
            primary_blocks=14,
            secondary_blocks=6,
            num_layers=2,
            num_kv_heads=1,
            head_dim=1,
            max_attention_window=windows,
        ),
    )
    running, live = list[int](), dict[int, dict[tuple[int, int], set[int]]]()
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for request in range(40):
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            try:
                manager.add_sequence(request, prompt)
            except CapacityError:
                manager.remove_sequence(running.pop(0))
            else:
                manager.start_transfers()
                manager.store_context_blocks(request, len(prompt))
                running.append(request)
            batch = manager.flush()
            assert batch is not None
            live[batch.seq] = tables(manager, running)
    moved, batches = 0, sorted(live)
    for seq, slot, level in product((batches[20], batches[-1]), range(14), (0, 1)):
        for history in watched(tmp_path / "log", slot, level, seq):
            moved += any(change.type == "BlocksMoved" for change in history.changes)
            expected = live[seq].get((history.group, slot), set()) if level == PRIMARY else set()
            assert set(history.now.requests) == expected
    assert moved
    state = replay(tmp_path / "log").state
    for level in (0, 1):
        found = [each for slot in range(14) for each in watched(tmp_path / "log", slot, level)]
        for group in range(len(state.groups)):
            named = {
                int(each.now.name, 16) for each in found if each.group == group and each.now.name is not None
            }
            assert resident_names(state, level, group) <= named


def tables(manager: KVCacheManager, running: list[int]) -> dict[tuple[int, int], set[int]]:
    """By group and slot, in whose block tables it is."""
    found = defaultdict[tuple[int, int], set[int]](set)
    for group, created in enumerate(manager.state.created.groups):  # type: ignore[union-attr]
        for request in running:
            for slot in np.asarray(manager.block_table(request, window=created.window)).ravel().tolist():
                found[group, slot].add(request)
    return found
