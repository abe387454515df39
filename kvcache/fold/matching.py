"""Finding what of a prompt is cached. Lookups never change anything.

SECURITY: a hit is decided by comparing tokens inside one namespace, never by a hash.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from events.ids import LevelIndex
from events.packed import TOKEN_BYTES
from kvcache.fold.prefix_tree import Node, PrefixTree, Run, common_bytes, common_prefix


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


class GroupMatch(Protocol):
    """What one group has of a prompt."""

    @property
    def runs(self) -> list[tuple[Run, int]]:
        """The known path of its content: (run, how many of its blocks match)."""

    @property
    def blocks(self) -> int:
        """Full blocks on that path."""

    partial: PartialMatch | None
    """The block behind the path of which only the start matches."""

    def servable(self, blocks: int) -> int:
        """The most blocks up to so many that can be reused."""

    def limited(self, blocks: int, tokens_per_block: int, key_bytes: int) -> GroupMatch:
        """The match as if the prompt had no more than the first `blocks` full blocks, and the one behind in part."""

    def pieces(self, num_tokens: int, key_bytes: int) -> list[Piece]:
        """The blocks to hold in order to reuse so many tokens."""


@dataclass(slots=True)
class PathMatch:
    """The cached path of a prompt: runs from the root on, the last one perhaps in part."""

    runs: list[tuple[Run, int]] = field(default_factory=list)
    """(run, how many of its blocks match)."""
    blocks: int = 0
    partial: PartialMatch | None = None

    def servable(self, blocks: int) -> int:
        """The most blocks up to so many that can be reused."""
        return min(blocks, self.blocks)

    def pieces(self, num_tokens: int, key_bytes: int) -> list[Piece]:
        """The blocks to hold in order to reuse so many tokens: with full attention all there are."""
        return [_piece(run, 0, take, key_bytes) for run, take in self.runs]

    def limited(self, blocks: int, tokens_per_block: int, key_bytes: int) -> PathMatch:
        """The first `blocks` of the full ones; of a longer match the next one is its partial match."""
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
    """Blocks of a run of a window with full attention."""
    keys = bytes(run.keys[begin * key_bytes : end * key_bytes])
    return Piece(run.level, run.start + begin, run.slots[begin:end], keys, run.transfer == 0)


def match(tree: PrefixTree, top: Node | None, symbols: bytes, stop: int, *, partial: bool) -> PathMatch:
    """The longest prefix of ``symbols[:stop]`` (bytes) that is cached behind `top`, a namespace's root or a run.

    `partial` asks for the leading tokens of one more block as well.
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
            common = common_bytes(child, symbols, position, stop)
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
    """The child whose first block is cached and has the most leading tokens in common, and how many: a neighbour in
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
    """Whether a child's first block is cached and begins with these symbols."""
    at = bisect_left(node.order, symbols)
    return at < len(node.order) and node.order[at].startswith(symbols)


def covered_child(node: Node, symbols: bytes) -> Run | None:
    """The child whose (partial) only block is cached and the beginning of these symbols, but not all of them."""
    at = bisect_left(node.order, symbols)
    if at and symbols.startswith(node.order[at - 1]):
        return node.children[node.order[at - 1]]
    return None


def in_all(
    matches: Sequence[GroupMatch], tokens_per_block: int, key_bytes: int
) -> tuple[list[GroupMatch], int]:
    """What all groups have of a prompt, and how many tokens that are.

    The most full blocks that each can serve, and of one more as many tokens as the one that has the least.
    """
    if len(matches) == 1 and isinstance(matches[0], PathMatch):
        partial = matches[0].partial
        reused = 0 if partial is None else partial.num_tokens
        return list(matches), matches[0].blocks * tokens_per_block + reused
    blocks = again = min(found.blocks for found in matches)
    while (again := min(found.servable(blocks) for found in matches)) < blocks:
        blocks = again
    common = [found.limited(blocks, tokens_per_block, key_bytes) for found in matches]
    tokens = min(0 if found.partial is None else found.partial.num_tokens for found in common)
    for found in common:
        if found.partial is not None:
            found.partial = replace(found.partial, num_tokens=tokens) if tokens else None
    return common, blocks * tokens_per_block + tokens
