"""One sink, with a thread of its own that reads the log.

The log is the queue: a sink that is slow, fails or hangs lags in it, blocks no other sink, takes no memory, and loses
nothing. A batch may be delivered twice if the sink had taken half of it, or if the process was killed; its number shows
it.

A feed for routers folds, and so do sinks that count: such a sink begins with the log's last epoch or, for routers, with
its newest snapshot, without output, and is opened when it has reached the end. Routers then receive the whole state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from events.bus import EventBus
from events.codec import batch_without_tokens
from events.diagnostics import get_logger
from events.errors import LogDamaged, UnsafeFile, system_reason
from events.log import LogReader
from events.log.reader import Head
from events.log.segments import first_seq, segment_paths
from events.types import EventBatch, Gap
from kvcache.fold.state import CacheState
from kvcache.publish.errors import LogReplaced, NoTokens, NotPublishable
from kvcache.publish.start import Epoch, Position, Start, is_ahead, last_epoch, position_file, start_after
from kvcache.record.counting import StatsCounter
from kvcache.replay import Replayed, Unreplayable, fitting, refuse_impossible
from kvcache.stats import Stats
from sinks import Sink, SinkContext, SinkError, SinkStats, SinkURL, open_sink
from sinks.base import SinkUnavailable
from sinks.histogram import Histogram
from sinks.router.feed import RouterFeed
from sinks.runner import LostBatches, describe, pause_after

_SAVE_SECONDS = 0.5

_log = get_logger(__name__)

State = Literal["waiting", "catching up", "running", "failing", "ended"]
Until = Literal["stopped", "end", "closed"]
"""End of the work: never, at the current end of the log, or when the log's writer has closed it."""


@dataclass(frozen=True)
class CatchUp:
    """Progress of a sink towards the end of an existing log."""

    bytes_left: int
    """Bytes left to read, not counting files that are removed meanwhile."""
    bytes_per_second: float
    batches_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds left; None if nothing was read yet."""
        return self.bytes_left / self.bytes_per_second if self.bytes_per_second else None


@dataclass
class Progress:
    """Progress of a sink. One thread counts; others get a copy."""

    sink: str
    state: State = "waiting"
    waits_for: str | None = None
    """Reason why it cannot begin, in words; None: it has begun, or nothing is known yet."""
    seq: int | None = None
    """Last batch taken, for a feed the last one sent; -1: none; None: not known yet."""
    ts: int | None = None
    """Time of that batch, nanoseconds since 1970; None if before this process began."""
    batches: int = 0
    """Batches taken since this process began."""
    events: int = 0
    errors: int = 0
    """Number of exceptions that it raised."""
    last_error: str | None = None
    is_open: bool = False
    """True if it is open; a sink that folds is opened when it has caught up."""
    lost_batches: int = 0
    """Batches that were gone when they were to be read, or had no tokens although the sink needs them."""
    refused_peers: int = 0
    """Connections to a feed that failed because of keys."""
    lag_batches: int | None = 0
    """Batches of the log after the last one taken. None if that one is not known yet."""
    lag_seconds: float | None = 0.0
    """Seconds between the two, by the log's clock. None: unknown."""
    catch_up: CatchUp | None = None
    """Progress while it reaches the end of a log that existed before."""

    def as_sink_stats(self) -> SinkStats:
        """Return the progress in the form of an engine's own sinks."""
        works = self.is_open and self.state != "failing"
        return SinkStats(
            self.sink,
            self.batches,
            self.events,
            self.lost_batches,
            0,
            self.errors,
            self.lag_batches or 0,
            "closed" if self.state == "ended" else "running" if works else "quarantined",
            self.last_error,
            self.refused_peers,
        )


_REOPEN_AFTER = 5
"""Consecutive failures after which a sink is closed and reopened."""


