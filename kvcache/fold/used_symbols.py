"""Which pages of symbols a state needs: those that nothing uses may be forgotten."""

from __future__ import annotations

from events.tokens.symbols import pages_in
from kvcache.fold.contents import Contents


def used_pages(state: Contents) -> set[int]:
    """The pages whose symbols occur in cached blocks and running sequences."""
    used: set[int] = set()
    for group in state.groups:
        for run in group.tree.runs.values():
            used |= pages_in(run.symbols)
    for handle, end in state.rich.items():
        used |= pages_in(state.sequences[handle].tokens[:end].tobytes())
    return used
