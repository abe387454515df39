"""Changing the priority of cached blocks: which of them, and the events that say so."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

from events.ids import LevelIndex
from events.packed import SLOT_BYTES, names_of_keys
from events.types import PRIMARY, BlocksUpdated, Event, UpdateReason
from kvcache.decide.sliding_manager import SlidingWindowManager
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.prefix_tree import Run
from kvcache.fold.retention import Kept
from kvcache.fold.sequence import Sequence


class Row(NamedTuple):
    """Consecutive cached blocks of a sequence that are kept alike."""

    level: LevelIndex
    kept: Kept
    slots: array[int]
    names: bytes


def change_blocks(
    window: WindowBlockManager,
    emit: Callable[[Event], None],
    sequence: Sequence,
    blocks: tuple[int, int],
    priority: int,
    duration: int | None,
    why: UpdateReason,
) -> int:
    """Give the `blocks`, from and up to, of a sequence's cached path a priority, and keep them for a time (None: for as
    long as before); returns how many changed.

    One event for each row of blocks that were kept alike. All are noted first: applying one splits and joins runs.
    """

    def changes(old: Kept) -> bool:
        return old.priority != priority or (duration is not None and old.duration != duration)

    rows = (
        _held_rows(window, sequence, *blocks, changes)
        if isinstance(window, SlidingWindowManager)
        else _path_rows(window, sequence, *blocks, changes)
    )
    events = [
        BlocksUpdated(
            group=window.index,
            level=level,
            slots=slots.tobytes(),
            names=names,
            old_priority=old.priority,
            priority=priority,
            handle=sequence.handle,
            why=why,
            duration=duration,
        )
        for level, old, slots, names in rows
    ]
    for event in events:
        emit(event)
    return sum(len(event.slots) for event in events) // SLOT_BYTES


def _path_rows(
    window: WindowBlockManager, sequence: Sequence, first: int, last: int, changes: Callable[[Kept], bool]
) -> Iterator[Row]:
    """With full attention a sequence holds its whole path, in runs of blocks that are kept alike."""
    path: list[Run] = []
    for run in window.group.path(sequence.path_ends[window.index]):
        if run.end <= first:
            break
        if run.start < last:
            path.append(run)
    path.reverse()
    for (level, old), runs in groupby(path, lambda run: (run.level, Kept(run.priority, run.duration))):
        if changes(old):
            yield Row(level, old, *_within(list(runs), first, last, window.group.tree.key_bytes))


def _held_rows(
    window: SlidingWindowManager, sequence: Sequence, first: int, last: int, changes: Callable[[Kept], bool]
) -> Iterator[Row]:
    """In a sliding window it holds what that has not left behind, each block with a priority of its own."""
    table, group = sequence.tables[window.index], window.sliding
    held = range(max(first, sequence.detached[window.index]), min(last, sequence.path_ends[window.index].end))
    for old, alike in groupby((table[block] for block in held), group.kept_at):
        if changes(old):
            slots = array("i", alike)
            yield Row(PRIMARY, old, slots, window.names_at(slots))


def _within(runs: list[Run], first: int, last: int, key_bytes: int) -> tuple[array[int], bytes]:
    """The slots and names of the runs' blocks whose index in the path lies within the bounds."""
    slots, keys = array("i"), bytearray()
    for run in runs:
        begin, end = max(first - run.start, 0), max(last - run.start, 0)
        slots += run.slots[begin:end]
        keys += run.keys[begin * key_bytes : end * key_bytes]
    return slots, names_of_keys(bytes(keys), key_bytes)
