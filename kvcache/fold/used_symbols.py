"""Which pages of symbols a state needs: those that nothing uses may be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from events.tokens.symbols import pages_in

if TYPE_CHECKING:
    from kvcache.fold.state import CacheState


def used_pages(state: CacheState) -> set[int]:
    """The pages whose symbols occur in cached blocks and running sequences."""
    used: set[int] = set()
    for group in state.groups:
        for run in group.tree.runs.values():
            used |= pages_in(run.symbols)
    for handle, end in state.rich.items():
        used |= pages_in(state.sequences[handle].tokens[:end].tobytes())
    return used
