"""Finding what of a prompt a sliding window has cached, and how much of that can be reused in spite of holes."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np

from events.ids import LevelIndex
from events.packed import TOKEN_BYTES
from events.types import PRIMARY, SECONDARY, Namespace
from kvcache.fold.matching import PartialMatch, Piece, closest_child, match
from kvcache.fold.places import HOLE, indexes
from kvcache.fold.prefix_tree import Node, Run, common_prefix
from kvcache.fold.sliding_group import SlidingGroup


class SlidingMatch:
    """The known path of a prompt in a sliding window: contents, of which some blocks are not cached."""

    __slots__ = ("_group", "_root", "_stop", "_symbols", "_with_partial", "blocks", "partial", "runs")

    def __init__(
        self, group: SlidingGroup, namespace: Namespace, symbols: bytes, stop: int, *, partial: bool
    ) -> None:
        self._group = group
        self._root = group.tree.roots.get(namespace)
        self._symbols, self._stop, self._with_partial = symbols, stop, partial
        found = match(group.tree, self._root, symbols, stop, partial=False)
        self.runs = found.runs
        """(run, how many of its blocks match)."""
        # A window of one token sees nothing of what is before it, so nothing need be known of that.
        self.blocks = found.blocks if group.window > 1 else stop // group.tree.block_bytes
        """Full blocks of the path, or those to which it was limited."""
        self.partial: PartialMatch | None = None

    def servable(self, blocks: int) -> int:
        """The most blocks up to so many that can be reused: what the window sees from there is cached."""
        blocks = min(blocks, self.blocks)
        if self._group.window == 1 or HOLE not in self._row(self._first_seen(blocks), blocks):
            return blocks
        cached = np.frombuffer(self._row(0, blocks), np.int32) != HOLE
        counts = np.arange(blocks + 1)
        # Before so many blocks, the last hole.
        holes = np.concatenate([[-1], np.where(cached, -1, counts[:-1])])
        last_hole = np.maximum.accumulate(holes)
        size, window = self._group.tokens_per_block, self._group.window
        first_seen = np.maximum(counts * size - window + 1, 0) // size
        return int(np.flatnonzero(last_hole < np.maximum(first_seen, counts == 0))[-1])

    def _first_seen(self, blocks: int) -> int:
        return self._group.first_seen(blocks * self._group.tokens_per_block)

    def _row(self, first: int, last: int) -> array[int]:
        """The places of the path's blocks from `first` up to `last`."""
        row = array("i")
        for run, _ in self.runs:
            if run.end > first and run.start < last:
                row += run.slots[max(first - run.start, 0) : last - run.start]
        return row

    def limited(self, blocks: int, tokens_per_block: int, key_bytes: int) -> SlidingMatch:
        """The first `blocks` blocks, and what can be copied of the next one."""
        self.blocks = blocks
        self.partial = self._copyable(key_bytes) if self._with_partial else None
        return self

    def _copyable(self, key_bytes: int) -> PartialMatch | None:
        """The cached block behind the path with the longest prefix in common with what follows."""
        size = self._group.tree.block_bytes
        wanted = self._symbols[self.blocks * size : min((self.blocks + 1) * size, self._stop)]
        run, at, tokens = self._closest(wanted)
        if run is None or not tokens:
            return None
        keys = bytes(run.keys[at * key_bytes : (at + 1) * key_bytes])
        (piece,) = self._cut(run.start + at, run.slots[at : at + 1], keys)
        return PartialMatch(piece, tokens)

    def _closest(self, wanted: bytes) -> tuple[Run | None, int, int]:
        """The cached block behind the path with the most leading tokens in common with `wanted`: its run, its index in
        that, and how many tokens.
        """
        node: Node | None = self._root
        for run, take in self.runs:
            if run.start < self.blocks:
                node = run if run.start + take >= self.blocks or take == len(run.slots) else None
        if node is None or node.end < self.blocks:
            return None, 0, 0  # a window of one token may know less
        if not isinstance(node, Run) or node.end == self.blocks:
            child, tokens = closest_child(node, wanted)
            return child, 0, tokens
        at, size = self.blocks - node.start, self._group.tree.block_bytes
        if node.slots[at] == HOLE:
            return None, 0, 0
        content = bytes(node.symbols[at * size : (at + 1) * size])
        return node, at, common_prefix(content, wanted) // TOKEN_BYTES

    def pieces(self, num_tokens: int, key_bytes: int) -> list[Piece]:
        """The blocks to hold in order to reuse so many tokens: those that the window sees from there."""
        first = self._group.first_seen(num_tokens)
        keys = b"".join(
            bytes(run.keys[max(first - run.start, 0) * key_bytes : (self.blocks - run.start) * key_bytes])
            for run, _ in self.runs
            if run.end > first and run.start < self.blocks
        )
        return self._cut(first, self._row(first, self.blocks), keys)

    def _cut(self, first: int, row: array[int], keys: bytes) -> list[Piece]:
        """Consecutive cached blocks as pieces that lie at one level, and have landed or not."""
        if not row:
            return []
        if not self._group.levels[SECONDARY].size:
            return [Piece(PRIMARY, first, row, keys)]
        places = indexes(row)
        primary, size = self._group.levels[PRIMARY].size, len(keys) // len(row)
        levels = places >= primary
        landed = self._group.views["transfers"][places] == 0
        changes = (levels[1:] != levels[:-1]) | (landed[1:] != landed[:-1])
        ends = [0, *(np.flatnonzero(changes) + 1).tolist(), len(row)]
        pieces = []
        for begin, end in pairwise(ends):
            level = LevelIndex(int(levels[begin]))
            slots = array("i", (places[begin:end] - level * primary).astype(np.int32).tobytes())
            own = keys[begin * size : end * size]
            pieces.append(Piece(level, first + begin, slots, own, bool(landed[begin])))
        return pieces
