"""The run-compressed prefix tree.

Cached prefixes are long and rarely branch, so the tree keeps them as *runs*: consecutive cached blocks of
one prefix with the same state. A lookup compares the bytes of whole runs; its cost follows the number of
distinct prefixes touched, not the number of tokens.

A run is split where prefixes diverge and where the state differs, and joined with its only child when both
become equal again. In a split and in a join the *deeper* part keeps its identity: sequences point at the
deepest run that they hold, and children point up, so that neither has to be visited.

Children are found by the content of their whole first block (exact). Those whose first block is cached are listed in
the order of that content (the longest common prefix with any of them is at a neighbour of the insertion point).

SECURITY: the cached part of a prompt is found by comparing tokens inside one namespace, never by a hash.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from events.ids import LevelIndex
from events.packed import TOKEN_BYTES
from events.types import PRIMARY, Namespace
from kvcache.errors import invariant


class Node:
    """Parent of runs: the root of a namespace, or a run."""

    __slots__ = ("children", "end", "order")

    def __init__(self, end: int) -> None:
        self.children: dict[bytes, Run] = {}
        self.order: list[bytes] = []
        """Sorted keys of the `children` with a cached first block: with full attention all of them."""
        self.end = end
        """Blocks from the start of the prompt to the end of this node."""

    def grows(self, priority: int, duration: int) -> bool:
        """True if a sequence that ends here may extend this node itself by blocks with this retention."""
        return False

    def key_of_last(self, key_bytes: int) -> bytes:
        """The key that a child continues."""
        raise NotImplementedError("abstract")


class Root(Node):
    """The start of every prompt of one namespace."""

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        super().__init__(0)
        self.namespace = namespace
        self.key = key
        self.users = 0
        """Running sequences of the namespace."""

    def key_of_last(self, key_bytes: int) -> bytes:
        """The key that the namespace seeds."""
        return self.key


class PathEnd(Node):
    """Length of a sequence's cached path, without its place in the tree: enough for sliding windows."""

    __slots__ = ("left",)

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.left = (0, 0, -1)
        """The last cached block that the window has left: the number of blocks up to it, its place, and the stamp of
        its release. Valid while the place has that stamp. The path may have grown since. Not exported, as it only
        spares a search."""

    def grows(self, priority: int, duration: int) -> bool:
        """True: the run in which the path ends decides."""
        return True


class Run(Node):
    """Consecutive cached blocks of one prefix with the same state."""

    __slots__ = (
        "credit",
        "duration",
        "expiry",
        "head",
        "id",
        "keys",
        "level",
        "parent",
        "partial",
        "priority",
        "refs",
        "released_at",
        "same_level_children",
        "slots",
        "symbols",
        "transfer",
    )

    def __init__(
        self, run_id: int, parent: Node, symbols: bytearray, slots: array[int], keys: bytearray, head: bytes
    ) -> None:
        super().__init__(parent.end + len(slots))
        self.id = run_id
        self.parent = parent
        self.symbols = symbols
        """Content of the blocks: int32 tokens, or keys where a log records no tokens."""
        self.slots = slots
        self.keys = keys
        self.head = head
        """Content of the first block."""
        self.partial = 0
        """Tokens in the last block if it is not full, else 0. Only a run without children ends so."""
        self.level = PRIMARY
        self.priority = 0
        self.duration = 0
        """Duration of the priority from release on, in ns; 0: for good."""
        self.expiry = 0
        """End of that duration on the state's clock; 0 while held, or if never."""
        self.released_at = 0
        """Stamp of the release, a counter; 0 while held."""
        self.credit = 0
        """Number of releases by which reuse has deferred the turn; 0 where uses are not counted."""
        self.refs = 0
        self.transfer = 0
        """Id of the copy that brings these blocks here; 0 once landed."""
        self.same_level_children = 0
        """Children in the same level; without any, the last block may be evicted."""

    @property
    def is_leaf(self) -> bool:
        """True if the last block may be evicted: no holder, and no child in its level."""
        return not (self.refs or self.same_level_children)

    @property
    def turn(self) -> int:
        """Release stamp, credit included."""
        return self.released_at + self.credit

    def grows(self, priority: int, duration: int) -> bool:
        """True if a sequence that ends here may extend this run by blocks with this retention: as its only holder."""
        return (
            self.refs == 1
            and self.priority == priority
            and self.duration == duration
            and not (self.children or self.transfer or self.partial)
        )

    def key_of_last(self, key_bytes: int) -> bytes:
        """The key of the last block."""
        return bytes(self.keys[len(self.keys) - key_bytes :])

    @property
    def start(self) -> int:
        """Blocks before the first one."""
        return self.end - len(self.slots)

    def same_state(self, other: Run) -> bool:
        """True if the blocks of both could be one run."""
        return (
            self.refs == other.refs
            and self.level == other.level
            and self.released_at == other.released_at
            and self.transfer == other.transfer
            and self.priority == other.priority
            and self.duration == other.duration
            and self.expiry == other.expiry
            and self.credit == other.credit
        )


