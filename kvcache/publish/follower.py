"""One sink and its thread, which reads the log by itself.

The log is the queue: a sink that is slow, fails or hangs falls behind in it, holds up nobody, takes no memory, and
loses nothing. A batch may come twice where the sink had taken half of it, or the process was killed; its number tells.

A feed for routers folds, and so does what counts: such a sink begins with the beginning of the log's last epoch, or,
for routers, with its newest snapshot, in silence, and is opened when it has got to the end. Then routers are told the
whole state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from events.codec import batch_without_tokens
from events.diagnostics import get_logger
from events.errors import LogDamaged, UnsafeFile, system_reason
from events.log import LogReader
from events.log.reader import Head
from events.log.segments import first_seq, segment_paths
from events.types import EventBatch, Gap
from kvcache.fold.state import CacheState
from kvcache.publish.errors import LogReplaced, NoTokens, NotPublishable
from kvcache.publish.probe import LogProbe
from kvcache.publish.start import Epoch, Position, Start, behind, is_ahead, last_epoch, position_file
from kvcache.replay import Replayed, Unreplayable, fitting, refuse_impossible
from sinks import Sink, SinkContext, SinkError, SinkStats, SinkURL, open_sink
from sinks.base import SinkUnavailable
from sinks.router.feed import RouterFeed
from sinks.runner import LostBatches, describe, pause_after

_SAVE_SECONDS = 0.5

_log = get_logger(__name__)

State = Literal["waiting", "catching up", "running", "failing", "ended"]
Until = Literal["stopped", "end", "closed"]
"""When the work is done: never, at the log's end as it is, or when the log's writer has closed it."""


@dataclass(frozen=True)
class CatchUp:
    """How a sink comes to the end of the log that is there."""

    bytes_left: int
    """To be read; of files that are removed meanwhile, nothing."""
    bytes_per_second: float
    batches_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """At this pace; None: nothing was read yet."""
        return self.bytes_left / self.bytes_per_second if self.bytes_per_second else None


@dataclass
class Progress:
    """How far a sink is. One thread counts; whoever asks has a copy."""

    sink: str
    state: State = "waiting"
    waits_for: str | None = None
    """Why it cannot begin, in words; None: it has begun, or nothing is known yet."""
    seq: int | None = None
    """The last batch that it has had, of a feed the last one that went out; -1: none; None: not known yet."""
    ts: int | None = None
    """When that batch was made, nanoseconds since 1970; None: before this process began."""
    batches: int = 0
    """Taken since this process began."""
    events: int = 0
    errors: int = 0
    """Times that it raised."""
    last_error: str | None = None
    is_open: bool = False
    """Whether it is at work for others; one that folds is opened when it has caught up."""
    lost_batches: int = 0
    """Not there any more when they were to be read, or without the tokens that the sink needs."""
    refused_peers: int = 0
    """Connections to a feed that came to nothing because of keys."""
    lag_batches: int | None = 0
    """Of the log, after the last one that it has had. None: it is not known yet which that was."""
    lag_seconds: float | None = 0.0
    """Between the two, by the log's clock. None: unknown."""
    catch_up: CatchUp | None = None
    """While it comes to the end of a log that was there before."""

    def as_sink_stats(self) -> SinkStats:
        """The same as an engine has it of its own sinks."""
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
"""Failures in a row after which a sink is closed and opened again."""


class Delivery:
    """One sink. All is called on one thread; `stopping` ends what waits. What counts is for any thread to read.

    A batch whose write has failed is offered again: nothing is lost, and half of it may come twice.
    """

    def __init__(self, name: str, sink: Sink, stopping: threading.Event) -> None:
        self._name, self.sink, self._stopping = name, sink, stopping
        self.is_open = False
        self._opened_before = False
        self.errors = 0
        """Times that the sink raised."""
        self.failures = 0
        """The last ones in a row; 0: it works."""
        self.last_error: str | None = None

    def use(self, sink: Sink) -> None:
        """Serve this sink from now on; what was used before is closed."""
        self.close()
        self.sink = sink

    def open(self) -> bool:
        """Open the sink; False if it was told to stop. Raises what the sink does, the first time.

        What does not answer at the moment is tried again all the same (SinkUnavailable).
        """
        if not self._opened_before:
            try:
                self._open()
            except SinkUnavailable as error:
                self._note(error)
            self._opened_before = True
        return self._until_done(lambda: None)

    def write(self, batch: EventBatch) -> bool:
        """Have the sink take a batch; False if it was told to stop before it did."""
        return self._until_done(lambda: self.sink.write(batch))

    def tick(self) -> bool:
        """To be called after each batch, and all the time while there is none; False if the sink failed."""
        return self._try(self.sink.tick)

    def close(self) -> None:
        """Close the sink, if it is open; what it raises is reported."""
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
        """Do it once, opening the sink if need be; if that fails, wait a moment."""
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
        self.errors += 1
        self.failures += 1
        self.last_error = describe(error)
        if self.failures == 1:
            _log.error("sink_fails", sink=self._name, reason=self.last_error)


