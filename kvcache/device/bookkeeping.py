"""Memory for the bookkeeping of blocks, compared with what is free before any of it is taken.

The pools compare their own bytes. But a cache may run without pools, and a number of blocks that no machine can even
count should be an error at the start rather than a process that grows until the system ends it.
"""

from __future__ import annotations

from kvcache.config import KVCacheConfig
from kvcache.device.memory import free_bytes
from kvcache.errors import NotEnoughMemory, Unsupported
from kvcache.layout import Layout

SLOT_BYTES = 24
"""About what one slot takes in lists of blank slots and of owners, with a copy while the state is written down."""


def served_layout(config: KVCacheConfig) -> Layout:
    """The layout of a cache that a manager can serve; raises `Unsupported` or `NotEnoughMemory` for others."""
    layout = Layout.of(config)
    if len(layout.groups) > 1 or layout.groups[0].window < config.max_sequence_length:
        raise Unsupported(
            "an attention window shorter than max_sequence_length", "leave max_attention_window out"
        )
    _refuse_too_much(layout)
    return layout


def _refuse_too_much(layout: Layout) -> None:
    """Raise `NotEnoughMemory` if there is no room to keep book of so many blocks."""
    needed = SLOT_BYTES * sum(sum(group.num_blocks) for group in layout.groups)
    free = free_bytes()
    if needed > free:
        raise NotEnoughMemory(
            needed,
            free,
            "host memory for the bookkeeping of its blocks",
            "primary_blocks, max_tokens or secondary_blocks",
        )
