"""A state and its record: emit = apply and publish, flush = one batch to the log and the sinks.

`EventSourcedCache` is the base of a manager and a recorder: a cache changed by one thread, by events alone.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from numbers import Real
from typing import TYPE_CHECKING, Any

import msgspec

from events.bus import EventBus
from events.closing import Closing
from events.diagnostics import get_logger
from events.feed.inventory import Inventory
from events.formats.trtllm import Data, EventDicts
from events.ids import epoch_of, first_number
from events.log import LogStats
from events.tokens.names import ALGORITHMS, DEFAULT_ALGORITHM
from events.types import (
    FIRST_FORMAT,
    FORMAT_VERSION,
    CacheCreated,
    Event,
    EventBatch,
    PoolShared,
    StateExported,
    TokensAppended,
)
from kvcache.calls.guard import Guard, closing, exclusive
from kvcache.config import KVCacheConfig
from kvcache.decide.housekeeping import Housekeeping
from kvcache.errors import ManagerBusy, Unsupported, UsageError
from kvcache.fold.state import CacheState
from kvcache.inputs import checked_integer, time_from
from kvcache.layout import Layout
from kvcache.record.counting import StatsCounter
from kvcache.record.outputs import LogTarget, Outputs
from kvcache.replay import Replayed
from kvcache.stats import Stats
from sinks import Sink, SinkContext, SinkRunner, SinkStats
from sinks.histogram import STEP_SECONDS, Histogram

if TYPE_CHECKING:
    from sinks.router.feed import RouterFeed

_log = get_logger(__name__)
UNFLUSHED_STEPS = 100
"""Number of times that one sequence gets tokens without a flush before a warning."""
LONGEST_WAIT_SECONDS = 1e9
"""Longest wait, 30 years: platforms refuse to wait for much longer."""


def cache_created(config: KVCacheConfig, layout: Layout, *, published: bool) -> CacheCreated:
    """Build the first event of a cache. `published`: True if a log or a sink receives its events."""
    algorithm: str = config.block_hash
    if algorithm == "auto":
        # Names are for subscribers: without any, computing them would be most of the work.
        named = published or config.eviction_policy == "levels"
        algorithm = DEFAULT_ALGORITHM if named else "none"
    odd = config.tokens_per_block & (config.tokens_per_block - 1)
    return CacheCreated(
        format_version=FORMAT_VERSION if odd else FIRST_FORMAT,
        config=config.model_dump_json(),
        tokens_per_block=config.tokens_per_block,
        groups=tuple(group.group_created() for group in layout.groups),
        hash_algorithm=algorithm,
        key_bytes=ALGORITHMS[algorithm].key_bytes,
        content_id=layout.content_id,
        attention_dp_rank=config.attention_dp_rank,
    )


class LatestEvents:
    """The last `max_size` unread events in TensorRT-LLM's form, for programs that poll `get_latest_events`.

    Flushed events are visible at once; beyond `max_size` dicts the oldest are dropped, which a reader sees as a gap in
    `event_id`. Reading empties the buffer, from any thread.
    """

    def __init__(self, max_size: int) -> None:
        self._inventory, self._dicts = Inventory(), EventDicts()
        self._visible: deque[Data] = deque(maxlen=max_size)
        self._changed = threading.Condition()

    def get(self, timeout: float | None) -> list[Data]:
        """Return and remove everything visible; wait for something for `timeout` seconds (None: for ever)."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._visible), timeout)
            events = list(self._visible)
            self._visible.clear()
            return events

    def publish(self, batch: EventBatch) -> None:
        """Make the events of a batch visible."""
        changes = self._inventory.fold(batch)
        with self._changed:
            self._visible.extend(self._dicts.dicts(changes))
            self._dicts.settle()
            self._changed.notify_all()


