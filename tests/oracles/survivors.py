"""What a warm restart must find, worked out a block at a time from the log's state and the bytes of the file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from kvcache.fold.group import Group
from kvcache.fold.prefix_tree import Run, runs_below
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.state import CacheState
from kvcache.layout import Layout
from kvcache.replay import replay

Path_ = tuple[bytes, ...]
"""The contents of a block and of all before it."""
PAGE = 4096


class Block(NamedTuple):
    """A cached block."""

    level: int
    slot: int
    arriving: bool


class Found(NamedTuple):
    """A block that is found again."""

    group: int
    namespace: object
    path: Path_
    slot: int


def blocks_of(state: CacheState, index: int) -> dict[tuple[object, Path_], Block]:
    """All cached blocks of a group, parents first."""
    group, found = state.groups[index], dict[tuple[object, Path_], Block]()
    for root in group.tree.roots.values():
        path_of: dict[int, Path_] = {}
        for run in runs_below(root):
            path = path_of[run.parent.id] if isinstance(run.parent, Run) else ()
            size = group.tree.block_bytes
            for number, slot in enumerate(run.slots):
                path = (*path, bytes(run.symbols[number * size : (number + 1) * size]))
                block = _block(state, group, index, run, slot)
                if block is not None:
                    found[root.namespace, path] = block
            path_of[run.id] = path
    return found


def _block(state: CacheState, group: Group, index: int, run: Run, slot: int) -> Block | None:
    assert state.created is not None
    if state.created.groups[index].kind != "sliding":
        return Block(run.level, slot, run.transfer > 0)
    if slot < 0:
        return None
    first = group.levels[0].size
    assert isinstance(group, SlidingGroup)
    arriving = group.transfers[slot] > 0
    return Block(int(slot >= first), slot - first if slot >= first else slot, arriving)


def survivors(log: Path, file: Path, layout: Layout) -> set[Found]:
    """The blocks that a cache must begin with."""
    state, data = replay(log).state, file.read_bytes()
    offset = -(-(20 + int.from_bytes(data[12:16], "little")) // PAGE) * PAGE
    found = set()
    for index, group in enumerate(layout.groups):
        pools = []
        for pool in group.pools:
            pools.append((offset, pool.bytes_per_block))
            offset = -(-(offset + group.num_blocks[1] * pool.bytes_per_block) // PAGE) * PAGE
        noted, right = state.groups[index].levels[1].checksums, set[tuple[object, Path_]]()
        for (namespace, path), block in blocks_of(state, index).items():
            if block.level != 1 or block.arriving or noted is None:
                continue
            there = b"".join(data[at + block.slot * size :][:size] for at, size in pools)
            closed = group.kind == "sliding" or len(path) == 1 or (namespace, path[:-1]) in right
            if closed and xxhash.xxh3_64_digest(there) == noted[block.slot].tobytes():
                right.add((namespace, path))
                found.add(Found(index, namespace, path, block.slot))
    assert offset == len(data)
    return found


def held_by(state: CacheState, recomputed: int = 0) -> set[Found]:
    """What a cache has in secondary that has just begun: so many blocks are in primary, and nothing is on its way."""
    found = set()
    for index in range(len(state.groups)):
        for (namespace, path), block in blocks_of(state, index).items():
            assert not block.arriving
            recomputed -= block.level == 0
            if block.level:
                found.add(Found(index, namespace, path, block.slot))
    assert recomputed == 0
    return found


def flip(file: Path, at: int) -> None:
    """Change one bit of a file in place, as its other users see it."""
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = np.frombuffer(opened.read(1), np.uint8)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))
