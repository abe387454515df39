"""How full each level of each window is, over time: in so many equal parts as stay readable, however long a log is."""

from __future__ import annotations

from typing import NamedTuple

from kvcache.fold.state import CacheState

PARTS = 400
"""At most; from then on two become one."""
_FIRST_NS = 1_000_000


class Filled(NamedTuple):
    """Blocks of one level of one window."""

    held: int
    """In use by running requests."""
    free: int
    """Cached, and held by none: reusable, and evicted when room is needed."""
    blank: int


Shelf = tuple[int, int]
"""A window in tokens, and a level."""


class Sample(NamedTuple):
    """A moment."""

    at: int
    """Wall-clock ns."""
    filled: dict[Shelf, Filled]
    held: int
    """Of all primary levels."""


class Occupancy:
    """Of each part of the time it keeps the moment at which running requests held most."""

    def __init__(self) -> None:
        self._parts: dict[int, Sample] = {}
        self._start: int | None = None
        self._width = _FIRST_NS

    def add(self, state: CacheState, now: int) -> None:
        """Look at the state behind a batch."""
        if self._start is None:
            self._start = now
        part = max(0, now - self._start) // self._width
        while part >= PARTS:
            self._join()
            part //= 2
        held = sum(
            group.levels[0].size - len(group.levels[0].blank) - group.levels[0].unreferenced
            for group in state.groups
        )
        known = self._parts.get(part)
        if known is None or known.held < held:
            self._parts[part] = Sample(now, _filled(state), held)

    def _join(self) -> None:
        self._width *= 2
        joined: dict[int, Sample] = {}
        for part, sample in self._parts.items():
            known = joined.get(part // 2)
            if known is None or known.held < sample.held:
                joined[part // 2] = sample
        self._parts = joined

    @property
    def samples(self) -> list[Sample]:
        """In order of time."""
        return [self._parts[part] for part in sorted(self._parts)]

    @property
    def shelves(self) -> list[Shelf]:
        """Those that have ever had blocks, in the order of the log's groups, primary first."""
        return list(
            {shelf: None for sample in self.samples for shelf, filled in sample.filled.items() if sum(filled)}
        )


def _filled(state: CacheState) -> dict[Shelf, Filled]:
    created = state.created
    if created is None:
        return {}
    return {
        (shape.window, level.index): Filled(
            level.size - len(level.blank) - level.unreferenced, level.unreferenced, len(level.blank)
        )
        for shape, group in zip(created.groups, state.groups, strict=True)
        for level in group.levels
    }
