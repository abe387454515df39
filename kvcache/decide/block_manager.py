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
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.ids import Handle, numbers_left
from events.packed import SLOT_BYTES, TOKEN_BYTES
from events.tokens.sequences import lengths
from events.types import CROSS_WINDOW, PRIMARY, SECONDARY, AllocateReason, Event, RequestId
from kvcache.config import ANY_STOP, KVCacheConfig
from kvcache.decide.decoding import DecodeBatch, RunningRequests
from kvcache.decide.eviction_order import ORDERS, EvictionOrder
from kvcache.decide.full_attention import FullAttentionManager
from kvcache.decide.housekeeping import Housekeeping
from kvcache.decide.sliding_window import SlidingWindowManager
from kvcache.decide.window_manager import Claims, CopySource, Plan, WindowPlan, in_all
from kvcache.errors import (
    OutOfBlocks,
    OutOfNumbers,
    PinsExceeded,
    UsageError,
    invariant,
    shown,
)
from kvcache.fold.sequence import DEFAULT, DEFAULT_PRIORITY, BlockRetention, Sequence, packed_handles
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.state import CacheState
from kvcache.inputs import NS_PER_MS, CheckedRequest
from kvcache.layout import Bound
from kvcache.results import Replacement, StoreResult
from kvcache.sizes import primary_settings

EVICT_AHEAD_SHARE = 16
"""Upper bound of blocks evicted ahead (`evict_ahead`), as a fraction of the primary slots, so that a small cache does
not lose what it could still reuse."""
AnyWindow = FullAttentionManager | SlidingWindowManager
"""Decisions for a window of one kind or the other."""
_KEPT_NUMBERS = 1 << 36
"""Transfer ids reserved for sequences that run when admission ends."""


