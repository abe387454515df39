"""Inputs of attention kernels for a step: where the K/V of its tokens goes, and where that of each sequence lies.

Each is of one window, of the sequences in the order in which they are named, and of a step that computes some tokens
of each: those from `starts` up to `stops`. By default these are all that are not computed yet: the next token of a
sequence that decodes, or what is left of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt

from events.types import RequestId
from kvcache.calls.guard import Guard, exclusive
from kvcache.config import KVCacheConfig
from kvcache.decide.block_manager import BlockManager
from kvcache.device.transfer_checks import TransferChecks
from kvcache.errors import StaleTables, UnknownRequest, UsageError, shown
from kvcache.fold.sequence import DETACHED, Sequence
from kvcache.fold.state import CacheState
from kvcache.inputs import checked_integer, checked_natural, listed
from kvcache.layout import Layout
from kvcache.results import BlockTable, PagedTables

if TYPE_CHECKING:
    from kvcache.pools import Pools

Column = npt.NDArray[Any]
NO_SLOT = -1
"""Entry of a mapping that is longer than the tokens of the step."""
MAX_SLOT = int(np.iinfo(np.int32).max)


class _Note(NamedTuple):
    """Sequences, or encoders' inputs, of a table, and the values that it was made from."""

    sequences: tuple[Sequence, ...]
    group: int
    of_step: bool
    made_from: list[tuple[Any, ...]]


class TableTracker:
    """Record of the values that each table was made from, as long as the table lives.

    A count of changes would not do: it grows with each call of an engine, whether or not these tables have changed.
    """

    def __init__(self, running: Mapping[int, Sequence]) -> None:
        self._running = running
        """Running sequences by handle."""
        self._notes: dict[int, tuple[ref[Any], _Note]] = {}

    def __len__(self) -> int:
        """Return how many tables are remembered."""
        return len(self._notes)

    def note(self, tables: Items[Any], sequences: Items[Sequence], group: int, *, of_step: bool) -> None:
        """Note objects made now from these sequences; `of_step`: they also depend on the tokens of a step."""
        made_from = [_made_from(each, group, of_step=of_step) for each in sequences]
        for table in tables:
            self._keep(table, _Note(tuple(sequences), group, of_step, made_from))

    def _keep(self, table: Any, note: _Note) -> None:
        key = id(table)
        self._notes[key] = ref(table, lambda _: self._notes.pop(key, None)), note

    def check(self, table: Any) -> tuple[Sequence, ...]:
        """Raise `StaleTables` if this table would differ if made now; returns its sequences.

        Raises `UsageError` for an object that was not given out here.
        """
        reference, note = self._notes.get(id(table), (None, None))
        if note is None or reference is None or reference() is not table:
            raise UsageError(
                f"tables.check: this {type(table).__name__} was not returned by this manager: pass tables as "
                "they were returned, or the buffers passed as out, not copies of them on a device"
            )
        for sequence, before in zip(note.sequences, note.made_from, strict=True):
            runs = self._running.get(sequence.handle) is sequence
            if not runs or _made_from(sequence, note.group, of_step=note.of_step) != before:
                raise StaleTables(sequence.request_id)
        return note.sequences


def _made_from(sequence: Sequence, group: int, *, of_step: bool) -> tuple[Any, ...]:
    """Return the values that a table of a sequence is made from."""
    table = tuple(sequence.tables[group])
    return (table, sequence.computed, sequence.num_tokens) if of_step else (table,)


