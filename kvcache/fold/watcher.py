"""Who is told what becomes of cached blocks, to be able to say which go next. A replay tells nobody."""

from __future__ import annotations

from array import array

from kvcache.fold.prefix_tree import Run


class Watcher:
    """Hears of changes when they are made, and must not change anything itself. This one ignores them."""

    def evictable(self, run: Run) -> None:
        """The last block of this run can be evicted from now on, or something that decides when has changed."""

    def released(self, level: int, places: array[int]) -> None:
        """Sliding windows: these blocks can be evicted from now on, at this level, lowest first."""

    def held(self, level: int, slots: array[int]) -> None:
        """A sequence holds these cached blocks, which none held before."""

    def gone(self, level: int, slots: array[int]) -> None:
        """These blocks are not cached in this level any more."""

    def cleared(self) -> None:
        """Nothing is cached any more."""
