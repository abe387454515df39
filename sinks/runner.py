"""A sink's thread, and the bounded queue between it and the engine's thread.

Whatever a sink does (sleep, raise, hang, exit its thread, fork), `put` does not wait for it. And nothing is lost
without a trace: a batch that does not reach the sink is counted as dropped, and an `EventBatch` with a `Gap` over its
seq takes its place in the sink's stream. At any time::

    batches put = delivered + dropped + lag

*The queue.* `put` is the engine's side and must cost next to nothing: it counts, and appends to a deque. There is no
condition and no wake-up per batch: the other side polls every few milliseconds, and is woken early only when the queue
is half full. Only an overflow takes the lock. A run of lost batches is one `LostBatches` item exactly in their place in
the queue; between two losses there is always a batch, so both stay bounded. Counters only grow, and each has one writer
(`put_*` the engine's thread, all else the holder of the lock), so the fast path knows the fill without the lock.

*The runner.* A failing sink is reported once, and again when it recovers. One that keeps failing is quarantined:
closed, while batches pass it by, and retried with growing pauses. Once it can be opened and accepts the gap over the
missed batches, it continues. (A fold after such a gap needs the whole state, which the manager publishes then.) So a
disk that was full for a while costs the batches of that while, and no more. Every counter and the list of owed gaps
belongs to the sink's thread, and the rest are flags that are set once.

SECURITY: texts of a sink's exceptions may quote the batch being written. Only those of the operating system and of
`SinkError` are kept; of all others, the type and the place in the code.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from events.codec import batch_without_tokens
from events.diagnostics import get_logger
from events.errors import UnsafeFile, type_and_place
from events.size import batch_bytes
from events.types import EventBatch, Gap
from sinks.base import Overflow, Sink, SinkError, SinkOpenError, SinkStats, State


@dataclass(slots=True)
class LostBatches:
    """A run of lost batches, with nothing delivered between them."""

    first_seq: int
    last_seq: int
    ts: int
    reason: str

    def as_batch(self) -> EventBatch:
        """Return the batch that takes their place. It has the seq of the last lost batch, so that seq keeps rising."""
        gap = Gap(first_seq=self.first_seq, last_seq=self.last_seq, reason=self.reason)
        return EventBatch(self.last_seq, self.ts, (gap,))


Queued = tuple[EventBatch, int]
"""A batch and its size in bytes as counted. A plain tuple, because making a named one takes ten times as long."""

Item = Queued | LostBatches


def note_loss(items: list[LostBatches] | deque[Item], loss: LostBatches) -> None:
    """Append a loss to `items`, or extend the last one by it."""
    last = items[-1] if items else None
    if isinstance(last, LostBatches) and last.reason == loss.reason:
        last.last_seq, last.ts = loss.last_seq, loss.ts
    else:
        items.append(loss)


class BatchQueue:
    """Batches on their way to one sink; `put` is for one thread, `take` for one other.

    `max_events` and `max_bytes` bound it; an empty queue takes one batch of any size, so that a state export larger
    than the bound is not lost for good. `overflow` selects what is dropped when it is full.
    """

    def __init__(self, max_events: int, max_bytes: int, overflow: Overflow) -> None:
        if max_events < 1 or max_bytes < 1:
            raise ValueError("max_events and max_bytes must be at least 1")
        if overflow not in get_args(Overflow):
            raise ValueError(f"overflow must be one of {', '.join(get_args(Overflow))}, not {overflow!r}")
        self._max_events, self._max_bytes = max_events, max_bytes
        self._overflow = overflow
        self._items: deque[Item] = deque()
        self._refusal: str | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self.put_batches = self._put_events = self._put_bytes = 0
        self._left_events = self._left_bytes = 0
        self.dropped_batches = self.dropped_events = 0

    def __len__(self) -> int:
        """Number of waiting batches, and losses between them."""
        return len(self._items)

    def put(self, batch: EventBatch, size: int | None = None) -> None:
        """Append a batch. Never raises or waits.

        `size`, if known already, is `events.size.batch_bytes` of the batch.
        """
        if size is None:
            size = batch_bytes(batch)
        self.put_batches += 1
        events = self._put_events = self._put_events + len(batch.events)
        total = self._put_bytes = self._put_bytes + size
        events -= self._left_events
        total -= self._left_bytes
        if events > self._max_events or total > self._max_bytes or self._refusal:
            self._put_slowly((batch, size))
            return
        self._items.append((batch, size))
        if (events * 2 > self._max_events or total * 2 > self._max_bytes) and not self._wake.is_set():
            self._wake.set()

    def take(self) -> Item | None:
        """Remove the head; None if there is nothing."""
        with self._lock:
            if not self._items:
                return None
            item = self._items.popleft()
            if not isinstance(item, LostBatches):
                self._count_left(item)
            return item

    def wait(self, seconds: float) -> bool:
        """Wait until the queue is half full, `wake` is called, or the time is up, for which it returns False."""
        woken = self._wake.wait(seconds)
        self._wake.clear()
        return woken

    def wake(self) -> None:
        """End the other thread's `wait`."""
        self._wake.set()

    def refuse(self, reason: str) -> None:
        """Drop all later batches for `reason`. Queued ones stay."""
        with self._lock:
            self._refusal = reason

    def accept(self, reason: str) -> None:
        """Accept batches again, unless they are refused for another reason than this one."""
        with self._lock:
            if self._refusal == reason:
                self._refusal = None

    def take_losses(self) -> list[LostBatches]:
        """Remove the losses before the first batch."""
        losses: list[LostBatches] = []
        with self._lock:
            while self._items and isinstance(head := self._items[0], LostBatches):
                losses.append(head)
                self._items.popleft()
        return losses

    def drop_all(self, reason: str) -> None:
        """Turn the queued batches into losses, in place. Called after `refuse`."""
        with self._lock:
            losses: deque[Item] = deque()
            while self._items:
                note_loss(losses, self._lose(self._items.popleft(), reason))
            self._items.extend(losses)

    def become_child(self) -> None:
        """Start anew in a forked process, empty and refusing: the content is the parent's to deliver."""
        # The thread that held the lock at the fork does not exist in this process.
        self._lock = threading.Lock()
        self._items.clear()
        self._refusal = "forked"

    def _put_slowly(self, item: Queued) -> None:
        with self._lock:
            if self._refusal:
                note_loss(self._items, self._lose(item, self._refusal))
            elif self._overflow == "drop_newest" and not self._fits(item):
                note_loss(self._items, self._lose(item, "overflow"))
            else:
                self._drop_oldest_until_fits(item)
                self._items.append(item)

    def _fits(self, item: Queued) -> bool:
        """Return True if `item`, which is counted already, is alone or has room."""
        events, total = self._put_events - self._left_events, self._put_bytes - self._left_bytes
        return total == item[1] or (total <= self._max_bytes and events <= self._max_events)

    def _drop_oldest_until_fits(self, item: Queued) -> None:
        losses: list[LostBatches] = []
        while not self._fits(item):
            note_loss(losses, self._lose(self._items.popleft(), "overflow"))
        self._items.extendleft(reversed(losses))

    def _lose(self, item: Item, reason: str) -> LostBatches:
        """Return the loss that replaces a dropped item; a loss stays as it is."""
        if isinstance(item, LostBatches):
            return item
        self._count_left(item)
        self.dropped_batches += 1
        self.dropped_events += len(item[0].events)
        return LostBatches(item[0].seq, item[0].seq, item[0].ts, reason)

    def _count_left(self, item: Queued) -> None:
        self._left_events += len(item[0].events)
        self._left_bytes += item[1]


