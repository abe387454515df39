"""What of a prompt is in the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcache.prefixes.runs import Node, Owner, Plane, Root, Run
from kvcache.prefixes.tree import common_blocks, next_extra

Rows = dict[Plane, int]
"""Which blocks of a prompt are in each plane, bit by bit."""
Step = tuple[Run, int, int]
"""A run along a prompt, the blocks of the prompt before it, and how many blocks of the run the prompt has."""


def path(root: Root, tokens: bytes, extras: Sequence[bytes] | None) -> Iterator[Step]:
    """The runs along a prompt."""
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


def rows_of(holder: Owner, runs: Sequence[Step]) -> Rows:
    """Which blocks of a prompt a holder has, in each plane."""
    rows: Rows = {}
    for run, start, take in runs:
        holding = run.holders.get(holder)
        if holding is None:
            break
        ones = (1 << take) - 1
        for plane, mask in holding.there().items():
            rows[plane] = rows.get(plane, 0) | (mask & ones) << start
    return rows


def leading_blocks(holder: Owner, runs: Sequence[Step], plane: Plane) -> int:
    """How many blocks a holder has in a plane from the start of a prompt on."""
    found = 0
    for run, _, take in runs:
        holding = run.holders.get(holder)
        if holding is None:
            break
        mask = (holding.masks if holding.more is None else holding.there()).get(plane, 0)
        # As `groups.leading` has it; this is where routers spend their time.
        count = (mask ^ (mask + 1)).bit_length() - 1
        if count < take:
            return found + count
        found += take
    return found
