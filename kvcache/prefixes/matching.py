"""What of a prompt is in the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvcache.prefixes.holding import Plane
from kvcache.prefixes.tree import Node, Root, Run, common_blocks, next_extra

if TYPE_CHECKING:
    from kvcache.prefixes.source import Source

Rows = dict[Plane, int]
"""Which blocks of a prompt are in each plane, bit by bit."""


def path(root: Root, tokens: bytes, extras: Sequence[bytes] | None) -> Iterator[tuple[Run, int, int]]:
    """The runs along a prompt, with the blocks of it before each one, and how many blocks of the run it has."""
    size = root.block_bytes
    blocks, at = len(tokens) // size, 0
    node: Node = root
    while at < blocks:
        key = tokens[at * size : (at + 1) * size]
        run = node.children.get(key + extras[at] if extras else key)
        if run is None:
            return
        take = common_blocks(run, 0, tokens, at, next_extra(extras, at + 1, blocks))
        yield run, at, take
        if take < run.size:
            return
        node, at = run, at + take


def add_rows(found: dict[Source, Rows], root: Root, tokens: bytes, extras: Sequence[bytes] | None) -> None:
    """Add the blocks of a prompt that are known below a root to the rows of those who have them."""
    for run, start, take in path(root, tokens, extras):
        ones = (1 << take) - 1
        for holder, holding in run.holders.items():
            masks = holding.masks if holding.more is None else holding.there()
            rows = found.get(holder.owner)
            if rows is None:
                rows = found[holder.owner] = {}
            for plane, mask in masks.items():
                rows[plane] = rows.get(plane, 0) | (mask & ones) << start
