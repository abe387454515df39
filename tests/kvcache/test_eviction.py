"""Eviction: who goes, who goes to secondary instead, and in which order."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from events.types import BlocksMoved, BlocksRemoved, MoveReason, RemoveReason
from kvcache.decide.eviction_order import EvictionOrder, LeastRecentlyUsed
from kvcache.decide.full_attention import FullAttentionManager
from kvcache.errors import InvariantViolated, UsageError
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.full_group import FullGroup
from kvcache.fold.prefix_tree import Run
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.inside import blocks_of
from tests.support.engines.strategies import cached_blocks, name_of, split_names
from tests.support.seeds import seeds

PLAIN = (None, None, None)


def cache(**settings: Any) -> KVCacheManager:
    return KVCacheManager(strategies.config(**settings))


def run(manager: KVCacheManager, prompt: list[int]) -> None:
    """Compute and end a request."""
    manager.add_sequence("run", prompt)
    manager.store_context_blocks("run", len(prompt))
    manager.remove_sequence("run")


def path(*tokens: int) -> tuple[Any, ...]:
    """A path of blocks of two tokens."""
    return (PLAIN, *(tokens[at : at + 2] for at in range(0, len(tokens), 2)))


def removed(manager: KVCacheManager, why: RemoveReason) -> list[bytes]:
    found = [event for event in manager.bus.pending if isinstance(event, BlocksRemoved) and event.why == why]
    return [name for event in found for name in split_names(event.names)]


def offloaded(manager: KVCacheManager) -> list[bytes]:
    events = [event for event in manager.bus.pending if isinstance(event, BlocksMoved)]
    return [name for event in events if event.why == MoveReason.OFFLOAD for name in split_names(event.names)]


def test_least_recently_released_goes_first_leaves_before_roots() -> None:
    """Without secondary, blocks are dropped in the order of their release, the deepest of a prompt first."""
    manager = cache()
    run(manager, [1, 1, 1, 2])
    run(manager, [2, 1, 2, 2])
    run(manager, [3, 1, 3, 2])
    run(manager, [1, 1, 1, 2])  # used again: now the youngest
    manager.flush()
    manager.add_sequence("a", [7] * 12)
    expected = [path(2, 1, 2, 2), path(2, 1), path(3, 1, 3, 2), path(3, 1)]
    assert removed(manager, RemoveReason.CAPACITY) == [name_of(each) for each in expected]
    assert manager.count_reusable([1, 1, 1, 2, 0]) == 2


def test_running_sequences_keep_their_blocks() -> None:
    """What a sequence holds is never evicted, however old."""
    manager = cache(primary_blocks=5)
    manager.add_sequence("old", [1, 1, 1, 2])
    manager.store_context_blocks("old", 4)
    run(manager, [2, 2, 2, 1])
    manager.add_sequence("new", [7] * 6)
    assert manager.count_reusable([1, 1, 1, 2, 0]) == 2
    assert manager.count_reusable([2, 2, 2, 1, 0]) == 0


def test_shared_stem_outlives_its_branches() -> None:
    """A block with cached children is no victim, though it is as old as they are; the branches go first."""
    manager = cache(primary_blocks=5)
    run(manager, [1, 1, 2, 2])
    run(manager, [1, 1, 3, 3])
    run(manager, [9, 9])
    manager.flush()
    manager.add_sequence("a", [7] * 8)
    expected = [path(1, 1, 2, 2), path(1, 1, 3, 3), path(1, 1)]
    assert removed(manager, RemoveReason.CAPACITY) == [name_of(each) for each in expected]


def test_secondary_takes_what_primary_gives_up() -> None:
    """With room in secondary, evicted blocks move there and can be matched at once."""
    manager = cache(primary_blocks=4, secondary_blocks=4)
    run(manager, [1, 1, 1, 2, 1, 1, 1, 2])
    manager.add_sequence("a", [7] * 6)
    assert offloaded(manager) == [name_of(path(1, 1, 1, 2, 1, 1, 1, 2)[:end]) for end in (5, 4, 3)]
    assert [block.level for block in manager.match([1, 1, 1, 2, 1, 1, 1, 2, 0]).blocks] == [0, 1, 1, 1]


def test_full_secondary_drops_its_oldest_for_younger_ones() -> None:
    """A full secondary makes room by dropping what was released before the block that comes."""
    manager = cache(primary_blocks=2, secondary_blocks=2)
    run(manager, [1, 1, 1, 2])
    run(manager, [2, 2, 2, 1])
    assert offloaded(manager) == [name_of(path(1, 1, 1, 2)), name_of(path(1, 1))]
    manager.flush()
    run(manager, [3, 3, 3, 1])
    assert removed(manager, RemoveReason.CAPACITY) == [name_of(path(1, 1, 1, 2)), name_of(path(1, 1))]
    assert offloaded(manager) == [name_of(path(2, 2, 2, 1)), name_of(path(2, 2))]


def test_low_priority_is_dropped_instead_of_offloaded() -> None:
    """Blocks below the configured priority never reach secondary."""
    manager = cache(primary_blocks=2, secondary_blocks=4, secondary_offload_min_priority=36)
    run(manager, [1, 1, 1, 2])
    manager.add_sequence("a", [7] * 4)
    assert offloaded(manager) == []
    assert removed(manager, RemoveReason.CAPACITY) == [name_of(path(1, 1, 1, 2)), name_of(path(1, 1))]
    assert strategies.cached_blocks(manager.state) == {}


def test_room_that_unreachable_blocks_leave_is_used() -> None:
    """A block that is dropped takes its offloaded child with it; the block before it then goes to secondary."""
    manager = cache(primary_blocks=6, secondary_blocks=1)
    manager.add_sequence("run", [1] * 11)
    manager.store_context_blocks("run", 10)
    manager.set_priority("run", 32, stop=8)
    manager.remove_sequence("run")
    manager.flush()
    manager.add_sequence("b", [2] * 8)
    assert offloaded(manager) == [name_of(path(*[1] * 10)), name_of(path(*[1] * 6))]
    assert removed(manager, RemoveReason.UNREACHABLE) == [name_of(path(*[1] * 10))]
    assert removed(manager, RemoveReason.CAPACITY) == [name_of(path(*[1] * 8))]
    manager.check()
    assert manager.count_reusable([1] * 11) == 3


def test_source_of_a_copy_is_spared_but_not_what_hangs_after_it() -> None:
    """While a batch copies from a block in secondary that block stays, yet older blocks behind it make room."""
    manager = cache(primary_blocks=4, secondary_blocks=2)
    run(manager, [0, 0, 0, 1])
    run(manager, [1] * 8)
    manager.flush()
    assert [block.level for block in manager.match([0, 0, 0, 1, 0]).blocks] == [1, 1]
    assert manager.add_sequence("a", [0, 1, 1, 1]).reused_partial == 1
    # Two blocks came; secondary held (0 0)(0 1): the second made room for one, which made room for the next.
    assert removed(manager, RemoveReason.CAPACITY) == [name_of(path(0, 0, 0, 1)), name_of(path(*[1] * 8))]
    assert offloaded(manager) == [name_of(path(*[1] * 8)), name_of(path(*[1] * 6))]
    assert manager.count_reusable([0, 0, 0, 1, 0]) == 1


def decode_into_a_full_cache(primary_blocks: int, evict_ahead: int = 64) -> tuple[KVCacheManager, list[int]]:
    """One sequence decodes beside old prompts that fill the cache; how many blocks each step evicts."""
    manager = cache(primary_blocks=primary_blocks, evict_ahead=evict_ahead)
    manager.add_sequence("decoding", [1])
    for number in range(primary_blocks - 1):
        run(manager, [2 + number, 1])
    evicted = []
    for step in range(10):
        manager.flush()
        manager.add_tokens(["decoding"], [step])
        evicted.append(len(removed(manager, RemoveReason.CAPACITY)))
    manager.check()
    return manager, evicted


def test_decoding_evicts_ahead() -> None:
    """A step that has to evict does so for the next ones as well, up to a sixteenth of the cache; the oldest go."""
    manager, evicted = decode_into_a_full_cache(64)
    assert evicted == [0, 4, 0, 0, 0, 0, 0, 0, 0, 4]
    assert [manager.count_reusable([2 + number, 1, 0]) for number in range(63)] == [0] * 8 + [1] * 55


def test_decoding_in_a_small_cache_evicts_what_it_needs() -> None:
    """Where a sixteenth of the cache is no block, each step evicts what it takes itself."""
    assert decode_into_a_full_cache(15)[1] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(("ahead", "expected"), [(0, [0, 1] * 5), (2, [0, 2, 0, 0, 0, 2, 0, 0, 0, 2])])
def test_how_far_decoding_evicts_ahead_is_a_setting(ahead: int, expected: list[int]) -> None:
    """0: each step evicts what it takes itself."""
    assert decode_into_a_full_cache(64, ahead)[1] == expected


def test_longer_block_supersedes_a_shorter_one() -> None:
    """An unfinished block is dropped when a block that begins with it is stored, and not stored where one is."""
    manager = cache(tokens_per_block=4)
    run(manager, [1, 2])
    run(manager, [1, 2, 3])
    assert removed(manager, RemoveReason.SUPERSEDED) == [name_of((PLAIN, (1, 2)))]
    run(manager, [1, 2, 3, 4, 5])
    assert removed(manager, RemoveReason.SUPERSEDED)[1:] == [name_of((PLAIN, (1, 2, 3)))]
    run(manager, [1, 2, 3])
    assert set(strategies.cached_blocks(manager.state)) == {
        name_of((PLAIN, (1, 2, 3, 4))),
        name_of((PLAIN, (1, 2, 3, 4), (5,))),
    }


def test_decoding_evicts_as_admission_does() -> None:
    """A block that decoding needs is taken from the oldest released one."""
    manager = cache(primary_blocks=3)
    run(manager, [1, 1])
    run(manager, [2, 2])
    manager.add_sequence("a", [7, 7])
    manager.flush()
    manager.add_tokens(["a"], [7])
    assert removed(manager, RemoveReason.CAPACITY) == [name_of(path(1, 1))]
    assert manager.num_free_blocks == 1


def trees(rng: random.Random, prompts: int) -> list[list[int]]:
    """Prompts of blocks of two tokens that share their beginnings at random."""
    return [[rng.randrange(1, 4) for _ in range(2 * rng.randrange(1, 7))] for _ in range(prompts)]


@pytest.mark.parametrize("secondary_blocks", [0, 20, 200])
@pytest.mark.parametrize("seed", seeds(range(8), quick=1))
def test_evicting_many_at_once_is_evicting_one_after_the_other(seed: int, secondary_blocks: int) -> None:
    """The same blocks go, in the same order, by fewer events; whatever is held, shared and of which priority."""
    pair = [
        cache(primary_blocks=60, secondary_blocks=secondary_blocks, max_sequence_length=120) for _ in range(2)
    ]
    (one_by_one,) = blocks_of(pair[1]).windows
    assert isinstance(one_by_one, FullAttentionManager)
    one_by_one.evict_together = lambda victims, handle: False  # type: ignore[method-assign]
    counts = [0, 0]
    for step in range(25):
        went = []
        for which, manager in enumerate(pair):
            rng = random.Random(1000 * seed + step)
            for prompt in trees(rng, 12):
                manager.add_sequence("short", prompt)
                manager.store_context_blocks("short", len(prompt))
                if rng.random() < 0.1:
                    manager.set_priority("short", rng.randrange(20, 50))
                manager.remove_sequence("short")
            manager.poll()
            manager.flush()
            manager.add_sequence("long", [100 + step] * rng.randrange(40, 120))
            went.append((removed(manager, RemoveReason.CAPACITY), offloaded(manager)))
            counts[which] += sum(
                isinstance(each, BlocksMoved | BlocksRemoved) for each in manager.bus.pending
            )
            manager.remove_sequence("long", store=False)
            manager.poll()
            manager.check()
        assert went[0] == went[1]
        assert cached_blocks(pair[0].state) == cached_blocks(pair[1].state)
    assert counts[0] < counts[1]


class MostRecentlyUsed(LeastRecentlyUsed):
    """What was released last goes first."""

    def key(self, run: Run) -> Any:
        return (-run.released_at, -run.end)


class LeastOftenUsed(LeastRecentlyUsed):
    """What was held least often goes first: known only by what it hears."""

    def __init__(self, group: FullGroup) -> None:
        self.held_slots: Counter[tuple[int, int]] = Counter()
        super().__init__(group)

    def held(self, level: int, slots: array[int]) -> None:
        self.held_slots.update((level, slot) for slot in slots)

    def gone(self, level: int, slots: array[int]) -> None:
        for slot in slots:
            del self.held_slots[level, slot]

    def key(self, run: Run) -> Any:
        return (self.held_slots[run.level, run.slots[-1]], run.released_at, -run.end)


@pytest.mark.parametrize(
    ("order", "kept"),
    [(LeastRecentlyUsed, [2, 3]), (MostRecentlyUsed, [1, 2]), (LeastOftenUsed, [1, 3])],
)
def test_another_order_can_be_tried(tmp_path: Path, order: type[LeastRecentlyUsed], kept: list[int]) -> None:
    """An order decides what goes, by the state or by what it has heard; the log replays without it."""
    manager = KVCacheManager(
        strategies.config(primary_blocks=8),
        log=tmp_path / "log",
        substitutes=Substitutes(eviction_order=order),
    )
    for prompt in (1, 1, 2, 3):
        run(manager, [prompt] * 4)
        manager.check()
    manager.add_sequence("a", [9] * 8)
    assert [prompt for prompt in (1, 2, 3) if manager.count_reusable([prompt] * 5) == 2] == kept
    manager.check()
    manager.close()
    assert replay(tmp_path / "log", verify=True).fingerprint == fingerprint(manager.state)


def test_an_order_that_was_not_reported_is_found_out() -> None:
    """`check` compares the next victim with all that could be one."""
    manager = cache()
    run(manager, [1, 1, 1, 2])
    manager.check()
    blocks_of(manager).windows[0].order.cleared()
    with pytest.raises(InvariantViolated, match="missing from the eviction order"):
        manager.check()


@pytest.mark.parametrize("order", [3, "x", int, EvictionOrder, lambda group: LeastRecentlyUsed(group)])
def test_what_is_no_order_is_refused(tmp_path: Path, order: Any) -> None:
    """It is said so before a log is opened."""
    with pytest.raises(UsageError, match="eviction_order must be"):
        KVCacheManager(
            strategies.config(), log=tmp_path / "log", substitutes=Substitutes(eviction_order=order)
        )
    assert not (tmp_path / "log").exists()
