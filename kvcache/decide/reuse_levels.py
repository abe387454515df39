"""The order of eviction of `eviction_policy="levels"`, and which order each policy stands for."""

from __future__ import annotations

from typing import Any

from kvcache.decide.eviction_order import EvictionOrder, LeastRecentlyUsed
from kvcache.fold.prefix_tree import Run


class ReuseLevels(LeastRecentlyUsed):
    """Lower priority first, then what was released longest ago, credit included, then the deepest.

    Credits are in the state of windows that count uses (`kvcache.fold.counting_group`); elsewhere there are none, and
    this is `LeastRecentlyUsed`.
    """

    def key(self, run: Run) -> Any:
        """By turn. Two runs with one turn may be those of two releases, which are not to go in turns."""
        return (run.priority, run.turn, run.released_at, -run.end)


ORDERS: dict[str, type[EvictionOrder]] = {"lru": LeastRecentlyUsed, "levels": ReuseLevels}
"""By the setting `eviction_policy`."""
