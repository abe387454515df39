"""Tokens with extra ids, and with the multimodal items that they belong to.

These are the meanings of symbols, and the content of names and outside formats; the tree and the log have symbols only
(`events.tokens.symbols` converts one into the other).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from events.packed import TOKEN_BYTES

ExtraIds = npt.NDArray[np.uint64]
DIGEST_BYTES = 32
"""Size of the digest of an item's content."""


class ItemSpan(NamedTuple):
    """Consecutive tokens of one item."""

    begin: int
    """Place of the first token in the sequence at hand."""
    end: int
    digest: bytes
    offset: int
    """Place of the first token in the item."""
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class RichTokens:
    """A prompt, or some blocks of one."""

    tokens: bytes
    """Plain token ids as int32 LE."""
    extra_ids: ExtraIds | None = None
    """One per token; None: all 0."""
    items: tuple[ItemSpan, ...] = ()
    """Items by place, each span as long as possible."""

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def extra_ids_at(self, begin: int, end: int) -> ExtraIds:
        """Return the extra ids of the tokens from `begin` to `end`, which may be after the last."""
        end = min(end, len(self))
        return np.zeros(end - begin, np.uint64) if self.extra_ids is None else self.extra_ids[begin:end]

    def items_by_block(self, tokens_per_block: int) -> list[list[ItemSpan]]:
        """Return for each block its spans, counted from its first token."""
        blocks: list[list[ItemSpan]] = [[] for _ in range(-(-len(self) // tokens_per_block))]
        for item in self.items:
            for block in range(item.begin // tokens_per_block, -(-item.end // tokens_per_block)):
                start = block * tokens_per_block
                begin, end = max(item.begin, start), min(item.end, start + tokens_per_block)
                offset = item.offset + begin - item.begin
                blocks[block].append(ItemSpan(begin - start, end - start, item.digest, offset, item.uuid))
        return blocks
