"""The contents of blocks as one tree for all publishers.

Runs are split where prefixes diverge, and grow at the end. Children are found by the content of their whole first
block, so whatever matches has been compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcache.errors import invariant
from kvcache.prefixes.runs import Adapter, Node, Root, Run

RUN_BLOCKS_MAX = 512
"""Blocks of the longest run: what is done to a run at once is bounded."""


class PrefixTree:
    """Roots and runs, and the operations that change their shape but not who has which block."""

    __slots__ = ("roots",)

    def __init__(self) -> None:
        self.roots: dict[Adapter, dict[int, Root]] = {}
        """By adapter, then by bytes per block."""

    def root(self, adapter: Adapter, block_bytes: int) -> Root:
        """The root for an adapter and a size of blocks, made on first use."""
        sizes = self.roots.setdefault(adapter, {})
        root = sizes.get(block_bytes)
        if root is None:
            root = sizes[block_bytes] = Root(adapter, block_bytes)
        return root

    def drop_unused(self, root: Root) -> None:
        """Forget a root that nothing hangs below."""
        sizes = self.roots.get(root.adapter, {})
        if not root.children and sizes.get(root.block_bytes) is root:
            del sizes[root.block_bytes]
            if not sizes:
                del self.roots[root.adapter]

    def add(self, parent: Node, extra: bytes, tokens: bytes, block_bytes: int) -> Run:
        """A new run below a node, with at most `RUN_BLOCKS_MAX` of these blocks."""
        content = bytearray(tokens[: RUN_BLOCKS_MAX * block_bytes])
        key = tokens[:block_bytes] + extra
        invariant(key not in parent.children, "a sibling with the same first block exists")
        run = parent.children[key] = Run(parent, key, extra, content, len(content) // block_bytes)
        return run

    def split(self, run: Run, at: int) -> Run:
        """Make the first `at` blocks a run of their own, above the rest; returns it."""
        block_bytes = len(run.tokens) // run.size
        parent, cut = run.parent, at * block_bytes
        upper = Run(parent, run.key, run.extra, run.tokens[:cut], at)
        parent.children[upper.key] = upper
        del run.tokens[:cut]
        run.size -= at
        run.parent, run.extra, run.key = upper, b"", bytes(run.tokens[:block_bytes])
        upper.children[run.key] = run
        for holder, holding in list(run.holders.items()):
            holder.split(holding, at, upper)
        return upper

    def shrink(self, run: Run) -> None:
        """Drop the content at the end of a run that nobody has any more; the run, too, if that is all of it.

        Goes on with what is above a run that went.
        """
        node: Node = run
        while isinstance(node, Run):
            if node.children:
                return
            kept = max([len(holding.names) for holding in node.holders.values()], default=0)
            if kept == node.size:
                return
            if kept:
                del node.tokens[kept * len(node.tokens) // node.size :]
                node.size = kept
                return
            del node.parent.children[node.key]
            node.size = 0
            node = node.parent
        assert isinstance(node, Root)
        self.drop_unused(node)

    def runs(self) -> Iterator[tuple[Root, Run]]:
        """All runs, parents before children, with the roots that they hang below."""
        for sizes in self.roots.values():
            for root in sizes.values():
                stack = list(root.children.values())
                while stack:
                    run = stack.pop()
                    yield root, run
                    stack.extend(run.children.values())


def common_blocks(run: Run, at: int, tokens: bytes, begin: int, stop: int) -> int:
    """How many blocks of a run, from `at` on, have the same tokens as the blocks from `begin` up to `stop`."""
    block_bytes = len(run.tokens) // run.size
    most = min(run.size - at, stop - begin)
    start = begin * block_bytes
    own = run.tokens
    if not at and most == run.size and tokens.startswith(own, start):
        return most
    ours, base = 0, at * block_bytes
    # Up to `ours` they agree, from `most` on nobody knows.
    while ours < most:
        middle = (ours + most + 1) // 2
        first, last = ours * block_bytes, middle * block_bytes
        if tokens.startswith(own[base + first : base + last], start + first):
            ours = middle
        else:
            most = middle - 1
    return ours


def next_extra(extras: Sequence[bytes] | None, begin: int, blocks: int) -> int:
    """The first block from `begin` on that has an extra, or how many blocks there are."""
    if extras is None:
        return blocks
    return next((at for at in range(begin, blocks) if extras[at]), blocks)
