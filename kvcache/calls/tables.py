"""What attention kernels take of a step: where the K/V of its tokens goes, and where that of each sequence lies.

Each is of one window, of the sequences in the order in which they are named, and of a step that computes some tokens
of each: those from `starts` up to `stops`. By default these are all that are not computed yet: the next token of a
sequence that decodes, or what is left of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from events.types import RequestId
from kvcache.calls.query import Query
from kvcache.decide.block_manager import BlockManager
from kvcache.device.readiness import Readiness
from kvcache.errors import UsageError, shown
from kvcache.fold.sequence import DETACHED, Sequence
from kvcache.guard import Guard, exclusive
from kvcache.inputs.arguments import checked_natural, listed
from kvcache.results import BlockTable, PagedTables

if TYPE_CHECKING:
    from kvcache.pools import Pools

Column = npt.NDArray[Any]
NO_SLOT = -1
"""In a mapping that is longer than the step has tokens."""
MAX_SLOT = int(np.iinfo(np.int32).max)


class Tables:
    """Changes nothing. Bound to the manager's thread, since it reads the live state."""

    def __init__(
        self,
        guard: Guard,
        tokens_per_block: int,
        blocks: BlockManager,
        query: Query,
        readiness: Readiness,
        pools: Pools | None,
    ) -> None:
        self._guard, self._size = guard, tokens_per_block
        self._blocks, self._query, self._readiness, self._pools = blocks, query, readiness, pools

    @exclusive
    def padded_tables(
        self,
        request_ids: Items[RequestId],
        window: int | None = None,
        *,
        filler: int = 0,
        out: Any = None,
    ) -> BlockTable:
        """Block tables whose every entry may be read: int32 [sequences, most blocks], for kernels that take a
        rectangle (flash-attn's ``block_table``, vLLM's, FlashAttention 3's ``page_table``).

        As `block_tables`, but padded with `filler`, a slot; and where a sliding window has left a block behind, a slot
        that the sequence still holds stands in its place: what kernels load ahead of their mask is there. `out`, an
        int32 array or tensor on the host with as many rows and columns at least (a pinned buffer that is used again),
        is written to; the result is its beginning, and what is left of it is filled as well.
        """
        padding = checked_natural(filler, "filler")
        if padding > MAX_SLOT:
            raise UsageError(f"filler must be a slot, at most {MAX_SLOT}")
        group = self._query.group_of(window)
        sequences = self._readable(request_ids, group)
        tables = [_safe(sequence, group) for sequence in sequences]
        shape = len(tables), max(map(len, tables), default=0)
        target = _target(out, np.int32, shape)
        target[:] = padding
        for row, table in zip(target, tables, strict=False):
            row[: len(table)] = table
        return self._result(out, target, shape, sequences, group)

    @exclusive
    def paged_tables(
        self,
        request_ids: Items[RequestId],
        window: int | None = None,
        *,
        stops: Items[int] | None = None,
    ) -> PagedTables:
        """Block tables in rows behind each other, as FlashInfer's paged wrappers take them (``kv_indptr``,
        ``kv_indices``, ``kv_last_page_len``), all int32: of the blocks that hold each sequence's tokens up to `stops`.

        What a sliding window has left behind is as in `padded_tables`: positions stay what they are.
        """
        group = self._query.group_of(window)
        sequences = self._readable(request_ids, group)
        ends = self._ends(sequences, group, stops)
        counts = [-(-end // self._size) for end in ends]
        rows = [_safe(sequence, group)[:blocks] for sequence, blocks in zip(sequences, counts, strict=True)]
        indptr = np.array([0, *accumulate(counts)], np.int32)
        indices = np.concatenate(rows) if rows else np.empty(0, np.int32)
        last = np.array([(end - 1) % self._size + 1 if end else 0 for end in ends], np.int32)
        tables = PagedTables(*map(self._presented, (indptr, indices, last)))
        self._query.note(tables, sequences, group, of_step=True)
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
        """Where the K/V of this step's tokens goes, int64 [tokens], sequence by sequence: slot × tokens_per_block +
        offset, as vLLM's and FlashAttention's ``slot_mapping``, an index into a layer's tokens (`pools.kv`).

        `out`: as in `padded_tables`, for int64 and one dimension; what is left of it is -1, which kernels skip.
        """
        group = self._query.group_of(window)
        sequences = self._readable(request_ids, group)
        ends = self._ends(sequences, group, stops)
        begins = self._begins(sequences, starts, ends)
        rows = [
            self._places(sequence, group, begin, end)
            for sequence, begin, end in zip(sequences, begins, ends, strict=True)
        ]
        mapping = np.concatenate(rows) if rows else np.empty(0, np.int64)
        target = _target(out, np.int64, mapping.shape)
        target[: len(mapping)] = mapping
        target[len(mapping) :] = NO_SLOT
        return self._result(out, target, mapping.shape, sequences, group, of_step=True)

    @exclusive
    def sequence_lengths(
        self,
        request_ids: Items[RequestId],
        window: int | None = None,
        *,
        stops: Items[int] | None = None,
        out: Any = None,
    ) -> BlockTable:
        """Tokens of each sequence when the step is done, int32 [sequences] (``seq_lens``, ``cache_seqlens``): `stops`,
        or all that it has. The same in all windows, so none need be given but `CROSS_WINDOW`, for encoders' inputs.
        """
        group = 0 if window is None else self._query.group_of(window)
        sequences = self._readable(request_ids, group)
        ends = np.array(self._ends(sequences, group, stops), np.int32)
        target = _target(out, np.int32, ends.shape)
        target[: len(ends)] = ends
        target[len(ends) :] = 0
        return self._result(out, target, ends.shape, sequences, group, of_step=True)

    # -- what is asked about

    def _readable(self, request_ids: Items[RequestId], group: int) -> list[Sequence]:
        """The sequences, or for cross attention the encoders' inputs that they read."""
        sequences = [self._blocks.sequence(each) for each in listed(request_ids, "request_ids")]
        self._readiness.refuse_unreadable(sequences)
        return [sequence.part_in(group) for sequence in sequences]

    def _ends(self, sequences: list[Sequence], group: int, stops: Items[int] | None) -> list[int]:
        """Up to which token each sequence is computed by the step."""
        if stops is None:
            # The tokens of encoders' inputs fill whole blocks, with zeros behind them.
            ends = [each.num_prompt_tokens if each.holders else each.num_tokens for each in sequences]
        else:
            ends = [checked_natural(stop, "stops") for stop in listed(stops, "stops")]
        _refuse_other_length(ends, sequences, "stops")
        for sequence, end in zip(sequences, ends, strict=True):
            slots = len(sequence.tables[group]) * self._size
            if end > slots:
                raise UsageError(
                    f"request {shown(sequence.request_id)} has slots for {slots} tokens, so {end} cannot be computed: "
                    "reserve more, or give stops"
                )
        return ends

    def _begins(self, sequences: list[Sequence], starts: Items[int] | None, ends: list[int]) -> list[int]:
        if starts is None:
            begins = [min(sequence.computed, end) for sequence, end in zip(sequences, ends, strict=True)]
        else:
            begins = [checked_natural(start, "starts") for start in listed(starts, "starts")]
        _refuse_other_length(begins, sequences, "starts")
        if any(begin > end for begin, end in zip(begins, ends, strict=True)):
            raise UsageError("starts must not be beyond stops")
        return begins

    def _places(self, sequence: Sequence, group: int, begin: int, end: int) -> Column:
        size, table = self._size, sequence.tables[group]
        if begin < end and begin // size < sequence.detached[group]:
            raise UsageError(
                f"request {shown(sequence.request_id)}: a sliding window has let go of the block of token {begin}, so "
                "nothing can be written there: begin behind it"
            )
        if end - begin == 1:  # decoding: without numpy's overhead
            return np.array([table[begin // size] * size + begin % size], np.int64)
        positions = np.arange(begin, end)
        return np.array(table, np.int64)[positions // size] * size + positions % size

    # -- what is given back

    def _presented(self, column: Column) -> BlockTable:
        return column if self._pools is None else self._pools.block_table(column)

    def _result(
        self,
        out: Any,
        target: Column,
        shape: tuple[int, ...],
        sequences: list[Sequence],
        group: int,
        *,
        of_step: bool = False,
    ) -> BlockTable:
        within = tuple(slice(length) for length in shape)
        result: BlockTable = self._presented(target) if out is None else out[within]
        self._query.note([result] if out is None else [result, out], sequences, group, of_step=of_step)
        return result


def _safe(sequence: Sequence, group: int) -> Column:
    """A block table with a slot of the sequence's own wherever it has none."""
    table, first = np.array(sequence.tables[group], np.int32), sequence.detached[group]
    if first:
        table[:first] = table[first] if first < len(table) else 0
    assert DETACHED not in table
    return table


def _refuse_other_length(numbers: list[int], sequences: list[Sequence], what: str) -> None:
    if len(numbers) != len(sequences):
        raise UsageError(
            f"{what} must have a number for each of {len(sequences)} sequences, not {len(numbers)}"
        )


def _target(out: Any, dtype: type[np.generic], shape: tuple[int, ...]) -> Column:
    """The array to write: a new one, or the memory of `out`."""
    if out is None:
        return np.empty(shape, dtype)
    try:
        # Shares the memory of arrays and of tensors on the host, which is what is asked for.
        target = out.numpy() if hasattr(out, "numpy") else np.asarray(out)
    except Exception:  # noqa: BLE001
        target = None
    enough = (
        target is not None
        and target.dtype == dtype
        and target.ndim == len(shape)
        and all(has >= needed for has, needed in zip(target.shape, shape, strict=True))
        and target.flags.writeable
        and np.shares_memory(target, out.numpy() if hasattr(out, "numpy") else out)
    )
    if not enough:
        raise UsageError(
            f"out must be an {np.dtype(dtype)} array or tensor on the host of at least {list(shape)}, writable"
        )
    return target  # type: ignore[return-value]
