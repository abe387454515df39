"""What an engine tells of its running sequences: what it has computed and sampled, and which are done."""

from __future__ import annotations

from collections.abc import Sequence as Items

from events.packed import TOKEN_BYTES
from events.types import EndReason, RequestId
from kvcache.decide.block_manager import BlockManager
from kvcache.device.readiness import Readiness
from kvcache.errors import UsageError, shown
from kvcache.fold.slots import PRIORITY_MAX
from kvcache.guard import Guard, exclusive
from kvcache.inputs.arguments import (
    checked_choice,
    checked_flag,
    checked_integer,
    checked_range,
    checked_request_id,
    listed,
)
from kvcache.inputs.requests import RequestChecker
from kvcache.inputs.tokens import Tokens, pack_counts, pack_naturals, pack_tokens
from kvcache.results import StoreResult

_FINISHED = EndReason.FINISHED


class Running:
    """The commands that concern sequences which run already."""

    def __init__(
        self, guard: Guard, blocks: BlockManager, checker: RequestChecker, readiness: Readiness
    ) -> None:
        self._guard, self._blocks = guard, blocks
        self._checker, self._readiness = checker, readiness

    @exclusive
    def store_context_blocks(self, request_id: RequestId, num_computed_tokens: int) -> StoreResult:
        """The engine has written K/V of the first `num_computed_tokens` tokens: full blocks become reusable at once.

        If another sequence has stored the same blocks meanwhile, this one's table points at those from now on
        (`StoreResult.replaced`): block tables read before are stale. Raises `TransfersPending` for a sequence whose
        copies have not been started: nothing can have been computed from them.
        """
        num_computed_tokens = checked_integer(num_computed_tokens, "num_computed_tokens")
        sequence = self._blocks.sequence(request_id)
        if not 0 <= num_computed_tokens <= sequence.num_tokens:
            raise UsageError(
                f"request {request_id!r} has {sequence.num_tokens} tokens, so {num_computed_tokens} cannot be "
                "computed: append sampled tokens with add_tokens first"
            )
        if num_computed_tokens > self._blocks.slots_of(sequence):
            self._blocks.refuse_without_slots([sequence])
        if not self._readiness.certain:
            self._readiness.refuse_uncomputable([sequence])
        with self._guard:
            swaps = self._blocks.compute(sequence, num_computed_tokens)
        return StoreResult(sequence.stored_blocks, swaps)

    @exclusive
    def store_encoder_blocks(self, request_id: RequestId) -> StoreResult:
        """The engine has written K/V of all of the encoder's input: its blocks become reusable at once.

        As `store_context_blocks`, but for the whole: what an encoder makes of each token depends on all of them.
        Nothing has to be told of an input that was reused whole (`Admission.reused_encoder_tokens`), or of a branch.
        Raises `UsageError` where the model has no encoder.
        """
        sequence = self._blocks.sequence(request_id)
        encoder = sequence.encoder
        if encoder is None:
            raise UsageError(
                f"request {shown(sequence.request_id)} has no encoder's input: the model has no encoder"
            )
        if not self._readiness.certain:
            self._readiness.refuse_uncomputable([sequence])
        with self._guard:
            return self._blocks.store_input(encoder)

    @exclusive
    def add_tokens(
        self,
        request_ids: Items[RequestId],
        tokens: Tokens,
        counts: Items[int] | None = None,
        *,
        draft: bool = False,
    ) -> dict[RequestId, StoreResult]:
        """Append sampled tokens: one call per engine step for all running sequences.

        `tokens` is flat; `counts` says how many belong to each sequence (None: one each). All tokens of a sequence but
        its last one are taken as computed from now on, the prompt and what was sampled before too, whether or not
        `store_context_blocks` said so, and what that completes becomes reusable. Not so with `draft`: of tokens that
        `rewind` may take back nothing counts as computed, or is stored, before the next call without it. What was
        reserved for a sequence is taken first, and given back where these tokens do not need it. Returns the sequences
        whose tables point at other blocks than before. Raises `OutOfBlocks` (and appends nothing) if the blocks for all
        of them cannot be had; `OutOfBlocks.index` is the first sequence that does not fit. Raises
        `TransfersPending` as `store_context_blocks` does, and `PromptTooLong` if one has reached `max_tokens`.
        """
        ids = request_ids if type(request_ids) is list else listed(request_ids, "request_ids")
        packed = pack_tokens(tokens, self._checker.max_tokens * (len(ids) or 1))
        num_tokens = len(packed) // TOKEN_BYTES
        if counts is None and draft is False:
            batch = self._blocks.decode_batch(ids, num_tokens, self._checker.longest_sequence)
            if not self._readiness.certain:
                self._readiness.refuse_uncomputable(batch.sequences)
            if not batch.even:
                self._blocks.refuse_without_slots(batch.sequences)
            try:
                return self._blocks.step(batch, packed)
            except BaseException as error:
                self._guard.note(error)
                raise
        draft = checked_flag(draft, "draft")
        sizes = pack_counts([1] * len(ids) if counts is None else counts, len(ids), num_tokens)
        running = self._blocks.running(ids)
        self._blocks.refuse_without_slots(running)
        if not self._readiness.certain:
            # Of drafts nothing counts as computed, so nothing need be there.
            refuse = self._readiness.refuse_lost if draft else self._readiness.refuse_uncomputable
            refuse(running)
        with self._guard:
            return self._blocks.append(running, packed, sizes, self._checker.longest_sequence, draft=draft)

    @exclusive
    def reserve(self, request_ids: Items[RequestId], counts: Items[int]) -> None:
        """Have slots for so many tokens to come of each of these sequences, whose values are not known yet.

        So an engine launches a step before it has read what the last one sampled, or writes K/V of tokens that it may
        reject. The slots are in the block tables, behind those of the tokens that are there; the next `add_tokens` that
        names the sequence takes those that its tokens need and gives the others back, and another `reserve` puts its
        count in the place of this one (0 gives all back). For a prompt that was admitted with `reserve_tokens`, and has
        not got all its slots, `counts` are of the tokens behind what is computed: its next chunk, which stays the
        sequence's. Raises `OutOfBlocks` (and reserves nothing) as `add_tokens` does, and `PromptTooLong` beyond
        `max_tokens`.
        """
        ids = listed(request_ids, "request_ids")
        sizes = pack_naturals(counts, len(ids))
        running = self._blocks.running(ids)
        with self._guard:
            self._blocks.reserve(running, sizes, self._checker.longest_sequence)

    @exclusive
    def set_priority(
        self, request_id: RequestId, priority: int, *, start: int = 0, stop: int | None = None
    ) -> int:
        """Change the priority (0 to 100) of a running sequence's cached blocks that overlap its tokens [start, stop).

        Blocks of a lower priority are evicted first, and those below `secondary_offload_min_priority` are not kept in
        secondary; a block is never evicted before the cached ones behind it, whatever its priority. Only blocks that
        are cached at the time of the call are concerned: what is stored later gets the default, 35. The priority is
        the block's, not the sequence's: it stays when the sequence ends, and holds for all that reuse the block.
        `stop` None, or beyond the end: up to the end. Returns of how many blocks it changed, in the window with the
        most; the events (`BlocksUpdated`) are of all windows.
        """
        priority = checked_integer(priority, "priority")
        if not 0 <= priority <= PRIORITY_MAX:
            raise UsageError(f"priority must be from 0 to {PRIORITY_MAX}, not {priority}")
        start, stop = checked_range(start, stop, self._checker.max_tokens)
        sequence = self._blocks.sequence(request_id)
        with self._guard:
            return self._blocks.set_priority(sequence, priority, start, stop)

    @exclusive
    def fork(self, request_id: RequestId, child_id: RequestId) -> StoreResult:
        """Branch a running sequence: `child_id` has the same tokens, and both go on, as for beam search or n-best.

        What is computed is stored first, as by `store_context_blocks` (the result says what that changed in the
        parent's tables). The child holds the same blocks, and has its own ones for the tokens after them: these are
        copied (`start_transfers`) with all K/V that they hold, so it does not matter whether the engine has computed
        the last token, or drafts, before this call. What is reserved for the parent the child has not. Raises
        `OutOfBlocks` if these cannot be had, `DuplicateRequest`, and as `store_context_blocks` does where the parent's
        own copies have not been started or have failed.
        """
        parent, child = self._blocks.sequence(request_id), checked_request_id(child_id)
        self._checker.refuse_running(child)
        if not self._readiness.certain:
            self._readiness.refuse_uncomputable([parent])
        with self._guard:
            return self._blocks.fork(parent, child)

    @exclusive
    def rewind(self, request_id: RequestId, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` tokens of a running sequence, as after rejected drafts.

        What was stored stays cached. Where the block of the last token that is left is cached, the sequence gets a copy
        of it (`start_transfers`), so block tables read before are stale. The last token does not count as computed any
        more; its K/V is still there, and may be computed anew. The slots
        that become blank are the next to be taken; what was reserved behind the tokens goes with them. Raises
        `OutOfBlocks` if there is no block for the copy, and `UsageError` where a sliding window has let go of what the
        token sees.
        """
        number, sequence = checked_integer(num_tokens, "num_tokens"), self._blocks.sequence(request_id)
        if not 1 <= number <= sequence.num_tokens:
            raise UsageError(
                f"request {shown(sequence.request_id)} has {sequence.num_tokens} tokens, of which from 1 to "
                f"all can be left, not {number}"
            )
        if not self._readiness.certain:
            self._readiness.refuse_uncomputable([sequence])
        if number < sequence.num_tokens:
            self._blocks.refuse_rewind(sequence, number)
            with self._guard:
                self._blocks.rewind(sequence, number)

    @exclusive
    def pin(self, request_id: RequestId, start: int = 0, stop: int | None = None) -> int:
        """Hold a running sequence's cached blocks that overlap its tokens [start, stop), also when it has ended.

        Pinned blocks are reused like all others, and are not evicted before `unpin` of the number that this returns.
        With full attention the blocks before them are pinned as well, without which none is reached. `clear` takes
        their names, not the blocks. Raises `PinsExceeded` beyond `max_pinned_share`.
        """
        start, stop = checked_range(start, stop, self._checker.max_tokens)
        sequence = self._blocks.sequence(request_id)
        with self._guard:
            return self._blocks.pin(sequence, start, stop)

    @exclusive
    def unpin(self, pin: int) -> None:
        """Let go of what `pin` holds: what no one else holds may be evicted from now on. Raises `UsageError` for a
        number that no pin has.
        """
        number = checked_integer(pin, "a pin")
        if number not in self._blocks.pins:
            raise UsageError(f"there is no pin {number}: it was let go of, or never made")
        with self._guard:
            self._blocks.unpin(number)

    @exclusive
    def remove_sequence(self, request_id: RequestId, store: bool = True, *, why: str = "finished") -> None:
        """End a request. With `store`, all that it computed stays reusable, its partial last block too.

        `why` is for who reads the events: ``finished``, ``aborted``, or ``preempted`` for one that makes room and will
        be admitted again (`Request.resumed`).
        """
        store = checked_flag(store, "store")
        reason = (
            _FINISHED if type(why) is str and why == "finished" else checked_choice(why, EndReason, "why")
        )
        sequence = self._blocks.sequence(request_id)
        with self._guard:
            self._blocks.remove(sequence, store=store, why=reason)
            self._readiness.forget(sequence.request_id)
