"""A recorder of live streams of KV events into a log, which it begins or continues.

::

    with Tap([Endpoint("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558")], "/data/taps") as tap:
        while True:
            tap.work(0.5)

Each endpoint has a thread; one further thread writes what they receive, a batch of the log for each received batch
(`FeedRecorder`), and holds the resident blocks.

A tap that continues a log has the last batch received from each publisher, and requests just that batch: if it is the
same, at the same time by the publisher's clock, only what follows is missing, and the log's state remains valid
(`Continued`). If another batch has that number, the engine was restarted, and everything is requested. If the number is
no longer available, the missed batches are a loss like any other. A publisher without a replay address cannot prove
continuity.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from events.formats.vllm import AllBlocksCleared
from events.log import LogReader, LogStats, LogWriter
from events.log.segments import is_log, segment_paths
from events.subscribe.continuity import Missed, Received, Report, Restarted
from events.subscribe.fan_in import FanInSubscriber, Worker, replay_in_topic
from events.subscribe.sockets import Curve
from events.subscribe.subscriber import Subscriber
from events.subscribe.workers import FeedState, WorkerState, from_wire
from events.types import (
    AnyEvent,
    EventBatch,
    FeedGap,
    FeedReceived,
    FeedRestarted,
    FeedStarted,
    WorkerSeen,
)
from kvcache._version import __version__
from kvcache.replay import fold_feed_batch
from kvcache.tap.lines import SCHEME, LineListener

_POLL_MS = 50
_LAST_SECOND = 1e9 * 9
"""Last valid time in seconds, in the year 2255: later times in nanoseconds exceed 64 bits."""
_MOST_QUEUED = 2000
"""Maximum number of reports queued for the recorder by a listening thread; further ones wait in socket buffers."""


class Continued(msgspec.Struct, frozen=True):
    """Mark: the publisher is the previous one, and continues after its last recorded batch."""


class Last(msgspec.Struct, frozen=True):
    """Last batch received from a publisher."""

    number: int
    published_ts: int


def nanoseconds(seconds: float) -> int:
    """Convert a publisher's time to nanoseconds; 0 if it is not a valid time."""
    return int(seconds * 1e9) if 0 <= seconds < _LAST_SECOND else 0


TapReport = Report | Continued


@dataclass(frozen=True)
class Endpoint:
    """Endpoint to listen at.

    `replay` is the address for requests of missed batches; True for a bound endpoint (`binds`): the addresses in the
    topics.
    """

    address: str
    replay: str | bool | None = None
    binds: bool = False
    topic: str = ""
    curve: Curve | None = None
    insecure: bool = False


