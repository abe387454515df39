"""Admitting requests: what each would take, whether a batch fits, and the events that admit it.

A batch is admitted whole or not at all. Its matches are all claimed before anything is evicted, so one request of
a batch never evicts what another one was going to reuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from events.ids import Handle
from events.packed import TOKEN_BYTES
from events.tokens.symbols import SymbolTable
from events.types import PRIMARY, SECONDARY, AllocateReason, Event, SequenceAdded
from kvcache.decide.decoding import packed_handles
from kvcache.decide.window_manager import BlockNames, CopySource, WindowBlockManager
from kvcache.fold.matching import PathMatch
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.inputs.requests import CheckedRequest


@dataclass(frozen=True, slots=True)
class Plan:
    """What admitting one request would take from one window.

    Slots are noted at once: claiming one request's blocks splits runs that another one's match may name.
    """

    request: CheckedRequest
    found: PathMatch
    claimed: tuple[BlockNames, BlockNames]
    """The cached blocks to hold, in primary and in secondary."""
    new_blocks: int
    """Blocks that are not cached."""
    source: CopySource | None
    """The block to copy the start of."""
    reused: tuple[int, int, int]
    """Tokens reused from primary, from secondary, and from the start of a copied block."""

    def with_symbols(self, table: SymbolTable) -> Plan:
        """The plan with the symbols that its request has by now. What had none before can match nothing."""
        return replace(self, request=self.request.with_symbols(table))


class Claims:
    """What the requests of a batch hold together: each cached block counts once, whoever claims it."""

    __slots__ = ("_taken", "needed", "unreferenced")

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}
        self.needed = 0
        """Primary slots that must be found: for new blocks, and for secondary ones to be onboarded."""
        self.unreferenced = 0
        """Claimed primary blocks that could have been evicted before."""

    def add(self, plan: Plan) -> None:
        """Count one more request."""
        self.needed += plan.new_blocks
        for run, take in plan.found.runs:
            more = take - self._taken.get(run.id, 0)
            if more <= 0:
                continue
            self._taken[run.id] = take
            if run.level == SECONDARY:
                self.needed += more
            elif not run.refs:
                self.unreferenced += more


def plan(window: WindowBlockManager, request: CheckedRequest) -> Plan:
    """Match a request. A prompt's last token is always computed, so it is never reused."""
    stop = len(request.symbols) - TOKEN_BYTES
    found = window.match(request.namespace, request.symbols, stop)
    claimed = (window.blocks_of(found, PRIMARY), window.blocks_of(found, SECONDARY))
    source = CopySource.of(found.partial) if found.partial is not None else None
    size = window.tokens_per_block
    reused = (len(claimed[0].slots) * size, len(claimed[1].slots) * size, source.num_tokens if source else 0)
    return Plan(request, found, claimed, window.blocks_for(request.num_tokens) - found.blocks, source, reused)


def fitting(
    window: WindowBlockManager, requests: list[CheckedRequest]
) -> tuple[list[Plan], Claims, int | None]:
    """Plans for a batch, the claims of all that fit, and the index of the first that does not."""
    plans, claims = [], Claims()
    available = window.group.levels[PRIMARY].available
    for index, request in enumerate(requests):
        plans.append(plan(window, request))
        claims.add(plans[-1])
        if claims.needed > available - claims.unreferenced:
            return plans, claims, index
    return plans, claims, None


def admit(
    state: CacheState,
    window: WindowBlockManager,
    emit: Callable[[Event], None],
    plans: list[Plan],
    claims: Claims,
) -> list[Sequence]:
    """Emit the admission of a batch that fits."""
    sequences = [_add(state, window, emit, each) for each in plans]
    sources = [each.source for each in plans if each.source is not None]
    window.free_up(
        claims.needed, sequences[0].handle, [source.slot for source in sources if source.level == SECONDARY]
    )
    unread = {source.slot for source in sources if source.level == PRIMARY}
    for each, sequence in zip(plans, sequences, strict=True):
        if each.source is not None:
            window.copy_partial(sequence, each.source, unread)
    for each, sequence in zip(plans, sequences, strict=True):
        count = each.new_blocks - (each.source is not None)
        if count:
            window.allocate(packed_handles([sequence]), count, [count], AllocateReason.PROMPT)
        window.onboard(sequence)
    return sequences


def _add(
    state: CacheState, window: WindowBlockManager, emit: Callable[[Event], None], each: Plan
) -> Sequence:
    handle, request = state.next_handle, each.request
    primary, secondary, partial = each.reused
    emit(
        SequenceAdded(
            handle=Handle(handle),
            request_id=request.request_id,
            namespace=request.namespace,
            num_tokens=request.num_tokens,
            tokens=request.symbols,
            reused_primary=(primary,),
            reused_secondary=(secondary,),
            reused_partial=partial,
        )
    )
    sequence = state.sequences[handle]
    window.claim(sequence, each.claimed)
    return sequence
