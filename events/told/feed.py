"""What routers are told of one worker of a log of kind `feed`: what it told itself, without copies.

A block is told when its first copy becomes resident and when the last one goes, in the worker's own words. So routers
that count copies and those that do not come to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from events import types as ev
from events.errors import EventsError
from events.feed.cache_fold import StreamFold
from events.feed.changes import AnyChange, Cleared, Told
from events.formats.told import to_wire
from events.told.blocks import stores_of
from events.told.state import Worker, name_of


class SeveralWorkers(EventsError):
    """A feed is that of one worker."""


class WorkerFeed(StreamFold[AnyChange]):
    """Folds batches into the changes of the worker with this name; None: of the only one that there is.

    `fold` raises SeveralWorkers.
    """

    _heard_when_lost = (ev.Gap, ev.FeedStarted, ev.WorkerSeen)

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.worker: Worker | None = None
        self._name = name
        self._number: int | None = None
        self._names: dict[int, str] = {}
        self._of_worker: dict[type, Callable[[Worker, Any], None]] = {
            ev.FeedStored: self._store,
            ev.FeedRemoved: self._remove,
            ev.FeedCleared: self._clear,
            ev.FeedGap: self._clear,
            ev.FeedRestarted: self._clear,
        }
        self._handlers |= {ev.FeedStarted: self._start, ev.WorkerSeen: self._see}
        self._handlers |= dict.fromkeys(self._of_worker, self._hear)

    def snapshot(self) -> Iterator[AnyChange]:
        """Everything that is known to be resident, as stores, parents first; what is folded later changes nothing."""
        if self.worker is None:
            return iter(())
        return map(_told, self.worker.resident())

    @property
    def missing(self) -> str | None:
        """Whom the log does not know (yet), in words; None: its worker is there."""
        if self.worker is not None:
            return None
        if self._name is None:
            return "the log knows of no worker yet"
        names = ", ".join(sorted(self._names.values())) or "none"
        return f"the log knows of no worker {self._name}; there are {names}"

    def _hear(self, event: Any) -> None:
        """What some worker told."""
        if self.worker is not None and event.worker == self._number:
            self._of_worker[type(event)](self.worker, event)

    def _start(self, event: ev.FeedStarted) -> None:
        self._begin()
        self.worker = self._number = None
        self._names.clear()
        self._changes.append(Cleared())

    def _see(self, event: ev.WorkerSeen) -> None:
        self._names[event.worker] = name_of(event)
        if self._name is None and len(self._names) > 1:
            names = ", ".join(sorted(self._names.values()))
            raise SeveralWorkers(
                f"the log is of several workers, and a feed is of one: name it with engine=; there are {names}"
            )
        if self._name in (None, self._names[event.worker]):
            if self.worker is None:
                self.worker, self._number = Worker(event), event.worker
            self.worker.seen = event

    def _store(self, worker: Worker, event: ev.FeedStored) -> None:
        new = worker.store(event)
        if len(new) == len(event.block_hashes):
            self._changes += [_told(event)] if new else []
        else:
            self._changes += map(_told, stores_of(new))

    def _remove(self, worker: Worker, event: ev.FeedRemoved) -> None:
        gone = worker.remove(event)
        if gone:
            self._changes.append(_told(msgspec.structs.replace(event, block_hashes=tuple(gone))))

    def _clear(self, worker: Worker, event: ev.FeedCleared | ev.FeedGap | ev.FeedRestarted) -> None:
        worker.forget()
        self._changes.append(Cleared())


def _told(event: ev.FeedStored | ev.FeedRemoved) -> Told:
    return Told(to_wire(event))
