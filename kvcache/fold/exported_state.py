"""Groups and sequences as an exported state has them (`CacheState.export`), and made of it again.

Runs are written as they are, parents before children. Where runs begin and end carries no meaning (a reader
may find others after folding from the start), only what is cached, held and blank, and in which order it goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

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
from kvcache.fold.group import MAX_TURN, Group, UseCounts
from kvcache.fold.prefix_tree import Node, Run, runs_below
from kvcache.fold.sequence import Sequence
from kvcache.fold.sliding_group import SlidingGroup


def export_group(group: Group) -> GroupExported:
    """All that a group has."""
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
    """All that there is of a running sequence."""
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
        keys=bytes(sequence.keys),
        retention=sequence.retention,
        inherited=sequence.inherited,
        encoder=sequence.encoder.handle if sequence.encoder is not None else 0,
    )


def install_group(group: Group, exported: GroupExported, root_key: Callable[[Namespace], bytes]) -> None:
    """Fill a new group with what an exported one has."""
    roots = [group.root(namespace, root_key(namespace)) for namespace in exported.namespaces]
    columns = _Columns(group, exported)
    runs = list[Run]()
    for parent, numbers in columns.rows():
        run = columns.run(runs[parent] if parent >= 0 else roots[-1 - parent], *numbers)
        runs.append(run)
        group.tree.link(run)
        group.place(run, columns.blocks(run))
    columns.check_used_up()
    if group.uses is not None:
        _install_uses(group.uses, runs, array("q", exported.uses))
    for level, free in zip(group.levels, exported.blank_slots, strict=True):
        level.blank = array("i", free)
    if exported.checksums:
        secondary = group.levels[SECONDARY]
        whole = len(exported.checksums) == CHECKSUM_BYTES * secondary.size
        invariant(whole, "there is no checksum for each slot")
        secondary.checksums = np.frombuffer(exported.checksums, np.uint64).copy()
    shared = array("q", exported.shared)
    group.shared = dict(zip(shared[::2], shared[1::2], strict=True))


class _Columns:
    """The columns of a group, from which the runs are cut one after the other."""

    def __init__(self, group: Group, exported: GroupExported) -> None:
        self._group = group
        self._with_tokens = group.tokens_recorded
        self._numbers = array("q", exported.runs)
        self._symbols = exported.symbols if group.tokens_recorded else exported.keys
        self._slots = array("i", exported.slots)
        self._keys = exported.keys
        self._of_blocks = array("q", exported.blocks)
        sliding = len(self._slots) if isinstance(group, SlidingGroup) else 0
        invariant(len(self._of_blocks) == sliding * BLOCK_COLUMNS, "the exported blocks are cut short")
        self._block = self._symbol = 0
        whole = len(self._keys) == len(self._slots) * group.tree.key_bytes
        invariant(whole, "the exported keys are not those of the exported blocks")

    def rows(self) -> Iterator[tuple[int, array[int]]]:
        """Each run's parent and its other numbers."""
        invariant(len(self._numbers) % RUN_COLUMNS == 0, "the exported runs are cut short")
        for at in range(0, len(self._numbers), RUN_COLUMNS):
            yield self._numbers[at], self._numbers[at + 1 : at + RUN_COLUMNS]

    def run(self, parent: Node, count: int, last_tokens: int, level: int, *rest: int) -> Run:
        """The next run."""
        group, begin, symbol = self._group, self._block, self._symbol
        invariant(0 < count <= len(self._slots) - begin, "an exported run has an impossible number of blocks")
        invariant(
            0 < last_tokens <= group.tokens_per_block, "an exported block has an impossible number of tokens"
        )
        invariant(level in (PRIMARY, SECONDARY), "there is no such level")
        partial = last_tokens % group.tokens_per_block
        size = count * group.tree.block_bytes
        if partial and self._with_tokens:
            size -= (group.tokens_per_block - partial) * TOKEN_BYTES
        self._block, self._symbol = begin + count, symbol + size
        key_bytes = group.tree.key_bytes
        run = group.tree.new_run(
            parent,
            bytearray(self._symbols[symbol : self._symbol]),
            self._slots[begin : self._block],
            bytearray(self._keys[begin * key_bytes : self._block * key_bytes]),
        )
        run.partial, run.level = partial, LevelIndex(level)
        run.priority, run.duration, run.expiry, run.released_at, run.refs, run.transfer = rest
        return run

    def blocks(self, run: Run) -> Iterator[tuple[int, ...]]:
        """What there is of each block of the last run."""
        for block in range(self._block - len(run.slots), self._block):
            yield tuple(self._of_blocks[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS])

    def check_used_up(self) -> None:
        """The runs are all there is."""
        fits = self._block == len(self._slots) and self._symbol == len(self._symbols)
        invariant(fits, "the exported runs do not fit their blocks and tokens")


def _install_uses(uses: UseCounts, runs: list[Run], numbers: array[int]) -> None:
    invariant(len(numbers) > len(runs), "the exported credits are cut short")
    for run, credit in zip(runs, numbers, strict=False):
        run.credit = credit
        invariant(credit >= 0 and run.turn <= MAX_TURN, "a run has an impossible credit")
    uses.install(numbers[len(runs) :])
