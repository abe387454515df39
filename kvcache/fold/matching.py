"""Finding what of a prompt is cached. Lookups never change anything.

SECURITY: a hit is decided by comparing tokens inside one namespace, never by a hash.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from events.packed import TOKEN_BYTES
from events.types import PRIMARY
from kvcache.fold.prefix_tree import Node, PrefixTree, Run, common_bytes, common_prefix


@dataclass(slots=True)
class PartialMatch:
    """A block of which only the start matches."""

    run: Run
    block: int
    """Index in the run."""
    num_tokens: int

    @property
    def slot(self) -> int:
        """Where the block lies, in the run's level."""
        return self.run.slots[self.block]


@dataclass(slots=True)
class PathMatch:
    """The cached path of a prompt: runs from the root on, the last one perhaps in part."""

    runs: list[tuple[Run, int]] = field(default_factory=list)
    """(run, how many of its blocks match)."""
    blocks: int = 0
    partial: PartialMatch | None = None

    def slots(self, level: int) -> array[int]:
        """Slots of the matching full blocks that lie in this level."""
        found = array("i")
        for run, take in self.runs:
            if run.level == level:
                found += run.slots[:take]
        return found

    def keys(self, level: int, key_bytes: int) -> bytes:
        """Their keys."""
        return b"".join(bytes(run.keys[: take * key_bytes]) for run, take in self.runs if run.level == level)

    def limited(self, blocks: int, tokens_per_block: int) -> PathMatch:
        """The first `blocks` of the full ones; of a longer match the next one is its partial match."""
        if blocks >= self.blocks:
            return self
        limited, left = PathMatch(blocks=blocks), blocks
        for run, take in self.runs:
            if left:
                limited.runs.append((run, min(take, left)))
            if take > left:
                limited.partial = PartialMatch(run, left, tokens_per_block)
                break
            left -= take
        return limited

    def unreferenced(self) -> int:
        """Matching primary blocks that no sequence holds: they are taken out of what can be evicted."""
        return sum(take for run, take in self.runs if run.level == PRIMARY and not run.refs)


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
                found.partial = PartialMatch(child, take, rest)
            return found
        node = child
    if partial and position < stop:
        found.partial = _partial_child(node, symbols[position : min(position + size, stop)])
    return found


def _partial_child(node: Node, wanted: bytes) -> PartialMatch | None:
    """The child whose first block has the longest prefix in common: a neighbour in the order of contents."""
    at = bisect_left(node.order, wanted)
    best, best_tokens = None, 0
    for head in node.order[max(at - 1, 0) : at + 1]:
        tokens = common_prefix(head, wanted) // TOKEN_BYTES
        if tokens > best_tokens:
            best, best_tokens = node.children[head], tokens
    return PartialMatch(best, 0, best_tokens) if best is not None else None


def covered(node: Node, symbols: bytes) -> bool:
    """Whether a child's first block begins with these symbols."""
    at = bisect_left(node.order, symbols)
    return at < len(node.order) and node.order[at].startswith(symbols)


def covered_child(node: Node, symbols: bytes) -> Run | None:
    """The child whose (partial) only block is the beginning of these symbols."""
    at = bisect_left(node.order, symbols)
    if at and symbols.startswith(node.order[at - 1]):
        return node.children[node.order[at - 1]]
    return None


def in_all(matches: Sequence[PathMatch], tokens_per_block: int) -> list[PathMatch]:
    """What all groups have of a prompt: as many blocks, and as many tokens of one more, as the one with the least."""
    if len(matches) == 1:
        return list(matches)
    least = min(found.blocks for found in matches)
    common = [found.limited(least, tokens_per_block) for found in matches]
    partial = [found.partial for found in common if found.partial is not None]
    tokens = min(each.num_tokens for each in partial) if len(partial) == len(common) else 0
    return [
        replace(
            found, partial=replace(found.partial, num_tokens=tokens) if found.partial and tokens else None
        )
        for found in common
    ]
