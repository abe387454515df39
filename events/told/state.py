"""Who holds which blocks, as far as engines told: a fold over the events of a log of kind `feed`.

Engines may store a block again while it is resident, a copy of its own, and remove each: so copies are counted, and the
block is resident until the last one is gone.

What is not sure is not there: behind a loss nothing is known to be resident but what is told after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from events import types as ev
from events.told.blocks import Block, blocks_of, parents_first, stores_of
from events.told.lineage import Lineage
from events.types import (
    FeedCleared,
    FeedGap,
    FeedReceived,
    FeedRemoved,
    FeedRestarted,
    FeedStarted,
    FeedStored,
    FeedUnknown,
    Hash,
    WorkerSeen,
)

GPU = "GPU"
MOST_COPIES = 100
"""Of one block in one place that are counted: of more, the last ones are not known to be there."""


class Place(NamedTuple):
    """Where blocks are, as the engine calls it; a removal has to name the same."""

    medium: str
    group: int
    locality: str | None = None
    ownership: str | None = None


def place_of(event: FeedStored | FeedRemoved) -> Place:
    """No medium is the GPU, no group the first one."""
    return Place(event.medium or GPU, event.group_idx or 0, event.locality, event.ownership)


def name_of(seen: WorkerSeen) -> str:
    """What people call a worker: where it is, and its rank if it is not the first one."""
    return f"{seen.source}#{seen.rank}" if seen.rank else seen.source


@dataclass
class Worker:
    """What is known of one engine, or of one of its data-parallel ranks."""

    seen: WorkerSeen
    complete: bool = True
    """Whether all that is resident in it is known."""
    number: int | None = None
    """Of the last batch."""
    published_ts: int | None = None
    """When that was published, by its clock."""
    blocks: dict[Place, dict[Hash, Block]] = field(default_factory=dict)
    copies: dict[tuple[Place, Hash], int] = field(default_factory=dict)
    """Of blocks that have several."""
    lineage: Lineage = field(default_factory=Lineage)
    batches: int = 0
    gaps: int = 0
    lost: int = 0
    """Batches in these."""
    restarts: int = 0
    clears: int = 0
    stored: int = 0
    removed: int = 0
    repeated: int = 0
    """Blocks that were stored while they were resident."""
    unknown_removals: int = 0
    """Blocks that were removed, but not known to be there: behind a loss, that is as it has to be."""
    unknown_events: int = 0

    @property
    def name(self) -> str:
        """What people call it."""
        return name_of(self.seen)

    @property
    def num_blocks(self) -> int:
        """Resident, each counted once for each place that it is in."""
        return sum(map(len, self.blocks.values()))

    def store(self, event: FeedStored) -> list[Block]:
        """Take the blocks in; returns those that were not resident there before."""
        place = place_of(event)
        there = self.blocks.setdefault(place, {}) if event.block_hashes else {}
        new = []
        for block in blocks_of(event):
            if block.name in there:
                self.repeated += 1
                self.copies[place, block.name] = min(self.copies.get((place, block.name), 1) + 1, MOST_COPIES)
            else:
                there[block.name] = block
                self.lineage.add(place.group, block)
                new.append(block)
        self.stored += len(event.block_hashes)
        return new

    def remove(self, event: FeedRemoved) -> list[Hash]:
        """Take a copy of each away; returns those that are not resident there any more."""
        place = place_of(event)
        there = self.blocks.get(place, {})
        gone = []
        for name in event.block_hashes:
            left = self.copies.pop((place, name), 1) - 1
            if left > 1:
                self.copies[place, name] = left
            elif not left and (block := there.pop(name, None)) is not None:
                self.lineage.take(place.group, block, is_last=not self._has(place.group, name))
                gone.append(name)
            elif not left:
                self.unknown_removals += 1
        if not there:
            self.blocks.pop(place, None)
        self.removed += len(event.block_hashes)
        return gone

    def _has(self, group: int, name: Hash) -> bool:
        return any(place.group == group and name in there for place, there in self.blocks.items())

    def forget(self) -> None:
        """Nothing is resident."""
        self.blocks.clear()
        self.copies.clear()
        self.lineage.clear()

    def resident(self) -> Iterator[FeedStored | FeedRemoved]:
        """Events that make what is resident now; nothing that happens later changes them.

        They are stores, parents first. What is resident only behind a block that is not there at the moment comes with
        that block, which is removed again at the end.
        """
        blocks = [block for there in self.blocks.values() for block in there.values()]
        kept = [*self.lineage.kept.values()]
        return chain(stores_of(parents_first(blocks + kept)), _removals(kept))

    def copied(self) -> Iterator[FeedStored]:
        """Stores of the further copies that there are of some of these: of all that have a second one, a third, …"""
        return stores_of(
            self.blocks[place][name]
            for number in range(1, max(self.copies.values(), default=1))
            for (place, name), count in self.copies.items()
            if count > number
        )


def _removals(blocks: Iterable[Block]) -> Iterator[FeedRemoved]:
    """Deepest first."""
    for block in reversed(list(parents_first(blocks))):
        event = block.scope.event
        yield FeedRemoved(
            worker=event.worker,
            block_hashes=(block.name,),
            medium=event.medium,
            group_idx=event.group_idx,
            locality=event.locality,
            ownership=event.ownership,
        )


class FeedState:
    """All workers of a log."""

    def __init__(self) -> None:
        self.epoch = 0
        self.started: FeedStarted | None = None
        self.tokens_recorded = True
        self.workers: dict[int, Worker] = {}
        """Of this epoch, by their numbers."""
        self._handlers: dict[type, Callable[[Any], object]] = {
            ev.EpochStarted: self._begin_epoch,
            FeedStarted: self._start,
            WorkerSeen: self._see,
            FeedReceived: self._receive,
            FeedStored: self.store,
            FeedRemoved: self.remove,
            FeedCleared: self._clear,
            FeedGap: self._lose,
            FeedRestarted: self._restart,
            FeedUnknown: self._note,
        }

    def apply(self, event: ev.AnyEvent) -> None:
        """Change the state by one event; those of other kinds of logs change nothing. KeyError: an unknown worker."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def store(self, event: FeedStored) -> list[Block]:
        """What becomes resident by it."""
        return self.workers[event.worker].store(event)

    def remove(self, event: FeedRemoved) -> list[Hash]:
        """What is not resident any more."""
        return self.workers[event.worker].remove(event)

    def forget(self, worker: Worker) -> None:
        """Nothing in a worker is known to be resident any more."""
        worker.forget()

    def _begin_epoch(self, event: ev.EpochStarted) -> None:
        self.epoch, self.tokens_recorded = event.epoch, event.tokens_recorded

    def _start(self, event: FeedStarted) -> None:
        self.started = event
        self.workers.clear()

    def _see(self, event: WorkerSeen) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            worker = self.workers[event.worker] = Worker(event)
        worker.seen, worker.complete = event, event.complete

    def _receive(self, event: FeedReceived) -> None:
        worker = self.workers[event.worker]
        worker.number, worker.published_ts = event.number, event.published_ts
        worker.batches += 1

    def _clear(self, event: FeedCleared) -> None:
        worker = self.workers[event.worker]
        self.forget(worker)
        worker.complete = True
        worker.clears += 1

    def _lose(self, event: FeedGap) -> None:
        worker = self.workers[event.worker]
        self.forget(worker)
        worker.complete = False
        worker.gaps += 1
        worker.lost += event.last - event.first + 1

    def _restart(self, event: FeedRestarted) -> None:
        worker = self.workers[event.worker]
        self.forget(worker)
        worker.complete = True
        worker.restarts += 1

    def _note(self, event: FeedUnknown) -> None:
        self.workers[event.worker].unknown_events += 1