class EndpointListener:
    """Listener at one endpoint. `before` has the last batches received from publishers, by source.

    A source identifies a publisher: the address of an endpoint or, if it is bound, topic and key.
    Raises EndpointError, InsecureEndpoint, KeyFileError.
    """

    def __init__(self, endpoint: Endpoint, before: Mapping[str, Last]) -> None:
        self._endpoint = endpoint
        self._unproven = dict(before)
        self._subscriber = self._bind() if endpoint.binds else self._connect()
        self.address = endpoint.address
        """Address as given, with the actual port if any free port was requested."""
        if isinstance(self._subscriber, FanInSubscriber):
            self.address = self._subscriber.endpoint

    @property
    def ignored(self) -> int:
        """Messages of engines beyond the number that can be followed."""
        return self._subscriber.ignored if isinstance(self._subscriber, FanInSubscriber) else 0

    def poll(self, timeout_ms: int = _POLL_MS) -> list[tuple[str, TapReport]]:
        """Return what was received, after at most `timeout_ms`."""
        found: list[tuple[str, TapReport]] = []
        restarted: set[str] = set()
        for source, report in self._reports(timeout_ms):
            if source in restarted:
                continue  # it is sent again, from the beginning
            proven = self._prove(source, report)
            if proven is None:
                restarted.add(source)
                self._reconnect_from_start(source)
            else:
                found.append((source, proven))
        return found

    def close(self) -> None:
        """Disconnect."""
        self._subscriber.close()

    def _prove(self, source: str, report: Report) -> TapReport | None:
        """Check the continuity of a publisher's first report; return None if everything has to be requested from it."""
        last = self._unproven.get(source)
        if last is None or (isinstance(report, Missed) and report.recovered):
            return report
        del self._unproven[source]
        if not isinstance(report, Received) or report.seq != last.number or not report.replayed:
            return report
        return Continued() if nanoseconds(report.batch.ts) == last.published_ts else None

    def _reports(self, timeout_ms: int) -> list[tuple[str, Report]]:
        if isinstance(self._subscriber, FanInSubscriber):
            return [(_source(worker), report) for worker, report in self._subscriber.poll(timeout_ms)]
        return [(self._endpoint.address, report) for report in self._subscriber.poll(timeout_ms)]

    def _bind(self) -> FanInSubscriber:
        return FanInSubscriber(
            self._endpoint.address,
            replay=replay_in_topic if self._endpoint.replay else None,
            topic=self._endpoint.topic,
            curve=self._endpoint.curve,
            insecure=self._endpoint.insecure,
            first=lambda worker: self._first(_source(worker)),
        )

    def _connect(self) -> Subscriber | FanInSubscriber:
        endpoint = self._endpoint
        replay = endpoint.replay if isinstance(endpoint.replay, str) else None
        start = None if replay is None else self._first(endpoint.address)
        return Subscriber(
            endpoint.address, replay=replay, topic=endpoint.topic, start=start, curve=endpoint.curve
        )

    def _first(self, source: str) -> int:
        last = self._unproven.get(source)
        return 0 if last is None else last.number

    def _reconnect_from_start(self, source: str) -> None:
        if isinstance(self._subscriber, FanInSubscriber):
            for worker in self._subscriber.workers:
                if _source(worker) == source:
                    self._subscriber.forget(worker)
        else:
            self._subscriber.close()
            self._subscriber = self._connect()


def _source(worker: Worker) -> str:
    return f"{worker.topic} {worker.key}" if worker.key else worker.topic


BEFORE = "said before it was listened to"
_NEVER: tuple[int, int, str] = (0, -1, "")