class PrefixTree:
    """Roots, runs, and the operations that change their shape but not what is cached."""

    def __init__(self, block_bytes: int, key_bytes: int) -> None:
        self.block_bytes = block_bytes
        """Bytes of `Run.symbols` per full block."""
        self.key_bytes = key_bytes
        self.roots: dict[Namespace, Root] = {}
        self.runs: dict[int, Run] = {}
        self.next_id = 0

    def link(self, run: Run) -> None:
        """Link a run below its parent."""
        parent = run.parent
        invariant(run.head not in parent.children, "a sibling with the same first block exists")
        parent.children[run.head] = run
        if run.slots[0] >= 0:
            list_child(run)
        if isinstance(parent, Run) and parent.level == run.level:
            parent.same_level_children += 1
        self.runs[run.id] = run

    def unlink(self, run: Run) -> None:
        """Unlink a run without children from its parent."""
        parent = run.parent
        invariant(not run.children, "a run with children cannot be removed")
        del parent.children[run.head]
        if run.slots[0] >= 0:
            delist_child(run)
        del self.runs[run.id]
        if isinstance(parent, Run):
            if parent.level == run.level:
                parent.same_level_children -= 1
        elif isinstance(parent, Root):
            self.drop_unused(parent)

    def drop_unused(self, root: Root) -> None:
        """Forget a namespace that nothing uses."""
        if not root.children and not root.users:
            del self.roots[root.namespace]

    def new_run(self, parent: Node, symbols: bytearray, slots: array[int], keys: bytearray) -> Run:
        """Create a run with the next id, not yet linked."""
        self.next_id += 1
        return Run(self.next_id, parent, symbols, slots, keys, bytes(symbols[: self.block_bytes]))

    def cut(self, run: Run, take: int) -> None:
        """Shorten a run by its last `take` blocks."""
        keep = len(run.slots) - take
        del run.symbols[keep * self.block_bytes :]
        del run.slots[keep:]
        if self.key_bytes:
            del run.keys[keep * self.key_bytes :]
        run.end -= take
        run.partial = 0

    def split(self, run: Run, at: int) -> Run:
        """Make the first `at` blocks a run of their own, above the rest; returns it.

        ::

            parent               parent
              |                    |
            run [a b c d]        upper [a b]        a new id
              |                    |
            children             run [c d]          the id that it had
                                   |
                                 children

        Invariant: what is cached, and in which state, is the same; `run.end` does not change, so references to the end
        of `run` (of sequences, pins, children) stay valid. Slots of the upper part have another owner: the caller notes
        it. Complexity: O(blocks of the run) bytes copied, regardless of the number of sequences and children.
        """
        size, keys = at * self.block_bytes, at * self.key_bytes
        parent = run.parent
        # The upper part is the new object. Sequences and children of `run` refer to its end, and stay as they are.
        upper = self.new_run(parent, run.symbols[:size], run.slots[:at], run.keys[:keys])
        del run.symbols[:size]
        del run.slots[:at]
        del run.keys[:keys]
        upper.level, upper.priority, upper.expiry = run.level, run.priority, run.expiry
        upper.refs, upper.released_at, upper.transfer = run.refs, run.released_at, run.transfer
        upper.credit, upper.duration = run.credit, run.duration
        upper.same_level_children = 1  # its only child has the same state, hence the same level
        run.head = bytes(run.symbols[: self.block_bytes])
        # It begins as `run` did, so it takes the same key, and `parent.order` stays as it is.
        parent.children[upper.head] = upper
        upper.children = {run.head: run}
        upper.order = [run.head] if run.slots[0] >= 0 else []
        run.parent = upper
        self.runs[upper.id] = upper
        return upper

    def may_join(self, run: Run) -> bool:
        """True if a run and its parent are one prefix with one state."""
        parent = run.parent
        return isinstance(parent, Run) and len(parent.children) == 1 and run.same_state(parent)

    def join(self, run: Run) -> Run:
        """Put the parent's blocks in front of its only child's; returns the parent, which is gone.

        The opposite of `split`, and allowed where `may_join` is true: the parent has one child and both one state.

        ::

            upper [a b]
              |                 =>   run [a b c d]
            run [c d]

        Invariant: the lower run keeps its id and its end; slots of the upper one have another owner, which the caller
        notes. Nothing refers to the end of the upper run: a sequence that ended there would have added a reference that
        the child does not have. Complexity: O(blocks of both).
        """
        upper = run.parent
        assert isinstance(upper, Run)
        # As in a split the lower run stays: references to its end stay valid.
        run.symbols[:0] = upper.symbols
        run.slots = upper.slots + run.slots
        run.keys[:0] = upper.keys
        run.head = upper.head
        run.parent = upper.parent
        run.parent.children[run.head] = run
        del self.runs[upper.id]
        return upper


