"""Proof of the conservation laws from scratch; raises `InvariantViolated` at the first that does not hold.

The laws: each slot is in exactly one state (`kvcache.fold.life`), and a copy brings what is in flight; references equal
the sequences that hold a block; every cached block's parent is cached, in primary if the block is.
"""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np

from events.tokens.symbols import rich_end
from events.types import PRIMARY
from kvcache.errors import invariant
from kvcache.fold.contents import Contents
from kvcache.fold.group_state import GroupState
from kvcache.fold.life import SlotState, States, slot_states
from kvcache.fold.prefix_tree import Root, Run, runs_below
from kvcache.fold.sequence import Sequence
from kvcache.fold.slots import Level


def check(state: Contents) -> None:
    """Verify the whole state."""
    for group in state.groups:
        _check_tree(group)
    check_slots(state)


def check_slots(state: Contents) -> None:
    """Verify who holds what: slots, references, sequences. Not whether the tree is in its best form."""
    for index, group in enumerate(state.groups):
        references: Counter[int] = Counter()
        for sequence in state.sequences.values():
            _check_sequence(group, index, sequence, references)
        for run in group.tree.runs.values():
            invariant(
                run.refs == references[run.id], "references differ from the sequences that hold a block"
            )
        for level, states in zip(group.levels, slot_states(state, index), strict=True):
            _check_level(group, level, states)
        _check_copies(state, index)
        users = Counter(sequence.namespace for sequence in state.sequences.values())
        for namespace, root in group.tree.roots.items():
            invariant(root.users == users[namespace], "a namespace counts its sequences wrongly")
            invariant(bool(root.children or root.users), "an unused namespace is kept")
    invariant(not state.awaiting_onboard, "a sequence waits for blocks that were not onboarded")
    invariant(
        {sequence.request_id: handle for handle, sequence in state.sequences.items()} == state.handles,
        "request ids and handles disagree",
    )
    _check_decoding(state)
    if state.tokens_recorded:
        _check_symbols(state)


def _check_decoding(state: Contents) -> None:
    """The row of sequences that decode together is only as good as `RunningTokens.forget_row` was called for it."""
    row = [state.sequences[handle] for handle in array("q", state.running.handles or b"")]
    invariant(
        all(sequence.is_decoding for sequence in row), "a sequence that decodes counts its tokens itself"
    )
    invariant(state.running.appends_to(row), "tokens are appended to other sequences than those that decode")


def _check_symbols(state: Contents) -> None:
    ends = {handle: rich_end(sequence.tokens.tobytes()) for handle, sequence in state.sequences.items()}
    rich = {handle: end for handle, end in ends.items() if end}
    invariant(state.rich == rich, "a sequence's symbols are noted wrongly, or stand for nothing")
    invariant(state.used_pages() <= state.symbols.pages.keys(), "a symbol stands for nothing")


def _check_tree(group: GroupState) -> None:
    seen = 0
    for root in group.tree.roots.values():
        for run in runs_below(root):
            seen += 1
            invariant(group.tree.runs.get(run.id) is run, "a run is not registered")
            _check_run(group, run)
    invariant(seen == len(group.tree.runs), "a run is registered that the tree does not hold")


def _check_run(group: GroupState, run: Run) -> None:
    tree, parent = group.tree, run.parent
    blocks = len(run.slots)
    invariant(blocks > 0, "a run is empty")
    invariant(run.end == parent.end + blocks, "a run ends elsewhere")
    full = (blocks - 1) * tree.block_bytes
    invariant(full < len(run.symbols) <= full + tree.block_bytes, "a run's content has another length")
    invariant(len(run.keys) == blocks * tree.key_bytes, "a run's keys have another length")
    invariant(parent.children.get(run.head) is run, "a parent does not know its child")
    invariant(bytes(run.symbols[: tree.block_bytes]) == run.head, "a run's first block is noted wrongly")
    invariant(run.order == sorted(run.children), "children are out of order")
    invariant(
        run.same_level_children == sum(c.level == run.level for c in run.children.values()),
        "children are counted wrongly",
    )
    invariant(not (run.partial and run.children), "a block hangs behind a partial one")
    invariant((run.refs == 0) or (run.released_at == 0), "a held block has a release stamp")
    if isinstance(parent, Run):
        invariant(parent.level <= run.level, "a primary block hangs behind a secondary one")
        invariant(parent.refs >= run.refs, "a block is held but its parent is not")
        invariant(not tree.may_join(run), "two runs with one state were not joined")
    else:
        invariant(isinstance(parent, Root), "a run hangs below nothing")


def _check_sequence(group: GroupState, index: int, sequence: Sequence, references: Counter[int]) -> None:
    table, tail = sequence.tables[index], sequence.path_ends[index]
    needed = -(-sequence.num_tokens // group.tokens_per_block)
    invariant(len(table) == needed, "a block table does not fit the tokens")
    invariant(len(set(table)) == len(table), "a block table names a slot twice")
    invariant(0 <= sequence.computed <= sequence.num_tokens, "more is computed than there is")
    path = list(group.path(tail))
    held = array("i", [slot for run in reversed(path) for slot in run.slots])
    invariant(table[: tail.end] == held, "a block table and the cached path disagree")
    invariant(all(run.level == PRIMARY for run in path), "a sequence holds a secondary block")
    references.update(run.id for run in path)


def _check_level(group: GroupState, level: Level, states: States) -> None:
    runs = [run for run in group.tree.runs.values() if run.level == level.index]
    for run in runs:
        invariant(all(level.run_ids[slot] == run.id for slot in run.slots), "a slot's owner is noted wrongly")
    unreferenced = np.isin(states, (SlotState.UNREFERENCED, SlotState.UNREFERENCED_IN_FLIGHT))
    invariant(level.unreferenced == unreferenced.sum(), "unreferenced blocks are counted wrongly")


def _check_copies(state: Contents, index: int) -> None:
    copies = [(number, copy) for number, copy in state.transfers.items() if copy.group == index]
    brought = {(number, copy.level): set(copy.slots) for number, copy in copies}
    for run in state.groups[index].tree.runs.values():
        if run.transfer:
            arriving = brought.get((run.transfer, run.level), set())
            invariant(arriving.issuperset(run.slots), "a block waits for a copy that does not bring it")
