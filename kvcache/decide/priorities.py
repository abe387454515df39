"""Changing the priority of cached blocks: which of them, and the events that say so."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

from events.ids import LevelIndex
from events.packed import SLOT_BYTES, names_of_keys
from events.types import PRIMARY, BlocksUpdated, Event
from kvcache.decide.sliding_manager import SlidingWindowManager
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import Sequence


class Row(NamedTuple):
    """Consecutive cached blocks of a sequence that have one priority."""

    level: LevelIndex
    priority: int
    slots: array[int]
    names: bytes


def set_priority(
    window: WindowBlockManager,
    emit: Callable[[Event], None],
    sequence: Sequence,
    priority: int,
    first: int,
    last: int,
) -> int:
    """Give the blocks from `first` up to `last` of a sequence's cached path a priority; returns how many changed.

    One event for each row of blocks that had one priority. All are noted first: applying one splits and joins runs.
    """
    if isinstance(window, SlidingWindowManager):
        rows = _held_rows(window, sequence, first, last)
    else:
        rows = _path_rows(window, sequence, first, last)
    events = [
        BlocksUpdated(
            group=window.index,
            level=level,
            slots=slots.tobytes(),
            names=names,
            old_priority=old,
            priority=priority,
            handle=sequence.handle,
        )
        for level, old, slots, names in rows
        if slots and old != priority
    ]
    for event in events:
        emit(event)
    return sum(len(event.slots) for event in events) // SLOT_BYTES


def _path_rows(window: WindowBlockManager, sequence: Sequence, first: int, last: int) -> Iterator[Row]:
    """With full attention a sequence holds its whole path, in runs of one priority."""
    path = list(window.group.path(sequence.path_ends[window.index]))
    path.reverse()
    for (level, old), runs in groupby(path, lambda run: (run.level, run.priority)):
        yield Row(level, old, *_within(list(runs), first, last, window.group.tree.key_bytes))


def _held_rows(window: SlidingWindowManager, sequence: Sequence, first: int, last: int) -> Iterator[Row]:
    """In a sliding window it holds what that has not left behind, each block with a priority of its own."""
    table, priorities = sequence.tables[window.index], window.sliding.priorities
    held = range(max(first, sequence.detached[window.index]), min(last, sequence.path_ends[window.index].end))
    for old, blocks in groupby(held, lambda block: priorities[table[block]]):
        slots = array("i", [table[block] for block in blocks])
        yield Row(PRIMARY, old, slots, window.names_at(slots))


def _within(runs: list[Run], first: int, last: int, key_bytes: int) -> tuple[array[int], bytes]:
    """The slots and names of the runs' blocks whose index in the path lies within the bounds."""
    slots, keys = array("i"), bytearray()
    for run in runs:
        begin, end = max(first - run.start, 0), max(last - run.start, 0)
        slots += run.slots[begin:end]
        keys += run.keys[begin * key_bytes : end * key_bytes]
    return slots, names_of_keys(bytes(keys), key_bytes)
