"""Whether the end of a request would store anything more: asked of a folded state, which stays as it is."""

from __future__ import annotations

from events.types import Event
from kvcache.config import KVCacheConfig
from kvcache.decide.block_manager import BlockManager
from kvcache.decide.sliding_manager import SlidingWindowManager
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.fold.watcher import Watcher


class _Wanted(Exception):
    """No error, but an answer: an event was decided upon."""


class Unstored:
    """Asks the decisions what they would do. They change nothing but by events, and here the first one ends them."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._windows: tuple[WindowBlockManager | SlidingWindowManager, ...] = ()

    def begin(self) -> None:
        """The state has begun anew."""
        self._windows = ()

    def any_of(self, sequence: Sequence) -> bool:
        """Whether blocks of this running sequence are computed that could be stored now, and are not."""
        try:
            for window in self._windows or self._made():
                window.store(sequence, partial=True)
        except _Wanted:
            return True
        return False

    def _made(self) -> tuple[WindowBlockManager | SlidingWindowManager, ...]:
        assert self._state.created is not None
        config = KVCacheConfig.model_validate_json(self._state.created.config)
        self._windows = BlockManager(config, self._state, _refuse, recorded=False, monotonic_ns=int).windows
        for group in self._state.groups:
            group.watcher = Watcher()  # what can be evicted is not asked here
        return self._windows


def _refuse(event: Event) -> None:
    raise _Wanted
