"""The whole state as one event, so that a fold can begin anywhere such an event stands.

Runs are written as they are, parents before children. Where runs begin and end carries no meaning (a reader
may find others after folding from the start), only what is cached, held and blank, and in which order it goes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from events.ids import MAX_NUMBER, GroupIndex, Handle, LevelIndex
from events.packed import TOKEN_BYTES
from events.structs import BLOCK_COLUMNS, RUN_COLUMNS
from events.types import (
    PRIMARY,
    SECONDARY,
    GroupExported,
    PinExported,
    SequenceExported,
    StateExported,
    TransferExported,
)
from kvcache.errors import invariant
from kvcache.fold.check import check_slots
from kvcache.fold.checksums import export_checksums, install_checksums
from kvcache.fold.contents import AnyGroup, Contents, Transfer
from kvcache.fold.counting_group import CountingGroup
from kvcache.fold.group_state import GroupState
from kvcache.fold.pin import Pin
from kvcache.fold.prefix_tree import Node, PathEnd, Run, runs_below
from kvcache.fold.sequence import DETACHED, Sequence
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.use_counts import MAX_TURN


def export(state: Contents) -> StateExported:
    """The state as an event."""
    return StateExported(
        groups=tuple(_export_group(group) for group in state.groups),
        sequences=tuple(_export_sequence(sequence) for sequence in state.sequences.values()),
        transfers=tuple(
            TransferExported(number, copy.group, copy.level, copy.slots.tobytes(), copy.handle)
            for number, copy in state.transfers.items()
        ),
        next_handle=state.next_handle,
        next_transfer=state.next_transfer,
        releases=state.releases,
        changed_blocks=state.changed_blocks,
        symbols=tuple(page for _, page in sorted(state.symbols.pages.items())),
        forget_symbols_at=state.symbols.forget_at,
        refused=tuple(state.refused),
        clock=state.clock,
        pins=tuple(
            PinExported(number, pin.request_id, pin.named, tuple(slots.tobytes() for slots in pin.slots))
            for number, pin in state.pins.items()
        ),
        next_pin=state.next_pin,
    )


def _export_group(group: AnyGroup) -> GroupExported:
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
    if isinstance(group, SlidingGroup):
        slots, blocks = group.exported(slots)
    elif isinstance(group, CountingGroup):
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
        checksums=export_checksums(group),
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
        keys=bytes(sequence.keys),
        retention=sequence.retention,
        inherited=sequence.inherited,
        encoder=sequence.encoder.handle if sequence.encoder is not None else 0,
    )


def install(state: Contents, event: StateExported) -> None:
    """Replace the state by an exported one. Raises `InvariantViolated` if it is none that a cache can have."""
    invariant(state.created is not None, "a state was exported before the cache was created")
    invariant(len(event.groups) == len(state.groups), "the exported state has other groups")
    for number, exported in enumerate(event.groups):
        state.groups[number] = state.make_group(number)
        _install_group(state, state.groups[number], exported)
    state.sequences.clear()
    state.handles.clear()
    state.symbols.install(event)
    state.rich.clear()
    state.refused = dict.fromkeys(event.refused)
    readers = Counter(entry.encoder for entry in event.sequences if entry.encoder)
    for entry in event.sequences:
        invariant(entry.handle < event.next_handle, "a running sequence has a handle of the future")
        _install_sequence(state, entry, readers[entry.handle])
    invariant(len(state.sequences) == len(event.sequences), "two sequences have one handle")
    for entry in event.sequences:
        if entry.encoder:
            state.sequences[entry.handle].encoder = state.sequences[entry.encoder]
    state.transfers = {
        item.transfer: Transfer(GroupIndex(item.group), item.level, array("i", item.slots), item.handle)
        for item in event.transfers
    }
    for transfer in state.transfers.values():
        invariant(transfer.level in (PRIMARY, SECONDARY), "there is no such level")
        invariant(0 <= transfer.group < len(state.groups), "there is no such group")
    numbers = (event.next_handle, event.next_transfer)
    invariant(min(numbers) > 0 and max(numbers) <= MAX_NUMBER, "no epoch has such handles or transfers")
    state.next_handle, state.next_transfer = numbers
    state.releases, state.changed_blocks, state.clock = event.releases, event.changed_blocks, event.clock
    counting = any(isinstance(group, CountingGroup) for group in state.groups)
    invariant(not counting or 0 <= state.releases <= MAX_TURN, "no cache has released so often")
    _install_pins(state, event)
    check_slots(state)


def _install_pins(state: Contents, event: StateExported) -> None:
    state.pins.clear()
    for entry in event.pins:
        invariant(0 < entry.pin < event.next_pin, "a pin has a number of the future")
        slots, ends = [array("i", packed) for packed in entry.slots], list[Run | None]()
        invariant(len(slots) == len(state.groups), "a pin holds blocks of other windows")
        for group, own in zip(state.groups, slots, strict=True):
            full = entry.named and len(own) and not isinstance(group, SlidingGroup)
            ends.append(group.run_at(PRIMARY, own[-1]) if full else None)  # type: ignore[union-attr]
        state.pins[entry.pin] = pin = Pin(entry.request_id, slots, ends)
        pin.named = entry.named
    state.next_pin = event.next_pin


def _install_group(state: Contents, group: AnyGroup, exported: GroupExported) -> None:
    roots = [group.root(namespace, state.root_key(namespace)) for namespace in exported.namespaces]
    columns = _Columns(state, group, exported)
    runs = list[Run]()
    for parent, numbers in columns.rows():
        run = columns.run(runs[parent] if parent >= 0 else roots[-1 - parent], *numbers)
        runs.append(run)
        group.tree.link(run)
        if isinstance(group, SlidingGroup):
            group.place(run, columns.blocks(run))
        else:
            _place(group, run)
    columns.check_used_up()
    if isinstance(group, CountingGroup):
        _install_uses(group, runs, array("q", exported.uses))
    for level, free in zip(group.levels, exported.blank_slots, strict=True):
        level.blank = array("i", free)
    install_checksums(group, exported.checksums)
    shared = array("q", exported.shared)
    group.shared = dict(zip(shared[::2], shared[1::2], strict=True))


class _Columns:
    """The columns of a group, from which the runs are cut one after the other."""

    def __init__(self, state: Contents, group: AnyGroup, exported: GroupExported) -> None:
        self._group = group
        self._with_tokens = state.tokens_recorded
        self._numbers = array("q", exported.runs)
        self._symbols = exported.symbols if state.tokens_recorded else exported.keys
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


def _place(group: GroupState, run: Run) -> None:
    level = group.levels[run.level]
    level.own(run.slots, run.id)
    if not run.refs:
        level.unreferenced += len(run.slots)


def _install_uses(group: CountingGroup, runs: list[Run], numbers: array[int]) -> None:
    invariant(len(numbers) > len(runs), "the exported credits are cut short")
    for run, credit in zip(runs, numbers, strict=False):
        run.credit = credit
        invariant(credit >= 0 and run.turn <= MAX_TURN, "a run has an impossible credit")
    group.uses.install(numbers[len(runs) :])


def _install_sequence(state: Contents, entry: SequenceExported, readers: int) -> None:
    tables = [array("i", slots) for slots in entry.slots]
    ends, detached = list[Node](), list[int]()
    for group, stored, table in zip(state.groups, entry.stored, tables, strict=True):
        root = group.root(entry.namespace, state.root_key(entry.namespace))
        root.users += 1
        invariant(0 <= stored <= len(table), "a sequence has more cached blocks than blocks")
        detached.append(next((n for n, slot in enumerate(table) if slot != DETACHED), len(table)))
        if isinstance(group, SlidingGroup):
            ends.append(PathEnd(stored))
            continue
        ends.append(group.run_at(PRIMARY, table[stored - 1]) if stored else root)
        invariant(ends[-1].end == stored, "a sequence's cached blocks end inside a run")
    tokens = state.tokens_of(
        entry.num_tokens, entry.tokens, state.longest_input if readers else state.longest
    )
    invariant(not (readers and entry.encoder), "an encoder's input reads another one")
    invariant(
        0 < entry.num_prompt_tokens <= entry.num_tokens, "a prompt is longer than its sequence, or empty"
    )
    sequence = Sequence(Handle(entry.handle), entry.request_id, entry.namespace, tokens, ends)
    sequence.num_prompt_tokens, sequence.computed = entry.num_prompt_tokens, entry.computed
    sequence.tables, sequence.detached, sequence.keys = tables, detached, bytearray(entry.keys)
    sequence.retention, sequence.inherited = entry.retention, entry.inherited
    state.all_kept_alike = state.all_kept_alike and entry.retention is None and not entry.inherited
    state.sequences[entry.handle] = sequence
    sequence.holders = readers
    if not readers:
        state.handles[entry.request_id] = entry.handle
    state.note_rich(entry.handle, entry.tokens)