class BlockTables:
    """Block tables and slot mappings. Changes nothing. Bound to the manager's thread, since it reads the live state."""

    def __init__(
        self,
        guard: Guard,
        config: KVCacheConfig,
        layout: Layout,
        state: CacheState,
        blocks: BlockManager,
        transfer_checks: TransferChecks,
        pools: Pools | None,
    ) -> None:
        self._guard, self._size, self._max_length = guard, config.tokens_per_block, config.max_sequence_length
        self._windows, self._own = [group.window for group in layout.groups], layout.windows
        self._blocks, self._transfer_checks, self._pools = blocks, transfer_checks, pools
        self._handles = state.handles
        self._issued_tables = TableTracker(state.sequences) if config.debug_check_tables else None

    def one(self, request_id: RequestId, window: int | None) -> BlockTable:
        """See `KVCacheManager.block_table`."""
        group = self._group_of(window)
        return self._table_of(self._blocks.running.sequence(request_id), group)

    @exclusive
    def of_admission(self, request_id: RequestId, handle: int) -> tuple[BlockTable, ...]:
        """Return the block tables of one admission: a later one of the same id is another sequence."""
        if self._handles.get(request_id) != handle:
            raise UnknownRequest(request_id)
        sequence = self._blocks.running.sequence(request_id)
        return tuple(self._table_of(sequence, group) for group in range(len(sequence.tables)))

    def _table_of(self, sequence: Sequence, group: int) -> BlockTable:
        self._transfer_checks.refuse_unreadable([sequence])
        table = self._presented(np.array(sequence.part_in(group).tables[group], np.int32))
        self._note([table], [sequence.part_in(group)], group)
        return table

    def several(self, request_ids: Iterable[RequestId], window: int | None) -> BlockTable:
        """See `KVCacheManager.block_tables`."""
        group = self._group_of(window)
        sequences = self._readable(request_ids, group)
        tables = [sequence.tables[group] for sequence in sequences]
        padded = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        presented = self._presented(padded)
        self._note([presented], sequences, group)
        return presented

    @exclusive
    def check(self, *tables: BlockTable | Items[BlockTable]) -> None:
        """Raise unless a forward pass may use these tables now, as they were given out; call it right before.

        With `debug_check_tables` only, else nothing is checked. `StaleTables`: a call has since changed the content of
        one of them, or for those of a step (`slot_mapping`, `paged`, `sequence_lengths`) the computed tokens.
        `TransfersPending`, `TransfersNotAwaited`: copies were not started, or nothing waits for their ticket.
        `ComputationLost`: a copy failed. `UsageError` for an object that is no table of this manager, as a copy on a
        device.
        """
        if self._issued_tables is None:
            return
        for each in tables:
            for table in each if isinstance(each, tuple) else (each,):
                self._transfer_checks.refuse_unreadable(self._issued_tables.check(table))
        self._transfer_checks.refuse_not_awaited()

    @exclusive
    def padded(
        self,
        request_ids: Items[RequestId],
        window: int | None = None,
        *,
        filler: int = 0,
        out: Any = None,
    ) -> BlockTable:
        """Return block tables with every entry readable: int32 [sequences, most blocks], for kernels that take a
        rectangle (flash-attn's ``block_table``, vLLM's, FlashAttention 3's ``page_table``).

        As `KVCacheManager.block_tables`, but padded with `filler`, a slot; and where a block was detached from a
        sliding window, a slot that the sequence still holds is in its place, because kernels load ahead of their mask.
        `out`, an int32 array or tensor on the host with as many rows and columns at least (a reused pinned buffer), is
        written to; the result is its beginning, and the rest of it is filled as well.
        """
        padding = checked_natural(filler, "filler")
        if padding > MAX_SLOT:
            raise UsageError(f"filler must be a slot, at most {MAX_SLOT}")
        group = self._group_of(window)
        sequences = self._readable(request_ids, group)
        tables = [_safe(sequence, group) for sequence in sequences]
        rectangle = np.full((len(tables), max(map(len, tables), default=0)), padding, np.int32)
        for row, table in zip(rectangle, tables, strict=True):
            row[: len(table)] = table
        return self._result(rectangle, out, padding, sequences, group)

    @exclusive
    def paged(
        self,
        request_ids: Items[RequestId],
        window: int | None = None,
        *,
        stops: Items[int] | None = None,
    ) -> PagedTables:
        """Return block tables in rows one after the other, as FlashInfer's paged wrappers take them (``kv_indptr``,
        ``kv_indices``, ``kv_last_page_len``), all int32: of the blocks with each sequence's tokens up to `stops`.

        Blocks that a sliding window has left are as in `padded`: positions stay the same.
        """
        group = self._group_of(window)
        sequences = self._readable(request_ids, group)
        ends = self._ends(sequences, group, stops)
        counts = [-(-end // self._size) for end in ends]
        rows = [_safe(sequence, group)[:blocks] for sequence, blocks in zip(sequences, counts, strict=True)]
        indptr = np.array([0, *accumulate(counts)], np.int32)
        indices = np.concatenate(rows) if rows else np.empty(0, np.int32)
        last = np.array([(end - 1) % self._size + 1 if end else 0 for end in ends], np.int32)
        tables = PagedTables(*map(self._presented, (indptr, indices, last)))
        self._note(tables, sequences, group, of_step=True)
        return tables

    @exclusive
    def slot_mapping(
        self,
        request_ids: Items[RequestId],
        window: int | None = None,
        *,
        starts: Items[int] | None = None,
        stops: Items[int] | None = None,
        out: Any = None,
    ) -> BlockTable:
        """Return the place of the K/V of this step's tokens, int64 [tokens], sequence by sequence: slot ×
        tokens_per_block + offset, as vLLM's and FlashAttention's ``slot_mapping``, an index into a layer's tokens
        (`pools.kv`).

        `out`: as in `padded`, for int64 and one dimension; the rest of it is -1, which kernels skip.
        """
        group = self._group_of(window)
        sequences = self._readable(request_ids, group)
        ends = self._ends(sequences, group, stops)
        begins = self._begins(sequences, starts, ends)
        rows = [
            self._places(sequence, group, begin, end)
            for sequence, begin, end in zip(sequences, begins, ends, strict=True)
        ]
        mapping = np.concatenate(rows) if rows else np.empty(0, np.int64)
        return self._result(mapping, out, NO_SLOT, sequences, group, of_step=True)

    @exclusive
    def sequence_lengths(
        self,
        request_ids: Items[RequestId],
        window: int | None = None,
        *,
        stops: Items[int] | None = None,
        out: Any = None,
    ) -> BlockTable:
        """Return the tokens of each sequence after the step, int32 [sequences] (``seq_lens``, ``cache_seqlens``):
        `stops`, or all of them. The same in all windows, so only `CROSS_WINDOW` need be given, for encoders' inputs.
        """
        group = 0 if window is None else self._group_of(window)
        sequences = self._readable(request_ids, group)
        ends = np.array(self._ends(sequences, group, stops), np.int32)
        return self._result(ends, out, 0, sequences, group, of_step=True)

    # -- arguments

    def _group_of(self, window: int | None) -> int:
        """Return the group of a window, as callers give it."""
        windows, own = self._windows, self._own
        if window is None:
            if len(own) > 1:
                raise UsageError(f"the cache has several windows: pass window, one of {windows}")
            return 0
        if checked_integer(window, "a window") in windows:
            return windows.index(window)
        if own[-1].kind == "full" and window >= self._max_length:
            return len(own) - 1
        raise UsageError(f"no window of {window} tokens; the windows are {windows}")

    def _readable(self, request_ids: Iterable[RequestId], group: int) -> list[Sequence]:
        """Return the sequences, or for cross attention the encoders' inputs that they read."""
        sequences = [self._blocks.running.sequence(each) for each in listed(request_ids, "request_ids")]
        self._transfer_checks.refuse_unreadable(sequences)
        return [sequence.part_in(group) for sequence in sequences]

    def _ends(self, sequences: list[Sequence], group: int, stops: Items[int] | None) -> list[int]:
        """Return the end of the step's tokens for each sequence."""
        if stops is None:
            # The tokens of encoders' inputs fill whole blocks, padded with zeros.
            ends = [each.num_prompt_tokens if each.holders else each.num_tokens for each in sequences]
        else:
            ends = _numbers(stops, sequences, "stops")
        for sequence, end in zip(sequences, ends, strict=True):
            slots = len(sequence.tables[group]) * self._size
            if end > slots:
                raise UsageError(
                    f"request {shown(sequence.request_id)} has slots for only {slots} tokens, so {end} cannot "
                    "be computed: reserve more, or pass stops"
                )
        return ends

    def _begins(self, sequences: list[Sequence], starts: Items[int] | None, ends: list[int]) -> list[int]:
        if starts is None:
            return [min(sequence.computed, end) for sequence, end in zip(sequences, ends, strict=True)]
        begins = _numbers(starts, sequences, "starts")
        if any(begin > end for begin, end in zip(begins, ends, strict=True)):
            raise UsageError("starts must not exceed stops")
        return begins

    def _places(self, sequence: Sequence, group: int, begin: int, end: int) -> Column:
        size, table = self._size, sequence.tables[group]
        if begin < end and begin // size < sequence.detached[group]:
            raise UsageError(
                f"request {shown(sequence.request_id)}: the block of token {begin} has left the sliding "
                "window, so it cannot be written; start after it"
            )
        if end - begin == 1:  # decoding: without numpy's overhead
            return np.array([table[begin // size] * size + begin % size], np.int64)
        positions = np.arange(begin, end)
        return np.array(table, np.int64)[positions // size] * size + positions % size

    # -- results

    def _note(
        self, tables: Items[BlockTable], sequences: Items[Sequence], group: int, *, of_step: bool = False
    ) -> None:
        """Record these tables of sequences or encoders' inputs as given out, for `check`."""
        if self._issued_tables is not None:
            self._issued_tables.note(tables, sequences, group, of_step=of_step)

    def _presented(self, column: Column) -> BlockTable:
        return column if self._pools is None else self._pools.block_table(column)

    def _result(
        self,
        values: Column,
        out: Any,
        filler: int,
        sequences: list[Sequence],
        group: int,
        *,
        of_step: bool = False,
    ) -> BlockTable:
        """Return these values, or the beginning of `out` with them, after filling the rest of it."""
        if out is None:
            result = self._presented(values)
            self._note([result], sequences, group, of_step=of_step)
            return result
        target, within = _target(out, values), tuple(slice(length) for length in values.shape)
        target[...] = filler
        target[within] = values
        written: BlockTable = out[within]
        self._note([written, out], sequences, group, of_step=of_step)
        return written


def _safe(sequence: Sequence, group: int) -> Column:
    """Return a block table with a slot of the sequence's own wherever it has none."""
    table, first = np.array(sequence.tables[group], np.int32), sequence.detached[group]
    if first:
        table[:first] = table[first] if first < len(table) else 0
    assert DETACHED not in table
    return table


def _numbers(given: Items[int], sequences: list[Sequence], what: str) -> list[int]:
    numbers = [checked_natural(each, what) for each in listed(given, what)]
    if len(numbers) != len(sequences):
        raise UsageError(
            f"{what} must have one number for each of {len(sequences)} sequences, not {len(numbers)}"
        )
    return numbers


def _target(out: Any, values: Column) -> Column:
    """Return the memory of `out`, which has room for these values."""
    try:
        # Shares the memory of arrays and of tensors on the host, as intended.
        target = out.numpy() if hasattr(out, "numpy") else np.asarray(out)
    except Exception:  # noqa: BLE001
        target = None
    enough = (
        target is not None
        and target.dtype == values.dtype
        and target.ndim == values.ndim
        and all(has >= needed for has, needed in zip(target.shape, values.shape, strict=True))
        and target.flags.writeable
        and np.shares_memory(target, out.numpy() if hasattr(out, "numpy") else out)
    )
    if not enough:
        raise UsageError(
            f"out must be a writable {values.dtype} array or tensor on the host of at least {list(values.shape)}"
        )
    return target  # type: ignore[return-value]
