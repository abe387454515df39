"""What holds of a sliding window beside the laws of every window (`kvcache.fold.check`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from events.types import PRIMARY
from kvcache.errors import invariant
from kvcache.fold.matching import match
from kvcache.fold.places import HOLE, position_of
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import Pin, Sequence
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.slots import DEFAULT_PRIORITY

_TRACES = ("refs", "released_at", "transfers", "durations", "expiries")
"""Columns that are 0 where nothing is cached."""


def check_places(group: SlidingGroup, run: Run) -> None:
    """Verify that a run and the columns agree about its blocks."""
    invariant(bool(run.children) or run.slots[-1] != HOLE, "content is kept behind which nothing is cached")
    for depth, place in enumerate(run.slots, run.start):
        if place == HOLE:
            continue
        owned = group.positions[place] == position_of(run) + depth
        invariant(owned, "a slot's owner is noted wrongly")
        released = group.released_at[place] > 0
        invariant(released != (group.refs[place] > 0), "a block is held and released, or neither")
        expires = group.expiries[place] > 0
        timed = expires == (released and group.durations[place] > 0)
        alike = not group.kept_alike or group.priorities[place] == DEFAULT_PRIORITY
        invariant(alike, "a block has another priority than all are said to have")
        invariant(timed, "a block expires that is held, or kept for good")


def check_references(group: SlidingGroup, sequences: Iterable[Sequence], pins: Iterable[Pin]) -> None:
    """Verify that references are those of the sequences, and that each holds blocks of its own content."""
    references = Counter(slot for pin in pins if pin.named for slot in pin.slots[group.index])
    for sequence in sequences:
        first, end = sequence.detached[group.index], sequence.path_ends[group.index].end
        table = sequence.tables[group.index]
        references.update(table[first:end])
        _check_content(group, sequence, first, end)
    cached = np.flatnonzero(group.views["positions"] >= 0).tolist()
    invariant(references.keys() <= set(cached), "a sequence holds a block that is not cached")
    for place in cached:
        held = references[place] if place < group.levels[PRIMARY].size else 0
        invariant(group.refs[place] == held, "references differ from the sequences that hold a block")
    empty = group.views["positions"] < 0
    traces = [group.views[name][empty].any() for name in _TRACES]
    invariant(not any(traces), "a block that is not cached has left traces")
    named = sum(place != HOLE for run in group.tree.runs.values() for place in run.slots)
    invariant(len(cached) == named, "a block is in two places or in none")


def _check_content(group: SlidingGroup, sequence: Sequence, first: int, end: int) -> None:
    """The tree has the sequence's content before the blocks that it holds, and these blocks behind it."""
    nameless = not group.tokens_recorded and len(sequence.keys) < end * group.tree.key_bytes
    if first >= end or nameless:
        return
    found = match(
        group.tree,
        group.tree.roots[sequence.namespace],
        content := group.content(sequence, 0, end, group.tokens_per_block),
        len(content),
        partial=False,
    )
    row = [place for run, take in found.runs for place in run.slots[:take]]
    held = sequence.tables[group.index][first:end].tolist()
    invariant(row[first:end] == held, "a block table and the tree disagree")


def arriving(group: SlidingGroup) -> Iterator[tuple[int, int, list[int]]]:
    """The blocks whose copy has not landed, each as copy, level and slot."""
    for place in np.flatnonzero(group.views["transfers"]).tolist():
        level, slot = group.slot_of(place)
        yield group.transfers[place], level, [slot]
