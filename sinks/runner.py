"""Runs one sink on a thread of its own.

Whatever a sink does (sleeps, raises, hangs, exits its thread, forks), `put` does not wait for it, unless
`overflow` is "block". And nothing is lost without a trace: a batch that does not reach the sink is counted as
dropped, and an `EventBatch` with a `Gap` over its seq takes its place in the sink's stream. At any time::

    batches put = delivered + dropped + lag

A sink that fails is reported, once, and when it works again. One that keeps failing is quarantined: closed, while
batches go by it, and tried again with growing pauses. When it can be opened and takes the gap over what it has missed,
it goes on. (A fold behind such a gap needs the whole state, which the manager publishes then.) So a disk that was full
for a while costs what came in that while, and no more.

Two threads meet here and share no lock: the queue between them has its own, every counter and the list of owed
gaps belongs to the sink's thread, and the rest are flags that are set once.

SECURITY: texts of a sink's exceptions may quote what was being written. Only those of the operating system
and of `SinkError` are kept; of all others, the type and the place in the code.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from events.diagnostics import get_logger
from events.errors import UnsafeFile, type_and_place
from events.types import EventBatch
from sinks.base import Sink, SinkError, SinkOpenError, SinkStats, State
from sinks.queue import BatchQueue, Item, Loss, Overflow, note_loss

POLL_SECONDS = 0.01
OPEN_SECONDS = 2.0
"""How long `start` waits to learn whether the sink could be opened."""
GRACE_SECONDS = 0.25
"""How long `close` waits beyond the drain for the last `Gap` to be written."""
BACKOFF_SECONDS_MAX = 5.0
SILENCE_SECONDS = 60.0
"""It is said once in this time that a sink fails, however often it does and recovers."""


_log = get_logger("sinks")


class SinkRunner:
    """Feeds a sink from the engine's thread.

    The queue is bounded by `max_events` and `max_bytes`; `overflow` says what gives way when it is full: the
    oldest batches, the newest, or ("block", for offline use) the engine. None leaves that to the sink's own
    `overflow`, without which it is the oldest. A sink with a method `tick` has it called after each batch and
    about every 10 ms while none comes. After `max_errors` failures in a
    row, with pauses that double from `backoff_seconds` to 5 s, the sink is quarantined and reported. It is opened
    again after `retry_seconds`, and as long as that fails after pauses that double up to `retry_seconds_max`. `close`
    waits at most `drain_seconds` and a quarter second for the last `Gap`, and for none of the pauses.

    Tests replace `clock` and `pause`. The sink's thread calls `pause` to wait for some seconds, or until the event is
    set, which happens when the runner is closed; it returns whether the event is set.

    `put`, `start` and `close` belong to the engine's thread, all else to any.
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
        backoff_seconds: float = 0.1,
        retry_seconds: float = 1.0,
        retry_seconds_max: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        if max_errors < 1:
            raise ValueError("max_errors must be at least 1")
        self.name = name
        self.sink = self._sink = sink
        self._tick: Callable[[], None] | None = getattr(sink, "tick", None)
        self.needs_tokens: bool | None = getattr(sink, "needs_tokens", None)
        """Whether the sink must have token ids, or must not; None: it does not say."""
        asked: Overflow = getattr(sink, "overflow", "drop_oldest")
        self._queue = BatchQueue(max_events, max_bytes, overflow or asked)
        self._waits_for_room = (overflow or asked) == "block"
        # Not a method around it: the engine calls this once per step and sink.
        self.put = self._queue.put
        """Hand a batch to the sink. Never raises; waits only if `overflow` is "block"."""
        self._drain_seconds, self._clock, self._wait = drain_seconds, clock, pause
        self._max_errors, self._backoff_seconds = max_errors, backoff_seconds
        self._retry_seconds, self._retry_seconds_max = retry_seconds, retry_seconds_max
        self._pause = retry_seconds  # the next one before a quarantined sink is tried
        self._recovered_at = self._told_at = float("-inf")
        self._failing_since: float | None = None
        self._is_open = self._open_failed = self._reopen_asked = self._forked = False
        self._owed: list[Loss] = []
        """Losses whose gaps are not written yet."""
        self._batches = self._events = self._failed_batches = self._failed_events = 0
        self._errors = self._errors_in_row = self._tick_errors_in_row = 0
        self._last_error: str | None = None
        self._state: State = "running"
        self._opened, self._closing = threading.Event(), threading.Event()
        self._started = threading.Event()
        """Whether `start` has returned, or `close` was called."""
        self._deadline = 0.0
        self._thread: threading.Thread | None = None
        _runners.add(self)

    # --- the engine's thread ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and open the sink. To be called once.

        Raises SinkOpenError if the sink cannot be opened. A sink that takes longer than `OPEN_SECONDS` to
        open goes on doing so while batches wait in its queue; if it fails then, it is tried again as others are.
        """
        if self._thread is not None:
            raise RuntimeError(f"sink {self.name} was started already")
        # A daemon: a sink that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=f"kvcache-sink-{self.name}", daemon=True)
        self._thread.start()
        self._opened.wait(OPEN_SECONDS)
        if self._open_failed:
            self.close()
            raise SinkOpenError(self.name, self._last_error or "it failed")
        self._started.set()

    def close(self) -> None:
        """Deliver what is queued, within the drain time, and let the sink close. Further calls do nothing."""
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
        if self._state == "running":
            self._state = "closed"
        stats = self.stats()
        if stats.dropped_batches or stats.lag_batches:
            lost = {"dropped": stats.dropped_batches, "unfinished": stats.lag_batches}
            _log.warning("sink_lost_batches", sink=self.name, **lost)

    def reopen(self) -> None:
        """Have the sink call its `reopen`, if it has one, on its own thread. May be called in a signal handler."""
        # A flag that is looked at, since a lock may be held by what the signal has interrupted.
        self._reopen_asked = True

    def stats(self) -> SinkStats:
        """The counters of this moment."""
        # What was put is read last: counters only grow, so the lag cannot come out negative.
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
            state="failing" if self._failing_since is not None and self._state == "running" else self._state,
            last_error=self._last_error,
            refused_peers=getattr(self.sink, "refused_peers", 0),
        )

    @property
    def state(self) -> State:
        """Whether batches reach the sink at the moment, which are also given to one that is failing ("running")."""
        return self._state

    # --- the sink's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._open():
            self._open_failed = True
            self._state = "quarantined"
            if self._waits_for_room:
                # Elsewhere what is put stays in the queue: the sink has missed nothing yet.
                self._leave_out()
        self._opened.set()
        self._started.wait()  # which refuses a sink that could not be opened in time, and says why
        if self._open_failed and not self._closing.is_set():
            self._report_quarantine()
        while self._serve() and self._recover():
            pass
        if self._may_go_on():
            self._settle()
        self._close_sink()

    def _serve(self) -> bool:
        """Deliver until there is nothing more to come (False), or the sink fails too often."""
        while (item := self._next()) is not None:
            self._deliver(item)
            self._call_tick()
        return self._state == "quarantined" and not self._forked

    def _open(self) -> bool:
        # Looked up in the call: what has no such method is a sink that fails.
        self._is_open = self._call("open", lambda: self._sink.open())  # noqa: PLW0108
        return self._is_open and not self._forked

    def _close_sink(self) -> None:
        if self._is_open and not self._forked:
            self._is_open = False
            self._call("close", lambda: self._sink.close())  # noqa: PLW0108

    def _recover(self) -> bool:
        """Try a quarantined sink until it works; False if the runner is closed before that."""
        self._close_sink()
        while not self._wait(self._closing, self._pause):
            self._pause = min(self._pause * 2, self._retry_seconds_max)
            if self._open() and self._takes_what_it_missed():
                self._go_on()
                return True
            self._close_sink()
            if self._forked:
                break
        return False

    def _takes_what_it_missed(self) -> bool:
        """Whether the sink works: that it could be opened proves little, as where a disk is full."""
        for loss in self._queue.take_losses():
            note_loss(self._owed, loss)
        return self._settle() and (self._tick is None or self._call("tick", self._tick))

    def _go_on(self) -> None:
        self._errors_in_row = self._tick_errors_in_row = 0
        self._recovered_at = self._clock()
        self._queue.accept("quarantined")
        self._state = "running"
        self._report_recovery()

    def _report_recovery(self) -> None:
        dropped = self._queue.dropped_batches + self._failed_batches
        _log.warning("sink_recovered", sink=self.name, dropped=dropped)

    def _may_go_on(self) -> bool:
        # A fork inside the sink returns twice, and the child must publish nothing of the parent's again.
        return self._state != "quarantined" and not self._forked

    def _next(self) -> Item | None:
        """Take the head of the queue; wait for one; None when closing has emptied it, or the sink was given up."""
        while self._may_go_on():
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
        if isinstance(item, Loss):
            self._owed.append(item)
            self._settle()
        elif (not self._owed or self._settle()) and self._write(item[0]):
            self._batches += 1
            self._events += len(item[0].events)
        else:
            self._failed_batches += 1
            self._failed_events += len(item[0].events)
            note_loss(self._owed, Loss(item[0], "failed"))
        if self._errors_in_row and not self._forked:
            self._after_failure(self._errors_in_row)
        elif self._failing_since is not None:
            self._note_success()

    def _settle(self) -> bool:
        """Write the gaps that the stream is owed. What cannot be written now stays owed."""
        while self._owed:
            if not self._write(self._owed[0].as_batch()):
                return False
            del self._owed[0]
        return True

    def _write(self, batch: EventBatch) -> bool:
        try:  # as `_call` does, without a call and a lambda for each batch
            self._sink.write(batch)
        except BaseException as error:  # noqa: BLE001
            self._note_error("write", error)
            self._errors_in_row += 1
            return False
        self._errors_in_row = 0
        return not self._forked

    def _call_tick(self) -> None:
        if self._reopen_asked and self._may_go_on():
            self._reopen_asked = False
            self._run_tick("reopen", getattr(self._sink, "reopen", None))
        self._run_tick("tick", self._tick)

    def _run_tick(self, what: str, method: Callable[[], None] | None) -> None:
        if method is None or not self._may_go_on():
            return
        # Counted apart: that batches are taken does not mean that ticks work.
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
        doublings = min(errors_in_row - 1, 16)
        self._wait(self._closing, min(self._backoff_seconds * 2**doublings, BACKOFF_SECONDS_MAX))

    def _call(self, what: str, method: Callable[[], None]) -> bool:
        try:
            method()
        except BaseException as error:  # noqa: BLE001  a sink's sys.exit() must not end the thread unnoticed
            self._note_error(what, error)
            return False
        return True

    def _note_error(self, what: str, error: BaseException) -> None:
        self._errors += 1
        self._last_error = f"{what}: {describe(error)}"

    def _note_failure(self) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._told_at > SILENCE_SECONDS:
            self._told_at = now
            _log.warning("sink_fails", sink=self.name, errors=self._errors, last_error=self._last_error)

    def _note_success(self) -> None:
        since = self._failing_since
        if since is None or self._errors_in_row or self._tick_errors_in_row:
            return
        self._failing_since = None
        if self._told_at >= since:
            self._report_recovery()

    def _quarantine(self) -> None:
        self._leave_out()
        self._failing_since = None
        if self._clock() - self._recovered_at > self._retry_seconds_max:
            # One that fails soon again has not recovered, and is not to be tried more often for that.
            self._pause = self._retry_seconds
        self._report_quarantine()

    def _leave_out(self) -> None:
        self._state = "quarantined"
        self._queue.refuse("quarantined")
        self._queue.drop_all("quarantined")

    def _report_quarantine(self) -> None:
        _log.error("sink_quarantined", sink=self.name, errors=self._errors, last_error=self._last_error)

    def _become_child(self) -> None:
        """A forked child has none of its parent's threads."""
        self._forked = True
        self._state = "closed"
        self._queue.become_child()


def describe(error: BaseException) -> str:
    """What went wrong, without any text that may quote what was being published."""
    # An OSError without a number was made up by a library, and may hold anything.
    if isinstance(error, SinkError | UnsafeFile) or (isinstance(error, OSError) and error.errno is not None):
        return f"{type(error).__name__}: {error}"
    return type_and_place(error)


_runners: weakref.WeakSet[SinkRunner] = weakref.WeakSet()


def _close_runners_in_child() -> None:
    for runner in list(_runners):
        runner._become_child()


os.register_at_fork(after_in_child=_close_runners_in_child)