class FeedRecorder:
    """Recorder of received batches in a log, for one thread. `before`: state of the log that is continued."""

    def __init__(
        self,
        log: LogWriter,
        endpoints: tuple[str, ...],
        before: FeedState | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._log, self._endpoints, self._wall_ns = log, endpoints, wall_ns
        self.state = FeedState()
        """Current state."""
        self._before: dict[str, list[WorkerState]] = {}
        for worker in before.workers.values() if before is not None else ():
            self._before.setdefault(worker.seen.source, []).append(worker)
        numbers = [worker.seen.worker for workers in self._before.values() for worker in workers]
        self._next_worker = max(numbers, default=-1) + 1
        self._sources: dict[str, dict[int | None, int]] = {}
        """Workers by rank, of each publisher."""
        self._losses: dict[str, tuple[int, int, str]] = {}
        """Losses of publishers since they began: they may concern a rank that was not received yet."""
        self._seq = log.next_seq
        self.batches = self.events = self.recovered = 0
        """Batches and events received since this began; missed batches recovered by replay."""

    def last_received(self) -> dict[str, Last]:
        """Return the last batches of the publishers that were known before."""
        found = {}
        for source, workers in self._before.items():
            numbered = [(w.published_ts, w.number) for w in workers]
            if known := [(ts, number) for ts, number in numbered if ts is not None and number is not None]:
                ts, number = max(known)
                found[source] = Last(number, ts)
        return found

    def begin(self) -> None:
        """Write the beginning of the epoch. Call this first."""
        self._append([self._log.begin_epoch(0), FeedStarted(endpoints=self._endpoints)])

    def record(self, source: str, report: TapReport) -> None:
        """Record what was received from a publisher."""
        if isinstance(report, Continued):
            self._take_over(source)
            return
        if not (isinstance(report, Missed) and report.recovered):
            self._before.pop(source, None)
        if isinstance(report, Received):
            self._receive(source, report)
        elif isinstance(report, Missed) and report.recovered:
            self.recovered += report.last - report.first + 1
        elif isinstance(report, Missed):
            self._lose(source, report)
        elif isinstance(report, Restarted):
            self._losses.pop(source, None)
            self._append(
                [
                    FeedRestarted(worker=worker, last=report.last, first=report.first)
                    for worker in self._sources.get(source, {}).values()
                ]
            )

    def catch_up(self) -> None:
        """After the disk accepts batches again: record what is missing, and the whole state."""
        if not self._log.has_lost:
            return
        gap = self._log.pop_gap()
        if gap is not None:
            state = [event for worker in self.state.workers.values() for event in _all_of(worker)]
            self._write([gap, FeedStarted(endpoints=self._endpoints), *state])

    # --- received batches ----------------------------------------------------------------------------------

    def _receive(self, source: str, report: Received) -> None:
        batch = report.batch
        events: list[AnyEvent] = []
        worker = self._worker(source, report, events)
        if not events and not batch.events:
            return  # a heartbeat: nothing is new
        events.append(
            FeedReceived(
                worker=worker, number=report.seq, published_ts=nanoseconds(batch.ts), replayed=report.replayed
            )
        )
        events += [from_wire(worker, event) for event in batch.events]
        self.batches += 1
        self.events += len(batch.events)
        self._append(events)

    def _worker(self, source: str, report: Received, events: list[AnyEvent]) -> int:
        """Return the worker of a batch; add the events that must precede it to `events`."""
        ranks = self._sources.setdefault(source, {})
        rank = report.batch.rank
        number = ranks.get(rank)
        if number is None:
            number = ranks[rank] = self._next_worker
            self._next_worker += 1
            events.append(
                WorkerSeen(worker=number, source=source, topic=report.topic, rank=rank, complete=True)
            )
            events += self._lost_before(source, report, number, is_first=len(ranks) == 1)
        elif report.topic and report.topic != (seen := self.state.workers[number].seen).topic:
            complete = self.state.workers[number].complete
            events.append(msgspec.structs.replace(seen, topic=report.topic, complete=complete))
        return number

    def _lost_before(
        self, source: str, report: Received, worker: int, *, is_first: bool
    ) -> Iterable[FeedGap]:
        """Yield the gap before a worker's first batch here, if it had earlier ones and they matter."""
        if source not in self._losses and is_first and report.seq and not report.replayed:
            self._losses[source] = 0, report.seq - 1, BEFORE
        first, last, reason = self._losses.get(source, _NEVER)
        begins_with_clear = bool(report.batch.events) and isinstance(report.batch.events[0], AllBlocksCleared)
        if last >= first and not begins_with_clear:
            yield FeedGap(worker=worker, first=first, last=last, reason=reason)

    def _lose(self, source: str, missed: Missed) -> None:
        workers = self._sources.get(source, {})
        first, last, _ = self._losses.get(source, _NEVER)
        start = missed.first if last < first else min(first, missed.first)
        self._losses[source] = (start, max(last, missed.last), missed.reason)
        self._append(
            [
                FeedGap(worker=worker, first=missed.first, last=missed.last, reason=missed.reason)
                for worker in workers.values()
            ]
        )

    def _take_over(self, source: str) -> None:
        """Keep the log's state of a publisher."""
        events: list[AnyEvent] = []
        for worker in self._before.pop(source, ()):
            if not worker.complete and worker.number is not None:
                self._losses[source] = 0, worker.number, BEFORE
            self._sources.setdefault(source, {})[worker.seen.rank] = worker.seen.worker
            events += _all_of(worker)
        self._append(events)

    # --- the log ----------------------------------------------------------------------------------------

    def _append(self, events: list[AnyEvent]) -> None:
        if not events:
            return
        for event in events:
            self.state.apply(event)
        self._write(events)

    def _write(self, events: list[AnyEvent]) -> None:
        self._log.append(EventBatch(self._seq, self._wall_ns(), tuple(events)))
        self._seq += 1


def _all_of(worker: WorkerState) -> Iterable[AnyEvent]:
    """Yield events that reset the state of a worker."""
    yield msgspec.structs.replace(worker.seen, complete=worker.complete)
    if worker.number is not None and worker.published_ts is not None:
        yield FeedReceived(
            worker=worker.seen.worker, number=worker.number, published_ts=worker.published_ts, replayed=False
        )
    yield from worker.resident()
    yield from worker.copied()


class Tap:
    """Recorder of what is published at endpoints, each with a thread of its own.

    With `resume` an existing log is continued: its state of an engine remains valid if the engine proves to be the
    same, and is dropped otherwise. `record_tokens=False` leaves out the tokens of blocks.

    Raises EndpointError, InsecureEndpoint, KeyFileError, and what `LogWriter` and `LogReader` raise.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        log: str | os.PathLike[str],
        *,
        resume: bool = False,
        record_tokens: bool = True,
    ) -> None:
        self._listeners: list[EndpointListener | LineListener] = []
        self._log = LogWriter(
            Path(log),
            resume=resume,
            record_tokens=record_tokens,
            software=f"kvcache {__version__}",
            kind="feed",
        )
        try:
            before = state_of(Path(log)) if resume else None
            self.recorder = FeedRecorder(self._log, tuple(each.address for each in endpoints), before)
            """Recorder, with its counts."""
            last = self.recorder.last_received()
            for endpoint in endpoints:
                is_file = endpoint.address.startswith(SCHEME)
                self._listeners.append(
                    LineListener(endpoint.address) if is_file else EndpointListener(endpoint, last)
                )
        except BaseException:
            for listener in self._listeners:
                listener.close()
            self._log.close()
            raise
        self.endpoints = tuple(listener.address for listener in self._listeners)
        self._silent = {*self.endpoints}
        self._queue: queue.Queue[tuple[str, TapReport] | BaseException] = queue.Queue(_MOST_QUEUED)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._listen, args=(each,), name=f"kvcache-tap-{each.address}", daemon=True
            )
            for each in self._listeners
        ]
        self.recorder.begin()
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> FeedState:
        """Current state."""
        return self.recorder.state

    @property
    def silent(self) -> frozenset[str]:
        """Endpoints at which nothing was received yet."""
        return frozenset(self._silent)

    @property
    def ignored(self) -> int:
        """Messages of engines beyond the number that can be followed, if many connect."""
        return sum(listener.ignored for listener in self._listeners)

    def log_stats(self) -> LogStats:
        """Return the progress of the log."""
        return self._log.stats()

    def work(self, seconds: float) -> None:
        """Record what is received, for `seconds`. Raises what listeners do; LogWriteFailed if the log has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            report = None
            with suppress(queue.Empty):
                report = self._queue.get(timeout=min(left, 0.05))
            if isinstance(report, BaseException):
                raise report
            self.recorder.catch_up()
            if report is not None:
                self.recorder.record(*report)

    def close(self) -> None:
        """Stop listening, and close the log in order. Raises LogWriteFailed if the disk refuses its end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self.recorder.catch_up()
        self._log.close()

    # --- the threads of the endpoints ---------------------------------------------------------------------

    def _listen(self, listener: EndpointListener | LineListener) -> None:
        try:
            while not self._stopping.is_set():
                for report in listener.poll():
                    self._silent.discard(listener.address)
                    self._put(report)
        except BaseException as error:  # noqa: BLE001  `work` raises it
            self._put(error)
        finally:
            listener.close()

    def _put(self, report: tuple[str, TapReport] | BaseException) -> None:
        while not self._stopping.is_set():
            with suppress(queue.Full):
                self._queue.put(report, timeout=_POLL_MS / 1000)
                return


def state_of(log: Path, at: int | None = None) -> FeedState:
    """Return the state of a `feed` log after batch `at`, or at its end. Raises `Unreplayable`, or as `LogReader`."""
    state = FeedState()
    if is_log(log) and segment_paths(log):
        for batch in LogReader(log, kind="feed"):
            if at is not None and batch.seq > at:
                break
            fold_feed_batch(state, batch)
    return state
