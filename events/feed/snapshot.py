"""The whole visible state, told anew to a router that knows nothing.

A block on its way between two levels is in none for routers, though what hangs behind it may stay visible: they were
told of it in time, and hang it below a block that is nowhere just then. Who comes late must be able to do the same. So
such a block is told as if it had arrived, and taken back at the end; when it lands, it is announced to all.

There may be millions of blocks, so all of this works on columns: `freeze` copies them at once, in tens of nanoseconds
per block, and `visible_blocks` tells them from the copy, piece by piece, while the fold goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from events.feed.changes import Removed, Stored
from events.feed.slots import Columns
from events.packed import NAME_BYTES
from events.types import PRIMARY, SECONDARY, Namespace

_GATHERED = 4096
"""Blocks whose columns are put into order at a time."""

_Indices = npt.NDArray[np.int64]
_Names = npt.NDArray[np.uint64]
"""Names as numbers, which sort and compare fast; what their values are means nothing. 0: no parent."""


@dataclass(frozen=True, slots=True)
class FrozenBlocks:
    """The visible blocks of a group, in no order, with those on their way that visible ones hang behind."""

    names: _Names
    parents: _Names
    levels: npt.NDArray[np.uint8]
    on_their_way: npt.NDArray[np.bool_]
    namespaces: _Indices
    """Indices into `known`."""
    known: tuple[Namespace, ...]
    tokens: npt.NDArray[np.void]
    tokens_per_block: int
    slides: bool
    """Whether a block is told whose parent is not."""


def freeze(levels: tuple[Columns, Columns], slides: bool) -> FrozenBlocks:
    """Copy what is visible now; in a sliding window blocks may be so without the one before."""
    seen = [columns.announced_slots() for columns in levels]
    behind = [np.empty(0, np.intp), np.empty(0, np.intp)] if slides else _bridges(levels, seen)
    slots = [np.concatenate(both) for both in zip(seen, behind, strict=True)]
    rows = [columns.rows(at) for columns, at in zip(levels, slots, strict=True)]
    names, parents, tokens, namespaces = map(np.concatenate, zip(*rows, strict=True))
    sizes = [len(at) for at in slots]
    namespaces[sizes[0] :] += len(levels[0].known)  # each level counts its own
    return FrozenBlocks(
        names,
        parents,
        np.repeat(np.array([PRIMARY, SECONDARY], np.uint8), sizes),
        np.concatenate([np.arange(len(at)) >= len(its) for at, its in zip(slots, seen, strict=True)]),
        namespaces,
        (*levels[0].known, *levels[1].known),
        tokens,
        levels[0].tokens_per_block,
        slides,
    )


def visible_blocks(group: int, blocks: FrozenBlocks) -> Iterator[Stored | Removed]:
    """Chains from the roots on, each as long as one level goes; at the end what is on its way, taken back."""
    gathered: list[list[int]] = []
    total = 0
    for chain in _chains(blocks):
        gathered.append(chain)
        total += len(chain)
        if total >= _GATHERED:
            yield from _stores(group, blocks, gathered)
            gathered, total = [], 0
    yield from _stores(group, blocks, gathered)
    if blocks.on_their_way.any():
        # The order in which they were told, backwards: leaves first.
        told = [index for chain in _chains(blocks) for index in chain if blocks.on_their_way[index]][::-1]
        for level in (PRIMARY, SECONDARY):
            gone = [index for index in told if blocks.levels[index] == level]
            if gone:
                yield Removed(group, level, blocks.names[gone].tobytes())


def _chains(blocks: FrozenBlocks) -> Iterator[list[int]]:
    """Indices of consecutive blocks in one level, parents first. What hangs behind nothing that is told is left out."""
    parents = _parent_indices(blocks)
    inner = np.flatnonzero(parents >= 0)
    count = np.bincount(parents[inner], minlength=len(parents))
    # A chain goes on where a block has a single child, in the same level.
    above = parents[inner]
    goes_on = (count[above] == 1) & (blocks.levels[above] == blocks.levels[inner])
    following = np.full(len(parents), -1)
    following[above[goes_on]] = inner[goes_on]
    branches: dict[int, list[int]] = {}
    for parent, head in zip(above[~goes_on].tolist(), inner[~goes_on].tolist(), strict=True):
        branches.setdefault(parent, []).append(head)
    heads = np.flatnonzero(parents < 0 if blocks.slides else blocks.parents == 0)[::-1].tolist()
    after: list[int] = following.tolist()
    while heads:
        index = heads.pop()
        chain = [index]
        while (index := after[index]) >= 0:
            chain.append(index)
        yield chain
        if chain[-1] in branches:
            heads += reversed(branches[chain[-1]])


def _parent_indices(blocks: FrozenBlocks) -> _Indices:
    """For each block the index of its parent; -1 where that is not among them."""
    order = np.argsort(blocks.names)
    names = blocks.names[order]
    # Looked up in their own order: then neighbours find neighbours, at a third of the time.
    by_parent = np.argsort(blocks.parents)
    wanted = blocks.parents[by_parent]
    at = np.searchsorted(names, wanted)
    at[at == len(names)] = 0
    indices = np.full(len(names), -1)
    indices[by_parent] = np.where((names[at] == wanted) & (wanted != 0), order[at], -1) if len(names) else 0
    return indices


def _stores(group: int, blocks: FrozenBlocks, chains: list[list[int]]) -> Iterator[Stored]:
    """The chains as they are told; their columns are gathered together, which costs little per chain."""
    order = np.array([index for chain in chains for index in chain], np.int64)
    if not len(order):
        return
    names, tokens = blocks.names[order].tobytes(), blocks.tokens[order].tobytes()
    size = blocks.tokens.itemsize
    begin = 0
    for chain in chains:
        end = begin + len(chain)
        head = chain[0]
        yield Stored(
            group,
            int(blocks.levels[head]),
            names[begin * NAME_BYTES : end * NAME_BYTES],
            blocks.parents[head].tobytes() if blocks.parents[head] else b"",
            tokens[begin * size : end * size],
            blocks.tokens_per_block,
            blocks.known[blocks.namespaces[head]],
        )
        begin = end


def _bridges(levels: tuple[Columns, Columns], seen: list[npt.NDArray[np.intp]]) -> list[npt.NDArray[np.intp]]:
    """The slots of blocks that are not visible and have something visible behind them, per level."""
    found: list[list[int]] = [[], []]
    hidden: dict[int, tuple[int, int, int]] = {}
    for level, columns in enumerate(levels):
        at = columns.hidden_slots()
        names, parents, *_ = columns.rows(at)
        hidden.update(zip(names.tolist(), zip(parents.tolist(), repeat(level), at.tolist()), strict=False))
    if hidden:
        rows = [columns.rows(at) for columns, at in zip(levels, seen, strict=True)]
        visible = {name for names, *_ in rows for name in names.tolist()}
        missing = hidden.keys() & {parent for _, parents, *_ in rows for parent in parents.tolist()} - visible
        while missing:
            parent, level, slot = hidden.pop(missing.pop())
            found[level].append(slot)
            if parent in hidden and parent not in visible:
                missing.add(parent)
    return [np.array(slots, np.intp) for slots in found]
