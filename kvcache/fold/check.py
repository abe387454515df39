"""Proof of the conservation laws from scratch; raises `InvariantViolated` at the first that does not hold.

The laws: each slot is in exactly one state (`kvcache.fold.slot_states`), and a copy brings what is in flight;
references equal the sequences that hold a block; every cached block's parent is cached, in primary if the block is.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np

from events.types import CROSS
from kvcache.errors import invariant
from kvcache.fold.prefix_tree import Node, Root, Run, runs_below
from kvcache.fold.sequence import DETACHED, Pin, Sequence, Transfer
from kvcache.fold.sliding_group import AnyGroup
from kvcache.fold.slot_states import SlotState, slot_states


def check_runs(group: AnyGroup) -> None:
    """Verify the tree of a group, run by run."""
    for run in runs_of(group):
        check_shape(group, run)
        group.check_run(run)
    if group.uses is not None:
        group.uses.check()


def check_group(
    group: AnyGroup,
    sequences: Collection[Sequence],
    pins: Collection[Pin],
    copies: dict[int, Transfer],
    *,
    grows_at_will: bool,
) -> None:
    """Verify references and slots of a group against their holders.

    `grows_at_will`: True if an engine allocates slots on its own schedule, for the last sampled token perhaps later.
    """
    for sequence in sequences:
        if (group.kind == CROSS) == (sequence.holders > 0):
            _check_table(group, sequence, grows_at_will=grows_at_will)
        else:
            none = not sequence.tables[group.index] and not sequence.path_ends[group.index].end
            invariant(none, "a sequence has blocks of a group that it does not belong to")
    group.check_references(sequences, pins)
    for level, states in zip(group.levels, slot_states(group, sequences, pins), strict=True):
        unreferenced = np.isin(states, (SlotState.UNREFERENCED, SlotState.UNREFERENCED_IN_FLIGHT))
        invariant(level.unreferenced == unreferenced.sum(), "unreferenced blocks are counted wrongly")
    group.check_owners()
    _check_copies(group, copies)
    users = Counter(sequence.namespace for sequence in sequences)
    for namespace, root in group.tree.roots.items():
        invariant(root.users == users[namespace], "a namespace counts its sequences wrongly")
        invariant(bool(root.children or root.users), "an unused namespace is kept")


def runs_of(group: AnyGroup) -> Iterator[Run]:
    """All registered runs, which are all runs in the tree."""
    seen = 0
    for root in group.tree.roots.values():
        for run in runs_below(root):
            seen += 1
            invariant(group.tree.runs.get(run.id) is run, "a run is not registered")
            yield run
        _check_order(root)
    invariant(seen == len(group.tree.runs), "a registered run is not in the tree")


def check_shape(group: AnyGroup, run: Run) -> None:
    """Verify a run and its place in the tree, whatever the state of its blocks."""
    tree, parent = group.tree, run.parent
    blocks = len(run.slots)
    invariant(blocks > 0, "a run is empty")
    invariant(run.end == parent.end + blocks, "the end of a run is recorded wrongly")
    full = (blocks - 1) * tree.block_bytes
    invariant(
        full < len(run.symbols) <= full + tree.block_bytes, "the content of a run does not match its blocks"
    )
    invariant(len(run.keys) == blocks * tree.key_bytes, "the keys of a run do not match its blocks")
    invariant(parent.children.get(run.head) is run, "a parent does not have its child")
    invariant(
        bytes(run.symbols[: tree.block_bytes]) == run.head, "the first block of a run is recorded wrongly"
    )
    _check_order(run)
    invariant(not (run.partial and run.children), "a block follows a partial one")
    invariant(isinstance(parent, Root | Run), "a run has no parent")
    invariant(not tree.may_join(run), "two runs with equal state were not joined")


def _check_order(node: Node) -> None:
    cached = [head for head, child in node.children.items() if child.slots[0] >= 0]
    invariant(node.order == sorted(cached), "children are out of order")


def _check_table(group: AnyGroup, sequence: Sequence, *, grows_at_will: bool) -> None:
    table, first = sequence.tables[group.index], sequence.detached[group.index]
    size = group.tokens_per_block
    exact = sequence.is_decoding and not grows_at_will
    tokens = sequence.num_tokens if exact else sequence.computed
    needed = -(-tokens // size) or not grows_at_will
    invariant(len(table) >= needed, "a block table is too short for what is computed")
    invariant(not exact or len(table) == needed, "a sequence that decodes has reserved slots")
    full = -(-sequence.num_tokens // size)
    agrees = len(table) == (full if sequence.holders else len(sequence.tables[0]))
    invariant(
        agrees,
        "the windows of a sequence differ in their number of blocks, or an encoder input has "
        "incomplete blocks",
    )
    # A window may have left all blocks of a prompt that has no slot yet for the next token, and of one that would have
    # to begin again after a failed copy and cannot.
    last = len(table) - (len(table) * size > sequence.computed > 0)
    invariant(0 <= first <= last, "a sequence has released its last block")
    invariant(table[:first] == array("i", [DETACHED]) * first, "blocks were released out of order")
    held = table[first:]
    invariant(
        len(set(held)) == len(held) and min(held, default=0) >= 0,
        "a block table has a duplicate or missing slot",
    )
    invariant(0 <= sequence.computed <= sequence.num_tokens, "more tokens are computed than exist")


def _check_copies(group: AnyGroup, copies: dict[int, Transfer]) -> None:
    brought: dict[tuple[int, int], set[int]] = {
        (number, copy.level): set(copy.slots) for number, copy in copies.items()
    }
    for number, level, slots in group.arriving():
        there = brought.get((number, level), set())
        invariant(there.issuperset(slots), "a block waits for a copy that does not target it")