class Journal:
    """Event journal of an epoch; after its start nothing changes the state but `emit`. Any thread may read
    (`sinks.base.Probe`).
    """

    def __init__(
        self,
        created: CacheCreated,
        outputs: Outputs,
        event_buffer_max_size: int = 0,
        first: StateExported | None = None,
        shared: PoolShared | None = None,
    ) -> None:
        if not outputs.records_tokens and not created.key_bytes:
            raise Unsupported(
                "a log with neither tokens nor block names, which could not identify blocks",
                "choose a block_hash other than none, or record tokens",
            )
        self.state = CacheState()
        self.bus = EventBus()
        self._pending, self._subscribers = self.bus.pending, self.bus.subscribers
        self.counter = StatsCounter(self.bus)
        self.latest = LatestEvents(event_buffer_max_size) if event_buffer_max_size else None
        self.outputs = outputs
        self.step_times: Histogram | None = None
        """Duration of calls per engine step; None until a sink has requested it."""
        self._state_due = False
        self.next_seq = 0 if outputs.log is None else outputs.log.next_seq
        """Number of the next batch."""
        self._exported_seq = -1
        """Number of the last batch with the whole state."""
        self._start(created, first)
        if shared is not None:
            self.emit(shared)

    def _start(self, created: CacheCreated, first: StateExported | None) -> None:
        """Emit the first events of an epoch: its beginning, and the initial state of folds (`first`, or empty)."""
        used = 0 if first is None else epoch_of(max(first.next_handle, first.next_transfer))
        epoch = None if self.outputs.log is None else self.outputs.log.begin_epoch(used)
        if epoch is not None:
            self.bus.publish(epoch)  # it describes the log; the live state always has its tokens
        self.emit(created)
        if epoch is not None:
            first, number = first or self.state.export(), first_number(epoch.epoch)
            # Things numbered in an earlier epoch keep their numbers.
            handle, transfer = max(first.next_handle, number), max(first.next_transfer, number)
            self.emit(msgspec.structs.replace(first, next_handle=handle, next_transfer=transfer))
        elif first is not None:
            self.emit(first)

    def emit(self, event: Event) -> None:
        """Apply and publish an event: the only way in which anything changes."""
        self.state.apply(event)
        # Inlined `bus.publish`, to save the call: this runs several times per engine step.
        self._pending.append(event)
        for subscriber in self._subscribers[type(event)]:
            subscriber(event)

    def record_losses(self) -> None:
        """Record losses, and the whole state with the next flush; called before each flush where `outputs.may_lose`."""
        gap = self.outputs.pop_gap()
        if gap is not None:
            self.bus.publish(gap)
        lost = self.outputs.resync_after_seq
        # The batch with the state may itself be the last one lost.
        if gap is not None or (lost >= 0 and lost >= self._exported_seq):
            self._state_due = True

    @property
    def due(self) -> bool:
        """True if there is something to flush."""
        return self._state_due or bool(self.bus.pending)

    def flush(self, now: int) -> EventBatch | None:
        """Publish everything since the last flush as one batch, stamped `now`; no batch if empty."""
        if self._state_due:
            self._state_due = False
            for event in (self.state.export(), *self.state.export_shared()):
                self.bus.publish(event)  # describes the present, so there is nothing to apply
            self._exported_seq = self.next_seq
        if not self.bus.pending:
            return None
        events = self.bus.take_events()
        batch = EventBatch(self.next_seq, now, events)
        self.next_seq += 1
        self.counter.publish(self.state, len(events))
        self.outputs.publish(batch)
        if self.latest is not None:
            self.latest.publish(batch)
        return batch

    def stats(self) -> Stats:
        """Counters and gauges as of the last flush."""
        return self.counter.read()

    def log_stats(self) -> LogStats | None:
        """Progress of the log; None without one."""
        return None if self.outputs.log is None else self.outputs.log.stats()

    def sink_stats(self) -> tuple[SinkStats, ...]:
        """Progress of the sinks."""
        return self.outputs.sink_stats()


