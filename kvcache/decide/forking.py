"""A sequence branches: the branch holds what is computed, and gets blocks of its own for the rest. Or it goes back.

An engine may have computed more than counts as computed: the last token, drafts, all of a prompt. The next
`add_tokens` makes it count, so a block that takes another one's place gets all tokens of that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from events import types as ev
from events.ids import Handle
from events.types import Event, RequestId
from kvcache.decide.claims import CopySource
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState


def own_blocks(parent: Sequence, tokens_per_block: int) -> int:
    """Blocks that a branch does not share: the one that is computed in part, and those after it."""
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
    for window in windows:
        sources = _sources(window, parent, parent.num_tokens, parent.computed // state.tokens_per_block)
        window.free_up(len(sources), child)
        window.copy_blocks(branch, sources, ev.AllocateReason.FORK)


def _sources(window: WindowBlockManager, sequence: Sequence, num_tokens: int, first: int) -> list[CopySource]:
    """The blocks of a sequence's first tokens, from the block `first` on."""
    size = window.tokens_per_block
    return [
        window.source_of_own(sequence, block, min(size, num_tokens - block * size))
        for block in range(first, needed_blocks(sequence, num_tokens, size))
    ]


def rewind(
    state: CacheState,
    windows: Items[WindowBlockManager],
    emit: Callable[[Event], None],
    sequence: Sequence,
    num_tokens: int,
    clock: int,
) -> None:
    """Take back all but the first tokens of a sequence: where its last block is cached, it gets a copy of its own."""
    sources, freed = [], []
    for window in windows:
        first = window.first_to_leave(sequence, num_tokens)
        sources.append(_sources(window, sequence, num_tokens, first))
        freed.append(window.freed_by(sequence, first))
    freed += [b""] * (len(state.groups) - len(windows))  # cross attention
    emit(ev.SequenceRewound(handle=sequence.handle, num_tokens=num_tokens, freed=tuple(freed), clock=clock))
    for window, copied in zip(windows, sources, strict=True):
        window.free_up(len(copied), sequence.handle)
        window.copy_blocks(sequence, copied, ev.AllocateReason.REWIND)