class Delivery:
    """Delivery to one sink. Call it on one thread; `stopping` ends waits. Counters can be read from any thread.

    A batch that failed to be written is offered again: nothing is lost, and half of it may be delivered twice.
    """

    def __init__(self, name: str, sink: Sink, stopping: threading.Event) -> None:
        self._name, self.sink, self._stopping = name, sink, stopping
        self.is_open = False
        self._opened_before = False
        self.errors = 0
        """Number of exceptions that the sink raised."""
        self.failures = 0
        """Number of consecutive failures up to now; 0: it works."""
        self.last_error: str | None = None

    def open(self) -> bool:
        """Open the sink; return False if `stopping` was set. Raises what the sink does, the first time.

        A peer that does not answer at the moment is retried even then (SinkUnavailable).
        """
        if not self._opened_before:
            try:
                self._open()
            except SinkUnavailable as error:
                self._note(error)
            self._opened_before = True
        return self._until_done(lambda: None)

    def write(self, batch: EventBatch) -> bool:
        """Write a batch to the sink; return False if `stopping` was set before it was taken."""
        return self._until_done(lambda: self.sink.write(batch))

    def tick(self) -> bool:
        """Give the sink time, after each batch and regularly while there is none; return False if it failed."""
        return self._try(self.sink.tick)

    def close(self) -> None:
        """Close the sink if it is open; report what it raises."""
        if self.is_open:
            self.is_open = False
            try:
                self.sink.close()
            except BaseException as error:  # noqa: BLE001  a sink may raise anything
                self._note(error)

    def _until_done(self, action: Callable[[], None]) -> bool:
        while not self._try(action):
            if self._stopping.is_set():
                return False
        return True

    def _try(self, action: Callable[[], None]) -> bool:
        """Try an action once, opening the sink if necessary; wait a moment if that fails."""
        try:
            if not self.is_open:
                self._open()
            action()
        except BaseException as error:  # noqa: BLE001  a sink's sys.exit() must not end the thread unnoticed
            self._note(error)
            if self.failures % _REOPEN_AFTER == 0:
                self.close()
            self._stopping.wait(pause_after(self.failures))
            return False
        if self.failures:
            self.failures = 0
            _log.warning("sink_recovered", sink=self._name)
        return True

    def _open(self) -> None:
        self.sink.open()
        self.is_open = True

    def _note(self, error: BaseException) -> None:
        self.last_error = describe(error)
        self.errors += 1
        self.failures += 1
        if self.failures == 1:
            _log.error("sink_fails", sink=self._name, reason=self.last_error)


@dataclass(frozen=True)
class ReadLog:
    """The part of `events.log.LogStats` that the log itself has."""

    batches: int
    """Batches read, from the beginning of an epoch on."""
    dropped_batches: int
    """Batches lost to the log, by its gaps."""
    bytes: int
    """Bytes read."""
    lag_batches: None = None
    durable_seq: None = None
    state: None = None
    """Unknown: only the writer has these three."""


class LogProbe:
    """A fold of a log from the beginning of an epoch on. One thread folds, any thread may query (`sinks.base.Probe`).

    A manager answers such queries from its own state (`kvcache.record.counting`). Here the same counters receive the
    same events, and gauges are those of the same fold.

    - `replayed`: the cache after the batches so far, folded by the caller of `note`.
    - `reader`: the log's reader, once it has begun.
    - `sink_stats`: progress of all sinks of this process.
    """

    step_times: Histogram | None = None
    """Unknown: no log has the manager's time per step."""

    def __init__(
        self,
        replayed: Replayed,
        reader: Callable[[], LogReader | None],
        sink_stats: Callable[[], tuple[SinkStats, ...]],
    ) -> None:
        self._reader, self._sink_stats = reader, sink_stats
        self._bus = EventBus()
        self._counter = StatsCounter(self._bus)
        self._replayed = replayed
        self._lost = 0

    def note(self, batch: EventBatch) -> None:
        """Count the last batch."""
        for event in batch.events:
            self._bus.publish(event)
            if type(event) is Gap:
                self._lost += event.last_seq - event.first_seq + 1
        self._counter.publish(self._replayed.state, len(self._bus.take_events()))

    def stats(self) -> Stats:
        """Return counters and gauges as of the last batch."""
        return self._counter.read()

    def log_stats(self) -> ReadLog:
        """Return the progress of reading the log."""
        reader = self._reader()
        return ReadLog(self._replayed.batches, self._lost, 0 if reader is None else reader.bytes_read)

    def sink_stats(self) -> tuple[SinkStats, ...]:
        """Return the progress of the sinks of this process."""
        return self._sink_stats()