POLL_SECONDS = 0.01
OPEN_SECONDS = 2.0
"""Time that `start` waits for the sink to open."""
GRACE_SECONDS = 0.25
"""Time that `close` waits, after the drain, for the last `Gap` to be written."""
BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = 0.1, 5.0
SILENCE_SECONDS = 60.0
"""Minimum time between two reports that a sink fails, however often it does and recovers."""


_log = get_logger("sinks")


class SinkRunner:
    """Feeds a sink from the engine's thread.

    The queue is bounded by `max_events` and `max_bytes`; `overflow` selects which batches are dropped when it is full:
    the oldest or the newest. None means the sink's own `overflow`. `tick` is called after each batch and about every 10
    ms while none comes. After `max_errors` failures in a row, with pauses that double from `backoff_seconds` to 5 s,
    the sink is quarantined and reported. It is opened again after `retry_seconds`, and as long as that fails after
    pauses that double up to `retry_seconds_max`. `close` waits at most `drain_seconds` and a quarter second for the
    last `Gap`, and never for a pause.

    Tests replace `clock` and `pause`. The sink's thread calls `pause` to wait for some seconds, or until the event is
    set, which happens when the runner is closed; it returns whether the event is set.

    Only the engine's thread calls `put`, `start` and `close`; the rest is for any.
    """

    def __init__(
        self,
        sink: Sink,
        name: str,
        *,
        max_events: int = 65536,
        max_bytes: int = 32 << 20,
        overflow: Overflow | None = None,
        drain_seconds: float = 2.0,
        max_errors: int = 10,
        backoff_seconds: float = BACKOFF_SECONDS,
        retry_seconds: float = 1.0,
        retry_seconds_max: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        if max_errors < 1:
            raise ValueError("max_errors must be at least 1")
        self.name = name
        self.sink = sink
        self.hides_tokens = sink.needs_tokens is False
        """True if token ids are removed from the sink's batches."""
        self._queue = BatchQueue(max_events, max_bytes, overflow or sink.overflow)
        # Not a method around it: the engine calls this once per step and sink.
        self.put = self._queue.put
        """Put a batch into the sink's queue. Never raises or waits."""
        self._drain_seconds, self._clock, self._wait = drain_seconds, clock, pause
        self._max_errors, self._backoff_seconds = max_errors, backoff_seconds
        self._retry_seconds, self._retry_seconds_max = retry_seconds, retry_seconds_max
        self._retries = 0
        """Retries of a quarantined sink since its last failure after longer operation."""
        self._recovered_at = self._warned_at = float("-inf")
        self._failing_since: float | None = None
        self._is_open = self._open_failed = self._reopen_asked = self._forked = False
        self._owed: list[LostBatches] = []
        """Losses with gaps not written yet."""
        self._batches = self._events = self._failed_batches = self._failed_events = 0
        self._errors = self._errors_in_row = self._tick_errors_in_row = 0
        self._last_error: str | None = None
        self.state: State = "running"
        """The state of delivery; a failing sink that is still given batches is "running"."""
        self._opened, self._closing = threading.Event(), threading.Event()
        self._started = threading.Event()
        """Set once `start` has returned, or `close` was called."""
        self._deadline = 0.0
        self._thread: threading.Thread | None = None
        _runners.add(self)

    # --- the engine's thread ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and open the sink. Call once.

        Raises SinkOpenError if the sink cannot be opened. A sink that takes longer than `OPEN_SECONDS` to open
        continues while batches wait in its queue; if it fails then, it is retried like any other.
        """
        if self._thread is not None:
            raise RuntimeError(f"sink {self.name} has already been started")
        # A daemon: a sink that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=f"kvcache-sink-{self.name}", daemon=True)
        self._thread.start()
        self._opened.wait(OPEN_SECONDS)
        if self._open_failed:
            self.close()
            raise SinkOpenError(self.name, self._last_error or "it failed")
        self._started.set()

    def close(self) -> None:
        """Deliver the queue, within the drain time, and close the sink. Further calls do nothing."""
        if self._closing.is_set() or self._forked:
            return
        self._queue.refuse("closed")
        self._deadline = self._clock() + self._drain_seconds
        self._closing.set()
        self._started.set()
        self._queue.wake()
        if self._thread is not None:
            self._thread.join(self._drain_seconds + GRACE_SECONDS)
        self._queue.drop_all("closed")
        if self.state == "running":
            self.state = "closed"
        stats = self.stats()
        if stats.dropped_batches or stats.lag_batches:
            lost = {"dropped": stats.dropped_batches, "unfinished": stats.lag_batches}
            _log.warning("sink_lost_batches", sink=self.name, **lost)

    def reopen(self) -> None:
        """Request a call of the sink's `reopen`, if it has one, on its own thread. Safe in a signal handler."""
        # A flag, since the interrupted code may hold a lock.
        self._reopen_asked = True

    def stats(self) -> SinkStats:
        """The counters at this moment."""
        # `put` counters are read last: counters only grow, so the lag cannot come out negative.
        batches, events = self._batches, self._events
        dropped_batches = self._queue.dropped_batches + self._failed_batches
        return SinkStats(
            name=self.name,
            batches=batches,
            events=events,
            dropped_batches=dropped_batches,
            dropped_events=self._queue.dropped_events + self._failed_events,
            errors=self._errors,
            lag_batches=self._queue.put_batches - batches - dropped_batches,
            state="failing" if self._failing_since is not None and self.state == "running" else self.state,
            last_error=self._last_error,
            refused_peers=self.sink.refused_peers,
        )

    # --- the sink's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._open():
            self._open_failed = True
            self.state = "quarantined"  # Batches put stay in the queue: the sink has missed nothing yet.
        self._opened.set()
        self._started.wait()  # which refuses a sink that could not be opened in time, and gives the reason
        if self._open_failed and not self._closing.is_set():
            self._report_quarantine()
        while self._serve() and self._recover():
            pass
        if self._may_continue():
            self._settle()
        self._close_sink()

    def _serve(self) -> bool:
        """Deliver until the queue is closed and empty (False), or the sink fails too often."""
        while (item := self._next()) is not None:
            self._deliver(item)
            self._call_tick()
        return self.state == "quarantined" and not self._forked

    def _open(self) -> bool:
        self._is_open = self._call("open", self.sink.open)
        return self._is_open and not self._forked

    def _close_sink(self) -> None:
        if self._is_open and not self._forked:
            self._is_open = False
            self._call("close", self.sink.close)

    def _recover(self) -> bool:
        """Retry a quarantined sink until it works; False if the runner is closed before that."""
        self._close_sink()
        while not self._wait(
            self._closing, pause_after(self._retries + 1, self._retry_seconds, self._retry_seconds_max)
        ):
            self._retries += 1
            if self._open() and self._redelivers_missed():
                self._errors_in_row = self._tick_errors_in_row = 0
                self._recovered_at = self._clock()
                self._queue.accept("quarantined")
                self.state = "running"
                self._report_recovery()
                return True
            self._close_sink()
            if self._forked:
                break
        return False

    def _redelivers_missed(self) -> bool:
        """Return True if the sink works: opening alone proves little, as when a disk is full."""
        for loss in self._queue.take_losses():
            note_loss(self._owed, loss)
        return self._settle() and self._call("tick", self.sink.tick)

    def _report_recovery(self) -> None:
        dropped = self._queue.dropped_batches + self._failed_batches
        _log.warning("sink_recovered", sink=self.name, dropped=dropped)

    def _may_continue(self) -> bool:
        # A fork inside the sink returns twice, and the child must publish nothing of the parent's again.
        return self.state != "quarantined" and not self._forked

    def _next(self) -> Item | None:
        """Take the head of the queue, waiting for one; None when closing has emptied it, or the sink was abandoned."""
        while self._may_continue():
            # Read before `take`: nothing is queued any more after it is set, so empty then means finished.
            closing = self._closing.is_set()
            if closing and self._clock() >= self._deadline:
                self._queue.drop_all("closed")
            item = self._queue.take()
            if item is not None or closing:
                return item
            self._queue.wait(POLL_SECONDS)
            self._call_tick()
        return None

    def _deliver(self, item: Item) -> None:
        if isinstance(item, LostBatches):
            self._owed.append(item)
            self._settle()
        elif (not self._owed or self._settle()) and self._write(
            batch_without_tokens(item[0]) if self.hides_tokens else item[0]
        ):
            self._batches += 1
            self._events += len(item[0].events)
        else:
            self._failed_batches += 1
            self._failed_events += len(item[0].events)
            note_loss(self._owed, LostBatches(item[0].seq, item[0].seq, item[0].ts, "failed"))
        if self._errors_in_row and not self._forked:
            self._after_failure(self._errors_in_row)
        elif self._failing_since is not None:
            self._note_success()

    def _settle(self) -> bool:
        """Write the owed gaps. Gaps that cannot be written now stay owed."""
        while self._owed:
            if not self._write(self._owed[0].as_batch()):
                return False
            del self._owed[0]
        return True

    def _write(self, batch: EventBatch) -> bool:
        try:  # as `_call` does, without a call and a lambda for each batch
            self.sink.write(batch)
        except BaseException as error:  # noqa: BLE001
            self._note_error("write", error)
            self._errors_in_row += 1
            return False
        self._errors_in_row = 0
        return not self._forked

    def _call_tick(self) -> None:
        if self._reopen_asked and self._may_continue():
            self._reopen_asked = False
            self._run_tick("reopen", self.sink.reopen)
        self._run_tick("tick", self.sink.tick)

    def _run_tick(self, what: str, method: Callable[[], None]) -> None:
        if not self._may_continue():
            return
        # Counted separately: a sink that accepts batches may still fail in `tick`.
        if self._call(what, method):
            self._tick_errors_in_row = 0
            if self._failing_since is not None:
                self._note_success()
        elif not self._forked:
            self._tick_errors_in_row += 1
            self._after_failure(self._tick_errors_in_row)

    def _after_failure(self, errors_in_row: int) -> None:
        if errors_in_row >= self._max_errors:
            self._quarantine()
            return
        self._note_failure()
        self._wait(self._closing, pause_after(errors_in_row, self._backoff_seconds))

    def _call(self, what: str, method: Callable[[], None]) -> bool:
        try:
            method()
        except BaseException as error:  # noqa: BLE001  a sink's sys.exit() must not end the thread unnoticed
            self._note_error(what, error)
            return False
        return True

    def _note_error(self, what: str, error: BaseException) -> None:
        self._last_error = f"{what}: {describe(error)}"
        self._errors += 1  # after the text: whoever sees the number finds it

    def _note_failure(self) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._warned_at > SILENCE_SECONDS:
            self._warned_at = now
            _log.warning("sink_fails", sink=self.name, errors=self._errors, last_error=self._last_error)

    def _note_success(self) -> None:
        since = self._failing_since
        if since is None or self._errors_in_row or self._tick_errors_in_row:
            return
        self._failing_since = None
        if self._warned_at >= since:
            self._report_recovery()

    def _quarantine(self) -> None:
        self._queue.refuse("quarantined")
        self._queue.drop_all("quarantined")
        self.state = "quarantined"  # after this: whoever sees it finds nothing queued
        self._failing_since = None
        if self._clock() - self._recovered_at > self._retry_seconds_max:
            # A sink that fails again soon has not recovered, and is not retried more often for that.
            self._retries = 0
        self._report_quarantine()

    def _report_quarantine(self) -> None:
        _log.error("sink_quarantined", sink=self.name, errors=self._errors, last_error=self._last_error)


def pause_after(failures: int, first: float = BACKOFF_SECONDS, longest: float = BACKOFF_SECONDS_MAX) -> float:
    """Return the pause after N failures in a row: doubling from `first` up to `longest`, in seconds."""
    return min(first * 2.0 ** min(failures - 1, 16), longest)


def describe(error: BaseException) -> str:
    """Describe an error, without any text that may quote events being published."""
    # A library made an OSError without a number, and it may hold anything.
    if isinstance(error, SinkError | UnsafeFile) or (isinstance(error, OSError) and error.errno is not None):
        return f"{type(error).__name__}: {error}"
    return type_and_place(error)


_runners: weakref.WeakSet[SinkRunner] = weakref.WeakSet()


def _close_runners_in_child() -> None:
    """Close all runners in a forked child, which has none of its parent's threads."""
    for runner in list(_runners):
        runner._forked, runner.state = True, "closed"
        runner._queue.become_child()


os.register_at_fork(after_in_child=_close_runners_in_child)
