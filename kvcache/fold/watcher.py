"""Who is told what becomes of cached blocks, to be able to say which go next. A replay tells nobody."""

from __future__ import annotations

from array import array
from typing import Protocol

from kvcache.fold.prefix_tree import Run


class Watcher(Protocol):
    """Hears of changes when they are made. It must not change anything itself."""

    def evictable(self, run: Run) -> None:
        """The last block of this run can be evicted from now on, or something that decides when has changed."""

    def held(self, level: int, slots: array[int]) -> None:
        """A sequence holds these cached blocks, which none held before."""

    def gone(self, level: int, slots: array[int]) -> None:
        """These blocks are not cached in this level any more."""

    def cleared(self) -> None:
        """Nothing is cached any more."""


class Nobody:
    """Hears nothing."""

    def evictable(self, run: Run) -> None:
        """Ignore it."""

    def held(self, level: int, slots: array[int]) -> None:
        """Ignore it."""

    def gone(self, level: int, slots: array[int]) -> None:
        """Ignore it."""

    def cleared(self) -> None:
        """Ignore it."""
