"""Counters: those of random logs are compared with a count that looks at one slot at a time."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from events import types as ev
from events.bus import EventBus
from events.log import LogReader
from kvcache.errors import Unsupported, UsageError
from kvcache.fold.state import CacheState
from kvcache.manager import KVCacheManager
from kvcache.record.counting import RequestCounter, StatsCounter
from kvcache.stats import RequestStats, Stats
from tests.support.engines import strategies
from tests.support.logs.random_logs import random_log
from tests.support.seeds import seeds

SEEDS = range(12)


class NaiveStats:
    """Counts of each window, and of each request that ended, from what events say of single slots."""

    def __init__(self) -> None:
        self.windows: dict[int, Counter[str]] = {}
        self.requests: dict[int, Counter[str]] = {}
        self.ended: list[tuple[int, Counter[str]]] = []

    def fold(self, event: Any) -> None:
        match event:
            case ev.CacheCreated():
                self.groups = event.groups
                self.size = event.tokens_per_block
                self.taken: set[tuple[int, int]] = set()
                self.requests.clear()
                for group in event.groups:
                    self.windows.setdefault(group.window, Counter())
            case ev.SequenceAdded():
                self.requests[event.handle] = Counter()
            case ev.SequenceRemoved() if event.handle in self.requests:
                self.ended.append((event.handle, self.requests[event.handle]))
            case ev.BlocksAllocated():
                self.allocate(event)
            case ev.BlocksReused():
                name = "blocks_deduplicated" if event.replaced else "blocks_reused_full"
                for _ in array("i", event.slots):
                    self.count(event, event.handle, name)
            case ev.BlocksCopied():
                self.count(event, event.handle, "blocks_reused_partial")
                self.count(event, None, "blocks_copied")
                if (event.source_level, event.source) != (0, event.target):
                    self.count(event, None, "bytes_copied", event.num_tokens * self.token_bytes(event.group))
            case ev.BlocksStored() | ev.BlocksFilled() | ev.BlocksUpdated():
                name = "blocks_updated" if isinstance(event, ev.BlocksUpdated) else "blocks_stored"
                for _ in array("i", event.slots):
                    self.count(event, None, name)
            case ev.BlocksMoved():
                self.move(event)
            case ev.BlocksRemoved():
                for _ in array("i", event.slots):
                    self.count(event, None, "blocks_removed")
                    if event.level == 1 and event.why in ("capacity", "unreachable"):
                        self.count(event, None, "blocks_dropped")
            case ev.CacheCleared():
                for group, removed in zip(self.groups, event.removed, strict=True):
                    self.windows[group.window]["blocks_removed"] += sum(removed)

    def token_bytes(self, group: int) -> int:
        return sum(pool.bytes_per_block for pool in self.groups[group].pools) // self.size

    def count(self, event: Any, handle: int | None, name: str, more: int = 1) -> None:
        self.windows[self.groups[event.group].window][name] += more
        if handle in self.requests:
            self.requests[handle][name] += more

    def allocate(self, event: ev.BlocksAllocated) -> None:
        handles = array("q", event.handles)
        counts = array("I", event.counts) or [1] * len(handles)
        owners = chain.from_iterable([handle] * count for handle, count in zip(handles, counts, strict=True))
        for handle, slot in zip(owners, array("i", event.slots), strict=True):
            self.count(event, handle, "blocks_allocated")
            if event.why == "decode":
                self.count(event, handle, "blocks_allocated_decode")
            if event.why == "prompt":
                self.count(event, handle, "blocks_missed")
            if (event.group, slot) not in self.taken:
                self.count(event, handle, "blocks_allocated_new")
            self.taken.add((event.group, slot))

    def move(self, event: ev.BlocksMoved) -> None:
        name = {"offload": "offloaded", "onboard": "onboarded", "recomputed": "recomputed"}[event.why]
        for slot in array("i", event.to_slots):
            self.count(event, None, f"blocks_{name}")
            if event.why != "recomputed":
                self.count(event, None, f"bytes_{name}", self.token_bytes(event.group) * self.size)
            if event.to_level == 0:
                self.taken.add((event.group, slot))


GAUGES = {"blocks_total", "blocks_blank", "blocks_unreferenced"}
COUNTED = [
    each.name
    for each in fields(Stats)
    if each.name.startswith(("blocks_", "bytes_")) and each.name not in GAUGES
]


def counted(log: Path) -> tuple[Stats, list[RequestStats], NaiveStats]:
    """What a log comes to: by the counters, and naively."""
    bus, of_epoch, naive, records = EventBus(), EventBus(), NaiveStats(), list[RequestStats]()
    counter, requests = StatsCounter(bus), None
    for batch in LogReader(log):
        for event in batch.events:
            naive.fold(event)
            bus.publish(event)
            if isinstance(event, ev.CacheCreated):
                of_epoch = EventBus()
                requests = RequestCounter(of_epoch, event, 10_000)
            elif requests is not None:
                of_epoch.publish(event)
                records += requests.take()
    counter.publish(CacheState(), 0)
    return counter.read(), records, naive


@pytest.mark.parametrize("seed", seeds(SEEDS, quick=3))
def test_counters_are_those_of_a_naive_count(seed: int, tmp_path: Path) -> None:
    """Of each window and of all together; what a prompt misses is what was allocated for it beside copies."""
    stats, _, naive = counted(random_log(seed, tmp_path / "log"))
    assert stats.windows.keys() == naive.windows.keys()
    for window, expected in naive.windows.items():
        assert {name: getattr(stats.windows[window], name) for name in COUNTED} == {
            name: expected[name] for name in COUNTED
        }
    for name in COUNTED:
        assert getattr(stats, name) == sum(each[name] for each in naive.windows.values())


@pytest.mark.parametrize("seed", seeds(SEEDS, quick=3))
def test_records_of_requests_are_those_of_a_naive_count(seed: int, tmp_path: Path) -> None:
    """One for each request that ended and was seen to begin."""
    _, records, naive = counted(random_log(seed, tmp_path / "log"))
    assert [each.handle for each in records] == [handle for handle, _ in naive.ended]
    for record, (_, expected) in zip(records, naive.ended, strict=True):
        for name in ("allocated", "allocated_new", "reused_full", "reused_partial", "missed"):
            assert getattr(record, f"blocks_{name}") == expected[f"blocks_{name}"], name


def test_random_logs_have_all_that_is_counted(tmp_path: Path) -> None:
    """Otherwise the comparisons above would prove nothing."""
    seen: Counter[str] = Counter()
    for seed in SEEDS[:6]:
        for window in counted(random_log(seed, tmp_path / str(seed)))[2].windows.values():
            seen += window
    assert all(seen[name] for name in COUNTED), seen


def cache(**settings: Any) -> KVCacheManager:
    """Blocks of 2 tokens; 8 primary ones."""
    options = {name: settings.pop(name) for name in ("request_stats",) if name in settings}
    return KVCacheManager(strategies.config(**settings), **options)


def serve(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    """Admit, compute and end a request."""
    manager.add_sequence(name, tokens)
    manager.store_context_blocks(name, len(tokens))
    manager.remove_sequence(name)
    manager.flush()


def test_difference_of_two_moments_is_what_happened_between() -> None:
    """Counters are differences, window by window too; gauges and shares are those of the time between."""
    manager = cache(max_attention_window=(4, 24), primary_blocks=12, num_layers=2)
    serve(manager, "a", [1, 2, 3, 4, 5])
    before = manager.stats()
    serve(manager, "b", [1, 2, 3, 4, 5, 6, 7])
    after = manager.stats()
    between = after - before
    assert (between.requests, between.prompt_tokens, between.reused_tokens) == (1, 7, 5)
    assert between.hit_rate == 5 / 7
    assert between.blocks_blank == after.blocks_blank != (0, 0)
    assert list(between.windows) == [4, 24]
    full, sliding = between.windows[24], between.windows[4]
    assert (full.blocks_reused_full, full.blocks_reused_partial, full.blocks_missed) == (2, 1, 1)
    assert full.block_hit_rate == 3 / 4
    assert between.blocks_missed == full.blocks_missed + sliding.blocks_missed == 2
    assert after - Stats() == after
    nothing: Any = dict.fromkeys(GAUGES, (0, 0)) | {"windows": {}}
    assert replace(after - after, **nothing) == Stats()


def test_a_pool_that_is_larger_than_needed_has_slots_that_nothing_took() -> None:
    """First uses stop where others suffice: one short request after the other takes the same few."""
    manager = cache(enable_block_reuse=False)
    for _ in range(5):
        serve(manager, "a", [1, 2, 3])
    assert (manager.stats().blocks_allocated, manager.stats().blocks_allocated_new) == (10, 2)


def test_records_are_kept_up_to_a_number_for_who_asked() -> None:
    """The oldest go first; each is taken once; nobody else pays for them."""
    manager = cache(request_stats=2)
    for name in ("a", "b", "c"):
        serve(manager, name, [1, 2, 3])
    assert [record.request_id for record in manager.take_request_stats()] == ["b", "c"]
    assert manager.take_request_stats() == []
    manager.add_sequence("d", [1, 2, 3, 4])
    manager.add_tokens(["d"], [5])
    manager.remove_sequence("d", why="preempted")
    (record,) = manager.take_request_stats()
    assert (record.why, record.prompt_tokens, record.reused_tokens) == (ev.EndReason.PREEMPTED, 4, 3)
    assert (record.num_tokens, record.computed_tokens) == (5, 4)
    assert (record.blocks_allocated, record.blocks_reused, record.blocks_missed) == (2, 2, 0)
    with pytest.raises(Unsupported, match="request_stats"):
        cache().take_request_stats()
    for wrong in (-1, True, "many"):
        with pytest.raises(UsageError, match="request_stats"):
            cache(request_stats=wrong)


def test_a_resumed_manager_has_no_records_of_what_ran_before(tmp_path: Path) -> None:
    """How that began is unknown; what begins later has one."""
    with cache() as manager:
        manager.add_sequence("a", [1, 2, 3])
        resumed = KVCacheManager.resume(manager.state, request_stats=5)
        resumed.add_tokens(["a"], [4])
        serve(resumed, "b", [1, 2])
        resumed.remove_sequence("a")
        assert [record.request_id for record in resumed.take_request_stats()] == ["b"]


def test_a_branch_has_a_record_of_its_own() -> None:
    """What it shares was its parent's to find; what it computes by itself is allocated for it."""
    manager = cache(request_stats=2)
    manager.add_sequence("a", [1, 2, 3, 4, 5])
    manager.store_context_blocks("a", 5)
    manager.fork("a", "b")
    for name in ("b", "a"):
        manager.remove_sequence(name)
    branch, parent = manager.take_request_stats()
    assert (parent.blocks_allocated, parent.blocks_missed) == (3, 3)
    assert (branch.request_id, branch.blocks_allocated, branch.blocks_missed) == ("b", 1, 0)
    assert (branch.prompt_tokens, branch.reused_tokens, branch.num_tokens) == (5, 0, 5)
