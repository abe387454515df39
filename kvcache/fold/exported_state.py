"""Exporting groups and sequences (`CacheState.export`), and rebuilding them from an exported state.

Runs are written as they are, parents before children. Run boundaries carry no meaning (a reader may find others after
folding from the start), only what is cached, held and blank, and the eviction order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from events.ids import LevelIndex
from events.packed import CHECKSUM_BYTES, TOKEN_BYTES
from events.structs import BLOCK_COLUMNS, RUN_COLUMNS
from events.types import (
    PRIMARY,
    SECONDARY,
    GroupExported,
    Namespace,
    SequenceExported,
)
from kvcache.errors import invariant
from kvcache.fold.group import MAX_TURN, UseCounts
from kvcache.fold.prefix_tree import Run, runs_below
from kvcache.fold.sequence import Sequence
from kvcache.fold.sliding_group import AnyGroup, SlidingGroup


def export_group(group: AnyGroup) -> GroupExported:
    """Export all of a group."""
    numbers: list[int] = []
    symbols, keys, slots, put_off = bytearray(), bytearray(), array("i"), array("q")
    index: dict[int, int] = {}
    for number, root in enumerate(group.tree.roots.values()):
        for run in runs_below(root):
            parent = index[run.parent.id] if isinstance(run.parent, Run) else -1 - number
            index[run.id] = len(index)
            numbers += [parent, len(run.slots), run.partial or group.tokens_per_block]
            numbers += [run.level, run.priority, run.duration, run.expiry]
            numbers += [run.released_at, run.refs, run.transfer]
            put_off.append(run.credit)
            symbols += run.symbols
            keys += run.keys
            slots += run.slots
    blocks = uses = b""
    checksums = group.landed_checksums()
    if isinstance(group, SlidingGroup):
        slots, blocks = group.exported(slots)
    elif group.uses is not None:
        uses = (put_off + group.uses.numbers()).tobytes()
    return GroupExported(
        namespaces=tuple(group.tree.roots),
        runs=array("q", numbers).tobytes(),
        symbols=bytes(symbols),
        slots=slots.tobytes(),
        keys=bytes(keys),
        blank_slots=(group.levels[0].blank.tobytes(), group.levels[1].blank.tobytes()),
        shared=array("q", [number for item in sorted(group.shared.items()) for number in item]).tobytes(),
        blocks=blocks,
        uses=uses,
        checksums=b"" if checksums is None else checksums.tobytes(),
    )


def export_sequence(sequence: Sequence) -> SequenceExported:
    """Export all of a running sequence."""
    return SequenceExported(
        handle=sequence.handle,
        request_id=sequence.request_id,
        namespace=sequence.namespace,
        num_tokens=sequence.num_tokens,
        tokens=sequence.tokens.tobytes(),
        num_prompt_tokens=sequence.num_prompt_tokens,
        computed=sequence.computed,
        stored=sequence.stored,
        slots=tuple(slots.tobytes() for slots in (*sequence.tables, *sequence.replaced)),
        keys=bytes(sequence.keys),
        retention=sequence.retention,
        inherited=sequence.inherited,
        encoder=sequence.encoder.handle if sequence.encoder is not None else 0,
    )


def install_group(group: AnyGroup, exported: GroupExported, root_key: Callable[[Namespace], bytes]) -> None:
    """Fill a new group from an exported one."""
    runs = _install_runs(group, exported, root_key)
    if group.uses is not None:
        _install_uses(group.uses, runs, array("q", exported.uses))
    for level, free in zip(group.levels, exported.blank_slots, strict=True):
        level.blank = array("i", free)
    if exported.checksums:
        secondary = group.levels[SECONDARY]
        whole = len(exported.checksums) == CHECKSUM_BYTES * secondary.size
        invariant(whole, "the number of checksums differs from the number of slots")
        secondary.checksums = np.frombuffer(exported.checksums, np.uint64).copy()
    shared = array("q", exported.shared)
    group.shared = dict(zip(shared[::2], shared[1::2], strict=True))


def _install_runs(
    group: AnyGroup, exported: GroupExported, root_key: Callable[[Namespace], bytes]
) -> list[Run]:
    """Cut the runs from the columns, one after the other."""
    size, key_bytes, block_bytes = group.tokens_per_block, group.tree.key_bytes, group.tree.block_bytes
    roots = [group.root(namespace, root_key(namespace)) for namespace in exported.namespaces]
    numbers, slots, keys = array("q", exported.runs), array("i", exported.slots), exported.keys
    contents = exported.symbols if group.tokens_recorded else keys
    columns = array("q", exported.blocks)
    of_blocks = len(slots) * BLOCK_COLUMNS if isinstance(group, SlidingGroup) else 0
    invariant(len(columns) == of_blocks, "the exported blocks are incomplete")
    invariant(len(keys) == len(slots) * key_bytes, "the exported keys do not match the exported blocks")
    invariant(len(numbers) % RUN_COLUMNS == 0, "the exported runs are incomplete")
    runs, begin, content = list[Run](), 0, 0
    for at in range(0, len(numbers), RUN_COLUMNS):
        parent, count, last_tokens, level, *rest = numbers[at : at + RUN_COLUMNS]
        end, partial = begin + count, last_tokens % size
        invariant(begin < end <= len(slots), "an exported run has an impossible number of blocks")
        invariant(0 < last_tokens <= size, "an exported block has an impossible number of tokens")
        invariant(level in (PRIMARY, SECONDARY), "unknown level")
        length = count * block_bytes
        if partial and group.tokens_recorded:
            length -= (size - partial) * TOKEN_BYTES
        run = group.tree.new_run(
            runs[parent] if parent >= 0 else roots[-1 - parent],
            bytearray(contents[content : content + length]),
            slots[begin:end],
            bytearray(keys[begin * key_bytes : end * key_bytes]),
        )
        run.partial, run.level = partial, LevelIndex(level)
        run.priority, run.duration, run.expiry, run.released_at, run.refs, run.transfer = rest
        runs.append(run)
        group.tree.link(run)
        rows = columns[begin * BLOCK_COLUMNS : end * BLOCK_COLUMNS]
        group.place(run, (rows[row : row + BLOCK_COLUMNS] for row in range(0, len(rows), BLOCK_COLUMNS)))
        begin, content = end, content + length
    fits = begin == len(slots) and content == len(contents)
    invariant(fits, "the exported runs do not fit their blocks and tokens")
    return runs


def _install_uses(uses: UseCounts, runs: list[Run], numbers: array[int]) -> None:
    invariant(len(numbers) > len(runs), "the exported credits are incomplete")
    for run, credit in zip(runs, numbers, strict=False):
        run.credit = credit
        invariant(credit >= 0 and run.turn <= MAX_TURN, "a run has an impossible credit")
    uses.install(numbers[len(runs) :])
