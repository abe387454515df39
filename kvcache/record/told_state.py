"""A fold of batches beside a sink that tells them: whoever hears of it later begins with its state."""

from __future__ import annotations

from events.types import CacheCreated, EventBatch, PoolShared, StateExported
from kvcache.errors import invariant
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed


class ToldState:
    """The state behind the last batch (`sinks.base.CacheFold`). For one thread."""

    def __init__(self) -> None:
        self._replayed = Replayed(CacheState())

    def fold(self, batch: EventBatch) -> None:
        """Take in a batch. Raises what `kvcache.replay` does of batches that do not fit."""
        self._replayed.fold(batch, verify=False)

    def told(self) -> tuple[CacheCreated | StateExported | PoolShared, ...]:
        """What an epoch that goes on from here begins with."""
        created = self._replayed.state.created
        invariant(created is not None, "no cache has begun")
        assert created is not None
        return created, self._replayed.state.export(), *self._replayed.state.export_shared()
