"""Tokens that stand for more than themselves: with extra ids, and with the multimodal items that they belong to.

This is what symbols mean, and what goes into names and outside formats; the tree and the log know symbols only
(`events.tokens.symbols` turns one into the other).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from events.packed import TOKEN_BYTES

ExtraIds = npt.NDArray[np.uint64]
DIGEST_BYTES = 32
"""Of an item's content."""


class ItemSpan(NamedTuple):
    """Consecutive tokens of one item."""

    begin: int
    """The first one's place among the tokens at hand."""
    end: int
    digest: bytes
    offset: int
    """The first one's place in the item."""
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class RichTokens:
    """A prompt, or some blocks of one."""

    tokens: bytes
    """Plain token ids as int32 LE."""
    extra_ids: ExtraIds | None = None
    """One per token; None: all 0."""
    items: tuple[ItemSpan, ...] = ()
    """By place, as long as they can be."""

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def extra_ids_at(self, begin: int, end: int) -> ExtraIds:
        """The extra ids of the tokens from `begin` to `end`, which may lie behind the last."""
        end = min(end, len(self))
        return np.zeros(end - begin, np.uint64) if self.extra_ids is None else self.extra_ids[begin:end]

    def items_by_block(self, tokens_per_block: int) -> list[list[ItemSpan]]:
        """For each block the spans in it, counted from its first token."""
        blocks: list[list[ItemSpan]] = [[] for _ in range(-(-len(self) // tokens_per_block))]
        for item in self.items:
            for block in range(item.begin // tokens_per_block, -(-item.end // tokens_per_block)):
                start = block * tokens_per_block
                begin, end = max(item.begin, start), min(item.end, start + tokens_per_block)
                offset = item.offset + begin - item.begin
                blocks[block].append(ItemSpan(begin - start, end - start, item.digest, offset, item.uuid))
        return blocks
