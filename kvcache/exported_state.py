"""The whole state as one event, so that a fold can begin anywhere such an event stands.

Runs are written as they are, parents before children. Where runs begin and end carries no meaning (a reader
may find others after folding from the start), only what is cached, held and free, and in which order it goes.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from events.types import GroupExported, SequenceExported, StateExported, TransferExported
from kvcache.errors import invariant
from kvcache.group_state import GroupState
from kvcache.prefix_tree import SYMBOL_BYTES, Node, Run, runs_below
from kvcache.sequence import Sequence

if TYPE_CHECKING:
    from kvcache.state import CacheState

COLUMNS = 9
"""Numbers per run in `GroupExported.runs`."""


def export(state: CacheState) -> StateExported:
    """The state as an event."""
    return StateExported(
        groups=tuple(_export_group(group) for group in state.groups),
        sequences=tuple(_export_sequence(sequence) for sequence in state.sequences.values()),
        transfers=tuple(
            TransferExported(
                transfer_id,
                transfer.group,
                transfer.level,
                transfer.slots.tobytes(),
                transfer.handle,
                transfer.first_block,
            )
            for transfer_id, transfer in state.transfers.items()
        ),
        next_handle=state.next_handle,
        next_transfer=state.next_transfer,
        stamp=state.stamp,
        changed_blocks=state.changed_blocks,
    )


def _export_group(group: GroupState) -> GroupExported:
    numbers: list[int] = []
    symbols, keys, slots = bytearray(), bytearray(), array("i")
    index: dict[int, int] = {}
    for number, root in enumerate(group.tree.roots.values()):
        for run in runs_below(root):
            parent = index[run.parent.id] if isinstance(run.parent, Run) else -1 - number
            index[run.id] = len(index)
            last_tokens = run.partial or group.tokens_per_block
            numbers += [parent, len(run.slots), last_tokens, run.level, run.priority, run.expiry]
            numbers += [run.stamp, run.refs, run.transfer]
            symbols += run.symbols
            keys += run.keys
            slots += run.slots
    return GroupExported(
        namespaces=tuple(group.tree.roots),
        runs=array("q", numbers).tobytes(),
        symbols=bytes(symbols),
        slots=slots.tobytes(),
        keys=bytes(keys),
        free=(group.levels[0].free.tobytes(), group.levels[1].free.tobytes()),
        shared=array("q", [number for item in group.shared.items() for number in item]).tobytes(),
    )


def _export_sequence(sequence: Sequence) -> SequenceExported:
    return SequenceExported(
        handle=sequence.handle,
        request_id=sequence.request_id,
        namespace=sequence.namespace,
        num_tokens=sequence.num_tokens,
        tokens=sequence.tokens.tobytes(),
        num_prompt_tokens=sequence.num_prompt_tokens,
        computed=sequence.computed,
        stored=sequence.stored,
        slots=tuple(table.tobytes() for table in sequence.tables),
    )


def install(state: CacheState, event: StateExported) -> None:
    """Replace the state by an exported one."""
    from kvcache.state import Transfer  # state installs by this module

    invariant(state.created is not None, "a state was exported before the cache was created")
    invariant(len(event.groups) == len(state.groups), "the exported state has other groups")
    for number, (old, exported) in enumerate(zip(state.groups, event.groups, strict=True)):
        sizes = (old.levels[0].size, old.levels[1].size)
        state.groups[number] = group = GroupState(
            sizes, old.tokens_per_block, old.tree.block_bytes, old.tree.key_bytes
        )
        _install_group(state, group, exported)
    state.sequences.clear()
    state.handles.clear()
    for entry in event.sequences:
        _install_sequence(state, entry)
    state.transfers = {
        item.transfer: Transfer(item.group, item.level, array("i", item.slots), item.handle, item.first_block)
        for item in event.transfers
    }
    for transfer_id, transfer in state.transfers.items():
        state.groups[transfer.group].expect(transfer_id, transfer.level, transfer.slots)
    state.next_handle, state.next_transfer = event.next_handle, event.next_transfer
    state.stamp, state.changed_blocks = event.stamp, event.changed_blocks


def _install_group(state: CacheState, group: GroupState, exported: GroupExported) -> None:
    roots = [group.root(namespace, state.root_key(namespace)) for namespace in exported.namespaces]
    numbers = array("q", exported.runs)
    symbols = exported.symbols if state.tokens_recorded else exported.keys
    slots, runs = array("i", exported.slots), list[Run]()
    block = symbol_at = 0
    for at in range(0, len(numbers), COLUMNS):
        parent, count, last_tokens, *columns = numbers[at : at + COLUMNS]
        partial = last_tokens if last_tokens < group.tokens_per_block else 0
        size = count * group.tree.block_bytes
        if partial and state.tokens_recorded:
            size -= (group.tokens_per_block - partial) * SYMBOL_BYTES
        key_range = slice(block * group.tree.key_bytes, (block + count) * group.tree.key_bytes)
        run = group.tree.new_run(
            runs[parent] if parent >= 0 else roots[-1 - parent],
            bytearray(symbols[symbol_at : symbol_at + size]),
            slots[block : block + count],
            bytearray(exported.keys[key_range]),
        )
        run.partial = partial
        run.level, run.priority, run.expiry, run.stamp, run.refs, run.transfer = columns
        _place(group, run)
        runs.append(run)
        block += count
        symbol_at += size
    for run in runs:
        group.levels[run.level].add_leaf(run)
    for level, free in zip(group.levels, exported.free, strict=True):
        level.free = array("i", free)
    shared = array("q", exported.shared)
    group.shared = dict(zip(shared[::2], shared[1::2], strict=True))


def _place(group: GroupState, run: Run) -> None:
    group.tree.link(run)
    level = group.levels[run.level]
    level.own(run.slots, run.id)
    if not run.refs:
        level.unreferenced += len(run.slots)


def _install_sequence(state: CacheState, entry: SequenceExported) -> None:
    tails: list[Node] = []
    for group, stored, slots in zip(state.groups, entry.stored, entry.slots, strict=True):
        root = group.root(entry.namespace, state.root_key(entry.namespace))
        root.users += 1
        last = array("i", slots)[stored - 1] if stored else None
        tails.append(root if last is None else group.owner(0, last))
    tokens = array("i", entry.tokens if state.tokens_recorded else bytes(SYMBOL_BYTES * entry.num_tokens))
    sequence = Sequence(entry.handle, entry.request_id, entry.namespace, tokens, tails)
    sequence.num_prompt_tokens, sequence.computed = entry.num_prompt_tokens, entry.computed
    sequence.tables = [array("i", slots) for slots in entry.slots]
    state.sequences[entry.handle] = sequence
    state.handles[entry.request_id] = entry.handle