def list_child(run: Run) -> None:
    """List a run in its parent as having a cached first block."""
    # Sorted, so that the child with the longest common prefix is a neighbour of a prompt's insertion point.
    insort(run.parent.order, run.head)


def delist_child(run: Run) -> None:
    """Remove a run from its parent's list of children with a cached first block."""
    order = run.parent.order
    del order[bisect_left(order, run.head)]


def root_of(node: Node) -> Node:
    """Return the root above a node."""
    while isinstance(node, Run):
        node = node.parent
    return node


def runs_below(top: Node) -> list[Run]:
    """Return all runs below a node, parents before children, in a fixed order."""
    found, stack = list[Run](), _children(top)
    while stack:
        run = stack.pop()
        found.append(run)
        stack += _children(run)
    return found


def _children(node: Node) -> list[Run]:
    """Return all children, the last one in order first."""
    heads = node.order if len(node.order) == len(node.children) else sorted(node.children)
    return [node.children[head] for head in reversed(heads)]


def common_bytes(
    content: bytes | bytearray, symbols: bytes | bytearray, start: int, stop: int, begin: int = 0
) -> int:
    """Length in bytes of the common prefix of ``content[begin:]`` and ``symbols[start:stop]``, both of int32."""
    # Compared as numbers, all at once; `argmax` of booleans is the first True, or 0 if there is none.
    count = min(len(content) - begin, stop - start) // TOKEN_BYTES
    ours = np.frombuffer(content, np.int32, count, begin)
    differs = ours != np.frombuffer(symbols, np.int32, count, start)
    first = int(differs.argmax()) if count else 0
    return (first if count and differs[first] else count) * TOKEN_BYTES


