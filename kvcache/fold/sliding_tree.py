"""Where in the prefix tree of a sliding window blocks are: runs have holes, and are split where prefixes diverge."""

from __future__ import annotations

from array import array

import numpy as np

from kvcache.errors import invariant
from kvcache.fold.places import HOLE, Places, indexes, position_of
from kvcache.fold.prefix_tree import Node, PathEnd, Run, common_bytes, delist_child, list_child
from kvcache.fold.sequence import Sequence


class SlidingTree(Places):
    """CacheState and places; who holds the blocks is not its concern."""

    __slots__ = ()

    def position(self, sequence: Sequence, block: int) -> tuple[Node, int, int]:
        """Where a block of a sequence is, or would be: a node, how many of its blocks are before, and the depth there.

        The depth is less than `block` if less of what is before it is known.
        """
        end: PathEnd = sequence.path_ends[self.index]  # type: ignore[assignment]
        held = sequence.detached[self.index] < block <= end.end
        place = sequence.tables[self.index][block - 1] if held else self._left(end, block)
        if place != HOLE:
            run, at = self.find(place)
            return run, at + 1, block
        root: Node = self.tree.roots[sequence.namespace]
        if not block:
            return root, 0, 0
        return self.walk(root, self.content(sequence, 0, block, self.tokens_per_block))

    def _left(self, end: PathEnd, block: int) -> int:
        """Where the block before this one is cached, if it is the last that the window has left and is still there."""
        left, place, stamp = end.left
        return place if left == block and self.released_at[place] == stamp else HOLE

    def walk(self, node: Node, content: bytes) -> tuple[Node, int, int]:
        """As far as the content of full blocks is known below a node."""
        size, at, position = self.tree.block_bytes, 0, 0
        while position < len(content):
            child = node.children.get(content[position : position + size])
            if child is None:
                break
            node, at = child, common_bytes(child, content, position, len(content)) // size
            position += at * size
            if at < len(child.slots):
                break
        return node, at, position // size

    def lay(
        self, node: Node, at: int, content: bytearray, places: array[int], keys: bytearray, partial: int
    ) -> None:
        """Note blocks from a position on: in holes as far as they are known there, the rest as new ones.

        Whoever calls this leaves content, places and keys to the tree. Holes come first among the places.
        """
        size, key_bytes, done = self.tree.block_bytes, self.tree.key_bytes, 0
        while done < len(places):
            if at < _length(node):
                assert isinstance(node, Run)
                same = common_bytes(node, content, done * size, len(content), at * size) // size
                if not same:
                    upper = self.tree.split(node, at)
                    self._own(upper.slots, upper)
                    node = upper
                else:
                    self._fill_holes(node, at, places[done : done + same])
                    at, done = at + same, done + same
                continue
            child = node.children.get(bytes(content[done * size : (done + 1) * size]))
            if child is None:
                if done:
                    content, places = content[done * size :], places[done:]
                    keys = keys[done * key_bytes :]
                self._append(node, content, places, keys, partial)
                return
            node, at = child, 0

    def _fill_holes(self, run: Run, at: int, places: array[int]) -> None:
        for index, place in enumerate(places, at):
            if place != HOLE:
                invariant(run.slots[index] == HOLE, "a stored block is cached already")
                run.slots[index] = place
                if not index:
                    list_child(run)
        if places:
            self._note(run, at, places)

    def _append(
        self, node: Node, content: bytearray, places: array[int], keys: bytearray, partial: int
    ) -> None:
        """New blocks behind a node's last one: a leaf gets longer, or a run is hung below it."""
        if isinstance(node, Run) and not node.children and not node.partial:
            run, at = node, len(node.slots)
            run.symbols += content
            run.slots += places
            run.keys += keys
            run.end += len(places)
        else:
            run, at = self.tree.new_run(node, content, places, keys), 0
            self.tree.link(run)
        run.partial = partial
        self._note(run, at, places)

    def _note(self, run: Run, at: int, places: array[int]) -> None:
        """Where these blocks of a run are, of which the first ones may be holes."""
        cached = indexes(places)
        first = position_of(run) + run.start + at
        positions = np.arange(first, first + len(cached))
        if places[0] == HOLE:
            there = cached != HOLE
            cached, positions = cached[there], positions[there]
        self.views["positions"][cached] = positions

    def _own(self, places: array[int], run: Run) -> None:
        """Another run has these blocks from now on."""
        at = indexes(places)
        at = at[at != HOLE]
        self.views["positions"][at] = position_of(run) + self.depths_at(at)

    def take_out(self, places: array[int]) -> None:
        """These blocks are not cached any more; what nothing cached hangs behind goes with them."""
        segments = self.replace(places, array("i", [HOLE]) * len(places))
        self.clear_places(places)
        for run, begin, _ in segments:
            if not begin:
                delist_child(run)
        # Content behind which nothing is cached is forgotten at once, so a run is cut off only where it lost its last.
        for run in [run for run, _, end in segments if end == len(run.slots)]:
            if not run.children and run.id in self.tree.runs:
                self._trim(run)

    def _trim(self, run: Run) -> None:
        """Forget the content of blocks behind which nothing is cached."""
        node: Node = run
        while isinstance(node, Run) and not node.children:
            if node.slots[-1] != HOLE:
                return
            cached = np.flatnonzero(np.frombuffer(node.slots, np.int32) != HOLE)
            if len(cached):
                self._shorten(node, int(cached[-1]) + 1)
                return
            parent = node.parent
            self.tree.unlink(node)
            node = parent
        if isinstance(node, Run) and len(node.children) == 1:
            (child,) = node.children.values()
            self._own(self.tree.join(child).slots, child)

    def _shorten(self, run: Run, kept: int) -> None:
        if kept < len(run.slots):
            run.end -= len(run.slots) - kept
            del run.symbols[kept * self.tree.block_bytes :]
            del run.keys[kept * self.tree.key_bytes :]
            del run.slots[kept:]
            run.partial = 0


def _length(node: Node) -> int:
    return len(node.slots) if isinstance(node, Run) else 0
