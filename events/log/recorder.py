"""The log's thread: takes batches from the queue to the disk, and tries again where the disk refuses.

The thread sleeps while there is nothing to do; woken, it lets batches gather for a moment, so that one write and one
sync serve many. Syncs may be further apart (`sync_seconds`): what is written and not durable yet is kept until then,
and synced sooner if somebody waits or the queue is half full.

While the disk refuses, all that is not durable stays in the queue, as far as that has room, and writing is tried again
with growing pauses. A batch that cannot be encoded is lost, and so are all behind it up to the one that tells of that,
because a batch without those before it could not be folded.

There is no lock: each attribute is written by the engine's thread or by this one only.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from events.diagnostics import get_logger
from events.errors import LogWriteFailed
from events.log.output import LogOutput, Record
from events.types import EventBatch

_GATHER_SECONDS = 0.01
_GROUP_BYTES = 4 << 20
"""What is encoded before it is written; bounds the thread's memory beside the queue."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""Before the disk is tried again; doubled each time."""
_LOOK_SECONDS = 1.0
"""How often it is asked whether the files are where they were, though nothing is written."""
_log = get_logger(__name__)
Clock = Callable[[], float]


def pauses() -> Iterator[float]:
    """Yield the seconds to let pass before each try on a disk that refuses."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class Recorder:
    """Empties the queue that the engine fills.

    `clock` says, in seconds, when syncs of an interval and looks at the files are due.
    """

    def __init__(self, directory: Path, output: LogOutput, sync_seconds: float, clock: Clock) -> None:
        self._directory = directory
        self._sync_seconds = sync_seconds
        self._clock = clock
        self.output = output
        self.queue: deque[tuple[EventBatch, int]] = deque()
        """Batches, each with the size of all up to it."""
        # Written by the engine's thread.
        self.closing = False
        self.end_seq = 0
        """Set before `closing`: behind the last batch that was appended or refused."""
        self.announced = (0, -1)
        """The batch that tells of the last loss (second), and the first one that it says is lost."""
        # Written by this thread.
        self.done = 0
        """Batches from the queue that are durable, or lost."""
        self.done_bytes = 0
        self.skipped = 0
        """Batches from the queue that are lost."""
        self.spoiled: int | None = None
        """The first batch that is lost; all are until one comes that tells of it."""
        self.spoiled_by = ""
        self.trouble: LogWriteFailed | None = None
        """Why the disk was not written the last time."""
        self.failed_tries = 0
        # Written once, by whoever ends the log.
        self.failure: LogWriteFailed | None = None
        # Set by this thread, taken back by whoever wakes it.
        self.asleep = False
        self.work = threading.Event()
        self.hurry = threading.Event()
        self.retry = threading.Event()
        self.progress = threading.Condition()
        """Told when anything of the above has changed. Nothing is guarded by it."""
        self._group: deque[tuple[Record | None, int]] = deque()
        """What is being written: not durable yet, or lost (None)."""
        self._written = 0
        """So many of them were given to the system."""
        self._sync_at = math.inf
        """When they are to be durable, by the clock."""
        self._look_at = clock() + _LOOK_SECONDS
        """When the files are looked at next, by the same clock."""
        self._hurried = False
        self._pauses = pauses()
        self._pause = 0.0

    def run(self) -> None:
        """Write what is queued until the log is closed."""
        try:
            while self._group or self.queue or not self.closing:
                self._await_work()
                self._drain()
            while not self._attempt(self._mark_end):
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine must hear of it
            self.output.roll_back()
            told = self._told(error)
            self.failure = LogWriteFailed(told.path, told.reason, told.errno, ended=True)
            self.tell()

    def is_announced(self, seq: int) -> bool:
        """Whether a batch that tells of the loss of this one was appended."""
        first, last = self.announced
        return first <= seq < last

    def tell(self) -> None:
        """Wake whoever waits for progress."""
        with self.progress:
            self.progress.notify_all()

    def hasten(self) -> None:
        """Write and sync now rather than later; for those who wait."""
        self.hurry.set()
        if self._sync_seconds:
            self.work.set()

    def _await_work(self) -> None:
        """Sleep until something is queued, then let more gather; or until the disk is to be tried again, or synced."""
        if self.trouble is not None:
            if not self.closing:
                self.retry.wait(self._pause)
            self.retry.clear()
            return
        self.asleep = True
        # Asked only after saying so: an append after this question sees that we sleep and wakes us.
        if not self.queue and not self.closing:
            now = self._clock()
            self.work.wait(max(min(self._sync_at, self._look_at) - now, 0))
        self.asleep = False
        self.work.clear()
        left = self._time_left()
        self._hurried = self.hurry.wait(_GATHER_SECONDS if left is None else min(_GATHER_SECONDS, left))
        self.hurry.clear()

    def _time_left(self) -> float | None:
        """Seconds until the next sync; None: there is nothing to sync."""
        return None if self._sync_at == math.inf else max(self._sync_at - self._clock(), 0)

    def _look(self) -> bool:
        """Whether the files are where they were, as far as it is time to ask; each time while nothing else is tried."""
        if self.trouble is not None and (self._group or self.queue):
            return True
        now = self._clock()
        if self.trouble is None and now < self._look_at:
            return True
        self._look_at = now + _LOOK_SECONDS
        return self._attempt(self.output.look)

    def _drain(self) -> None:
        """Write all that is queued, in groups, and sync it if that is due, as long as the disk takes it."""
        while self._look():
            if self._written == len(self._group):
                self._take_group()
            if self._written == len(self._group) and not (self._group and self._is_sync_due()):
                return
            if not self._attempt(self._write_group):
                return

    def _is_sync_due(self) -> bool:
        asked = not self._sync_seconds or self._hurried or self.closing or self.trouble is not None
        return asked or self._clock() >= self._sync_at

    def _take_group(self) -> None:
        size = 0
        while self.queue and size < _GROUP_BYTES:
            batch, total = self.queue.popleft()
            record = self._encoded(batch)
            self._group.append((record, total))
            if record is not None:
                size += len(record.payload)

    def _encoded(self, batch: EventBatch) -> Record | None:
        """The batch as it is written; None if it is lost."""
        if self.spoiled is not None:
            if batch.seq != self.announced[1] or not self.is_announced(self.spoiled):
                self.skipped += 1
                return None
            self.spoiled = None
        try:
            return self.output.encode(batch)
        except Exception as error:  # noqa: BLE001 - a batch that cannot be encoded is lost, whatever the reason
            # Not its message: that could quote what it failed to encode.
            reason = f"a batch cannot be encoded ({type(error).__name__})"
            _log.warning("log_lost_batch", log=str(self._directory), seq=batch.seq, reason=reason)
            self.skipped += 1
            self.spoiled_by, self.spoiled = reason, batch.seq
            return None

    def _write_group(self) -> None:
        before, refused = self.output.batches_written, None
        try:
            new = [record for record, _ in islice(self._group, self._written, None) if record is not None]
            self.output.write(new)
            self._written = len(self._group)
            if self._is_sync_due():
                self.output.sync()
            elif self._sync_at == math.inf:
                self._sync_at = self._clock() + self._sync_seconds
        except Exception as error:  # noqa: BLE001 - whatever is durable now needs no second try
            refused = error
        self._forget(self.output.batches_written - before)
        if refused is not None:
            self._roll_back()
            if self._group:
                raise refused

    def _roll_back(self) -> None:
        """What is not durable is to be written again."""
        self._written = 0
        self.output.roll_back()

    def _forget(self, durable: int) -> None:
        """Let go of so many batches of the group, which are durable, and of lost ones between them."""
        group = self._group
        if durable and durable == len(group):  # all of it, and none is lost
            self._written = 0
            self.done += durable
            self.done_bytes = group[-1][1]
            group.clear()
        while group and (durable or group[0][0] is None):
            record, total = group.popleft()
            durable -= record is not None
            self._written = max(self._written - 1, 0)
            self.done += 1
            self.done_bytes = total
        if not group:
            self._sync_at = math.inf
        self.tell()

    def _mark_end(self) -> None:
        self.output.close(self.end_seq)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do something with the disk; False if it refuses. The second time while closing, that is raised."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - what is not the system's refusal is no reason to stop either
            self._roll_back()
            self._note_trouble(self._told(error))
            return False
        if self.trouble is not None:
            self.trouble = None
            self.tell()
            _log.info("log_continues", log=str(self._directory))
        return True

    def _note_trouble(self, failure: LogWriteFailed) -> None:
        again = self.trouble is not None
        if not again:
            self._pauses = pauses()
        self._pause = next(self._pauses)
        self.trouble = failure
        self.failed_tries += 1
        self.tell()
        if not again:
            _log.warning("log_suspended", log=str(self._directory), reason=failure.reason)
        elif self.closing:
            raise failure

    def _told(self, error: BaseException) -> LogWriteFailed:
        if isinstance(error, LogWriteFailed):
            return error
        if isinstance(error, OSError) and error.errno is not None:
            return LogWriteFailed(self._directory, os.strerror(error.errno), error.errno)
        return LogWriteFailed(self._directory, f"a batch cannot be written ({type(error).__name__})")