def common_prefix(one: bytes, other: bytes) -> int:
    """Length in bytes of the common prefix of two short contents."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


class Piece(NamedTuple):
    """Consecutive cached blocks at one level."""

    level: LevelIndex
    first: int
    """Blocks before them in the prompt."""
    slots: array[int]
    keys: bytes
    landed: bool = True


@dataclass(slots=True)
class PartialMatch:
    """A block of which only the start matches."""

    block: Piece
    num_tokens: int


@dataclass(slots=True)
class PathMatch:
    """Cached path of a prompt: runs from the root on, the last one perhaps in part."""

    runs: list[tuple[Run, int]] = field(default_factory=list)
    """(run, number of its blocks that match)."""
    blocks: int = 0
    """Full blocks on that path."""
    partial: PartialMatch | None = None
    """Next block after the path, if its start matches."""

    def servable(self, blocks: int) -> int:
        """Largest number of blocks, at most `blocks`, that can be reused."""
        return min(blocks, self.blocks)

    def pieces(self, num_tokens: int, key_bytes: int) -> list[Piece]:
        """Return the blocks to hold in order to reuse this number of tokens: with full attention all before them."""
        return [_piece(run, 0, take, key_bytes) for run, take in self.runs]

    def limited(self, blocks: int, tokens_per_block: int, key_bytes: int) -> PathMatch:
        """Restrict to the first `blocks` full blocks; the next one of a longer match is its partial match."""
        if blocks >= self.blocks:
            return self
        limited, left = PathMatch(blocks=blocks), blocks
        for run, take in self.runs:
            if left:
                limited.runs.append((run, min(take, left)))
            if take > left:
                limited.partial = PartialMatch(_piece(run, left, left + 1, key_bytes), tokens_per_block)
                break
            left -= take
        return limited


def _piece(run: Run, begin: int, end: int, key_bytes: int) -> Piece:
    """Make a piece from blocks of a run of a window with full attention."""
    keys = bytes(run.keys[begin * key_bytes : end * key_bytes])
    return Piece(run.level, run.start + begin, run.slots[begin:end], keys, run.transfer == 0)


def match(tree: PrefixTree, top: Node | None, symbols: bytes, stop: int, *, partial: bool) -> PathMatch:
    """Find the longest cached prefix of ``symbols[:stop]`` (bytes) below `top`, a namespace's root or a run.

    With `partial`, match the leading tokens of one more block as well.
    """
    found = PathMatch()
    if top is None:
        return found
    size = tree.block_bytes
    node = top
    position = 0
    while position + size <= stop:
        child = node.children.get(symbols[position : position + size])
        if child is None:
            break
        common = len(child.symbols)
        if position + common > stop or not symbols.startswith(child.symbols, position):
            common = common_bytes(child.symbols, symbols, position, stop)
        take = min(common // size, len(child.slots) - bool(child.partial))
        found.runs.append((child, take))
        found.blocks += take
        position += take * size
        if take < len(child.slots):
            rest = (common - take * size) // TOKEN_BYTES
            if partial and rest:
                found.partial = PartialMatch(_piece(child, take, take + 1, tree.key_bytes), rest)
            return found
        node = child
    if partial and position < stop:
        child, tokens = closest_child(node, symbols[position : min(position + size, stop)])
        if child is not None:
            found.partial = PartialMatch(_piece(child, 0, 1, tree.key_bytes), tokens)
    return found


def closest_child(node: Node, wanted: bytes) -> tuple[Run | None, int]:
    """Find the child with a cached first block and the most leading tokens in common, and their number: a neighbour in
    the order of contents.
    """
    at = bisect_left(node.order, wanted)
    best, best_tokens = None, 0
    for head in node.order[max(at - 1, 0) : at + 1]:
        tokens = common_prefix(head, wanted) // TOKEN_BYTES
        if tokens > best_tokens:
            best, best_tokens = node.children[head], tokens
    return best, best_tokens


def covered(node: Node, symbols: bytes) -> bool:
    """True if a child's first block is cached and begins with these symbols."""
    at = bisect_left(node.order, symbols)
    return at < len(node.order) and node.order[at].startswith(symbols)


def covered_child(node: Node, symbols: bytes) -> Run | None:
    """Find the child with a cached (partial) only block that is a proper prefix of these symbols."""
    at = bisect_left(node.order, symbols)
    if at and symbols.startswith(node.order[at - 1]):
        return node.children[node.order[at - 1]]
    return None
