"""Epochs one after the other in time, also where the clock of one begins before the end of the one before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from events.types import EpochStarted, EventBatch


class EpochClock:
    """Times of a log whose clock may begin again with an epoch, as it does in logs of simulated time."""

    def __init__(self) -> None:
        self._shift, self._latest = 0, 0
        self._epochs = 0
        self.set_back: list[int] = []
        """Batches with which epochs began that have been shifted behind those before them."""

    def begin(self, at: int, batch: int) -> None:
        """An epoch begins at this time (ns)."""
        self._epochs += 1
        self._shift = max(0, self._latest - at) if self._epochs > 1 else 0
        if self._shift:
            self.set_back.append(batch)

    def of(self, at: int) -> int:
        """A time of this epoch, shifted where its clock began too early."""
        shifted = at + self._shift
        self._latest = max(self._latest, shifted)
        return shifted


def laid_out(batches: Iterable[EventBatch], clock: EpochClock) -> Iterator[EventBatch]:
    """The batches, with shifted times."""
    for batch in batches:
        if any(type(event) is EpochStarted for event in batch.events):
            clock.begin(batch.ts, batch.seq)
        at = clock.of(batch.ts)
        yield batch if at == batch.ts else msgspec.structs.replace(batch, ts=at)
