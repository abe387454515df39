"""Admitting requests: what each would take, whether a batch fits, and the events that admit it.

A batch is admitted whole or not at all. Its matches are all claimed before anything is evicted, so one request of
a batch never evicts what another one was going to reuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from events.ids import Handle
from events.packed import TOKEN_BYTES
from events.tokens.symbols import SymbolTable
from events.types import PRIMARY, SECONDARY, AllocateReason, Event, SequenceAdded
from kvcache.decide.claims import BlockNames, Claims, CopySource
from kvcache.decide.decoding import packed_handles
from kvcache.decide.encoders import add_input
from kvcache.decide.retention import restate
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.matching import GroupMatch, in_all
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.inputs.requests import CheckedRequest, EncoderInput

Windows = tuple[WindowBlockManager, ...]


class WindowPlan(NamedTuple):
    """What admitting one request would take from one window."""

    found: GroupMatch
    claimed: list[BlockNames]
    """The cached blocks to hold."""
    new_blocks: int
    """Blocks that are not cached."""
    source: CopySource | None
    """The block to copy the start of."""
    primary: int
    """Tokens in full blocks that the sequence takes from primary."""
    secondary: int
    """Tokens in full blocks that it takes from secondary."""


class Plan(NamedTuple):
    """What admitting one request would take."""

    request: CheckedRequest
    windows: tuple[WindowPlan, ...]
    cross: tuple[WindowPlan, ...]
    """The same of cross attention; none where the model has no encoder."""
    reused_tokens: int
    """Leading tokens that all windows have, those of a copied block too."""
    reused_partial: int
    """Tokens reused from the start of a copied block."""

    def with_symbols(self, table: SymbolTable) -> Plan:
        """The plan with the symbols that its request has by now. What had none before can match nothing."""
        return self._replace(request=self.request.with_symbols(table))

    @property
    def reused(self) -> tuple[int, int, int]:
        """Tokens reused from primary in all windows, from secondary in some, and from the start of a copied block."""
        tokens, partial = self.reused_tokens, self.reused_partial
        secondary = max([each.secondary for each in self.windows]) if tokens else 0
        return tokens - partial - secondary, secondary, partial

    @property
    def reused_input(self) -> tuple[int, int]:
        """Tokens of the encoder's input, and how many leading ones of these are reused."""
        if self.request.encoder is None:
            return 0, 0
        num_tokens = self.request.encoder.num_tokens
        return num_tokens, min(num_tokens, self.cross[0].primary + self.cross[0].secondary)


def plan(windows: Windows, cross: Windows, request: CheckedRequest) -> Plan:
    """Match a request. A prompt's last token is always computed, so it is never reused."""
    stop = len(request.symbols) - TOKEN_BYTES
    size = windows[0].tokens_per_block
    matches = [window.match(request.namespace, request.symbols, stop) for window in windows]
    common, tokens = in_all(matches, size, windows[0].key_bytes)
    num_tokens = request.num_tokens
    if request.reserve_tokens is not None:
        num_tokens = min(num_tokens, tokens + request.reserve_tokens)
    new_blocks = windows[0].blocks_for(num_tokens) - common[0].blocks
    plans = tuple(
        [_planned(window, found, tokens, new_blocks) for window, found in zip(windows, common, strict=True)]
    )
    inputs = () if request.encoder is None else tuple([_plan_input(each, request.encoder) for each in cross])
    source = plans[0].source
    return Plan(request, plans, inputs, tokens, 0 if source is None else source.num_tokens)


def _planned(window: WindowBlockManager, found: GroupMatch, tokens: int, new_blocks: int) -> WindowPlan:
    blocks, size = [0, 0], window.tokens_per_block
    claimed = window.claimed(found, tokens)
    for each in claimed:
        blocks[each.level] += len(each.slots)
    source = window.source(found.partial) if found.partial is not None else None
    return WindowPlan(found, claimed, new_blocks, source, blocks[0] * size, blocks[1] * size)


def _plan_input(cross: WindowBlockManager, given: EncoderInput) -> WindowPlan:
    """Match an encoder's input, whose last token is reused as well."""
    found = cross.match(given.namespace, given.tokens, len(given.tokens))
    new_blocks = cross.blocks_for(given.num_tokens) - found.blocks
    return _planned(cross, found, found.blocks * cross.tokens_per_block, new_blocks)


def fitting(
    windows: Windows, cross: Windows, requests: list[CheckedRequest]
) -> tuple[list[Plan], list[Claims], int | None]:
    """Plans for a batch, the claims of all that fit per window, and the index of the first that does not."""
    plans, claims = [], [window.claims() for window in (*windows, *cross)]
    for index, request in enumerate(requests):
        planned = plan(windows, cross, request)
        plans.append(planned)
        fits = True
        for claim, each in zip(claims, planned.windows + planned.cross, strict=True):
            claim.add(each.found, each.claimed, each.new_blocks)
            if claim.needed > claim.available:
                fits = False
        if not fits:
            return plans, claims, index
    return plans, claims, None


def admit(
    state: CacheState,
    windows: Windows,
    cross: Windows,
    emit: Callable[[Event], None],
    plans: list[Plan],
    claims: list[Claims],
    time: int,
) -> list[Sequence]:
    """Emit the admission of a batch that fits, at a time (0: nothing is kept for a time)."""
    sequences = [_add(state, windows, cross, emit, each, time) for each in plans]
    for index, (window, claim) in enumerate(zip(windows, claims, strict=False)):
        _fill(window, sequences, [each.windows[index] for each in plans], claim.needed)
    for window in cross:
        inputs = [each.encoder for each in sequences if each.encoder is not None]
        _fill(window, inputs, [each.cross[0] for each in plans], claims[-1].needed)
    for each, sequence in zip(plans, sequences, strict=True):
        if sequence.retention is not None:
            for window in windows:
                restate(window, emit, sequence, 0, each.reused_tokens // window.tokens_per_block)
    return sequences


def _fill(
    window: WindowBlockManager, sequences: list[Sequence], plans: list[WindowPlan], needed: int
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
            window.allocate(packed_handles([sequence]), count, [count], AllocateReason.PROMPT)
        if each.secondary:
            window.onboard(sequence)


def _add(
    state: CacheState,
    windows: Windows,
    cross: Windows,
    emit: Callable[[Event], None],
    each: Plan,
    time: int,
) -> Sequence:
    handle, request = Handle(state.next_handle), each.request
    emit(
        SequenceAdded(
            handle=handle,
            request_id=request.request_id,
            namespace=request.namespace,
            num_tokens=request.num_tokens,
            tokens=request.symbols,
            reused=each.reused_tokens,
            reused_primary=tuple([of_window.primary for of_window in each.windows]),
            reused_secondary=tuple([of_window.secondary for of_window in each.windows]),
            reused_partial=each.reused_partial,
            resumed=request.resumed,
            retention=request.retention,
            clock=time,
        )
    )
    sequence = state.sequences[handle]
    if each.reused_tokens:
        # The widest first: it holds most of the blocks, and so gives their names.
        for window, of_window in zip(reversed(windows), reversed(each.windows), strict=True):
            window.claim(sequence, of_window.claimed)
    if request.encoder is not None:
        for window, of_input in zip(cross, each.cross, strict=True):
            blocks = (
                of_input.primary // window.tokens_per_block,
                of_input.secondary // window.tokens_per_block,
            )
            encoder = add_input(state, window, emit, sequence, request.encoder, blocks)
            window.claim(encoder, of_input.claimed)
    return sequence