class SinkFollower:
    """Thread that delivers the batches of a log to the sink at `url`.

    `sink_stats` returns the progress of all sinks of the process. Raises SinkURLError, and NotPublishable for a sink
    that needs data only an engine has.
    """

    def __init__(
        self,
        log: Path,
        url: str,
        state_dir: Path,
        *,
        until: Until = "stopped",
        poll_seconds: float = 0.005,
        sink_stats: Callable[[], tuple[SinkStats, ...]] = tuple,
    ) -> None:
        self.name = str(SinkURL.parse(url))
        self.failure: BaseException | None = None
        """Exception that ended it, if it was not stopped and did not reach the end."""
        self._log, self._url, self._state_dir = log, url, state_dir
        self._until, self._poll_seconds, self._sink_stats = until, poll_seconds, sink_stats
        self.stopping = threading.Event()
        """Set to request an end after the current batch."""
        sink = self._made(SinkContext(0, 1, kind=None, state_dir=state_dir))
        self._delivery = Delivery(self.name, sink, self.stopping)
        self._folds = sink.folds
        forgets = self._folds or SinkURL.parse(url).scheme == "stdout"
        self._file = None if forgets else position_file(state_dir, self.name)
        """# Its position file. Output printed once is lost for later readers, so none is kept for such sinks."""
        self._epoch: Epoch | None = None
        """Epoch of the last batch read."""
        self._misfit = -1  # The batch that began an epoch for which the sink must be remade.
        self._concealed = False
        """True if batches are withheld, because the sink needs tokens and they have none."""
        self._has_begun = self._is_live = self._is_finished = False
        """True if a sink was made, if it has been opened, if all is done."""
        self._given: tuple[int, int | None] = -1, None
        """Last batch given to the sink, with its time. A feed only folds that, and sends it later."""
        self._before = -1
        """Position before the first batch given to the sink."""
        self._progress = Progress(self.name)
        self._saved: Position | None = None
        self._saved_at = 0.0
        self._replayed: Replayed | None = None
        """Cache that rejects batches which do not follow, before a sink that folds gets them; None for other sinks."""
        self._probe: LogProbe | None = None
        """State for a sink's queries of the cache; None: it has none, or does not get whole epochs."""
        self._reader: LogReader | None = None
        self._read_since: tuple[float, int] = 0.0, 0
        """Time when that began to read, and batches taken before."""
        self._thread = threading.Thread(target=self._run, name=f"kvcache-publish-{self.name}", daemon=True)

    # --- any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait until it has ended, if it was started; return False if it has not within `timeout`."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """True if it has ended."""
        return self._progress.state == "ended"

    def stats(self, head: Head | None) -> Progress:
        """Return the current progress; the log ends at `head`."""
        delivery, progress = self._delivery, replace(self._progress)
        is_failing = delivery.failures and progress.state in ("catching up", "running")
        lag_batches, lag_seconds = _lag(head, progress)
        return replace(
            progress,
            state="failing" if is_failing else progress.state,
            errors=delivery.errors,
            last_error=delivery.last_error,
            is_open=self._is_live and delivery.is_open,
            refused_peers=self._delivery.sink.refused_peers,
            lag_batches=lag_batches,
            lag_seconds=lag_seconds,
            catch_up=None if head is None else self._catch_up(),
        )

    def _catch_up(self) -> CatchUp | None:
        """Return the distance from the end of the log; None: it was reached before, or reading has not begun."""
        reader, progress, (since, before) = self._reader, self._progress, self._read_since
        if progress.state != "catching up" or reader is None:
            return None
        seconds = max(time.monotonic() - since, 1e-3)
        with suppress(OSError):  # the log's reader reports that
            batches = progress.batches - before
            return CatchUp(reader.bytes_left(), reader.bytes_read / seconds, batches / seconds)
        return None

    # --- its thread: start of reading ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self.stopping.is_set() or self._is_finished):
                start = self._find_start()
                if start is not None:
                    self._follow(start)
                elif self._until == "end":
                    self._is_finished = True
                else:
                    self.stopping.wait(self._poll_seconds)
        except BaseException as error:  # noqa: BLE001  raised again by whoever waits for this thread
            gone = isinstance(error, FileNotFoundError) and not self._log.is_dir()
            self.failure = LogReplaced(self._log) if gone else error
            self._clear_routers()
        finally:
            self._end()

    def _find_start(self) -> Start | None:
        """Return where to begin, now or after the log was cut; None: there is nothing to begin with yet."""
        if self._folds:
            return last_epoch(self._log, counts=not isinstance(self._delivery.sink, RouterFeed))
        if self._file is not None and not self._file.is_open:
            self._saved = self._file.open()
        position = self._position() or self._saved
        if position is not None and not self._has_begun and is_ahead(self._log, position):
            why = self._progress.waits_for = (
                f"the log ends before batch {position.seq:,}, which the sink has already received"
            )
            if self._until == "end":
                raise SinkError(f"{self.name}: {why}: remove {self._file and self._file.path} to start again")
            return None
        return start_after(self._log, position)

    def _follow(self, start: Start) -> None:
        """Read on from there, until all is done, the sink has to be remade, or the log was cut."""
        first = self._begin(start)
        reader = self._reader = LogReader(
            self._log,
            follow=True,
            start=None if start.is_snapshot else first,
            state_at=first if start.is_snapshot else None,
            kind=None,
        )
        self._read_since = time.monotonic(), self._progress.batches
        try:
            for batch in reader.live():
                if self.stopping.is_set():
                    return
                if batch is None:
                    self._is_finished = self._rest(reader)
                    if self._is_finished:
                        return
                    self.stopping.wait(self._poll_seconds)
                elif not self._check_continuity(batch) or not self._deliver(batch):
                    return
        except LogDamaged:
            paths = segment_paths(self._log)
            if not paths or first_seq(paths[0]) <= self._given[0] + 1:
                raise
            # Else the segments to be read next were removed.

    def _begin(self, start: Start) -> int:
        """Make the sink, and open it unless it has to catch up first; return the first batch that it needs."""
        epoch, first, known = start.epoch, start.seq, self._position() or self._saved
        self._progress.state, self._progress.waits_for = "catching up", None
        sink = self._made(replace(epoch.context, state_dir=self._state_dir))
        if not self._has_begun and sink.needs_tokens and not epoch.has_tokens:
            raise NoTokens(str(self._log), self.name)
        self._delivery.close()
        self._delivery.sink = sink
        self._epoch, self._concealed = epoch, False
        reopened, self._has_begun, self._is_live = self._has_begun, True, not self._folds
        self._replayed = Replayed(CacheState()) if self._folds and epoch.context.kind == "cache" else None
        self._probe = None
        if self._replayed is not None and sink.watches:
            self._probe = LogProbe(self._replayed, lambda: self._reader, self._sink_stats)
            sink.watch(self._probe)
        if not self._is_live:
            if reopened:
                sink.resume(first - 1)
            self._before, self._given = first - 1, (first - 1, None)
            self._note_delivered(*self._given)
            return first
        if known is not None and known.log_id == epoch.log_id.hex():
            # It may have taken more than was recorded before the process was killed.
            first = max(first, sink.resume(first - 1) + 1)
        self._note_delivered(first - 1, None)
        if self._delivery.open():
            if start.removed:
                gone = start.seq - start.removed, start.seq - 1
                self._note_gap(*gone)
                self._delivery.write(LostBatches(*gone, 0, "removed from the log").as_batch())
            self._given = first - 1, None
            self._save()
        return first

    def _made(self, context: SinkContext) -> Sink:
        sink = open_sink(self._url, context)
        if context.salts.wanted:
            reason = "salts=plain needs the salts, but a log contains only their digests: omit it"
            raise NotPublishable(self.name, reason)
        if context.kind == "feed" and sink.needs_cache:
            reason = (
                "it publishes what a cache does, but this log records only what engines published: omit it"
            )
            raise NotPublishable(self.name, reason)
        return sink

    # --- its thread: batches ----------------------------------------------------------------------------

    def _check_continuity(self, batch: EventBatch) -> bool:
        """Handle the beginning of an epoch; return False if the sink was not made for it.

        Raises `Unreplayable` if the log's segments lack that epoch, so that no sink can be made for it.
        """
        epoch = Epoch.of(batch)
        if epoch is None or self._epoch is None:
            return True
        for gap in batch.events:
            if isinstance(gap, Gap):
                self._note_gap(gap.first_seq, gap.last_seq)
        fits = epoch.context == self._epoch.context
        if not fits:
            invented = batch.seq == self._misfit
            self._misfit = batch.seq
            if invented:
                raise Unreplayable(batch.seq, "an epoch begins in a segment that should not have one")
        self._epoch = epoch
        self._concealed = bool(self._delivery.sink.needs_tokens) and not epoch.has_tokens
        if self._concealed:
            _log.error("log_without_tokens", log=str(self._log), sink=self.name, epoch=epoch.number)
            if isinstance(self._delivery.sink, RouterFeed):
                self._delivery.sink.resync()
        return fits

    def _deliver(self, batch: EventBatch) -> bool:
        """Deliver a batch to the sink; return False if it was stopped before."""
        with fitting(batch.seq):
            given = self._to_deliver(batch)
            if not self._folds:
                # A batch that it cannot take would be offered forever.
                for event in batch.events:
                    refuse_impossible(event)
        if self._folds:
            # Folding is done once or not at all; the sink may not be open yet.
            self._fold(batch, given)
        elif not self._delivery.write(given):
            return False
        self._given = batch.seq, batch.ts
        self._progress.batches += 1
        self._progress.events += len(batch.events)
        if not (self._folds and self._is_live):
            self._note_delivered(*self._given)
        if self._is_live:
            self._tick()
        return True

    def _fold(self, batch: EventBatch, given: EventBatch) -> None:
        """Let the sink fold a batch that follows the previous ones. Raises what `Replayed.fold` does for others."""
        if self._replayed is not None:
            self._replayed.fold(batch, verify=False)
        if self._probe is not None:
            self._probe.note(batch)
        with fitting(batch.seq):
            self._delivery.sink.write(given)

    def _tick(self) -> None:
        if self._delivery.tick():
            self._note_delivered(*self._given)
        if time.monotonic() - self._saved_at >= _SAVE_SECONDS:
            self._save()

    def _note_delivered(self, seq: int | None, ts: int | None) -> None:
        """Record that the sink is done with all batches up to this one."""
        self._progress.seq, self._progress.ts = seq, ts

    def _to_deliver(self, batch: EventBatch) -> EventBatch:
        if self._concealed:
            self._progress.lost_batches += 1
            return LostBatches(batch.seq, batch.seq, batch.ts, "the log has no token ids").as_batch()
        return batch_without_tokens(batch) if self._delivery.sink.needs_tokens is False else batch

    def _note_gap(self, first: int, last: int) -> None:
        """Record batches that were removed from the log before they were read."""
        self._progress.lost_batches += last - first + 1
        _log.warning("log_was_cut", log=str(self._log), sink=self.name, first_seq=first, last_seq=last)

    def _rest(self, reader: LogReader) -> bool:
        """Do the work due when everything available was read; return True if nothing more is to come."""
        at_the_end = self._until == "end" or (self._until == "closed" and reader.closed)
        if not self._is_live:
            self._open_late(at_the_end=at_the_end)
        if not self._is_live:
            return False
        self._progress.state = "running"
        self._tick()
        # A failed sink is retried: it has not taken everything.
        return at_the_end and not self._delivery.failures

    def _open_late(self, *, at_the_end: bool) -> None:
        """Open a sink that has folded everything, if possible. Raises SinkError if there is no other chance."""
        waits_for = self._progress.waits_for = self._delivery.sink.waits_for
        if waits_for is None:
            self._note_delivered(self._before, None)  # nothing was sent yet
            self._is_live = self._delivery.open()
        elif at_the_end:
            raise SinkError(f"{self.name}: {waits_for}")
        else:
            self._progress.state = "waiting"

    # --- its thread: position, and the end ----------------------------------------------------------

    def _position(self) -> Position | None:
        if self._epoch is None:
            return None
        return Position(self._epoch.log_id.hex(), self._epoch.number, self._given[0])

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        position = self._position()
        if self._file is None or position is None or position == self._saved:
            return
        try:
            self._file.save(position)
            self._saved = position
        except (OSError, UnsafeFile) as error:
            reason = str(error) if isinstance(error, UnsafeFile) else system_reason(error)
            _log.warning("position_not_saved", sink=self.name, reason=reason)

    def _clear_routers(self) -> None:
        """Clear the routers' state: it may soon be wrong, and no more events will follow."""
        if isinstance(self._delivery.sink, RouterFeed) and self._delivery.is_open:
            with suppress(Exception):  # this sink may be what failed
                unread = self._given[0] + 1
                self._delivery.sink.write(LostBatches(unread, unread, 0, "the log cannot be read").as_batch())
                self._delivery.sink.resync()

    def _end(self) -> None:
        failed = self._delivery.failures
        self._delivery.close()
        if self._delivery.failures > failed and self._is_finished:
            self._note_delivered(None, None)
            self.failure = SinkError(f"{self.name} did not take the end: {self._delivery.last_error}")
        elif self._has_begun:
            self._save()
        if self._file is not None:
            self._file.close()
        self._progress.state = "ended"


def _lag(head: Head | None, progress: Progress) -> tuple[int | None, float | None]:
    """Return batches and seconds between a sink's position and the end of the log."""
    if head is None:
        return 0, 0.0
    if progress.seq is None:
        return None, None
    batches = max(0, head.seq - progress.seq)
    if not batches:
        return 0, 0.0
    if head.ts is None or progress.ts is None:
        return batches, None
    return batches, max(0.0, (head.ts - progress.ts) / 1e9)
