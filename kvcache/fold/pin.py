"""References that outlive the sequence for which they were taken."""

from __future__ import annotations

from array import array

from events.types import RequestId
from kvcache.fold.prefix_tree import Run


class Pin:
    """What one pin holds."""

    __slots__ = ("ends", "named", "request_id", "slots")

    def __init__(self, request_id: RequestId, slots: list[array[int]], ends: list[Run | None]) -> None:
        self.request_id = request_id
        self.slots = slots
        """Per group: primary slots, shallowest first."""
        self.ends = ends
        """Per group: with full attention, the run at whose end the pinned path ends."""
        self.named = True
        """Whether the blocks are still cached; after the cache was cleared they are only held."""
