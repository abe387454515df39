"""Memory for the bookkeeping of blocks, compared with what is free before any of it is taken.

The pools compare their own bytes. But a cache may run without pools, and a number of blocks that no machine can even
count should be an error at the start rather than a process that grows until the system ends it.
"""

from __future__ import annotations

from kvcache.errors import NotEnoughMemory
from kvcache.layout import Layout
from kvcache.memory import free_bytes

SLOT_BYTES = 24
"""About what one slot takes in lists of blank slots and of owners, with a copy while the state is written down."""


def refuse_too_much(layout: Layout) -> None:
    """Raise `NotEnoughMemory` if there is no room to keep book of so many blocks."""
    needed = SLOT_BYTES * sum(sum(group.num_blocks) for group in layout.groups)
    free = free_bytes()
    if needed > free:
        raise NotEnoughMemory(
            needed,
            free,
            "host memory for their bookkeeping",
            "primary_blocks, max_tokens or secondary_blocks",
        )
