"""What a log of what engines told says over time: how long blocks stay, what comes back, what several workers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from events.feed_events import FeedRemoved, FeedStarted, FeedStored, Hash
from events.told.blocks import Block
from events.told.state import FeedState, Place, Worker, place_of
from events.types import AnyEvent, EventBatch
from kvcache.audit.histogram import Ages
from kvcache.replay import known_events

_Key = tuple[int, Place, Hash]


class History(FeedState):
    """A fold that also counts. Times are those at which batches were recorded, in ns."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.first: EventBatch | None = None
        self.last: EventBatch | None = None
        self.counting = True
        """Whether what happens counts, or only leads to where counting begins."""
        self.stored = self.removed = 0
        """Blocks that became resident in a place, and that left one."""
        self.stored_elsewhere = 0
        """Blocks that became resident in a worker while another one had them."""
        self.stored_again = 0
        """Blocks that became resident in a worker that had had them and let them go."""
        self.forgotten = 0
        """Blocks that were cleared, or of which nothing is known since a loss or a restart."""
        self.lifetimes, self.gone_ages = Ages(), Ages()
        """From store to removal; from removal to the next store."""
        self._since: dict[_Key, int] = {}
        self._taken_over: dict[_Key, int] = {}
        """Of the epoch before, until it is said again or forgotten."""
        self._gone: dict[tuple[int, Hash], int] = {}
        self._holders: dict[Hash, Counter[int]] = {}

    def fold(self, batch: EventBatch, *, counts: bool = True) -> None:
        """Take a batch in."""
        self.now, self.counting = batch.ts, counts
        for event in known_events(batch):
            self.apply(event)
        if counts:
            self.first, self.last = self.first or batch, batch

    def apply(self, event: AnyEvent) -> None:
        """Change the state by one event, and count it."""
        if isinstance(event, FeedStarted):
            self._taken_over, self._since = self._since, {}
            self._holders.clear()
        super().apply(event)

    @property
    def held_by(self) -> dict[int, int]:
        """How many different blocks are resident in so many workers now."""
        counted = Counter(len(workers) for workers in self._holders.values())
        return dict(sorted(counted.items()))

    def store(self, event: FeedStored) -> list[Block]:
        """Count what becomes resident."""
        new, place, ages = super().store(event), place_of(event), []
        for block in new:
            key, holders = (event.worker, place, block.name), self._holders.setdefault(block.name, Counter())
            since = self._taken_over.pop(key, None)
            elsewhere = any(worker != event.worker for worker in holders)
            holders[event.worker] += 1
            self._since[key] = self.now if since is None else since
            gone = self._gone.pop((event.worker, block.name), None)
            if since is None and self.counting:
                self.stored += 1
                self.stored_elsewhere += elsewhere and holders[event.worker] == 1
                if gone is not None:
                    ages.append(self.now - gone)
        self.stored_again += len(ages)
        _add(self.gone_ages, ages)
        return new

    def remove(self, event: FeedRemoved) -> list[Hash]:
        """Count what is not resident any more."""
        gone, place, ages = super().remove(event), place_of(event), []
        for name in gone:
            ages.append(self.now - self._since.pop((event.worker, place, name)))
            if self._release(event.worker, name):
                self._gone[event.worker, name] = self.now
        if self.counting:
            self.removed += len(gone)
            _add(self.lifetimes, ages)
        return gone

    def forget(self, worker: Worker) -> None:
        """Count what is not known to be there any more."""
        number = worker.seen.worker
        for place, there in worker.blocks.items():
            for name in there:
                del self._since[number, place, name]
                self._release(number, name)
        self.forgotten += worker.num_blocks if self.counting else 0
        self._taken_over = {key: since for key, since in self._taken_over.items() if key[0] != number}
        super().forget(worker)

    def _release(self, worker: int, name: Hash) -> bool:
        """One place of a worker less has it; returns whether none has."""
        holders = self._holders[name]
        holders[worker] -= 1
        if holders[worker]:
            return False
        del holders[worker]
        if not holders:
            del self._holders[name]
        return True


def _add(ages: Ages, found: Iterable[int]) -> None:
    ages.add(np.array(list(found), np.int64))
