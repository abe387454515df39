"""A sequence branches: the branch holds what is computed, and gets blocks of its own for the rest."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from events import types as ev
from events.ids import Handle, Slot
from events.types import PRIMARY, Event, RequestId
from kvcache.decide.claims import CopySource
from kvcache.decide.decoding import packed_handles
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.retention import kept
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState


def own_blocks(parent: Sequence, tokens_per_block: int) -> int:
    """Blocks that a branch does not share: the one that is computed in part, and those behind it."""
    return len(parent.tables[0]) - parent.computed // tokens_per_block


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
            how = kept(parent, window.index, shared, state.tokens_per_block)
            source = CopySource(PRIMARY, Slot(parent.tables[window.index][shared]), begun, how)
            window.copy_partial(branch, source, set())
            left -= 1
        if left:
            window.allocate(packed_handles([branch]), left, [left], ev.AllocateReason.FORK)
