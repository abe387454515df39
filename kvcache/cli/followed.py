"""A log that is followed for who watches it: the cache as it is now, and what happened lately."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from events.log import LogEnd, LogReader
from events.log.reader import Beginning, LogHead, beginnings, first_batch
from events.log.segments import Segment, segment_paths
from events.types import EpochStarted, EventBatch
from kvcache.audit.history import HistoryFold
from kvcache.audit.recent import Lately, Recent
from kvcache.audit.tables import occupancy
from kvcache.fold.state import CacheState
from kvcache.keep.prune import state_batch
from kvcache.publish.errors import LogReplaced
from kvcache.publish.follower import CatchUp

_CONTENTS_MAX = 1 << 20
"""Different blocks of which the history is known, where no more are cached; a fifth of a gigabyte."""
_POLL_SECONDS = 0.1
_BEHIND_SECONDS = 1.0
"""A reader that has not reached the end of the log in this time lags."""


class Followed:
    """A log, read from the newest epoch or snapshot that is at least `window` ns older than its last batch."""

    def __init__(
        self,
        log: Path,
        window: int,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self.window = window
        self._wall_ns, self._clock = wall_ns, clock
        self._recent = Recent(window)
        self.history = HistoryFold(self._recent)
        self.known_since: tuple[int, int] | None = None
        """The batch with the state of which reading began, and when it was made; None: it began with the log."""
        self.end: LogEnd | None = None
        """How the log ends, where it was not to be followed."""
        self._reader: LogReader | None = None
        self._started: EpochStarted | None = None
        """With which the epoch began."""
        self._batches = 0
        self._came_at: float | None = None
        """When the last batch came, by the clock; None: it was there when reading began."""
        self._begun_at = self._clock()
        self._at_end_at: float | None = None
        """When all that was there had been read; None: not yet."""

    def read(
        self, look: Callable[[], None], stop: Callable[[], bool] = lambda: False, *, follow: bool = True
    ) -> None:
        """Read the log to its end, and `follow` it until `stop()`; `look` is called after each batch and meanwhile.

        Raises what reading and folding do, and LogReplaced.
        """

        def waiting() -> bool:
            self._at_end_at = self._clock()
            self._refuse_other_log()
            look()
            return stop()

        self._reader = reader = self._opened(follow, waiting)
        try:
            for batch in reader:
                self._fold(batch)
                look()
                if stop():
                    return
        except FileNotFoundError:
            if self.log.is_dir():
                raise
            raise LogReplaced(self.log) from None
        self._at_end_at = self._clock()
        self.end = reader.end

    @property
    def state(self) -> CacheState:
        """Of the cache, after the last batch."""
        return self.history.replayed.state

    @property
    def closed(self) -> bool:
        """Whether the writer has ended in order, so that only a new epoch can follow."""
        return self._reader is not None and self._reader.closed

    @property
    def age(self) -> float:
        """Seconds since the last batch: since it came, or by the wall clock if it was there before; never below 0."""
        if self._came_at is not None:
            return self._clock() - self._came_at
        last = self.history.replayed.last_ts
        return 0.0 if last is None else max(0, self._wall_ns() - last) / 1e9

    @property
    def waiting(self) -> int:
        """Requests that were refused or preempted in the window, and not admitted since."""
        return self._recent.waiting(self._until)

    def lately(self, length: int) -> Lately:
        """What happened in the last `length` ns, or in those before a closed log ended."""
        return self._recent.over(length, self._until)

    def catch_up(self) -> CatchUp | None:
        """How far it is from the end of the log; None: it is there. Raises OSError."""
        reader = self._reader
        if reader is None or not self._is_behind:
            return None
        seconds = max(self._clock() - self._begun_at, 1e-3)
        return CatchUp(reader.bytes_left(), reader.bytes_read / seconds, self._batches / seconds)

    @property
    def _until(self) -> int:
        return self._recent.last_at + (0 if self.closed else int(self.age * 1e9))

    @property
    def _is_behind(self) -> bool:
        return self._at_end_at is None or self._clock() - self._at_end_at > _BEHIND_SECONDS

    def _opened(self, follow: bool, stop: Callable[[], bool]) -> LogReader:
        begin = self._beginning()
        start = None if begin is None or begin.is_snapshot else begin.seq
        state_at = begin.seq if begin is not None and begin.is_snapshot else None
        return LogReader(
            self.log, follow=follow, stop=stop, start=start, state_at=state_at, poll_seconds=_POLL_SECONDS
        )

    def _beginning(self) -> Beginning | None:
        head = LogHead(self.log)
        try:
            found = head.look()
        finally:
            head.close()
        if found is None or found.ts is None:
            return None
        for each in reversed(beginnings(self.log)):
            batch = first_batch(self.log, each)
            if batch is not None and batch.ts <= found.ts - self.window:
                return each
        return None

    def _fold(self, batch: EventBatch) -> None:
        assert self._reader is not None
        if not self._batches and (batch.seq or self._reader.snapshot is not None):
            self.known_since = batch.seq, batch.ts
        first = batch.events[0] if batch.events else None
        if isinstance(first, EpochStarted):
            self._started = first
        self.history.fold(batch)
        self._batches += 1
        self._came_at = None if self._is_behind else self._clock()
        known = len(self.history.contents)
        if known > _CONTENTS_MAX and known > 2 * sum(each.blocks for each in occupancy(self.state)):
            self._forget()

    def _forget(self) -> None:
        """Go on with what is cached, and without all that was: else memory would grow as long as the log does."""
        before = self.history
        assert self._started is not None
        batch = state_batch(before.replayed, self._started)
        self.history = HistoryFold()  # with no listener: this batch has been counted
        self.history.fold(batch)
        self.history.epochs, self.history.replayed.gaps = before.epochs, before.replayed.gaps
        self.history.listeners = (self._recent,)
        self.known_since = batch.seq, batch.ts

    def _refuse_other_log(self) -> None:
        """Raise LogReplaced if what is there now is another log than was read, or none."""
        paths = segment_paths(self.log)
        known = None if self._started is None else self._started.log_id
        if not paths and known is not None:
            raise LogReplaced(self.log)
        with suppress(FileNotFoundError):  # compressed or put aside meanwhile
            for path in paths[-1:]:
                with Segment(path) as segment:
                    header = segment.header()
                if header is not None and known not in (None, header.log_id):
                    raise LogReplaced(self.log)
