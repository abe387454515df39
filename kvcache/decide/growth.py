"""What running sequences get when tokens arrive: blocks for these; what they complete is stored, and what windows leave
behind is let go of.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import accumulate

from events import types as ev
from events.ids import GroupIndex
from events.tokens.sequences import lengths
from events.types import CROSS, CROSS_WINDOW, Event, RequestId
from kvcache.config import KVCacheConfig
from kvcache.decide.decoding import PLAIN_IDS, DecodeBatch, packed_handles
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.decide.expiry import Expiry
from kvcache.decide.retention import restate
from kvcache.decide.reuse_levels import ORDERS
from kvcache.decide.sliding_manager import SlidingWindowManager
from kvcache.decide.whole_cache import WholeCache
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.errors import InvalidTokens, OutOfBlocks, UnknownRequest, UsageError, shown
from kvcache.fold.sequence import Sequence
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.state import CacheState
from kvcache.inputs.arguments import checked_request_id
from kvcache.layout import Bound
from kvcache.results import Replacement, StoreResult
from kvcache.sizes import primary_settings

EVICT_AHEAD_SHARE = 16
"""Blocks that are evicted ahead (`EvictionOrder.ahead`) are at most this part of the primary slots, so that a small
cache does not lose what it could still reuse."""


class Growth(WholeCache):
    """Decides for the sequences that run."""

    def __init__(
        self,
        config: KVCacheConfig,
        state: CacheState,
        emit: Callable[[Event], None],
        *,
        recorded: bool,
        monotonic_ns: Callable[[], int],
        order: type[EvictionOrder] | None = None,
    ) -> None:
        # Where no log keeps them, there are no checkpoints.
        spacing = config.checkpoint_spacing if recorded else math.inf
        super().__init__(state, emit, Expiry(state, emit, monotonic_ns), spacing)
        self._config = config
        self._decoding: DecodeBatch | None = None
        order = order or ORDERS[config.eviction_policy]
        self._ahead = order.ahead
        managers = [
            (SlidingWindowManager if isinstance(group, SlidingGroup) else WindowBlockManager)(
                state,
                GroupIndex(index),
                emit,
                reuse=config.enable_block_reuse,
                partial_reuse=config.enable_partial_reuse and group.kind != CROSS,
                offload_min_priority=config.secondary_offload_min_priority,
                order=order,
            )
            for index, group in enumerate(state.groups)
        ]
        self.windows = tuple([each for each in managers if each.window != CROSS_WINDOW])
        self.cross = tuple([each for each in managers if each.window == CROSS_WINDOW])
        """What decides for cross attention, if the model has any."""
        self._sliding = [each for each in self.windows if isinstance(each, SlidingWindowManager)]
        self._blocks_for = self.windows[0].blocks_for

    def _out_of_blocks(self, index: int, needed: Items[int], available: Items[int]) -> OutOfBlocks:
        """The refusal of a call, beginning with its entry `index`."""
        windows = [window.window for window in (*self.windows, *self.cross)][: len(needed)]
        return OutOfBlocks(index, needed, available, windows, primary_settings(self._config))

    # -- a running sequence

    def compute(self, sequence: Sequence, num_tokens: int) -> list[Replacement]:
        """The engine has written K/V of the first `num_tokens` tokens: their full blocks become reusable."""
        if num_tokens > sequence.computed:
            self._emit(ev.ContextComputed(handle=sequence.handle, num_tokens=num_tokens))
        replaced = self._store_in_all(sequence)
        for window in self._sliding:
            window.detach([sequence], [sequence.num_next], self._expiry.told())
        return replaced

    def _store_in_all(self, sequence: Sequence, *, partial: bool = False) -> list[Replacement]:
        """Make what is computed reusable; returns what the sequence's tables point at instead."""
        if sequence.retention is None and len(self.windows) == 1:
            return self.windows[0].store(sequence, partial=partial)  # nearly always
        replaced: list[Replacement] = []
        for window in self.windows:
            replaced += self._store_in(window, sequence, partial=partial)
        return replaced

    def _store_in(
        self, window: WindowBlockManager, sequence: Sequence, *, partial: bool = False
    ) -> list[Replacement]:
        if sequence.retention is None:
            return window.store(sequence, partial=partial)
        end, window.adopted = sequence.path_ends[window.index].end, False
        replaced = window.store(sequence, partial=partial)
        if window.adopted:
            # What another sequence has stored first is kept as this one states, too.
            restate(window, self._emit, sequence, end, sequence.path_ends[window.index].end)
        return replaced

    def sequence(self, request_id: RequestId) -> Sequence:
        """The sequence of a request; raises `UnknownRequest`, or `UsageError` for what is no request id."""
        if type(request_id) is not str and type(request_id) is not int:
            request_id = checked_request_id(request_id)
        handle = self._state.handles.get(request_id)
        if handle is None:
            raise UnknownRequest(checked_request_id(request_id))
        return self._state.sequences[handle]

    def running(self, request_ids: list[RequestId]) -> list[Sequence]:
        """The sequences of these requests; raises as `sequence` does, and `UsageError` for one named twice."""
        handles, sequences = self._state.handles, self._state.sequences
        if not PLAIN_IDS.issuperset(map(type, request_ids)):
            request_ids = [checked_request_id(request_id) for request_id in request_ids]
        try:
            running = list(map(sequences.__getitem__, map(handles.__getitem__, request_ids)))
        except Exception:  # noqa: BLE001  unknown, or no id at all: find out which one, and why
            running = [self.sequence(request_id) for request_id in request_ids]
        if len(set(running)) != len(running):
            raise UsageError("a call names a sequence twice: counts say how many tokens each one gets")
        return running

    def decode_batch(self, request_ids: list[RequestId], num_tokens: int, limit: Bound) -> DecodeBatch:
        """The sequences that get one token each: the batch of the last step, if they are the same."""
        batch = self._decoding
        # The row of sequences that the fold appends to is the batch's as long as nothing else has happened to them.
        # Types before ids, for what is no id may equal one.
        if (
            batch is None
            or self._state.running.handles != batch.handles
            or batch.kinds != list(map(type, request_ids))
            or batch.ids != request_ids
        ):
            windows = [window.window for window in self._sliding]
            size = self._state.tokens_per_block
            batch = DecodeBatch(request_ids, self.running(request_ids), size, limit.tokens, windows)
        if num_tokens != len(batch.ids):
            raise InvalidTokens(
                f"{num_tokens} tokens were given for {len(batch.ids)} sequences: one each, or counts"
            )
        if batch.at_limit:
            raise limit.exceeded_by(limit.tokens + 1)
        self._decoding = batch
        return batch

    def step(self, batch: DecodeBatch, tokens: bytes) -> dict[RequestId, StoreResult]:
        """Append one token to each sequence of the batch."""
        if not batch.ids:
            return {}
        if not batch.even:
            self._decoding = None
            return self._append(batch.sequences, tokens, None)
        changed: dict[RequestId, StoreResult] = {}
        due, handles = batch.due, b""
        if due is not None:
            handles = packed_handles(due)
            self._grow(batch.sequences, due, handles, None)
        self._emit(ev.TokensAppended(handles=batch.handles, counts=b"", tokens=tokens))
        if due is not None:
            changed = self._store_filled(due, handles)
        if self._sliding:
            for number, sliding in enumerate(self._sliding):
                leaving = batch.leaving(number)
                if leaving:
                    sliding.detach(leaving, lengths(leaving), self._expiry.told())
        batch.advance()
        return changed

    def _store_filled(self, sequences: list[Sequence], handles: bytes) -> dict[RequestId, StoreResult]:
        """Store the block that each of these has filled; returns the sequences whose tables have changed."""
        replaced: dict[Sequence, list[Replacement]] | None = None
        filled: ev.BlocksFilled | None = None
        for window in self.windows:
            others, filled = window.store_filled(sequences, handles, filled)
            for sequence in others:
                replaced = replaced or {}
                replaced.setdefault(sequence, []).extend(self._store_in(window, sequence))
        return _changed(replaced) if replaced else {}

    def append(
        self, sequences: list[Sequence], tokens: bytes, counts: array[int], limit: Bound, *, draft: bool
    ) -> dict[RequestId, StoreResult]:
        """Append several tokens to each sequence; none may get longer than `limit`. Of drafts nothing is stored."""
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.num_tokens + count > limit.tokens:
                raise limit.exceeded_by(sequence.num_tokens + count)
        return self._append(sequences, tokens, counts, draft=draft) if sequences else {}

    def refuse_without_slots(self, sequences: Items[Sequence]) -> None:
        """Raise `UsageError` for a sequence of which not all tokens have slots yet."""
        for sequence in sequences:
            slots = self.slots_of(sequence)
            if slots < sequence.num_tokens:
                raise UsageError(
                    f"request {shown(sequence.request_id)} has slots for {slots} of its {sequence.num_tokens} tokens: "
                    "reserve slots for the others first"
                )

    def slots_of(self, sequence: Sequence) -> int:
        """For how many tokens a sequence has slots."""
        return len(sequence.tables[0]) * self._state.tokens_per_block

    def _append(
        self, sequences: list[Sequence], tokens: bytes, counts: array[int] | None, *, draft: bool = False
    ) -> dict[RequestId, StoreResult]:
        """None: one token each."""
        wanted = [
            self._blocks_for(sequence.num_tokens + count)
            for sequence, count in zip(sequences, counts or [1] * len(sequences), strict=True)
        ]
        filling: list[Sequence] = []
        if not draft:
            filling = [
                each
                for each, blocks in zip(sequences, wanted, strict=True)
                if each.computed < each.num_tokens - 1 or blocks > self._blocks_for(each.num_tokens)
            ]
        self._resize(sequences, wanted, ev.AllocateReason.DECODE)
        self._emit(
            ev.TokensAppended(
                handles=packed_handles(sequences),
                counts=b"" if counts is None else counts.tobytes(),
                tokens=tokens,
                draft=draft,
            )
        )
        changed = self._store(filling)
        for window in self._sliding:
            window.detach(sequences, [each.num_next for each in sequences], self._expiry.told())
        return changed

    def reserve(self, sequences: list[Sequence], counts: array[int], limit: Bound) -> None:
        """Have slots for so many tokens to come of each sequence, or for the next ones of a prompt without."""
        wanted = []
        for sequence, count in zip(sequences, counts, strict=True):
            stop = sequence.num_tokens + count
            if self.slots_of(sequence) < sequence.num_tokens:
                stop = max(self.slots_of(sequence), min(sequence.computed + count, sequence.num_tokens))
            elif stop > limit.tokens:
                raise limit.exceeded_by(stop)
            wanted.append(self._blocks_for(stop))
        self._resize(sequences, wanted, ev.AllocateReason.RESERVE)

    def _resize(self, sequences: list[Sequence], wanted: Items[int], why: ev.AllocateReason) -> None:
        """Have so many blocks for each sequence of a call, or refuse for all: some return theirs, then others grow."""
        growing: list[Sequence] = []
        taken, surplus = list[int](), list[tuple[Sequence, int]]()
        for sequence, blocks in zip(sequences, wanted, strict=True):
            more = blocks - len(sequence.tables[0])
            if more > 0:
                growing.append(sequence)
                taken.append(more)
            elif more < 0:
                surplus.append((sequence, -more))
        if surplus:
            self._refuse_beyond(sequences, growing, taken, sum(blocks for _, blocks in surplus))
            self._return(surplus)
        if growing:
            self._grow(sequences, growing, packed_handles(growing), taken, why)

    def _return(self, surplus: Items[tuple[Sequence, int]]) -> None:
        """Give back so many blocks of each of these sequences, the last ones."""
        handles = packed_handles([sequence for sequence, _ in surplus])
        counts = array("I", [blocks for _, blocks in surplus]).tobytes()
        for window in self.windows:
            slots = array("i")
            for sequence, blocks in surplus:
                slots += sequence.tables[window.index][: -blocks - 1 : -1]
            self._emit(
                ev.BlocksReturned(handles=handles, counts=counts, group=window.index, slots=slots.tobytes())
            )

    def _store(self, sequences: Items[Sequence]) -> dict[RequestId, StoreResult]:
        """Store what the arrival of tokens has completed; returns the sequences whose tables have changed."""
        return _changed({sequence: self._store_in_all(sequence) for sequence in sequences})

    def _grow(
        self,
        sequences: list[Sequence],
        growing: list[Sequence],
        handles: bytes,
        blocks: list[int] | None,
        why: ev.AllocateReason = ev.AllocateReason.DECODE,
    ) -> None:
        """Allocate blocks (None: one each) to some of the sequences of a call, or refuse for all of them."""
        needed = len(growing) if blocks is None else sum(blocks)
        for window in self.windows:
            if needed > len(window.primary.blank):
                self._make_room(sequences, growing, needed, blocks)
                break
        for window in self.windows:
            window.allocate(handles, needed, blocks, why)

    def _make_room(
        self, sequences: list[Sequence], growing: list[Sequence], needed: int, blocks: list[int] | None
    ) -> None:
        """Have so many blank slots in all windows."""
        self._refuse_beyond(sequences, growing, blocks)
        for window in self.windows:
            if needed > len(window.primary.blank):
                size, left = window.primary.size, window.primary.available
                window.free_up(
                    max(needed, min(self._ahead, size // EVICT_AHEAD_SHARE, left)), growing[0].handle
                )

    def _refuse_beyond(
        self, sequences: list[Sequence], growing: list[Sequence], blocks: list[int] | None, returned: int = 0
    ) -> None:
        """Raise `OutOfBlocks` if these blocks (None: one each) cannot be had when so many have been returned."""
        needed = len(growing) if blocks is None else sum(blocks)
        available = tuple(window.primary.available + returned for window in self.windows)
        if needed > min(available):
            taken = list(accumulate(blocks or [1] * len(growing)))
            first = growing[bisect_right(taken, min(available))]
            raise self._out_of_blocks(sequences.index(first), (needed,) * len(available), available)


def _changed(replaced: dict[Sequence, list[Replacement]]) -> dict[RequestId, StoreResult]:
    """The sequences whose tables point at other blocks in some window, after all windows have stored."""
    return {
        sequence.request_id: StoreResult(sequence.stored_blocks, blocks)
        for sequence, blocks in replaced.items()
        if blocks
    }
