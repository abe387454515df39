"""Blocks that are not resident at the moment, but something resident hangs behind them.

That happens while a block is on its way from one level to another. Who comes just then must be told of it all the same,
to understand what hangs behind it. So it is kept as long as anything does.
"""

from __future__ import annotations

from events.told.blocks import Block
from events.types import Hash

Key = tuple[int, Hash]
"""Group and name."""


class Lineage:
    """What hangs behind which block, resident or kept."""

    def __init__(self) -> None:
        self._children: dict[Key, int] = {}
        self.kept: dict[Key, Block] = {}
        """In the order in which they went."""

    def add(self, group: int, block: Block) -> None:
        """It is resident in one more place."""
        if not block.scope.chained:
            return
        if block.parent is not None:
            self._children[group, block.parent] = self._children.get((group, block.parent), 0) + 1
        back = self.kept.pop((group, block.name), None)
        if back is not None:
            self._let_go(group, back)

    def take(self, group: int, block: Block, *, is_last: bool) -> None:
        """It is resident in one place less; `is_last`: and now in none of its group."""
        if not block.scope.chained:
            return
        if is_last and (group, block.name) in self._children:
            self.kept[group, block.name] = block
        else:
            self._let_go(group, block)

    def clear(self) -> None:
        """Nothing is resident."""
        self._children.clear()
        self.kept.clear()

    def _let_go(self, group: int, block: Block) -> None:
        """Nothing of it hangs behind its parent any more, which may have been kept for it alone."""
        gone: Block | None = block
        while gone is not None and gone.parent is not None:
            key = (group, gone.parent)
            left = self._children[key] - 1
            if left:
                self._children[key] = left
                return
            del self._children[key]
            gone = self.kept.pop(key, None)