class BlockManager:
    """Decisions for the whole cache: each call takes effect in all windows, or in none.

    `housekeeping` decides about the cache as a whole.
    """

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
        self._config, self._state, self._emit = config, state, emit
        # A log that does not keep checkpoints has none.
        spacing = config.checkpoint_spacing if recorded else math.inf
        self.housekeeping = Housekeeping(state, emit, monotonic_ns, spacing)
        self._expiry = self.housekeeping.expiry
        self._handles_end = state.next_handle + numbers_left(state.next_handle)
        self._transfers_end = state.next_transfer + numbers_left(state.next_transfer)
        """First transfer id beyond the epoch."""
        order = order or ORDERS[config.eviction_policy]
        self._stop_retention: dict[str | None, BlockRetention] = {
            stop: BlockRetention(rule.priority, (rule.duration_ms or 0) * NS_PER_MS)
            for stop, rule in config.stop_retention.items()
        }
        managers: list[AnyWindow] = [
            SlidingWindowManager(state, group, emit, config)
            if isinstance(group, SlidingGroup)
            else FullAttentionManager(state, group, emit, config, order)
            for group in state.groups
        ]
        self.windows = tuple([each for each in managers if each.window != CROSS_WINDOW])
        self.cross = tuple([each for each in managers if each.window == CROSS_WINDOW])
        """Manager of cross attention, if the model has any."""
        self._sliding = [each for each in self.windows if isinstance(each, SlidingWindowManager)]
        self.running = RunningRequests(state, [each.window for each in self._sliding])
        self._blocks_for = self.windows[0].blocks_for

    def _out_of_blocks(self, index: int, needed: Items[int], available: Items[int]) -> OutOfBlocks:
        """The refusal of a call, beginning with its entry `index`."""
        windows = tuple([window.window for window in (*self.windows, *self.cross)])[: len(needed)]
        settings = primary_settings(self._config)
        return OutOfBlocks(index, tuple(needed), tuple(available), windows, settings)

    def check(self) -> None:
        """Prove the laws of the state, and that the right block would be evicted next; raises `InvariantViolated`."""
        self._state.check()
        for window in (*self.windows, *self.cross):
            window.order.check()
        self._expiry.check()
        pairs = zip(self._pinned, self._count_pins(), strict=True)
        invariant(all(np.array_equal(*pair) for pair in pairs), "pinned blocks are counted wrongly")
        self.running.check()

    def _time(self, *, begins: bool = False) -> int:
        """Return the time for an event; 0 while nothing has ever had a duration, unless one begins with this event."""
        return self._expiry.now() if begins or self._state.clock else 0

    def refuse_without_slots(self, sequences: Items[Sequence]) -> None:
        """Raise `UsageError` for a sequence with tokens that have no slots yet."""
        for sequence in sequences:
            slots = self.slots_of(sequence)
            if slots < sequence.num_tokens:
                raise UsageError(
                    f"request {shown(sequence.request_id)} has slots for only {slots} of its "
                    f"{sequence.num_tokens} tokens: reserve the remaining ones first"
                )

    def slots_of(self, sequence: Sequence) -> int:
        """Number of tokens that a sequence has slots for."""
        return len(sequence.tables[0]) * self._state.tokens_per_block

    # -- admission: first read the needs of each request, then emit

    def claims(self) -> list[Claims]:
        """Empty claims of a batch on each window, cross attention last."""
        return [window.claims() for window in (*self.windows, *self.cross)]

    def plan(self, request: CheckedRequest, claims: list[Claims]) -> Plan:
        """Match a request, and count the blocks it takes. A prompt's last token is always computed, so it is never
        reused.
        """
        windows, size = self.windows, self._state.tokens_per_block
        stop = len(request.symbols) - TOKEN_BYTES if request.lookup else 0
        matches = [window.match(request.namespace, request.symbols, stop) for window in windows]
        common, tokens = in_all(matches, size, windows[0].key_bytes)
        num_tokens = request.num_tokens
        if request.reserve_tokens is not None:
            num_tokens = min(num_tokens, tokens + request.reserve_tokens)
        new_blocks = self._blocks_for(num_tokens) - common[0].blocks
        plans = tuple(
            [
                window.plan(found, tokens, new_blocks, each)
                for window, found, each in zip(windows, common, claims, strict=False)
            ]
        )
        inputs: tuple[WindowPlan, ...] = ()
        encoder = request.encoder
        if encoder is not None and self.cross:
            (cross,) = self.cross
            # An input's last token is reused as well.
            found = cross.match(
                encoder.namespace, encoder.tokens, len(encoder.tokens) if request.lookup else 0
            )
            more = self._blocks_for(encoder.num_tokens) - found.blocks
            inputs = (cross.plan(found, found.blocks * size, more, claims[-1]),)
        source = plans[0].source
        return Plan(request, plans, inputs, tokens, 0 if source is None else source.num_tokens)

    def _fitting(self, requests: list[CheckedRequest]) -> tuple[list[Plan], list[Claims], int | None]:
        """Plan a batch; returns the plans, the claims per window of all that fit, and the index of the first that does
        not.
        """
        plans, claims = list[Plan](), self.claims()
        for index, request in enumerate(requests):
            plans.append(self.plan(request, claims))
            for claim in claims:
                if claim.needed > claim.available:
                    return plans, claims, index
        return plans, claims, None

    def count_fitting(self, requests: list[CheckedRequest]) -> int:
        """Length of the longest prefix of the batch that fits."""
        requests = requests[: self._numbers_left()]
        _, _, misfit = self._fitting(requests)
        return len(requests) if misfit is None else misfit

    def _numbers_left(self) -> int:
        """Number of sequences that can still be admitted and leave transfer ids for all running ones."""
        handles = self._handles_end - self._state.next_handle
        transfers = self._transfers_end - self._state.next_transfer - _KEPT_NUMBERS
        return max(0, min(handles, transfers) // (1 + len(self.cross)))

    def admit(self, requests: list[CheckedRequest]) -> list[tuple[Sequence, Plan]]:
        """Admit a batch whole; raises `OutOfBlocks` if it does not fit, and `OutOfNumbers`.

        Its matches are all claimed before anything is evicted, so one request of a batch never evicts what another one
        was going to reuse.
        """
        if len(requests) > self._numbers_left():
            raise OutOfNumbers
        plans, claims, misfit = self._fitting(requests)
        if misfit is not None:
            raise self._out_of_blocks(
                misfit, [claim.needed for claim in claims], [claim.available for claim in claims]
            )
        rich = [request.rich for request in requests if request.rich is not None]
        if rich:
            self.housekeeping.intern(self.housekeeping.missing_pages(rich))
            # New symbols cannot match anything.
            symbols = self._state.symbols
            plans = [each._replace(request=each.request.with_symbols(symbols)) for each in plans]
        stated = [request.retention for request in requests if request.retention is not None]
        time = self._time(begins=any(map(_lasts_a_time, stated)))
        sequences = list[Sequence]()
        for each in plans:
            sequences.append(self._add(each, time))
        for window, claim in zip(self.windows, claims, strict=False):
            self._give_blocks(window, sequences, [each.windows[window.index] for each in plans], claim.needed)
        for window in self.cross:
            inputs = [each.encoder for each in sequences if each.encoder is not None]
            self._give_blocks(window, inputs, [each.cross[0] for each in plans], claims[-1].needed)
        for each, sequence in zip(plans, sequences, strict=True):
            for window in self.windows if sequence.retention is not None else ():
                window.report_retention(sequence, 0, each.reused_tokens // window.tokens_per_block)
        return list(zip(sequences, plans, strict=True))

    def _add(self, plan: Plan, time: int) -> Sequence:
        """Emit a sequence, at a time (0: nothing has a duration), and let it hold its reused blocks."""
        handle, request = Handle(self._state.next_handle), plan.request
        self._emit(
            ev.SequenceAdded(
                handle=handle,
                request_id=request.request_id,
                namespace=request.namespace,
                num_tokens=request.num_tokens,
                tokens=request.symbols,
                reused=plan.reused_tokens,
                reused_primary=tuple([each.primary for each in plan.windows]),
                reused_secondary=tuple([each.secondary for each in plan.windows]),
                reused_partial=plan.reused_partial,
                resumed=request.resumed,
                retention=request.retention,
                clock=time,
                session=request.session,
                labels=request.labels,
                lookup=None if request.lookup else False,
            )
        )
        sequence = self._state.sequences[handle]
        # The widest first: it holds most of the blocks, and so names them.
        for window in reversed(self.windows) if plan.reused_tokens else ():
            for blocks in plan.windows[window.index].claimed:
                window.events.reuse(sequence, window.with_names_before(sequence, blocks))
        for window, each in zip(self.cross, plan.cross, strict=True):
            encoder = self._add_input(window, sequence, plan, each)
            for blocks in each.claimed:
                window.events.reuse(encoder, window.with_names_before(encoder, blocks))
        return sequence

    def _add_input(self, cross: AnyWindow, reader: Sequence, plan: Plan, own: WindowPlan) -> Sequence:
        """Emit the encoder's input of a request that was admitted.

        An input is a sequence of its own in the group of cross attention, padded to whole blocks, that the request's
        sequence and its branches read. So it is matched, stored, evicted and brought back like any other; it never
        grows.
        """
        handle, given = Handle(self._state.next_handle), plan.request.encoder
        assert given is not None
        self._emit(
            ev.EncoderAdded(
                handle=handle,
                sequence=reader.handle,
                group=cross.index,
                namespace=given.namespace,
                num_tokens=given.num_tokens,
                tokens=given.tokens,
                reused_primary=own.primary // cross.tokens_per_block,
                reused_secondary=own.secondary // cross.tokens_per_block,
            )
        )
        return self._state.sequences[handle]

    def _give_blocks(
        self, window: AnyWindow, sequences: list[Sequence], plans: list[WindowPlan], needed: int
    ) -> None:
        """Give the sequences of a batch the blocks of one window that they have not claimed."""
        sources = [each.source for each in plans if each.source is not None]
        spared = [source.slot for source in sources if source.level == SECONDARY] if sources else ()
        window.free_up(needed, sequences[0].handle, spared)
        if sources:
            unread = {source.slot for source in sources if source.level == PRIMARY}
            for each, sequence in zip(plans, sequences, strict=True):
                if each.source is not None:
                    window.copy_partial(sequence, each.source, unread)
        for each, sequence in zip(plans, sequences, strict=True):
            count = each.new_blocks - (each.source is not None)
            if count:
                slots = window.primary.peek(count)
                window.events.allocate(packed_handles([sequence]), slots, [count], AllocateReason.PROMPT)
            if each.secondary:
                window.onboard(sequence)

    # -- storing computed blocks

    def compute(self, sequence: Sequence, num_tokens: int) -> list[Replacement]:
        """Make the full blocks of the first `num_tokens` tokens reusable: the engine has written their K/V."""
        if num_tokens > sequence.computed:
            self._emit(ev.ContextComputed(handle=sequence.handle, num_tokens=num_tokens))
        replaced = self._store(sequence)
        self._detach([sequence])
        return replaced

    def store_input(self, encoder: Sequence) -> StoreResult:
        """Make the blocks of an encoder's input reusable: the engine has written all of its K/V."""
        (cross,) = self.cross
        if encoder.computed < encoder.num_tokens:
            self._emit(ev.ContextComputed(handle=encoder.handle, num_tokens=encoder.num_tokens))
        replaced = cross.store(encoder)
        return StoreResult(encoder.stored_blocks, replaced)

    def _store(self, sequence: Sequence, *, partial: bool = False) -> list[Replacement]:
        """Make computed blocks reusable; returns the replaced entries of the sequence's tables."""
        replaced: list[Replacement] = []
        for window in self.windows:
            replaced += window.store(sequence, partial=partial)
        return replaced

    def _detach(self, sequences: list[Sequence]) -> None:
        """Release blocks that sliding windows have left."""
        for window in self._sliding:
            window.detach(sequences, [each.num_next for each in sequences], self._time())

    # -- appending tokens

    def step(self, batch: DecodeBatch, tokens: bytes) -> dict[RequestId, StoreResult]:
        """Append one token to each sequence of the batch."""
        if not batch.ids:
            return {}
        if not batch.is_steady:
            self.running.batch = None
            return self._append(batch.sequences, tokens, None)
        replaced: dict[Sequence, list[Replacement]] = {}
        due, handles = batch.due, b""
        if due is not None:
            handles = packed_handles(due)
            self._grow(batch.sequences, due, handles, None)
        self._emit(ev.TokensAppended(handles=batch.handles, counts=b"", tokens=tokens))
        if due is not None:
            for window in self.windows:
                for sequence, blocks in window.store_filled(due, handles):
                    replaced.setdefault(sequence, []).extend(blocks)
        if self._sliding:
            for number, sliding in enumerate(self._sliding):
                sliding_out = batch.sliding_out(number)
                if sliding_out:
                    sliding.detach(sliding_out, lengths(sliding_out), self._time())
        batch.advance()
        return _changed(replaced) if replaced else {}

    def append(
        self, sequences: list[Sequence], tokens: bytes, counts: array[int], limit: Bound, *, draft: bool
    ) -> dict[RequestId, StoreResult]:
        """Append several tokens to each sequence; none may get longer than `limit`. Drafts are not stored."""
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.num_tokens + count > limit.tokens:
                raise limit.exceeded_by(sequence.num_tokens + count)
        return self._append(sequences, tokens, counts, draft=draft) if sequences else {}

    def _append(
        self, sequences: list[Sequence], tokens: bytes, counts: array[int] | None, *, draft: bool = False
    ) -> dict[RequestId, StoreResult]:
        """Append `counts` tokens to each sequence; None: one each."""
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
        if self._config.keep_reservations:
            needed, wanted = wanted, list(map(max, wanted, [len(each.tables[0]) for each in sequences]))
            if counts is None and wanted != needed:
                # Without counts they would decode like sequences with exactly the slots that they need.
                counts = array("I", [1]) * len(sequences)
        self._resize(sequences, wanted, AllocateReason.DECODE)
        self._emit(
            ev.TokensAppended(
                handles=packed_handles(sequences),
                counts=b"" if counts is None else counts.tobytes(),
                tokens=tokens,
                draft=draft,
            )
        )
        changed = _changed({sequence: self._store(sequence) for sequence in filling})
        self._detach(sequences)
        return changed

    # -- slots for tokens

    def reserve(self, sequences: list[Sequence], counts: array[int], limit: Bound) -> None:
        """Reserve slots for `counts` tokens to come of each sequence, or for the next ones of a prompt that has not all
        slots.
        """
        wanted = []
        for sequence, count in zip(sequences, counts, strict=True):
            stop = sequence.num_tokens + count
            if self.slots_of(sequence) < sequence.num_tokens:
                stop = max(self.slots_of(sequence), min(sequence.computed + count, sequence.num_tokens))
            elif stop > limit.tokens:
                raise limit.exceeded_by(stop)
            wanted.append(self._blocks_for(stop))
        self._resize(sequences, wanted, AllocateReason.RESERVE)

    def _resize(self, sequences: list[Sequence], wanted: Items[int], why: AllocateReason) -> None:
        """Resize the tables of a call to `wanted` blocks each, or refuse for all: some shrink, then others grow."""
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
        """Return the given number of blocks of each of these sequences, the last ones."""
        handles = packed_handles([sequence for sequence, _ in surplus])
        counts = array("I", [blocks for _, blocks in surplus]).tobytes()
        for window in self.windows:
            slots = array("i")
            for sequence, blocks in surplus:
                slots += sequence.tables[window.index][: -blocks - 1 : -1]
            self._emit(
                ev.BlocksReturned(handles=handles, counts=counts, group=window.index, slots=slots.tobytes())
            )

    def _grow(
        self,
        sequences: list[Sequence],
        growing: list[Sequence],
        handles: bytes,
        blocks: list[int] | None,
        why: AllocateReason = AllocateReason.DECODE,
    ) -> None:
        """Allocate blocks (None: one each) to some of the sequences of a call, or refuse for all of them."""
        needed = len(growing) if blocks is None else sum(blocks)
        if needed > min([len(window.primary.blank) for window in self.windows]):
            self._refuse_beyond(sequences, growing, blocks)
            for window in self.windows:
                if needed > len(window.primary.blank):
                    size, left = window.primary.size, window.primary.available
                    ahead = min(self._config.evict_ahead, size // EVICT_AHEAD_SHARE, left)
                    window.free_up(max(needed, ahead), growing[0].handle)
        for window in self.windows:
            window.events.allocate(handles, window.primary.peek(needed), blocks, why)

    def _refuse_beyond(
        self, sequences: list[Sequence], growing: list[Sequence], blocks: list[int] | None, returned: int = 0
    ) -> None:
        """Raise `OutOfBlocks` if these blocks (None: one each) are not available after `returned` ones are."""
        taken = list(accumulate(blocks or [1] * len(growing)))
        available = [window.primary.available + returned for window in self.windows]
        if taken and taken[-1] > min(available):
            first = growing[bisect_right(taken, min(available))]
            raise self._out_of_blocks(sequences.index(first), taken[-1:] * len(available), available)

    # -- forking and rewinding An engine may have computed more than counts as computed: the last token, drafts, all of
    # a prompt. The next `add_tokens` makes it count, so a block that replaces another one gets all tokens of that.

    def fork(self, parent: Sequence, request_id: RequestId) -> StoreResult:
        """Branch a sequence, after storing what it has computed; returns the changes to its tables.

        The branch holds the computed blocks, and gets copies of its own of the block computed in part and those after
        it.
        """
        first = parent.computed // self._state.tokens_per_block
        needed = len(self._own_blocks(parent, parent.num_tokens, first))
        if self._state.keeps_replaced and self._config.enable_block_reuse:
            # Any block that is stored first may be another sequence's by now, and take two slots from then on.
            ends = zip(parent.stored, parent.detached, strict=True)
            needed += first - min([max(end) for end in ends][: len(self.windows)])
        available = [window.primary.available for window in self.windows]
        if needed > min(available):
            raise self._out_of_blocks(0, [needed] * len(available), available)
        if not self._numbers_left():
            raise OutOfNumbers
        replaced, child = self._store(parent), Handle(self._state.next_handle)
        self._emit(ev.SequenceForked(handle=parent.handle, child=child, request_id=request_id))
        for window in self.windows:
            sources = self._sources(window, parent, parent.num_tokens, first)
            window.free_up(len(sources), child)
            window.copy_blocks(self._state.sequences[child], sources, AllocateReason.FORK)
        return StoreResult(parent.stored_blocks, replaced)

    def refuse_rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Raise `UsageError` if a window has released blocks that the last remaining token sees."""
        computed = min(sequence.computed, num_tokens - 1)
        for sliding in self._sliding:
            if sliding.group.first_seen(computed) < sequence.detached[sliding.index]:
                raise UsageError(
                    f"the window of {sliding.window} tokens has released blocks that token {computed} attends "
                    "to: rewind less far, or remove the sequence and add it again"
                )

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back all but the first tokens of a sequence, and copy its last block if that is cached."""
        sources, freed, available = [], [], []
        for window in self.windows:
            first = window.first_to_leave(sequence, num_tokens)
            sources.append(self._sources(window, sequence, num_tokens, first))
            freed.append(window.group.freed_by(sequence, first))
            more = len(freed[-1]) // SLOT_BYTES + window.released_by(sequence, first)
            available.append(window.primary.available + more)
        needed = list(map(len, sources))
        if any(more > there for more, there in zip(needed, available, strict=True)):
            raise self._out_of_blocks(0, needed, available)
        freed += [b""] * len(self.cross)
        time = self._time()
        self._emit(
            ev.SequenceRewound(handle=sequence.handle, num_tokens=num_tokens, freed=tuple(freed), clock=time)
        )
        for window, copied in zip(self.windows, sources, strict=True):
            window.free_up(len(copied), sequence.handle)
            window.copy_blocks(sequence, copied, AllocateReason.REWIND)

    def _own_blocks(self, sequence: Sequence, num_tokens: int, first: int) -> range:
        """Return the blocks of a sequence's first tokens from the block `first` on, without reserved ones."""
        return range(first, min(self._blocks_for(num_tokens), len(sequence.tables[0])))

    def _sources(
        self, window: AnyWindow, sequence: Sequence, num_tokens: int, first: int
    ) -> list[CopySource]:
        """Return these blocks as copy sources."""
        size = window.tokens_per_block
        return [
            window.source_of_own(sequence, block, min(size, num_tokens - block * size))
            for block in self._own_blocks(sequence, num_tokens, first)
        ]

    # -- retention

    def set_priority(self, sequence: Sequence, priority: int, start: int, stop: int) -> int:
        """Change the priority of the cached blocks that overlap its tokens [start, stop).

        Returns the number of changed blocks, in the window with the most.
        """
        first, last = start // self._state.tokens_per_block, self._blocks_for(stop) if start < stop else 0
        how = priority, None, ev.UpdateReason.SET
        return max([window.change_priority(sequence, first, last, *how) for window in self.windows])

    # -- pins

    def pin(self, sequence: Sequence, start: int, stop: int) -> int:
        """Hold the cached blocks that overlap its tokens [start, stop) beyond its end; returns the number of the pin.

        With full attention the blocks before them as well: no block is reached without those. Raises `PinsExceeded` if
        more than the share of a window's blocks were pinned then.
        """
        blocks = range(start // self._state.tokens_per_block, self._blocks_for(stop) if start < stop else 0)
        slots = []
        for window, counts in zip((*self.windows, *self.cross), self._pinned, strict=True):
            own = self._to_pin(window, sequence, blocks)
            pinned = int(np.count_nonzero(counts) + np.count_nonzero(counts[own] == 0))
            most = int(self._config.max_pinned_share * window.primary.size)
            if pinned > most:
                raise PinsExceeded(pinned, most, window.window)
            slots.append(own)
        number = self._state.next_pin
        packed = tuple([own.tobytes() for own in slots])
        self._emit(ev.BlocksPinned(pin=number, handle=sequence.handle, slots=packed))
        for counts, own in zip(self._pinned, slots, strict=True):
            counts[own] += 1
        return number

    def _to_pin(self, window: AnyWindow, sequence: Sequence, blocks: range) -> array[int]:
        """Return the slots that a pin of these blocks of a sequence holds in a window."""
        part, start, stop = sequence.part_in(window.index), blocks.start, blocks.stop
        table = part.tables[window.index]
        if part is not sequence:
            # Pinned blocks are of use only with the whole encoder's input.
            overlaps = start < min(stop, self._blocks_for(sequence.num_tokens))
            start, stop = 0, len(table) * overlaps
        end = min(stop, part.path_ends[window.index].end)
        return table[window.first_pinned(sequence, start) : end] if start < end else array("i")

    def unpin(self, number: int) -> None:
        """Release the blocks of a pin."""
        held, freed, pinned = self._state.pins[number], [], self._pinned
        for group, slots in zip(self._state.groups, held.slots, strict=True):
            blank = () if held.named else [slot for slot in slots if slot not in group.shared]
            freed.append(array("i", blank)[::-1].tobytes())
        self._emit(ev.BlocksUnpinned(pin=number, freed=tuple(freed), clock=self._time()))
        for counts, slots in zip(pinned, held.slots, strict=True):
            counts[slots] -= 1

    @cached_property
    def _pinned(self) -> list[npt.NDArray[np.int64]]:
        """Number of pins per window and slot, so that the cost of a pin does not depend on the number of pins."""
        return self._count_pins()

    def _count_pins(self) -> list[npt.NDArray[np.int64]]:
        counts = [np.zeros(group.levels[PRIMARY].size, np.int64) for group in self._state.groups]
        for pin in self._state.pins.values():
            for of_group, slots in zip(counts, pin.slots, strict=True):
                of_group[slots] += 1
        return counts

    # -- the end

    def remove(self, sequence: Sequence, *, store: bool, why: ev.EndReason, stop: str | None = None) -> None:
        """End a sequence; with `store`, everything it computed stays reusable, its partial last block too.

        `stop`: the reason for which its output ended, which may decide the retention of its blocks. An encoder's input
        ends with the last sequence that reads it.
        """
        if store:
            self._store(sequence, partial=True)
        stated = self._retention_after_end(sequence, stop) if self._stop_retention else DEFAULT
        clock, encoder = self._time(begins=stated.duration > 0), sequence.encoder
        freed = [window.group.freed_by(sequence) for window in self.windows]
        self._emit(
            ev.SequenceRemoved(
                handle=sequence.handle,
                stored=sequence.stored,
                freed=(*freed, *(b"",) * len(self.cross)),
                num_tokens=sequence.num_tokens,
                computed=sequence.computed,
                why=why,
                clock=clock,
                stop=stop,
            )
        )
        for window in self.cross:
            if encoder is not None and not encoder.holders:
                if store:
                    window.store(encoder)
                own = window.group.freed_by(encoder)
                self._emit(
                    ev.EncoderRemoved(handle=encoder.handle, group=window.index, freed=own, clock=clock)
                )

    def _retention_after_end(self, sequence: Sequence, stop: str | None) -> BlockRetention:
        """Apply the retention for the stop reason to blocks that a sequence alone holds; returns that retention.

        Blocks after its prompt's full blocks are reused only if the next prompt repeats the output token by token, so a
        higher priority does not apply to them. A lower one does: they are evicted before all others of the sequence.
        """
        rules = self._stop_retention
        stated = rules.get(stop) or rules.get(ANY_STOP) if sequence.retention is None else None
        if stated is None:
            return DEFAULT
        last = sequence.num_prompt_tokens // self._state.tokens_per_block
        if stated.priority < DEFAULT_PRIORITY:
            last = self._blocks_for(sequence.num_tokens)
        for window in self.windows:
            window.change_priority(sequence, 0, last, *stated, ev.UpdateReason.RETENTION, alone=True)
        return stated


def _changed(replaced: dict[Sequence, list[Replacement]]) -> dict[RequestId, StoreResult]:
    """Collect the sequences with changed tables in some window, after all windows have stored."""
    return {
        sequence.request_id: StoreResult(sequence.stored_blocks, blocks)
        for sequence, blocks in replaced.items()
        if blocks
    }


def _lasts_a_time(retention: ev.StatedRetention) -> bool:
    """True if any part of a request's retention has a duration."""
    return retention.duration > 0 or any(each.duration for each in retention.ranges)
