"""Prefixes that several workers computed: what routing by prefixes could have sent to one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.audit.columns import Ids
from kvcache.audit.contents import ContentIds

_Names = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Computed:
    """Different full blocks of prompts that a worker computed, by name, each with the one before it (0: none)."""

    names: _Names
    parents: _Names
    depths: npt.NDArray[np.int64]
    """Blocks before each."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Consecutive blocks that the same workers computed, with no other such blocks beside them."""

    name: str
    """Of its last block, 16 hex digits."""
    first: int
    stop: int
    """Tokens of the prompt, from `first` up to `stop`."""
    workers: tuple[str, ...]
    duplicated_tokens: int
    """Those of each worker but one."""


def computed(missed: Ids, names: _Names, contents: ContentIds) -> Computed:
    """What a worker computed, of contents that it was asked for in vain and that have a name."""
    ids = np.unique(missed)
    ids = ids[names[ids] != 0]
    parents = contents.parents()
    depths = np.zeros(len(parents), np.int64)
    above = parents[ids]
    while (deeper := above >= 0).any():
        depths[ids] += deeper
        above = np.where(deeper, parents[above], -1)
    before = parents[ids]
    return Computed(names[ids], np.where(before >= 0, names[before], 0).astype(np.uint64), depths[ids])


def spread(workers: Sequence[tuple[str, Computed]], tokens_per_block: int, top: int) -> list[Spread]:
    """The prefixes of which most tokens were computed by more workers than one, the most first."""
    shared = _shared(workers)
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name, block in shared.items():
        children[block.parent].append(name)
    chains = [
        _chain(name, shared, children)
        for name, block in shared.items()
        if block.parent not in shared
        or shared[block.parent].by != block.by
        or len(children[block.parent]) > 1
    ]
    names = [name for name, _ in workers]
    found = [_spread(chain, shared[chain[0]], names, tokens_per_block) for chain in chains]
    return sorted(found, key=lambda each: (-each.duplicated_tokens, each.first, each.name))[:top]


@dataclass(slots=True)
class _Block:
    parent: int
    depth: int
    by: tuple[int, ...] = ()
    """Numbers of the workers that computed it."""


def _shared(workers: Sequence[tuple[str, Computed]]) -> dict[int, _Block]:
    """Blocks of more workers than one, by name."""
    names, times = np.unique(
        np.concatenate([np.empty(0, np.uint64), *(each.names for _, each in workers)]), return_counts=True
    )
    several, blocks = names[times > 1], dict[int, _Block]()
    for number, (_, each) in enumerate(workers):
        at = np.flatnonzero(np.isin(each.names, several))
        columns = (each.names[at].tolist(), each.parents[at].tolist(), each.depths[at].tolist())
        for name, parent, depth in zip(*columns, strict=True):
            block = blocks.setdefault(name, _Block(parent, depth))
            block.by += (number,)
    return blocks


def _chain(name: int, shared: dict[int, _Block], children: dict[int, list[int]]) -> list[int]:
    chain = [name]
    while len(after := children.get(chain[-1], [])) == 1 and shared[after[0]].by == shared[name].by:
        chain += after
    return chain


def _spread(chain: list[int], first: _Block, workers: Sequence[str], tokens_per_block: int) -> Spread:
    return Spread(
        np.uint64(chain[-1]).tobytes().hex(),
        first.depth * tokens_per_block,
        (first.depth + len(chain)) * tokens_per_block,
        tuple(workers[number] for number in first.by),
        (len(first.by) - 1) * len(chain) * tokens_per_block,
    )
