"""What engines say becomes batches of a log, one for each of theirs, and the state that these fold to.

The recorder holds what is resident, and nothing of the past. What the log knows from before waits beside it until its
publisher has proven to be the one that said it (`Continued`): until then it is not known to be there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from events.formats.told import from_wire
from events.formats.vllm_decode import AllBlocksCleared
from events.log import LogWriter
from events.subscribe.continuity import Missed, Received, Restarted
from events.told.state import FeedState, Worker
from events.types import (
    AnyEvent,
    EventBatch,
    FeedGap,
    FeedReceived,
    FeedRestarted,
    FeedStarted,
    WorkerSeen,
)
from kvcache.tap.sources import Continued, Heard, Last, nanoseconds

BEFORE = "said before it was listened to"
_NEVER: tuple[int, int, str] = (0, -1, "")


class FeedRecorder:
    """Writes the log. For one thread. `before`: the state that the log has had, if it is continued."""

    def __init__(
        self,
        log: LogWriter,
        endpoints: tuple[str, ...],
        before: FeedState | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._log, self._endpoints, self._wall_ns = log, endpoints, wall_ns
        self.state = FeedState()
        """What is known now."""
        self._before: dict[str, list[Worker]] = {}
        for worker in before.workers.values() if before is not None else ():
            self._before.setdefault(worker.seen.source, []).append(worker)
        numbers = [worker.seen.worker for workers in self._before.values() for worker in workers]
        self._next_worker = max(numbers, default=-1) + 1
        self._sources: dict[str, dict[int | None, int]] = {}
        """Of each publisher, its workers by rank."""
        self._unheard: dict[str, tuple[int, int, str]] = {}
        """What was lost of publishers since they began: it may have been of a rank that was not heard yet."""
        self._seq = log.next_seq
        self.batches = self.events = self.recovered = 0
        """Heard since this began; batches that were missed and got by asking."""

    def last_heard(self) -> dict[str, Last]:
        """Of the publishers that were known before, what they said last."""
        found = {}
        for source, workers in self._before.items():
            known = [w for w in workers if w.number is not None and w.published_ts is not None]
            if known:
                last = max(known, key=lambda worker: (worker.published_ts, worker.number))
                assert last.number is not None
                assert last.published_ts is not None
                found[source] = Last(last.number, last.published_ts)
        return found

    def begin(self) -> None:
        """Write the beginning of the epoch. To be called first."""
        self._append([self._log.begin_epoch(0), FeedStarted(endpoints=self._endpoints)])

    def hear(self, source: str, heard: Heard) -> None:
        """Record what was heard from a publisher."""
        if isinstance(heard, Continued):
            self._take_over(source)
            return
        if not (isinstance(heard, Missed) and heard.recovered):
            self._before.pop(source, None)
        if isinstance(heard, Received):
            self._receive(source, heard)
        elif isinstance(heard, Missed) and heard.recovered:
            self.recovered += heard.last - heard.first + 1
        elif isinstance(heard, Missed):
            self._lose(source, heard)
        elif isinstance(heard, Restarted):
            self._unheard.pop(source, None)
            self._append(
                [
                    FeedRestarted(worker=worker, last=heard.last, first=heard.first)
                    for worker in self._sources.get(source, {}).values()
                ]
            )

    def catch_up(self) -> None:
        """Where the disk has refused batches, and takes them again: say what is missing, and all that is known."""
        if not self._log.has_lost:
            return
        gap = self._log.take_gap()
        if gap is not None:
            self._write([gap, FeedStarted(endpoints=self._endpoints), *self._restated()])

    # --- what is heard ----------------------------------------------------------------------------------

    def _receive(self, source: str, heard: Received) -> None:
        batch = heard.batch
        events: list[AnyEvent] = []
        worker = self._worker(source, heard, events)
        if not events and not batch.events:
            return  # a heartbeat says that nothing is new
        events.append(
            FeedReceived(
                worker=worker, number=heard.seq, published_ts=nanoseconds(batch.ts), replayed=heard.replayed
            )
        )
        events += [from_wire(worker, event) for event in batch.events]
        self.batches += 1
        self.events += len(batch.events)
        self._append(events)

    def _worker(self, source: str, heard: Received, events: list[AnyEvent]) -> int:
        """Whose batch it is; `events` get what has to be said of it first."""
        ranks = self._sources.setdefault(source, {})
        rank = heard.batch.rank
        number = ranks.get(rank)
        if number is None:
            number = ranks[rank] = self._next_worker
            self._next_worker += 1
            events.append(
                WorkerSeen(worker=number, source=source, topic=heard.topic, rank=rank, complete=True)
            )
            events += self._lost_before(source, heard, number, is_first=len(ranks) == 1)
        elif heard.topic and heard.topic != (seen := self.state.workers[number].seen).topic:
            complete = self.state.workers[number].complete
            events.append(msgspec.structs.replace(seen, topic=heard.topic, complete=complete))
        return number

    def _lost_before(self, source: str, heard: Received, worker: int, *, is_first: bool) -> Iterable[FeedGap]:
        """What a worker said before this, its first batch, if that was anything and matters."""
        if source not in self._unheard and is_first and heard.seq and not heard.replayed:
            self._unheard[source] = 0, heard.seq - 1, BEFORE
        first, last, reason = self._unheard.get(source, _NEVER)
        begins_anew = bool(heard.batch.events) and isinstance(heard.batch.events[0], AllBlocksCleared)
        if last >= first and not begins_anew:
            yield FeedGap(worker=worker, first=first, last=last, reason=reason)

    def _lose(self, source: str, missed: Missed) -> None:
        workers = self._sources.get(source, {})
        first, last, _ = self._unheard.get(source, _NEVER)
        start = missed.first if last < first else min(first, missed.first)
        self._unheard[source] = (start, max(last, missed.last), missed.reason)
        self._append(
            [
                FeedGap(worker=worker, first=missed.first, last=missed.last, reason=missed.reason)
                for worker in workers.values()
            ]
        )

    def _take_over(self, source: str) -> None:
        """What the log knew of a publisher holds on."""
        events: list[AnyEvent] = []
        for worker in self._before.pop(source, ()):
            if not worker.complete and worker.number is not None:
                self._unheard[source] = 0, worker.number, BEFORE
            self._sources.setdefault(source, {})[worker.seen.rank] = worker.seen.worker
            events += _all_of(worker)
        self._append(events)

    # --- the log ----------------------------------------------------------------------------------------

    def _restated(self) -> Iterable[AnyEvent]:
        for worker in self.state.workers.values():
            yield from _all_of(worker)

    def _append(self, events: list[AnyEvent]) -> None:
        if not events:
            return
        for event in events:
            self.state.apply(event)
        self._write(events)

    def _write(self, events: list[AnyEvent]) -> None:
        self._log.append(EventBatch(self._seq, self._wall_ns(), tuple(events)))
        self._seq += 1


def _all_of(worker: Worker) -> Iterable[AnyEvent]:
    """Events that make of nothing what is known of a worker."""
    yield msgspec.structs.replace(worker.seen, complete=worker.complete)
    if worker.number is not None and worker.published_ts is not None:
        yield FeedReceived(
            worker=worker.seen.worker, number=worker.number, published_ts=worker.published_ts, replayed=False
        )
    yield from worker.resident()
    yield from worker.copied()