class EventSourcedCache(Closing):
    """A cache that changes by events alone: one way to begin, to end a step and to close, for managers and recorders.

    One thread makes all calls, except those documented otherwise.
    """

    state: CacheState
    """State as of the last event."""
    bus: EventBus
    """Bus that dispatches each event."""
    _guard: Guard
    _journal: Journal
    _housekeeping: Housekeeping
    """Decisions about the cache as a whole."""

    @contextmanager
    def _beginning(
        self,
        created: CacheCreated,
        config: KVCacheConfig,
        log: LogTarget,
        sinks: Items[str | Sink | SinkRunner],
        wall_ns: Callable[[], int],
        first: StateExported | None = None,
        shared: PoolShared | None = None,
    ) -> Iterator[Outputs]:
        """Open log and sinks and begin an epoch; the body builds the parts that work on its state.

        Flushes the first batch after the body. If anything fails, everything opened here is closed.
        """
        started, self._wall_ns = time_from(wall_ns), wall_ns
        self._guard, self._look_at, self._warned = Guard(), UNFLUSHED_STEPS, False
        context = SinkContext(created.key_bytes, config.tokens_per_block, config.model, fold=Replayed)
        self._salts = context.salts
        outputs = Outputs.open(log, sinks, context, config.log)
        try:
            self._journal = journal = Journal(created, outputs, config.event_buffer_max_size, first, shared)
            self.state, self.bus, self._emit = journal.state, journal.bus, journal.emit
            yield outputs
            if outputs.attach_probe(journal):
                self._guard.clock, journal.step_times = time.perf_counter_ns, Histogram(STEP_SECONDS)
            journal.record_losses()
            journal.flush(started)
            self._acquire()
        except BaseException:
            outputs.close()
            raise

    # -- calls from any thread

    def stats(self) -> Stats:
        """Counters and gauges as of the last flush; may be called from any thread."""
        return self._journal.stats()

    def sink_stats(self) -> tuple[SinkStats, ...]:
        """Progress, lag and drops per sink; may be called from any thread."""
        return self._journal.sink_stats()

    def log_stats(self) -> LogStats | None:
        """Progress, lag, losses and write errors of the log; None without a log. May be called from any thread."""
        return self._journal.log_stats()

    def wait_durable(self, timeout: float = float("inf")) -> bool:
        """Wait until everything flushed so far is on disk; from any thread. Without a log there is nothing to wait for.

        Also waits for the `Gap` of each batch that the log has lost. Returns False after `timeout` seconds, or if the
        log is never synced (`log.fsync` "never"). Raises `events.LogWriteFailed` if the log has ended before.
        """
        seconds = checked_wait(timeout, "timeout must be a number")
        log, last = self._journal.outputs.log, self._journal.next_seq - 1
        return log is None or log.wait_durable(last, seconds)

    def reopen_sinks(self) -> None:
        """Reopen the files of sinks, as after their rotation; may be called in a signal handler."""
        self._journal.outputs.reopen()

    def wait_subscribers(
        self, count: int, timeout: float = float("inf"), stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until each feed for routers has `count` subscribers; False after `timeout` seconds or once `stop()`.

        May be called from any thread.
        """
        count = checked_integer(count, "count")
        if not callable(stop):
            raise UsageError(f"stop must be a function, not {type(stop).__name__}")
        seconds = checked_wait(timeout, "timeout must be a number")
        return self._journal.outputs.wait_subscribers(count, seconds, stop)

    @property
    def feeds(self) -> tuple[RouterFeed, ...]:
        """The sinks that feed routers."""
        return self._journal.outputs.feeds

    # -- end of a step

    @exclusive
    def flush(self) -> EventBatch | None:
        """End an engine step: publish everything since the last flush as one batch. An empty step makes no batch.

        With `log.overflow` "block", raises `events.LogWriteFailed` while the disk refuses the log. The batch is
        nevertheless handed to log and sinks: do not retry; the next flush ends the next step.
        """
        return self._end_step()

    @closing
    def close(self) -> None:
        """Land copies in flight, record a checkpoint, drain the log and the sinks. Closing twice is harmless.

        In the middle of another call, as from a signal handler, it takes effect when that call has ended.
        """
        try:
            if self._guard.failure is None:
                self._end_last_step()
        finally:
            self._guard.close()
            try:
                self._journal.outputs.close()
            finally:
                self._release()

    def _end_step(self) -> EventBatch | None:
        if self.state.transfers:
            self._record_copies()
        if self._housekeeping.due:
            with self._guard:
                self._housekeeping.run()
        batch, times = self._publish(), self._journal.step_times
        self._look_at = UNFLUSHED_STEPS
        if times is not None and batch is not None:
            # A flush's own time counts to the next step.
            times.add(self._guard.spent_ns)
            self._guard.spent_ns = 0
        log = self._journal.outputs.log
        if log is not None:
            log.check()
        return batch

    def _end_last_step(self) -> None:
        try:
            self._finish_copies()
            # A ticket that calls the manager proves nothing about its copies, and closing does not poll it again.
            with suppress(ManagerBusy):
                self._record_copies()
        finally:
            # An interrupted wait for copies still records everything that happened.
            if self._guard.failure is None:
                with self._guard:
                    self._housekeeping.checkpoint()
                self._journal.outputs.make_room()
                self._publish()

    def _publish(self) -> EventBatch | None:
        journal = self._journal
        if journal.outputs.may_lose:
            with self._guard:
                journal.record_losses()
        if not journal.due:
            return None
        # Outside the guard: with a failing clock, everything waits for the next flush.
        now = time_from(self._wall_ns)
        try:
            return journal.flush(now)
        except BaseException as error:
            self._guard.note(error)
            raise

    def _record_copies(self) -> tuple[int, ...]:
        """Record ended copies; returns those that landed. Without an engine that moves bytes all have landed."""
        landed = tuple(self.state.transfers)
        if landed:
            with self._guard:
                self._housekeeping.land(landed)
        return landed

    def _finish_copies(self) -> None:
        """Wait until all copies have ended."""

    def _acquire(self) -> None:
        """Acquire resources that are this cache's until it is closed, after everything else has worked."""

    def _release(self) -> None:
        """Release them."""

    def _warn_of_no_flush(self) -> None:
        """Warn once if steps follow each other without a flush: nothing is published then, and events pile up.

        Checks at a number of pending events, and again at twice that number.
        """
        pending = self.bus.pending
        if len(pending) < self._look_at or self._warned:
            return
        self._look_at = 2 * len(pending)
        steps = Counter[int]()
        for event in pending:
            if isinstance(event, TokensAppended):
                steps.update(array("q", event.handles))
        if max(steps.values(), default=0) >= UNFLUSHED_STEPS:
            self._warned = True
            reason = "call flush() at the end of each step: the log, sinks and stats() receive nothing before"
            _log.warning("flush_missing", events=len(pending), reason=reason)


def checked_wait(wait: Any, must: str, *, per_second: int = 1) -> float:
    """Validate a wait from 0 to the longest one, in seconds. Raises `UsageError` with `must`, its requirement."""
    number: Any = wait if isinstance(wait, Real) else None
    # NaN satisfies neither comparison.
    if number is not None and (number <= 0 or number > 0):
        return float(max(0, min(number, LONGEST_WAIT_SECONDS * per_second))) / per_second
    raise UsageError(f"{must}, not {type(wait).__name__} or NaN")