class SinkFollower:
    """Gives the batches of a log to the sink that `url` names, on a thread of its own.

    `sink_stats` is what a sink may ask of all that are served with it. Raises SinkURLError, and NotPublishable for what
    only an engine can know.
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
        """Why it has ended, if not because it was told to, or came to the end."""
        self._log, self._url, self._state_dir = log, url, state_dir
        self._until, self._poll_seconds, self._sink_stats = until, poll_seconds, sink_stats
        self._stopping = threading.Event()
        sink = self._made(SinkContext(0, 1, kind=None, state_dir=state_dir))
        self._delivery = Delivery(self.name, sink, self._stopping)
        self._folds = sink.folds
        forgets = self._folds or SinkURL.parse(url).scheme == "stdout"
        self._file = None if forgets else position_file(state_dir, self.name)
        """Where it is kept what it has had. What was printed once is not there any more for who looks again."""
        self._epoch: Epoch | None = None
        """Of the last batch that was met."""
        self._misfit = -1  # The batch with which an epoch began that needed a sink made anew.
        self._concealed = False
        """Whether batches are withheld, because the sink needs tokens and they have none."""
        self._has_begun = self._is_live = self._is_finished = False
        """Whether a sink was made, whether it has been opened, whether all is done."""
        self._given: tuple[int, int | None] = -1, None
        """The last batch that was given to it, and when that was made. A feed only folds that, and sends it later."""
        self._before = -1
        """What stood before the first batch that it was given."""
        self._progress = Progress(self.name)
        self._saved: Position | None = None
        self._saved_at = 0.0
        self._replayed: Replayed | None = None
        """The cache, which refuses what does not follow before a sink that folds has it; None: the sink does not."""
        self._probe: LogProbe | None = None
        """What the sink may ask of the cache; None: it does not want to, or does not hear all of an epoch."""
        self._reader: LogReader | None = None
        self._read_since: tuple[float, int] = 0.0, 0
        """When that began to read, and how many batches were taken before."""
        self._thread = threading.Thread(target=self._run, name=f"kvcache-publish-{self.name}", daemon=True)

    # --- any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def has_started(self) -> bool:
        """Whether `start` was called."""
        return self._thread.ident is not None

    def ask_to_stop(self) -> None:
        """End behind the batch at work."""
        self._stopping.set()

    def join(self, timeout: float) -> bool:
        """Wait until it has ended; False if it has not."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self._progress.state == "ended"

    def stats(self, head: Head | None) -> Progress:
        """How far it is at this moment; the log ends at `head`."""
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
        """How far it is from the end of the log; None: it was there before, or has not begun."""
        reader, progress, (since, before) = self._reader, self._progress, self._read_since
        if progress.state != "catching up" or reader is None:
            return None
        seconds = max(time.monotonic() - since, 1e-3)
        with suppress(OSError):  # whoever reads the log tells of that
            batches = progress.batches - before
            return CatchUp(reader.bytes_left(), reader.bytes_read / seconds, batches / seconds)
        return None

    # --- its thread: where to begin ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stopping.is_set() or self._is_finished):
                start = self._find_start()
                if start is not None:
                    self._follow(start)
                elif self._until == "end":
                    self._is_finished = True
                else:
                    self._stopping.wait(self._poll_seconds)
        except BaseException as error:  # noqa: BLE001  whoever waits for this thread is to hear of it
            gone = isinstance(error, FileNotFoundError) and not self._log.is_dir()
            self.failure = LogReplaced(self._log) if gone else error
            self._let_routers_forget()
        finally:
            self._end()

    def _find_start(self) -> Start | None:
        """Where to begin, now or after the log was cut; None: there is nothing to begin with yet."""
        if self._folds:
            return last_epoch(self._log, counts=not isinstance(self._delivery.sink, RouterFeed))
        if self._file is not None and not self._file.is_open:
            self._saved = self._file.open()
        position = self._position() or self._saved
        if position is not None and not self._has_begun and is_ahead(self._log, position):
            why = self._progress.waits_for = (
                f"the log ends before batch {position.seq:,}, which the sink has had"
            )
            if self._until == "end":
                raise SinkError(f"{self.name}: {why}: remove {self._file and self._file.path} to begin anew")
            return None
        return behind(self._log, position)

    def _follow(self, start: Start) -> None:
        """Read on from there, until all is done, the sink has to be made anew, or the log was cut."""
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
                if self._stopping.is_set():
                    return
                if batch is None:
                    self._is_finished = self._rest(reader)
                    if self._is_finished:
                        return
                    self._stopping.wait(self._poll_seconds)
                elif not self._meet(batch) or not self._give(batch):
                    return
        except LogDamaged:
            if not self._was_cut():
                raise

    def _begin(self, start: Start) -> int:
        """Make the sink, and open it, unless it has to catch up first; returns the first batch that it needs."""
        epoch, first, known = start.epoch, start.seq, self._position() or self._saved
        self._progress.state, self._progress.waits_for = "catching up", None
        sink = self._made(replace(epoch.context, state_dir=self._state_dir))
        if not self._has_begun and sink.needs_tokens and not epoch.has_tokens:
            raise NoTokens(str(self._log), self.name)
        self._delivery.use(sink)
        self._epoch, self._concealed = epoch, False
        made_anew, self._has_begun, self._is_live = self._has_begun, True, not self._folds
        self._replayed = Replayed(CacheState()) if self._folds and epoch.context.kind == "cache" else None
        self._probe = None
        if self._replayed is not None and sink.watches:
            self._probe = LogProbe(self._replayed, lambda: self._reader, self._sink_stats)
            sink.watch(self._probe)
        if not self._is_live:
            if made_anew:
                sink.resume(first - 1)
            self._before, self._given = first - 1, (first - 1, None)
            self._note_had(*self._given)
            return first
        if known is not None and known.log_id == epoch.log_id.hex():
            # It may have had more than was noted before the process was killed.
            first = max(first, sink.resume(first - 1) + 1)
        self._note_had(first - 1, None)
        if self._delivery.open():
            if start.removed:
                self._tell_of_gap(start)
            self._given = first - 1, None
            self._save()
        return first

    def _made(self, context: SinkContext) -> Sink:
        sink = open_sink(self._url, context)
        if context.salts.wanted:
            reason = "salts=plain needs the salts themselves, of which a log has digests only: leave it out"
            raise NotPublishable(self.name, reason)
        if context.kind == "feed" and sink.needs_cache:
            reason = "it is about what a cache does, of which a log of what engines told knows nothing: leave it out"
            raise NotPublishable(self.name, reason)
        return sink

    def _was_cut(self) -> bool:
        """Whether the segments were removed that would have been read next."""
        paths = segment_paths(self._log)
        return bool(paths) and first_seq(paths[0]) > self._given[0] + 1

    # --- its thread: batches ----------------------------------------------------------------------------

    def _meet(self, batch: EventBatch) -> bool:
        """Look whether an epoch begins; False if it is one that the sink was not made for.

        Raises `Unreplayable` where the log's segments do not know of that epoch, so that no sink can be made for it.
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
                raise Unreplayable(batch.seq, "an epoch begins where its segment has none")
        self._epoch = epoch
        self._concealed = bool(self._delivery.sink.needs_tokens) and not epoch.has_tokens
        if self._concealed:
            _log.error("log_without_tokens", log=str(self._log), sink=self.name, epoch=epoch.number)
            if isinstance(self._delivery.sink, RouterFeed):
                self._delivery.sink.restate()
        return fits

    def _give(self, batch: EventBatch) -> bool:
        """Have the sink take a batch; False if it was told to stop before."""
        with fitting(batch.seq):
            given = self._as_given(batch)
            if not self._folds:
                # What it cannot take it would be offered for ever.
                for event in batch.events:
                    refuse_impossible(event)
        if self._folds:
            # That is done once or not at all; the sink may not be open yet.
            self._fold(batch, given)
        elif not self._delivery.write(given):
            return False
        self._given = batch.seq, batch.ts
        self._progress.batches += 1
        self._progress.events += len(batch.events)
        if not (self._folds and self._is_live):
            self._note_had(*self._given)
        if self._is_live:
            self._tick()
        return True

    def _fold(self, batch: EventBatch, given: EventBatch) -> None:
        """Let the sink fold a batch that follows from those before it. Raises what `Replayed.fold` does of others."""
        if self._replayed is not None:
            self._replayed.fold(batch, verify=False)
        if self._probe is not None:
            self._probe.note(batch)
        with fitting(batch.seq):
            self._delivery.sink.write(given)

    def _tick(self) -> None:
        if self._delivery.tick():
            self._note_had(*self._given)
        if time.monotonic() - self._saved_at >= _SAVE_SECONDS:
            self._save()

    def _note_had(self, seq: int | None, ts: int | None) -> None:
        """It is done with all up to this batch."""
        self._progress.seq, self._progress.ts = seq, ts

    def _as_given(self, batch: EventBatch) -> EventBatch:
        if self._concealed:
            self._progress.lost_batches += 1
            return LostBatches(batch.seq, batch.seq, batch.ts, "the log has no token ids").as_batch()
        return batch_without_tokens(batch) if self._delivery.sink.needs_tokens is False else batch

    def _tell_of_gap(self, start: Start) -> None:
        first, last = start.seq - start.removed, start.seq - 1
        self._note_gap(first, last)
        self._delivery.write(LostBatches(first, last, 0, "removed from the log").as_batch())

    def _note_gap(self, first: int, last: int) -> None:
        """Batches were removed from the log before they were read."""
        self._progress.lost_batches += last - first + 1
        _log.warning("log_was_cut", log=str(self._log), sink=self.name, first_seq=first, last_seq=last)

    def _rest(self, reader: LogReader) -> bool:
        """Do what is to be done when all was read that is there; returns whether nothing more is to come."""
        at_the_end = self._until == "end" or (self._until == "closed" and reader.closed)
        if not self._is_live:
            self._open_late(at_the_end=at_the_end)
        if not self._is_live:
            return False
        self._progress.state = "running"
        self._tick()
        # What fails is tried again: it has not had everything.
        return at_the_end and not self._delivery.failures

    def _open_late(self, *, at_the_end: bool) -> None:
        """Open a sink that has folded all there is, if it can be; raises SinkError if there will be no other chance."""
        waits_for = self._progress.waits_for = self._delivery.sink.waits_for
        if waits_for is None:
            self._note_had(self._before, None)  # nothing has gone out yet
            self._is_live = self._delivery.open()
        elif at_the_end:
            raise SinkError(f"{self.name}: {waits_for}")
        else:
            self._progress.state = "waiting"

    # --- its thread: what is kept, and the end ----------------------------------------------------------

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

    def _let_routers_forget(self) -> None:
        """Whatever they were told may be wrong soon, and nothing more will be said."""
        if isinstance(self._delivery.sink, RouterFeed) and self._delivery.is_open:
            with suppress(Exception):  # it may be what has failed
                unread = self._given[0] + 1
                self._delivery.sink.write(LostBatches(unread, unread, 0, "the log cannot be read").as_batch())
                self._delivery.sink.restate()

    def _end(self) -> None:
        failed = self._delivery.failures
        self._delivery.close()
        if self._delivery.failures > failed and self._is_finished:
            self._note_had(None, None)
            self.failure = SinkError(f"{self.name} did not take the end: {self._delivery.last_error}")
        elif self._has_begun:
            self._save()
        if self._file is not None:
            self._file.close()
        self._progress.state = "ended"


def _lag(head: Head | None, progress: Progress) -> tuple[int | None, float | None]:
    """Batches and seconds between what a sink has had and the end of the log."""
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
