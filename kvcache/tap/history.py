"""Statistics over a log of engines' events: how long blocks stay, which return, and which several workers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from events.subscribe.workers import BlockPlace, FeedState, WorkerBlock, WorkerState, place_of
from events.types import (
    AnyEvent,
    EventBatch,
    FeedCleared,
    FeedGap,
    FeedReceived,
    FeedRemoved,
    FeedRestarted,
    FeedStarted,
    FeedStored,
    Hash,
)
from kvcache.audit.histogram import Ages
from kvcache.replay import fitting, known_events

_Key = tuple[int, BlockPlace, Hash]
_Name = tuple[int, int, Hash]
"""Worker, group, and hash of a block."""


class _Left(NamedTuple):
    """A block that has left a place."""

    place: BlockPlace
    since: int
    at: int


class FeedHistory:
    """Fold that counts changes of `state`. Ages are in ns, by the engine's clock if it reports times.

    A block that leaves a level and is in another one after the same batch has moved: it lives on.
    """

    def __init__(self) -> None:
        self.state = FeedState()
        self.now = 0
        self.first: EventBatch | None = None
        self.last: EventBatch | None = None
        self.counting = True
        """True if changes count; False while reading up to where counting begins."""
        self.stored = self.removed = self.moved = 0
        """Blocks that became resident in a place, that left one, and that left one for another."""
        self.stored_elsewhere = 0
        """Blocks that became resident in a worker while another worker had them."""
        self.stored_again = 0
        """Blocks that became resident in a worker that had removed them before."""
        self.forgotten = 0
        """Blocks that were cleared, or became unknown after a loss or a restart."""
        self.lifetimes, self.gone_ages = Ages(), Ages()
        """Durations from store to removal, and from removal to the next store."""
        self._since: dict[_Key, int] = {}
        self._taken_over: dict[_Key, int] = {}
        """Blocks of the previous epoch, until they are reported again or dropped."""
        self._gone: dict[tuple[int, Hash], int] = {}
        self._arrived: dict[_Name, BlockPlace] = {}
        """Blocks that arrived in this batch while they were in another place of the worker."""
        self._left: dict[_Name, _Left] = {}
        """Blocks that left in this batch, not counted yet."""

    def fold(self, batch: EventBatch, *, counts: bool = True) -> None:
        """Fold a batch. Raises `Unreplayable`."""
        self.now, self.counting = batch.ts, counts
        with fitting(batch.seq):
            for event in known_events(batch):
                self._apply(event)
        for key in [*self._left]:
            self._settle(key)
        self._arrived.clear()
        if counts:
            self.first, self.last = self.first or batch, batch

    def _apply(self, event: AnyEvent) -> None:
        """Apply one event to the state, and count it."""
        if isinstance(event, FeedStored):
            self._count_stored(event, self.state.store(event))
            return
        if isinstance(event, FeedRemoved):
            self._count_removed(event, self.state.remove(event))
            return
        if isinstance(event, FeedStarted):
            self._taken_over, self._since = self._since, {}
            self._arrived.clear()
        elif isinstance(event, FeedReceived) and event.published_ts:
            self.now = event.published_ts
        elif isinstance(event, FeedCleared | FeedGap | FeedRestarted):
            self._count_forgotten(self.state.workers[event.worker])
        self.state.apply(event)

    @property
    def held_by(self) -> dict[int, int]:
        """Number of distinct resident blocks by the number of workers that hold them."""
        workers = self.state.workers.values()
        holders = Counter(name for each in workers for name in set[Hash]().union(*each.blocks.values()))
        return dict(sorted(Counter(holders.values()).items()))

    def _has(self, worker: int, name: Hash, but: BlockPlace | None = None) -> bool:
        """Return True if a worker has a block in any place but this one."""
        known = self.state.workers.get(worker)
        return known is not None and any(name in there for at, there in known.blocks.items() if at != but)

    def _count_stored(self, event: FeedStored, new: list[WorkerBlock]) -> None:
        place, ages = place_of(event), []
        for block in new:
            key = event.worker, place, block.name
            its_name = event.worker, place.group, block.name
            since = self._taken_over.pop(key, None)
            if since is None:
                since = self._before_move(its_name, place)
            there_too = self._has(event.worker, block.name, place)
            self._since[key] = self.now if since is None else since
            if since is None and there_too:
                self._arrived[its_name] = place
            gone = self._gone.pop((event.worker, block.name), None)
            if since is None and self.counting:
                self.stored += 1
                others = (worker for worker in self.state.workers if worker != event.worker)
                self.stored_elsewhere += not there_too and any(self._has(each, block.name) for each in others)
                if gone is not None:
                    ages.append(max(0, self.now - gone))
        self.stored_again += len(ages)
        _add(self.gone_ages, ages)

    def _count_removed(self, event: FeedRemoved, gone: list[Hash]) -> None:
        place = place_of(event)
        for name in gone:
            key = event.worker, place.group, name
            since = self._since.pop((event.worker, place, name))
            arrived = self._arrived.pop(key, place)
            if arrived != place:
                self._since[event.worker, arrived, name] = since
                self._count_move(stored=-1)
                continue
            self._settle(key)
            self._left[key] = _Left(place, since, self.now)

    def _before_move(self, key: _Name, place: BlockPlace) -> int | None:
        """Return since when a block lives that has just left another place; None if it has not."""
        left = self._left.get(key)
        if left is None or left.place == place:
            self._settle(key)
            return None
        del self._left[key]
        self._count_move()
        return left.since

    def _count_move(self, stored: int = 0) -> None:
        if self.counting:
            self.moved += 1
            self.stored += stored

    def _settle(self, key: _Name) -> None:
        """Count a removal, if there was one that was not part of a move."""
        left = self._left.pop(key, None)
        if left is None:
            return
        worker, _, name = key
        if not self._has(worker, name, left.place):
            self._gone[worker, name] = left.at
        if self.counting:
            self.removed += 1
            _add(self.lifetimes, [max(0, left.at - left.since)])

    def _count_forgotten(self, worker: WorkerState) -> None:
        """Count the blocks of a worker that become unknown."""
        number = worker.seen.worker
        for place, there in worker.blocks.items():
            for name in there:
                del self._since[number, place, name]
        self.forgotten += worker.num_blocks if self.counting else 0
        self._taken_over = {key: since for key, since in self._taken_over.items() if key[0] != number}
        self._arrived.clear()


def _add(ages: Ages, found: Iterable[int]) -> None:
    ages.add(np.array(list(found), np.int64))
