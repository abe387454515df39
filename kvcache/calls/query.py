"""What an engine asks of a manager between its steps: reads the state and never changes it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from events.tokens.rich import RichTokens
from events.types import PRIMARY, RequestId
from kvcache.calls.handed_out import HandedOut
from kvcache.config import KVCacheConfig
from kvcache.decide.block_manager import BlockManager
from kvcache.decide.lookup import count_blocks, lookup
from kvcache.decide.window_manager import Plan
from kvcache.device.readiness import Readiness
from kvcache.errors import UnknownRequest, UsageError
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.guard import Guard, exclusive
from kvcache.inputs.arguments import checked_integer, listed
from kvcache.inputs.multimodal import MultimodalItem, rich_tokens
from kvcache.inputs.requests import Request, RequestChecker, namespace_of
from kvcache.inputs.tokens import Tokens, pack_tokens
from kvcache.layout import Layout
from kvcache.results import Admission, BlockTable, Match, Pinned

if TYPE_CHECKING:
    from kvcache.pools import Pools


class Query:
    """Changes nothing. Bound to the manager's thread, since it reads the live state."""

    def __init__(
        self,
        guard: Guard,
        config: KVCacheConfig,
        layout: Layout,
        state: CacheState,
        blocks: BlockManager,
        checker: RequestChecker,
        readiness: Readiness,
        pools: Pools | None,
    ) -> None:
        self._guard = guard
        self._config, self._layout, self._pools = config, layout, pools
        self._groups, self._own = [group.window for group in layout.groups], layout.windows
        self._state, self._blocks = state, blocks
        self._checker, self._readiness = checker, readiness
        self._handed_out = HandedOut(state.sequences) if config.debug_check_tables else None

    @exclusive
    def can_add(self, requests: Items[Request]) -> int:
        """How many requests of the batch, from the first on, could be admitted together now."""
        return self._blocks.count_fitting(self._checker.check(listed(requests, "requests")))

    def remaining_blocks_to_completion(
        self, request_id: RequestId, max_new_tokens: int, chunk_tokens: int | None = None
    ) -> int:
        """Blocks that a sequence needs at most, beside those it has, to grow by `max_new_tokens` tokens, one by one.

        In the window that needs the most, which may not be the one with the fewest free blocks: what each window needs,
        to compare with `num_free_blocks_per_window`, is told by `remaining_blocks_per_window`. Of a prompt that has not
        got all its slots (`reserve_tokens`), `chunk_tokens` says in which chunks at most it gets the others; None: at
        once.
        """
        return max(self.remaining_blocks_per_window(request_id, max_new_tokens, chunk_tokens).values())

    @exclusive
    def remaining_blocks_per_window(
        self, request_id: RequestId, max_new_tokens: int, chunk_tokens: int | None = None
    ) -> dict[int, int]:
        """The same for each window, by its tokens."""
        max_new_tokens = checked_integer(max_new_tokens, "max_new_tokens")
        if max_new_tokens < 0:
            raise UsageError("max_new_tokens must not be negative")
        if chunk_tokens is not None and checked_integer(chunk_tokens, "chunk_tokens") < 1:
            raise UsageError("chunk_tokens must be at least 1")
        sequence = self._blocks.sequence(request_id)
        return {
            each.window: each.blocks_to_grow(sequence, max_new_tokens, chunk_tokens)
            for each in self._blocks.windows
        }

    @exclusive
    def match(
        self,
        tokens: Tokens,
        *,
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Items[MultimodalItem] = (),
        extra_ids: Tokens | None = None,
        encoder_tokens: Tokens | None = None,
    ) -> Match:
        """What a prompt would reuse now, block by block. Changes nothing."""
        own = namespace_of(lora_id, lora_name, cache_salt, extra_ids is not None)
        namespace, encoder = self._checker.with_encoder(own, encoder_tokens)
        prompt = self._prompt(tokens, multimodal, extra_ids)
        if not self._config.enable_block_reuse:
            return Match(len(prompt))
        partial = self._config.enable_partial_reuse
        return lookup(self._state, namespace, prompt, partial=partial, encoder=encoder)

    @exclusive
    def count_reusable(
        self,
        tokens: Tokens,
        *,
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Items[MultimodalItem] = (),
        extra_ids: Tokens | None = None,
        encoder_tokens: Tokens | None = None,
    ) -> int:
        """Leading full blocks that a prompt would reuse now, without the list that `match` makes of each window's."""
        own = namespace_of(lora_id, lora_name, cache_salt, extra_ids is not None)
        namespace, _ = self._checker.with_encoder(own, encoder_tokens)
        prompt = self._prompt(tokens, multimodal, extra_ids)
        return count_blocks(self._state, namespace, prompt) if self._config.enable_block_reuse else 0

    def _prompt(
        self, tokens: Tokens, multimodal: Items[MultimodalItem], extra_ids: Tokens | None
    ) -> RichTokens:
        packed = pack_tokens(tokens, self._checker.max_tokens)
        rich = rich_tokens(packed, multimodal, extra_ids)
        return RichTokens(packed) if rich is None else rich

    @exclusive
    def block_table(self, request_id: RequestId, window: int | None = None) -> BlockTable:
        """The primary slot of each block of a sequence, int32 [blocks].

        With pools a torch tensor on the host, without them a numpy array. Stale after the next call that stores or
        appends. `window` is one of `num_free_blocks_per_window`, in tokens; for the layers that attend to everything,
        any number from `max_sequence_length` on, too. It may be left out where there is only one. 0 (`CROSS_WINDOW`):
        the blocks of the encoder's input, for cross attention.
        """
        group = self.group_of(window)
        return self._table_of(self._blocks.sequence(request_id), group)

    def group_of(self, window: int | None) -> int:
        """The group of a window, as callers give it."""
        windows, own = self._groups, self._own
        if window is None:
            if len(own) > 1:
                raise UsageError(f"say which window's blocks are meant: one of {windows}")
            return 0
        if checked_integer(window, "a window") in windows:
            return windows.index(window)
        if own[-1].kind == "full" and window >= self._config.max_sequence_length:
            return len(own) - 1
        raise UsageError(f"there is no window of {window} tokens, only of {windows}")

    def admission(self, sequence: Sequence, plan: Plan) -> Admission:
        """What a call that has admitted this sequence returns."""
        request_id, handle = sequence.request_id, sequence.handle
        return Admission(
            request_id,
            handle,
            sequence.num_tokens,
            *plan.reused,
            lambda: self._tables_of_admission(request_id, handle),
            *plan.reused_input,
        )

    @exclusive
    def _tables_of_admission(self, request_id: RequestId, handle: int) -> tuple[BlockTable, ...]:
        """The block tables of one admission: a later one of the same id is another sequence."""
        if self._state.handles.get(request_id) != handle:
            raise UnknownRequest(request_id)
        sequence = self._blocks.sequence(request_id)
        return tuple(self._table_of(sequence, group) for group in range(len(sequence.tables)))

    def _table_of(self, sequence: Sequence, group: int) -> BlockTable:
        self._readiness.refuse_unreadable([sequence])
        table = self._presented(np.array(sequence.part_in(group).tables[group], np.int32))
        self.note([table], [sequence.part_in(group)], group)
        return table

    @exclusive
    def block_tables(self, request_ids: Iterable[RequestId], window: int | None = None) -> BlockTable:
        """Block tables of several sequences, int32 [sequences, most blocks], padded with -1.

        With pools a torch tensor on the host, without them a numpy array. `window` as in `block_table`.
        """
        group = self.group_of(window)
        ids = listed(request_ids, "request_ids")
        sequences = [self._blocks.sequence(request_id) for request_id in ids]
        self._readiness.refuse_unreadable(sequences)
        if group >= len(self._own):
            sequences = [sequence.part_in(group) for sequence in sequences]
        tables = [sequence.tables[group] for sequence in sequences]
        padded = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        presented = self._presented(padded)
        self.note([presented], sequences, group)
        return presented

    def note(
        self, tables: Items[BlockTable], sequences: Items[Sequence], group: int, *, of_step: bool = False
    ) -> None:
        """These tables are given out, of sequences or encoders' inputs, for `check_tables`."""
        if self._handed_out is not None:
            self._handed_out.note(tables, sequences, group, of_step=of_step)

    @exclusive
    def check_tables(self, *tables: BlockTable | Items[BlockTable]) -> None:
        """Raise unless a forward pass may use these tables now, as they were given out; call it right before.

        With `debug_check_tables`, else nothing is looked at. `StaleTables`: a call has changed since what one of them
        says, or for those of a step (`slot_mapping`, `paged_tables`, `sequence_lengths`) what was computed.
        `TransfersPending`, `TransfersNotAwaited`: copies were not started, or nothing waits for their ticket.
        `ComputationLost`: a copy failed. `UsageError` for what is no table of this manager, as a copy on a device.
        """
        if self._handed_out is None:
            return
        for each in tables:
            for table in each if isinstance(each, tuple) else (each,):
                self._readiness.refuse_unreadable(self._handed_out.check(table))
        self._readiness.refuse_not_awaited()

    def _presented(self, table: npt.NDArray[np.int32]) -> BlockTable:
        return table if self._pools is None else self._pools.block_table(table)

    @exclusive
    def num_free_blocks(self) -> int:
        """Primary blocks that can be had in every window: blank ones, and cached ones that no sequence holds."""
        return min([window.primary.available for window in self._blocks.windows])

    @exclusive
    def num_free_blocks_per_window(self) -> dict[int, int]:
        """The same for each window, by its tokens, and for cross attention, as window 0."""
        groups = zip(self._layout.groups, self._state.groups, strict=True)
        return {layout.window: group.levels[PRIMARY].available for layout, group in groups}

    @exclusive
    def num_sequences(self) -> int:
        """Running sequences."""
        return len(self._state.handles)

    @exclusive
    def pins(self) -> dict[int, Pinned]:
        """What is pinned, by the numbers of the pins."""
        windows = self._groups
        return {
            number: Pinned(pin.request_id, dict(zip(windows, map(len, pin.slots), strict=True)), pin.named)
            for number, pin in self._state.pins.items()
        }

    @exclusive
    def fingerprint(self) -> bytes:
        """SHA-256 of the state; equal to that of the replayed log at this point."""
        return fingerprint(self._state)

    @exclusive
    def check(self) -> None:
        """Prove the invariants from scratch; raises `InvariantViolated`. Slow: for tests and debugging."""
        self._blocks.check()
