"""All windows of a cache: turns commands into events.

Pure: no clock, file, socket, thread or tensor. Every method first counts whether the whole call fits; a refusal emits
nothing. `emit` applies each event and passes it on.
"""

from __future__ import annotations

from functools import cached_property

from events import types as ev
from events.ids import numbers_left
from events.packed import SLOT_BYTES
from events.types import RequestId
from kvcache.decide.admission import Plan, admit, fitting
from kvcache.decide.encoders import release_input, store_input
from kvcache.decide.forking import fork, needed_blocks, own_blocks, rewind
from kvcache.decide.growth import Growth
from kvcache.decide.interning import intern, missing_pages
from kvcache.decide.pins import Pins
from kvcache.decide.priorities import change_blocks
from kvcache.decide.retention import lasts_a_time
from kvcache.errors import OutOfNumbers, UsageError
from kvcache.fold.check import check
from kvcache.fold.pin import Pin
from kvcache.fold.sequence import Sequence
from kvcache.inputs.requests import CheckedRequest
from kvcache.results import StoreResult

_KEPT_NUMBERS = 1 << 36
"""Transfer ids that are kept for sequences that run when admission ends."""


class BlockManager(Growth):
    """Decides for the whole cache: what one call does happens in all windows, or in none."""

    # -- admission

    def count_fitting(self, requests: list[CheckedRequest]) -> int:
        """Length of the longest prefix of the batch that fits."""
        requests = requests[: self._numbers_left()]
        _, _, misfit = fitting(self.windows, self.cross, requests)
        return len(requests) if misfit is None else misfit

    def admit(self, requests: list[CheckedRequest]) -> list[tuple[Sequence, Plan]]:
        """Admit a batch; raises `OutOfBlocks` if it does not fit as a whole, and `OutOfNumbers`."""
        if len(requests) > self._numbers_left():
            raise OutOfNumbers
        plans, claims, misfit = fitting(self.windows, self.cross, requests)
        if misfit is not None:
            needed, available = zip(*((claim.needed, claim.available) for claim in claims), strict=True)
            raise self._out_of_blocks(misfit, needed, available)
        rich = [request.rich for request in requests if request.rich is not None]
        if rich:
            intern(self._emit, missing_pages(self._state, rich))
            plans = [each.with_symbols(self._state.symbols) for each in plans]
        stated = [request.retention for request in requests if request.retention is not None]
        time = self._expiry.told(begins=any(map(lasts_a_time, stated)))
        admitted = admit(self._state, self.windows, self.cross, self._emit, plans, claims, time)
        return list(zip(admitted, plans, strict=True))

    def _numbers_left(self) -> int:
        """How many sequences can still be admitted, so that the copies for all that run have numbers too."""
        state = self._state
        left = min(numbers_left(state.next_handle), numbers_left(state.next_transfer) - _KEPT_NUMBERS)
        return max(0, left // (1 + len(self.cross)))

    # -- a running sequence

    def store_input(self, encoder: Sequence) -> StoreResult:
        """The engine has written all K/V of an encoder's input."""
        (cross,) = self.cross
        return store_input(cross, self._emit, encoder)

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
        return StoreResult(parent.stored_blocks, replaced)

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
            freed = len(window.freed_by(sequence, first)) // SLOT_BYTES + window.released_by(sequence, first)
            needed.append(max(0, needed_blocks(sequence, num_tokens, window.tokens_per_block) - first))
            available.append(window.primary.available + freed)
        if any(more > there for more, there in zip(needed, available, strict=True)):
            raise self._out_of_blocks(0, needed, available)
        rewind(self._state, self.windows, self._emit, sequence, num_tokens, self._expiry.told())

    def pin(self, sequence: Sequence, start: int, stop: int) -> int:
        """Hold the cached blocks that overlap its tokens [start, stop) beyond its end; returns the pin's number."""
        blocks = start // self._state.tokens_per_block, self._blocks_for(stop) if start < stop else 0
        return self._pinned.pin(sequence, blocks)

    @cached_property
    def _pinned(self) -> Pins:
        return Pins((*self.windows, *self.cross), self._state, self._emit, self._config.max_pinned_share)

    @property
    def pins(self) -> dict[int, Pin]:
        """By their numbers."""
        return self._state.pins

    def unpin(self, number: int) -> None:
        """Let go of what a pin holds."""
        self._pinned.unpin(number, self._expiry.told())

    def remove(self, sequence: Sequence, *, store: bool, why: ev.EndReason) -> None:
        """End a sequence; with `store`, all that it computed stays reusable, its partial last block too."""
        if store:
            self._store_in_all(sequence, partial=True)
        clock = self._expiry.told()
        self._emit(
            ev.SequenceRemoved(
                handle=sequence.handle,
                stored=sequence.stored,
                freed=(*[window.freed_by(sequence) for window in self.windows], *(b"",) * len(self.cross)),
                num_tokens=sequence.num_tokens,
                computed=sequence.computed,
                why=why,
                clock=clock,
            )
        )
        if self.cross:
            release_input(self.cross, self._emit, sequence.encoder, clock, store=store)

    # -- the whole cache

    def check(self) -> None:
        """Prove the laws of the state, and that the right block would be evicted next; raises `InvariantViolated`."""
        check(self._state)
        for window in (*self.windows, *self.cross):
            window.order.check()
        self._expiry.check()
        self._pinned.check()
        batch = self._decoding
        if batch is not None and self._state.running.handles == batch.handles:
            batch.check()
