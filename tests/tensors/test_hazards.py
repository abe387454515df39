"""Batches must be as good as one copy after another, whatever a device does inside a batch."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_ops.copier import Copy
from cuda_ops.hazards import schedule

SLOTS = 5
Memory = npt.NDArray[np.int64]
"""[group, level, slot] -> contents."""


def copy_of(pairs: list[tuple[int, int]], levels: tuple[int, int], group: int = 0) -> Copy:
    source, target = np.array(pairs, np.int32).reshape(-1, 2).T
    return Copy(*levels, source.copy(), target.copy(), group=group)


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    levels = draw(st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]))
    slots = st.integers(0, SLOTS - 1)
    if levels[0] == levels[1]:
        chosen = draw(st.lists(slots, min_size=2, max_size=2, unique=True))
        if draw(st.booleans()):
            return copy_of([(slot, slot) for slot in chosen], levels)
        return copy_of([(chosen[0], chosen[1])], levels)
    targets = draw(st.lists(slots, min_size=1, max_size=3, unique=True))
    pairs = [(draw(slots), target) for target in targets]
    return copy_of(pairs, levels, group=draw(st.integers(0, 1)))


def fresh() -> Memory:
    return np.arange(2 * 2 * SLOTS, dtype=np.int64).reshape(2, 2, SLOTS)


def in_order(memory: Memory, all_copies: list[Copy]) -> None:
    for copy in all_copies:
        for source, target in zip(copy.source, copy.target, strict=True):
            memory[copy.group, copy.target_level, target] = memory[copy.group, copy.source_level, source]


def reads_first(memory: Memory, batch: list[Copy]) -> None:
    """A device that fetches all sources of a batch before it writes anything."""
    before = memory.copy()
    for copy in batch:
        memory[copy.group, copy.target_level, copy.target] = before[
            copy.group, copy.source_level, copy.source
        ]


def shuffled(memory: Memory, batch: list[Copy], dice: random.Random) -> None:
    """A device that copies the pairs of a batch in any order."""
    pairs = [
        (copy, source, target)
        for copy in batch
        for source, target in zip(copy.source, copy.target, strict=True)
    ]
    dice.shuffle(pairs)
    for copy, source, target in pairs:
        memory[copy.group, copy.target_level, target] = memory[copy.group, copy.source_level, source]


@given(st.lists(copies(), max_size=12), st.integers(0, 2**32))
def test_batches_give_the_bytes_of_one_copy_after_another(all_copies: list[Copy], seed: int) -> None:
    """Sources read early or pairs copied in any order inside a batch leave the same bytes as plain order."""
    expected, early, mixed = fresh(), fresh(), fresh()
    in_order(expected, all_copies)
    dice = random.Random(seed)
    for indices in schedule(all_copies):
        batch = [all_copies[index] for index in indices]
        reads_first(early, batch)
        shuffled(mixed, batch, dice)
    np.testing.assert_array_equal(early, expected)
    np.testing.assert_array_equal(mixed, expected)


@given(st.lists(copies(), max_size=12))
def test_each_copy_is_in_one_batch(all_copies: list[Copy]) -> None:
    """Nothing is lost or doubled, and no batch is empty."""
    batches = schedule(all_copies)
    assert sorted(index for batch in batches for index in batch) == list(range(len(all_copies)))
    assert all(batches)


@pytest.mark.parametrize(
    "second",
    [
        copy_of([(3, 4)], (1, 0)),  # reads what was written
        copy_of([(4, 3)], (0, 1)),  # writes what was written
        copy_of([(4, 1)], (1, 0)),  # writes what was read
    ],
)
def test_dependent_copies_do_not_share_a_batch(second: Copy) -> None:
    """Read after write, write after write and write after read each need a second batch."""
    assert schedule([copy_of([(1, 3)], (0, 1)), second]) == [[0], [1]]


def test_an_early_reader_does_not_hide_a_late_one() -> None:
    """A slot read in the second batch and then again in the first is not overwritten before the third."""
    step = [
        copy_of([(1, 3)], (0, 1)),
        copy_of([(2, 3)], (0, 1)),  # second batch: writes what was written
        copy_of([(2, 4)], (0, 1)),  # first batch: reads the same slot
        copy_of([(0, 2)], (1, 0)),
    ]
    assert schedule(step) == [[0, 2], [1], [3]]


def test_the_same_slots_of_another_group_or_level_are_other_slots() -> None:
    """Only copies that touch the same memory are kept apart."""
    first = copy_of([(1, 3)], (0, 1))
    other_group = copy_of([(3, 1)], (1, 0), group=1)
    other_level = copy_of([(1, 3)], (1, 0))
    assert schedule([first, other_group, other_level]) == [[0, 1, 2]]


def test_evicting_and_loading_in_turn_takes_two_batches() -> None:
    """Offload from a slot, then onboard into it, for many slots: two batches, not one more than there are slots."""
    step = []
    for slot in range(50):
        step.append(copy_of([(slot, slot)], (0, 1)))
        step.append(copy_of([(100 + slot, slot)], (1, 0)))
    assert schedule(step) == [list(range(0, 100, 2)), list(range(1, 100, 2))]


@pytest.mark.parametrize(
    ("pairs", "levels"), [([(0, 3), (1, 3)], (0, 1)), ([(0, 1), (1, 2)], (0, 0)), ([(0, 0), (1, 0)], (0, 0))]
)
def test_a_copy_with_an_order_inside_is_refused(
    pairs: list[tuple[int, int]], levels: tuple[int, int]
) -> None:
    """A copy that writes a slot twice, or reads what it writes, has no meaning without an order."""
    with pytest.raises(ValueError, match="slot"):
        schedule([copy_of(pairs, levels)])


def test_nothing_gives_no_batches() -> None:
    """No copies need no batch, and a copy of no blocks delays none."""
    assert schedule([]) == []
    assert schedule([copy_of([], (0, 1)), copy_of([(1, 1)], (0, 1))]) == [[0, 1]]
