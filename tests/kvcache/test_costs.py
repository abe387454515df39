"""What calls cost does not grow with what is cached, known or running beside: steps are counted, not timed."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

from events.types import BlocksStored, Namespace
from kvcache.decide.decoding import DecodeBatch
from kvcache.errors import InvariantViolated
from kvcache.fold.prefix_tree import PathEnd, Root
from kvcache.fold.sequence import Sequence
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.manager import KVCacheManager
from sinks.router.replay import ENTRY_BYTES, ReplayRing
from tests.support.engines import strategies
from tests.support.engines.inside import blocks_of
from tests.support.engines.rig import Rig, keep


class Counting:
    """Counts how many entries of the containers below were looked at."""

    seen = 0


class CountingDict(dict[bytes, Any]):
    """Counts what is gone through; looking up one entry costs nothing."""

    def __iter__(self) -> Iterator[bytes]:
        for key in super().__iter__():
            Counting.seen += 1
            yield key

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


class CountingOrderedDict(OrderedDict[bytes, Any]):
    """Counts what is gone through; taking an entry from an end costs nothing."""

    def __iter__(self) -> Iterator[bytes]:
        for key in super().__iter__():
            Counting.seen += 1
            yield key


class CountingList(list[bytes]):
    """Counts what is read, in slices too."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Counting.seen += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[bytes]:
        for key in super().__iter__():
            Counting.seen += 1
            yield key


# -- sliding windows


def siblings(count: int) -> Rig:
    """A window of 8 tokens and prompts that begin with one token: the first blocks of every second one are evicted."""
    rig = Rig(8 * count + 16, windows=(8,), size=4, checkpoint_spacing=1000)
    for number in range(count):
        rig.prefill(number, [1, 10 + number, 2, 3] + [4] * (16 if number % 2 else 1))
    (window,) = blocks_of(rig.manager).windows
    window.free_up(window.primary.available, None)
    root = root_of(rig)
    assert [child.slots[0] < 0 for child in root.children.values()] == [False, True] * (count // 2)
    root.children, root.order = CountingDict(root.children), CountingList(root.order)
    return rig


def root_of(rig: Rig) -> Root:
    (root,) = rig.manager.state.groups[0].tree.roots.values()
    return root


def seen_by_a_request(rig: Rig) -> int:
    """Siblings that are looked at from the admission of a new prompt until its last block is stored."""
    Counting.seen = 0
    tokens = [1, 9, 2, 3, 4]
    assert rig.prefill("new", tokens) == 1
    rig.manager.remove_sequence("new")
    return Counting.seen


def test_request_looks_at_few_of_all_prompts_in_a_sliding_window() -> None:
    """Siblings are bisected, also where the first blocks of many were evicted."""
    few, many = (seen_by_a_request(siblings(count)) for count in (32, 256))
    assert few > 0
    assert many <= few + 8 * 3  # eight times as many: three more comparisons for each search


def test_children_are_listed_as_far_as_they_are_cached() -> None:
    """A first block that is evicted, and one that is cached again, are found so by `check`."""
    rig = siblings(8)
    root = root_of(rig)
    assert len(root.order) == 4
    rig.run("again", [1, 11, 2, 3] + [4] * 16)
    assert len(root.order) == 5
    root.order.pop()
    with pytest.raises(InvariantViolated, match="children are out of order"):
        rig.manager.check()


class Compared(Sequence):
    """A sequence that counts how often it is compared with others."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Compared.compared += 1
        return self is other

    __hash__ = object.__hash__


def changed_batch(count: int) -> DecodeBatch:
    """A batch in which every second sequence has not decoded yet."""
    sequences = []
    for number in range(count):
        tokens = array("i", [1] * (5 + number % 4))
        sequence = Compared(number + 1, number, Namespace(), tokens, [PathEnd(0)])  # type: ignore[arg-type]
        sequence.computed = -1 if number % 2 else len(tokens)
        sequences.append(sequence)
    return DecodeBatch(range(count), list(sequences), 4, 100, [6])


@pytest.mark.parametrize("count", [1, 7, 200])
def test_step_after_an_admission_compares_no_two_sequences(count: int) -> None:
    """Who leaves a block behind: those whose turn it is, and who has just been admitted, in the batch's order."""
    batch = changed_batch(count)
    Compared.compared = 0
    leaving = batch.sliding_out(0)
    assert Compared.compared == 0
    turn = [each for each in batch.sequences if (each.num_tokens + 1 - 6) % 4 == 0]
    expected = [each.handle for each in batch.sequences if each in turn or not each.is_decoding]
    assert [each.handle for each in leaving] == expected


@pytest.mark.parametrize("window", [2, 3, 4])
def test_window_no_longer_than_a_block_is_not_walked_from_its_start(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a sequence holds none of its cached blocks when it stores the next one, it is known where that goes."""
    rig = Rig(64, windows=(window,), size=4)
    rig.prefill("a", [1] * 9)
    rig.go_on("a", 8)
    walks: list[int] = []
    walk = SlidingGroup.walk

    def walked(self: Any, node: Any, content: bytes) -> Any:
        walks.append(len(content))
        return walk(self, node, content)

    monkeypatch.setattr(SlidingGroup, "walk", walked)
    rig.go_on("a", 40)
    assert walks == []
    rig.end("a")
    assert rig.reusable([1] * 9 + list(range(2, 50))) == 56


def test_step_that_stores_by_sequence_compares_no_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that keep what they decode otherwise than their prompts, as others do, store a first block each."""
    rig = Rig(128, size=4)
    names = list(range(24))
    for name in names:
        rig.prefill(name, [10 + name] * 4, keep(decode=60 if name % 2 else 70))
    rig.manager.add_tokens(names, names)
    for _ in range(3):
        rig.manager.add_tokens(names, names)
    monkeypatch.setattr(Sequence, "__eq__", Compared.__eq__)
    Compared.compared = 0
    rig.events.clear()
    rig.manager.add_tokens(names, names)
    assert [event.priority for event in rig.reported(BlocksStored)] == [
        60 if name % 2 else 70 for name in names
    ]
    assert Compared.compared == 0


# -- uses of blocks, for `eviction_policy="levels"`


def test_forgetting_uses_does_not_begin_at_the_front_each_time() -> None:
    """The oldest name is taken from an ordered dict: a plain one steps over all that was deleted before its first."""
    manager = KVCacheManager(strategies.config(primary_blocks=8, eviction_policy="levels"))
    (group,) = manager.state.groups
    assert group.uses is not None
    group.uses.by_name = CountingOrderedDict()
    Counting.seen = 0
    for prompt in range(120):
        for part in (prompt, prompt % 3):
            manager.add_sequence("served", [10 + part] * 4)
            manager.store_context_blocks("served", 4)
            manager.remove_sequence("served")
    assert len(group.uses.by_name) == 5 * 8
    assert Counting.seen == 0
    manager.check()


# -- readers that missed batches


def test_full_ring_finds_its_oldest_batch_at_once() -> None:
    """Batches have consecutive numbers: the oldest is not looked for behind all that were dropped."""
    ring = ReplayRing(10 * (ENTRY_BYTES + 1))
    ring._payloads = CountingDict()  # type: ignore[assignment]
    Counting.seen = 0
    for seq in range(100):
        ring.append(seq, b"x")
    assert Counting.seen == 0
    assert [seq for seq in range(101) if ring.get(seq)] == list(range(90, 100))
