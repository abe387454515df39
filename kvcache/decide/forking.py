"""A sequence branches: the branch holds what is computed, and gets blocks of its own for the rest. Or it goes back."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from events import types as ev
from events.ids import Handle
from events.types import Event, RequestId
from kvcache.decide.decoding import packed_handles
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState


def own_blocks(parent: Sequence, tokens_per_block: int) -> int:
    """Blocks that a branch does not share: the one that is computed in part, and those behind it."""
    return needed_blocks(parent, parent.num_tokens, tokens_per_block) - parent.computed // tokens_per_block


def needed_blocks(sequence: Sequence, num_tokens: int, tokens_per_block: int) -> int:
    """Blocks that a sequence has of its first tokens, without those that are reserved for others."""
    return min(-(-num_tokens // tokens_per_block), len(sequence.tables[0]))


def fork(
    state: CacheState,
    windows: Items[WindowBlockManager],
    emit: Callable[[Event], None],
    parent: Sequence,
    request_id: RequestId,
) -> None:
    """Emit a fork that fits, of a sequence whose computed blocks are stored as far as they can be."""
    child = Handle(state.next_handle)
    emit(ev.SequenceForked(handle=parent.handle, child=child, request_id=request_id))
    branch = state.sequences[child]
    needed = own_blocks(parent, state.tokens_per_block)
    shared, begun = divmod(parent.computed, state.tokens_per_block)
    for window in windows:
        window.free_up(needed, child)
        left = needed
        if begun:
            window.copy_partial(branch, window.source_of_own(parent, shared, begun), set())
            left -= 1
        if left:
            window.allocate(packed_handles([branch]), left, [left], ev.AllocateReason.FORK)


def rewind(
    state: CacheState,
    windows: Items[WindowBlockManager],
    emit: Callable[[Event], None],
    sequence: Sequence,
    num_tokens: int,
    clock: int,
) -> None:
    """Take back all but the first tokens of a sequence: where its last block is cached, it gets a copy of its own."""
    size = state.tokens_per_block
    blocks, begun = divmod(min(sequence.computed, num_tokens - 1), size)
    needed = needed_blocks(sequence, num_tokens, size)
    sources = [window.source_of_own(sequence, blocks, begun) if begun else None for window in windows]
    freed = [window.freed_by(sequence, window.first_to_leave(sequence, num_tokens)) for window in windows]
    freed += [b""] * (len(state.groups) - len(windows))  # cross attention
    emit(ev.SequenceRewound(handle=sequence.handle, num_tokens=num_tokens, freed=tuple(freed), clock=clock))
    for window, source in zip(windows, sources, strict=True):
        missing = needed - len(sequence.tables[window.index])
        window.free_up(missing, sequence.handle)
        if missing and source is not None:
            window.copy_partial(sequence, source, {source.slot} if source.cached else set())
            missing -= 1
        if missing:
            window.allocate(packed_handles([sequence]), missing, [missing], ev.AllocateReason.REWIND)
