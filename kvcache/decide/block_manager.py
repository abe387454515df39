"""All windows of a cache: turns commands into events.

Pure: no clock, file, socket, thread or tensor. Every method first counts whether the whole call fits; a refusal emits
nothing. `emit` applies each event and passes it on.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import accumulate

from events import types as ev
from events.ids import GroupIndex, numbers_left
from events.packed import SLOT_BYTES
from events.types import Event, RequestId
from kvcache.config import KVCacheConfig
from kvcache.decide.admission import Plan, admit, fitting
from kvcache.decide.decoding import DecodeBatch, packed_handles
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.decide.expiry import Expiry
from kvcache.decide.forking import fork, own_blocks, rewind
from kvcache.decide.interning import intern, missing_pages
from kvcache.decide.pins import pin, unpin
from kvcache.decide.priorities import change_blocks
from kvcache.decide.retention import lasts_a_time, restate
from kvcache.decide.reuse_levels import ORDERS
from kvcache.decide.sliding_manager import SlidingWindowManager
from kvcache.decide.whole_cache import WholeCache
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.errors import InvalidTokens, OutOfBlocks, OutOfNumbers, UnknownRequest, UsageError
from kvcache.fold.check import check
from kvcache.fold.pin import Pin
from kvcache.fold.sequence import Sequence
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.state import CacheState
from kvcache.inputs.arguments import checked_request_id
from kvcache.inputs.requests import CheckedRequest
from kvcache.layout import Bound
from kvcache.results import Replacement, StoreResult
from kvcache.sizes import primary_settings

_PLAIN_IDS = frozenset((str, int))
"""Types of ids that are looked up as they are."""
_KEPT_NUMBERS = 1 << 36
"""Transfer ids that are kept for sequences that run when admission ends."""
EVICT_AHEAD = 64
"""Blank slots that decoding makes when it has to evict: each of the next steps then finds one, instead of evicting one
or two of its own."""
EVICT_AHEAD_SHARE = 16
"""They are at most this part of the primary slots, so that a small cache does not lose what it could still reuse."""


class BlockManager(WholeCache):
    """Decides for the whole cache: what one call does happens in all windows, or in none."""

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
        self.windows = tuple(
            (SlidingWindowManager if isinstance(group, SlidingGroup) else WindowBlockManager)(
                state,
                GroupIndex(index),
                emit,
                reuse=config.enable_block_reuse,
                partial_reuse=config.enable_partial_reuse,
                offload_min_priority=config.secondary_offload_min_priority,
                order=order or ORDERS[config.eviction_policy],
            )
            for index, group in enumerate(state.groups)
        )
        self._sliding = [each for each in self.windows if isinstance(each, SlidingWindowManager)]
        self._blocks_for = self.windows[0].blocks_for

    # -- admission

    def count_fitting(self, requests: list[CheckedRequest]) -> int:
        """Length of the longest prefix of the batch that fits."""
        requests = requests[: self._numbers_left()]
        _, _, misfit = fitting(self.windows, requests)
        return len(requests) if misfit is None else misfit

    def admit(self, requests: list[CheckedRequest]) -> list[tuple[Sequence, Plan]]:
        """Admit a batch; raises `OutOfBlocks` if it does not fit as a whole, and `OutOfNumbers`."""
        if len(requests) > self._numbers_left():
            raise OutOfNumbers
        plans, claims, misfit = fitting(self.windows, requests)
        if misfit is not None:
            needed, available = zip(*((claim.needed, claim.available) for claim in claims), strict=True)
            raise self._out_of_blocks(misfit, needed, available)
        rich = [request.rich for request in requests if request.rich is not None]
        if rich:
            intern(self._emit, missing_pages(self._state, rich))
            plans = [each.with_symbols(self._state.symbols) for each in plans]
        time = self._expiry.told(begins=any(lasts_a_time(request.retention) for request in requests))
        return list(
            zip(admit(self._state, self.windows, self._emit, plans, claims, time), plans, strict=True)
        )

    def _out_of_blocks(self, index: int, needed: Items[int], available: Items[int]) -> OutOfBlocks:
        """The refusal of a call, beginning with its entry `index`."""
        windows = [window.window for window in self.windows]
        return OutOfBlocks(index, needed, available, windows, primary_settings(self._config))

    def note_refusal(self, request_id: RequestId, refusal: OutOfBlocks) -> None:
        """Record that a request did not fit: once until it is admitted, however often it is tried."""
        if request_id not in self._state.refused:
            self._emit(
                ev.AdmissionRefused(request_id=request_id, needed=refusal.needed, available=refusal.available)
            )

    def _numbers_left(self) -> int:
        """How many sequences can still be admitted, so that the copies for all that run have numbers too."""
        state = self._state
        return max(0, min(numbers_left(state.next_handle), numbers_left(state.next_transfer) - _KEPT_NUMBERS))

    # -- a running sequence

    def compute(self, sequence: Sequence, num_tokens: int) -> list[Replacement]:
        """The engine has written K/V of the first `num_tokens` tokens: their full blocks become reusable."""
        if num_tokens > sequence.computed:
            self._emit(ev.ContextComputed(handle=sequence.handle, num_tokens=num_tokens))
        replaced = self._store_in_all(sequence)
        for window in self._sliding:
            window.detach([sequence], self._expiry.told())
        return replaced

    def _store_in_all(self, sequence: Sequence, *, partial: bool = False) -> list[Replacement]:
        """Make what is computed reusable; returns what the sequence's tables point at instead."""
        replaced = self._store_in(self.windows[0], sequence, partial=partial)
        for window in self.windows[1:]:
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
        if not _PLAIN_IDS.issuperset(map(type, request_ids)):
            request_ids = [checked_request_id(request_id) for request_id in request_ids]
        try:
            running = [sequences[handles[request_id]] for request_id in request_ids]
        except Exception:  # noqa: BLE001  unknown, or no id at all: find out which one, and why
            running = [self.sequence(request_id) for request_id in request_ids]
        if len(set(running)) != len(running):
            raise UsageError("add_tokens names a sequence twice: use counts to append several tokens")
        return running

    def decode_batch(self, request_ids: list[RequestId], num_tokens: int, limit: Bound) -> DecodeBatch:
        """The sequences that get one token each: the batch of the last step, if they are the same."""
        batch = self._decoding
        # The row of sequences that the fold appends to is the batch's as long as nothing else has happened to them.
        # Types before ids: what is no id may equal one (1.0, True), or do anything when it is compared.
        if (
            batch is None
            or self._state.running.handles != batch.handles
            or not _PLAIN_IDS.issuperset(map(type, request_ids))
            or batch.ids != request_ids
        ):
            windows = [window.window for window in self._sliding]
            size = self._state.tokens_per_block
            batch = DecodeBatch(request_ids, self.running(request_ids), size, limit.tokens, windows)
        if num_tokens != len(batch.ids):
            raise InvalidTokens(
                f"{num_tokens} tokens were given for {len(batch.ids)} sequences: one each, or counts"
            )
        if batch.ids and batch.at_limit:
            raise limit.exceeded_by(limit.tokens + 1)
        self._decoding = batch
        return batch

    def step(self, batch: DecodeBatch, tokens: bytes) -> dict[RequestId, StoreResult]:
        """Append one token to each sequence of the batch."""
        if not batch.ids:
            return {}
        due = batch.due
        if due is not None:
            self._grow(batch.sequences, due.sequences, due.handles, None)
        self._emit(ev.TokensAppended(handles=batch.handles, counts=b"", tokens=tokens))
        changed = self._store_filled(due.sequences) if due is not None else {}
        if self._sliding:
            for number, sliding in enumerate(self._sliding):
                leaving = batch.leaving(number)
                if leaving:
                    sliding.detach(leaving, self._expiry.told())
        batch.advance()
        return changed

    def _store_filled(self, sequences: Items[Sequence]) -> dict[RequestId, StoreResult]:
        """Store the block that each of these has filled; returns the sequences whose tables have changed."""
        replaced: dict[Sequence, list[Replacement]] | None = None
        for window in self.windows:
            for sequence in window.store_filled(sequences):
                replaced = replaced or {}
                replaced.setdefault(sequence, []).extend(self._store_in(window, sequence))
        return _changed(replaced) if replaced else {}

    def append(
        self, sequences: list[Sequence], tokens: bytes, counts: array[int], limit: Bound
    ) -> dict[RequestId, StoreResult]:
        """Append several tokens to each sequence; none may get longer than `limit`."""
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.num_tokens + count > limit.tokens:
                raise limit.exceeded_by(sequence.num_tokens + count)
        if not sequences:
            return {}
        growing = self._growing(sequences, counts)
        if growing:
            more = [sequence for sequence, _ in growing]
            self._grow(sequences, more, packed_handles(more), [blocks for _, blocks in growing])
        self._emit(
            ev.TokensAppended(handles=packed_handles(sequences), counts=counts.tobytes(), tokens=tokens)
        )
        changed = self._store([sequence for sequence, _ in growing])
        for window in self._sliding:
            window.detach(sequences, self._expiry.told())
        return changed

    def _store(self, sequences: Items[Sequence]) -> dict[RequestId, StoreResult]:
        """Store what the arrival of tokens has completed; returns the sequences whose tables have changed."""
        return _changed({sequence: self._store_in_all(sequence) for sequence in sequences})

    def _growing(self, sequences: list[Sequence], counts: array[int]) -> list[tuple[Sequence, int]]:
        """The sequences that need more blocks, and how many."""
        blocks_for = self._blocks_for
        more = [
            (sequence, blocks_for(sequence.num_tokens + count) - blocks_for(sequence.num_tokens))
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        return [(sequence, blocks) for sequence, blocks in more if blocks]

    def _grow(
        self, sequences: list[Sequence], growing: list[Sequence], handles: bytes, blocks: list[int] | None
    ) -> None:
        """Allocate blocks (None: one each) to some of the sequences of a call, or refuse for all of them."""
        needed = len(growing) if blocks is None else sum(blocks)
        for window in self.windows:
            if needed > len(window.primary.blank):
                self._make_room(sequences, growing, needed, blocks)
                break
        for window in self.windows:
            window.allocate(handles, needed, blocks, ev.AllocateReason.DECODE)

    def _make_room(
        self, sequences: list[Sequence], growing: list[Sequence], needed: int, blocks: list[int] | None
    ) -> None:
        """Have so many blank slots in all windows."""
        available = tuple(window.primary.available for window in self.windows)
        if needed > min(available):
            taken = list(accumulate(blocks or [1] * len(growing)))
            first = growing[bisect_right(taken, min(available))]
            raise self._out_of_blocks(sequences.index(first), (needed,) * len(available), available)
        for window in self.windows:
            if needed > len(window.primary.blank):
                size, left = window.primary.size, window.primary.available
                window.free_up(
                    max(needed, min(EVICT_AHEAD, size // EVICT_AHEAD_SHARE, left)), growing[0].handle
                )

    def set_priority(self, sequence: Sequence, priority: int, start: int, stop: int) -> int:
        """Change the priority of the cached blocks that overlap its tokens [start, stop).

        Returns of how many blocks it has changed, in the window with the most.
        """
        first, last = start // self._state.tokens_per_block, self._blocks_for(stop)
        if start >= stop:
            return 0
        return max(
            change_blocks(window, self._emit, sequence, (first, last), priority, None, ev.UpdateReason.SET)
            for window in self.windows
        )

    def fork(self, parent: Sequence, request_id: RequestId) -> StoreResult:
        """Branch a sequence, after storing what it has computed; returns what that changed in its tables."""
        needed = own_blocks(parent, self._state.tokens_per_block)
        available = tuple(window.primary.available for window in self.windows)
        if needed > min(available):
            raise self._out_of_blocks(0, (needed,) * len(available), available)
        if not self._numbers_left():
            raise OutOfNumbers
        replaced = self._store_in_all(parent)
        fork(self._state, self.windows, self._emit, parent, request_id)
        return StoreResult(min(parent.stored), replaced)

    def refuse_rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Raise `UsageError` where a window has let go of what the last token that is left sees."""
        computed = min(sequence.computed, num_tokens - 1)
        for sliding in self._sliding:
            if sliding.sliding.first_seen(computed) < sequence.detached[sliding.index]:
                raise UsageError(
                    f"the window of {sliding.window} tokens has let go of blocks that token {computed} sees: rewind "
                    "less far, or remove the sequence and add it again"
                )

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back all but the first tokens of a sequence."""
        needed, available = [], []
        for window in self.windows:
            first = window.first_to_leave(sequence, num_tokens)
            freed = len(window.freed_by(sequence, first)) // SLOT_BYTES
            needed.append(max(0, self._blocks_for(num_tokens) - first))
            available.append(window.primary.available + freed)
        if any(more > there for more, there in zip(needed, available, strict=True)):
            raise self._out_of_blocks(0, needed, available)
        rewind(self._state, self.windows, self._emit, sequence, num_tokens, self._expiry.told())

    def pin(self, sequence: Sequence, start: int, stop: int) -> int:
        """Hold the cached blocks that overlap its tokens [start, stop) beyond its end; returns the pin's number."""
        blocks = start // self._state.tokens_per_block, self._blocks_for(stop) if start < stop else 0
        return pin(self.windows, self._state, self._emit, sequence, blocks, self._config.max_pinned_share)

    @property
    def pins(self) -> dict[int, Pin]:
        """By their numbers."""
        return self._state.pins

    def unpin(self, number: int) -> None:
        """Let go of what a pin holds."""
        unpin(self._state, self._emit, number, self._expiry.told())

    def remove(self, sequence: Sequence, *, store: bool, why: ev.EndReason) -> None:
        """End a sequence; with `store`, all that it computed stays reusable, its partial last block too."""
        if store:
            self._store_in_all(sequence, partial=True)
        self._emit(
            ev.SequenceRemoved(
                handle=sequence.handle,
                stored=sequence.stored,
                freed=tuple([window.freed_by(sequence) for window in self.windows]),
                num_tokens=sequence.num_tokens,
                computed=sequence.computed,
                why=why,
                clock=self._expiry.told(),
            )
        )

    # -- the whole cache

    def check(self) -> None:
        """Prove the laws of the state, and that the right block would be evicted next; raises `InvariantViolated`."""
        check(self._state)
        for window in self.windows:
            window.order.check()
        self._expiry.check()
        batch = self._decoding
        if batch is not None and self._state.running.handles == batch.handles:
            batch.check()


def _changed(replaced: dict[Sequence, list[Replacement]]) -> dict[RequestId, StoreResult]:
    """The sequences whose tables point at other blocks in some window, after all windows have stored."""
    return {
        sequence.request_id: StoreResult(min(sequence.stored), blocks)
        for sequence, blocks in replaced.items()
        if blocks
    }
