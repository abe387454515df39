"""Finding what of a prompt a sliding window has cached, and how much of that can be reused in spite of holes."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from events.ids import LevelIndex
from events.packed import TOKEN_BYTES
from events.types import PRIMARY, SECONDARY, Namespace
from kvcache.fold.matching import PartialMatch, Piece, match
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
        best, best_tokens = None, 0
        for run, at in self._following(wanted):
            tokens = common_prefix(bytes(run.symbols[at * size : (at + 1) * size]), wanted) // TOKEN_BYTES
            if tokens > best_tokens:
                best, best_tokens = (run, at), tokens
        if best is None:
            return None
        run, at = best
        keys = bytes(run.keys[at * key_bytes : (at + 1) * key_bytes])
        (piece,) = self._cut(run.start + at, run.slots[at : at + 1], keys)
        return PartialMatch(piece, best_tokens)

    def _following(self, wanted: bytes) -> Iterator[tuple[Run, int]]:
        """Of the cached blocks behind the path those that may have the longest prefix in common with `wanted`."""
        node: Node | None = self._root
        for run, take in self.runs:
            if run.start < self.blocks:
                node = run if run.start + take >= self.blocks or take == len(run.slots) else None
        if (node.end if node is not None else -1) < self.blocks:
            return  # a window of one token may know less
        if isinstance(node, Run) and self.blocks < node.end:
            at = self.blocks - node.start
            if node.slots[at] != HOLE:
                yield node, at
        elif node is not None and wanted:
            # The further from where it would stand, the shorter the common prefix.
            at = bisect_left(node.order, wanted)
            for heads in (reversed(node.order[:at]), iter(node.order[at:])):
                for head in heads:
                    if node.children[head].slots[0] != HOLE:
                        yield node.children[head], 0
                        break

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
