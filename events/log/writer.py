"""The log's writing end: a queue that the engine fills, and a thread that empties it to disk.

The engine thread spends a few comparisons and a deque append; encoding, checksums, writing and syncing happen on the
thread (`LogThread`). There is no lock around the queue: each counter has one writing thread, and the queue's length is
the difference of two counters.

Batches are written in order, or the log records which are missing: a full queue makes the engine wait ("block") or
loses batches ("drop"). From the first lost batch on everything is refused, until there is room and the manager has
taken the `Gap`, because a batch without those before it could not be folded.

If writing fails (the disk is full, or broken), the thread retries until it succeeds. Meanwhile `append` never waits for
room: batches that do not fit into the queue are lost, also with "block", with which `check` raises.

    appended = written + dropped + in flight     (batches; nothing is in flight after flush and close)

`written` are durable (when depends on `fsync`), except with "never": then all but those in the last file are.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from events.closing import Closing
from events.diagnostics import get_logger
from events.errors import LogUnavailable, LogWriteFailed, system_reason
from events.log.frames import Chain
from events.log.output import LogOutput, Record
from events.log.reader import Kind, refuse_other_kind
from events.log.recovery import claim, recover
from events.log.zstd import MAX_WINDOW_LOG, has_zstd
from events.size import batch_bytes
from events.types import EpochStarted, EventBatch, Gap

Fsync = Literal["always", "group", "interval", "never"]
Compression = Literal["zstd", "none"]
_EXIT_SECONDS = 2.0
_log = get_logger(__name__)
_ROOM = 0.25
"""Fraction of a full queue that must be free again before a waiting `append` continues."""
_GATHER_SECONDS = 0.01
_GROUP_BYTES = 4 << 20
"""Bytes encoded before they are written; bounds the thread's memory in addition to the queue."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""Pauses before writing is retried; doubled each time."""
_LOOK_SECONDS = 1.0
"""Interval at which the files are checked to be in their place, though nothing is written."""
Clock = Callable[[], float]


@dataclass(frozen=True)
class LogStats:
    """Counters of a log being written, at one moment. `append` calls so far = the three counts of batches together."""

    batches: int
    """Batches in the files; durable, unless `fsync` is "never"."""
    dropped_batches: int
    """Batches lost to the log for good; a `Gap` records them, once the log continues."""
    lag_batches: int
    """Batches waiting to be written, or to be durable."""
    bytes: int
    """Bytes in the files of this epoch."""
    state: Literal["running", "suspended", "closed"]
    """Suspended: writing fails, or the files are not in their place, and is retried."""
    last_error: str | None
    """The reason of the last failure, while it lasts."""
    durable_seq: int = -1
    """The last batch known to be on disk; with "never" known only at the end of each file. -1: none."""


class LogThread:
    """The log's thread: writes batches from the queue to disk, and retries if that fails.

    It sleeps while idle; woken, it lets batches gather for a moment, so that one write and one sync serve many. Syncs
    may be further apart (`sync_seconds`): batches written and not yet durable are kept until then, and synced sooner if
    a caller waits or the queue is half full. While writing fails, all that is not durable stays in the queue, if it has
    room, and is retried with growing pauses. A batch that cannot be encoded is lost, and so are all after it up to the
    one that announces the loss: without those before they could not be folded.

    There is no lock: each attribute is written by the engine's thread or by this one only. `clock`, in seconds, times
    syncs and checks of the files.
    """

    def __init__(self, directory: Path, output: LogOutput, sync_seconds: float, clock: Clock) -> None:
        self._directory = directory
        self._sync_seconds = sync_seconds
        self._clock = clock
        self.output = output
        self.queue: deque[tuple[EventBatch, int]] = deque()
        """Batches, each with the cumulative size up to it."""
        # Written by the engine's thread.
        self.closing = False
        self.end_seq = 0
        """Set before `closing`: the number after the last batch appended or refused."""
        self.announced = (0, -1)
        """The batch that announces the last loss (second), and the first batch lost by it."""
        # Written by this thread.
        self.done = 0
        """Batches from the queue that are durable, or lost."""
        self.done_bytes = 0
        self.skipped = 0
        """Lost batches from the queue."""
        self.unencodable_seq: int | None = None
        """The first lost batch; all after it are lost until one that announces the loss."""
        self.encode_error = ""
        self.trouble: LogWriteFailed | None = None
        """The error of the last failed write."""
        self.failed_tries = 0
        # Written once, by the thread that ends the log.
        self.failure: LogWriteFailed | None = None
        # Set by this thread, cleared by whichever thread wakes it.
        self.asleep = False
        self.work = threading.Event()
        self.hurry = threading.Event()
        self.retry = threading.Event()
        self.progress = threading.Condition()
        """Notified when any of the above has changed. It guards nothing."""
        self._group: deque[tuple[Record | None, int]] = deque()
        """Records being written, not yet durable; None for a lost batch."""
        self._written = 0
        """Number of them passed to the system."""
        self._sync_at = math.inf
        """Time at which they are to be durable, by the clock."""
        self._look_at = clock() + _LOOK_SECONDS
        """Time of the next check of the files, by the same clock."""
        self._hurried = False
        self._pause = 0.0
        """Seconds before the next retry."""

    def run(self) -> None:
        """Write what is queued until the log is closed, or disowned."""
        try:
            while self.failure is None and (self._group or self.queue or not self.closing):
                self._await_work()
                self._drain()
            while self.failure is None and not self._attempt(lambda: self.output.close(self.end_seq)):
                pass
        except BaseException as error:  # noqa: BLE001 - raised again in the engine's next call
            self.output.roll_back()
            failure = self._as_write_failure(error)
            self.failure = LogWriteFailed(failure.path, failure.reason, failure.errno, ended=True)
            self.notify_waiters()

    def is_announced(self, seq: int) -> bool:
        """True if a batch that announces the loss of this one was appended."""
        first, last = self.announced
        return first <= seq < last

    def notify_waiters(self) -> None:
        """Wake all that wait for progress."""
        with self.progress:
            self.progress.notify_all()

    def expedite(self) -> None:
        """Write and sync now rather than later; for callers that wait."""
        self.hurry.set()
        if self._sync_seconds:
            self.work.set()

    def _await_work(self) -> None:
        """Sleep until something is queued, then let more gather; or until a retry or sync is due."""
        if self.trouble is not None:
            if not self.closing:
                self.retry.wait(self._pause)
            self.retry.clear()
            return
        self.asleep = True
        # Checked only after setting the flag: a later append sees that the thread sleeps, and wakes it.
        if not self.queue and not self.closing:
            now = self._clock()
            self.work.wait(max(min(self._sync_at, self._look_at) - now, 0))
        self.asleep = False
        self.work.clear()
        # With nothing to sync, that is never due.
        self._hurried = self.hurry.wait(min(_GATHER_SECONDS, max(self._sync_at - self._clock(), 0)))
        self.hurry.clear()

    def _look(self) -> bool:
        """Check that the files are in their place, if that is due; every time while there is nothing else to retry."""
        if self.trouble is not None and (self._group or self.queue):
            return True
        now = self._clock()
        if self.trouble is None and now < self._look_at:
            return True
        self._look_at = now + _LOOK_SECONDS
        return self._attempt(self.output.look)

    def _drain(self) -> None:
        """Write all that is queued, in groups, and sync it if due, while the disk accepts it."""
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
        """Encode a batch; None if it is lost."""
        if self.unencodable_seq is not None:
            if batch.seq != self.announced[1] or not self.is_announced(self.unencodable_seq):
                self.skipped += 1
                return None
            self.unencodable_seq = None
        try:
            return self.output.encode(batch)
        except Exception as error:  # noqa: BLE001 - a batch that cannot be encoded is lost, whatever the reason
            # Not its message: that could quote what it failed to encode.
            reason = f"a batch cannot be encoded ({type(error).__name__})"
            _log.warning("log_lost_batch", log=str(self._directory), seq=batch.seq, reason=reason)
            self.skipped += 1
            self.encode_error, self.unencodable_seq = reason, batch.seq
            return None

    def _write_group(self) -> None:
        before, refused = self.output.batches_written, None
        begun = self._clock()
        try:
            new = [record for record, _ in islice(self._group, self._written, None) if record is not None]
            self.output.write(new)
            self._written = len(self._group)
            if self._is_sync_due():
                self.output.sync()
            elif self._sync_at == math.inf:
                self._sync_at = begun + self._sync_seconds
        except Exception as error:  # noqa: BLE001 - whatever is durable now needs no second try
            refused = error
        self._forget(self.output.batches_written - before)
        if refused is not None:
            self._roll_back()
            if self._group:
                raise refused

    def _roll_back(self) -> None:
        """Schedule all that is not durable to be written again."""
        self._written = 0
        self.output.roll_back()

    def _forget(self, durable: int) -> None:
        """Remove `durable` durable batches from the group, and lost ones between them."""
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
        self.notify_waiters()

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do something with the disk; False if it fails. The second failure while closing is raised."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - what is not the system's refusal is no reason to stop either
            self._roll_back()
            self._record_trouble(self._as_write_failure(error))
            return False
        if self.trouble is not None:
            self.trouble = None
            self.notify_waiters()
            _log.info("log_continues", log=str(self._directory))
        return True

    def _record_trouble(self, failure: LogWriteFailed) -> None:
        again = self.trouble is not None
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS) if again else _FIRST_PAUSE_SECONDS
        self.trouble = failure
        self.failed_tries += 1
        self.notify_waiters()
        if not again:
            _log.warning("log_suspended", log=str(self._directory), reason=failure.reason)
        elif self.closing:
            raise failure

    def _as_write_failure(self, error: BaseException) -> LogWriteFailed:
        if isinstance(error, LogWriteFailed):
            return error
        if isinstance(error, OSError) and error.errno is not None:
            return LogWriteFailed(self._directory, os.strerror(error.errno), error.errno)
        return LogWriteFailed(self._directory, f"a batch cannot be written ({type(error).__name__})")


class LogWriter(Closing):
    """Appends batches to a log directory. One process, one writer; `append` and `flush` from one thread.

    Opening raises NotALog, LogExists, LogLocked, LogUnavailable, UnsafeFile; with `resume` also LogDamaged, LogTooNew.
    With `resume` a log is continued by a new epoch: a torn tail is put into `quarantine/` and cut off. The manager
    begins its first batch with `epoch_started` and numbers it `next_seq`.

    - `record_tokens`: True to write token ids, that is the users' prompts, to disk.
    - `overflow`: behaviour of `append` when `max_queued_batches` or `max_queued_bytes` wait: "block" or "drop". While
      writing fails, both lose batches that do not fit, and "block" lets `check` raise.
    - `segment_bytes`: size at which a new file begins, or once its batches have eight times as many bytes uncompressed.
      A larger batch has a file of its own.
    - `compression`: "zstd" compresses batches written together, referring back by up to `window` bytes. Without zstd
      installed, the log is written as with "none", with a warning.
    - `segment_seconds`: maximal time from a file's first batch to its last, by the times of the batches.
    - `segment_begun`: called by the log's thread after the beginning of each file. It must not raise; if it waits, so
      does the log, as for a slow disk. `closed`: the same for `close`, which calls it at its end.
    - `fsync`: when batches become durable. "group": one sync for all that wait, at once; `append` does not wait for it.
      "always": the same, and `append` waits. "interval": a sync every `fsync_seconds`, never later than that after a
      batch was written, and sooner if a caller waits or the queue is half full. "never": the end of its file; before
      that the system, some time.
    - `log_id`: 16 bytes; random by default. A continued log keeps its own.
    - `kind`: kind of the log; a log of another kind is not continued (LogOfOtherKind).
    - `clock`: the seconds by which `fsync_seconds` count; for tests, which set it.
    """

    _num_lost_at_end = 0
    """Number of batches after the end that will never come."""

    def __init__(
        self,
        directory: str | Path,
        *,
        record_tokens: bool = True,
        resume: bool = False,
        overflow: Literal["block", "drop"] = "block",
        max_queued_batches: int = 4096,
        max_queued_bytes: int = 32 << 20,
        segment_bytes: int = 64 << 20,
        fsync: Fsync = "group",
        fsync_seconds: float = 1.0,
        software: str = "kvcache",
        log_id: bytes | None = None,
        kind: Kind = "cache",
        compression: Compression = "zstd",
        window: int = 1 << MAX_WINDOW_LOG,
        segment_seconds: float | None = None,
        segment_begun: Callable[[], None] = lambda: None,
        closed: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        if min(max_queued_batches, max_queued_bytes, segment_bytes) < 1 or fsync_seconds <= 0:
            raise ValueError("the limits of a log must be at least 1, and fsync_seconds above 0")
        if len(log_id or bytes(16)) != 16:
            raise ValueError("log_id must have 16 bytes")
        self.directory, self._when_closed = Path(directory), closed
        self._blocks, self._syncs = overflow == "block", fsync != "never"
        self._max_batches, self._max_bytes = max_queued_batches, max_queued_bytes
        self._easy_batches = -1 if fsync == "always" else max_queued_batches
        """Half of the queue may wait without further checks; below 0, none may, and `append` waits for each."""
        chain, lost = self._open(resume, kind)
        self.epoch_started = _next_epoch(chain, log_id or os.urandom(16), lost, record_tokens, software)
        self.next_seq = chain.seq
        output = LogOutput(
            self.directory,
            self._lock,
            chain,
            record_tokens=record_tokens,
            segment_bytes=segment_bytes,
            sync=self._syncs,
            window=self._window(compression, window),
            segment_seconds=segment_seconds,
            segment_begun=segment_begun,
        )
        self._recorder = LogThread(self.directory, output, fsync_seconds if fsync == "interval" else 0, clock)
        self._start()

    def _open(self, resume: bool, kind: Kind) -> tuple[Chain, bool]:
        """Lock the directory; return where its log ends, and True if something was cut off there."""
        try:
            self._lock = claim(self.directory, resume)
            try:
                refuse_other_kind(self.directory, kind)
                return recover(self.directory)
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise LogUnavailable(self.directory, system_reason(error)) from error

    def _window(self, compression: Compression, window: int) -> int:
        if compression == "none":
            return 0
        if not has_zstd():
            advice = "pip install 'kvcache[zstd]', or set log.compression=none"
            _log.warning(
                "log_not_compressed", log=str(self.directory), reason=f"zstd is not installed; {advice}"
            )
            return 0
        return window

    def begin_epoch(self, at_least: int) -> EpochStarted:
        """Return the first event of the epoch; before the first batch, the epoch is made `at_least` this one.

        For a state with sequences and copies numbered by a later epoch, of another log: new numbers must be new to
        both.
        """
        if at_least > self.epoch_started.epoch:
            if self._appended:
                raise ValueError("the epoch has already begun")
            self.epoch_started = msgspec.structs.replace(self.epoch_started, epoch=at_least)
            self._recorder.output.set_epoch(at_least)
        return self.epoch_started

    def _start(self) -> None:
        # All that is here is the engine thread's.
        self._expected_seq = self.next_seq
        self._appended = 0
        self._appended_bytes = 0
        self._refused = 0
        self._lost: tuple[int, int] | None = None
        self._lost_by = ""
        self._gap_popped = False
        self._closed = False
        self._queue = self._recorder.queue
        self._thread = threading.Thread(target=self._recorder.run, name="kvcache-log", daemon=True)
        self._thread.start()
        _open_logs.add(self)
        atexit.register(self._drain_at_exit)

    @property
    def bytes_written(self) -> int:
        """Bytes in the files of this epoch."""
        return self._recorder.output.bytes_written

    @property
    def batches_written(self) -> int:
        """Batches in the files of this epoch."""
        return self._recorder.output.batches_written

    @property
    def dropped_batches(self) -> int:
        """Batches given to `append` that are not in the log and never will be."""
        if self._recorder.failure is None:
            return self._refused + self._recorder.skipped
        return self._refused + self._appended - self.batches_written

    def stats(self) -> LogStats:
        """The counters at this moment; for any thread."""
        trouble = self._recorder.failure or self._recorder.trouble
        # What was appended is read last: counters only grow, so the lag cannot come out negative.
        written, dropped = self.batches_written, self.dropped_batches
        lag = self._appended + self._refused - written - dropped
        state: Literal["running", "suspended", "closed"] = "suspended" if trouble else "running"
        error = trouble.reason if trouble is not None and not self._closed else None
        state = "closed" if self._closed else state
        durable = self.durable_seq
        return LogStats(written, dropped, max(lag, 0), self.bytes_written, state, error, durable)

    @property
    def durable_seq(self) -> int:
        """The last batch known to be on disk, those of earlier epochs included (-1: none); for any thread.

        Those before it are on disk too, or recorded as lost. With "never" it advances at ends of files.
        """
        return self._recorder.output.durable_seq

    @property
    def has_lost(self) -> bool:
        """True if batches are lost that no `Gap` has announced yet."""
        self._record_unencodable()
        return self._lost is not None

    # --- engine thread ------------------------------------------------------------------------------

    def append(self, batch: EventBatch, size: int | None = None) -> bool:
        """Append the next batch; False if it was dropped. The log keeps a reference until it is written.

        `size`, if known already, is `events.size.batch_bytes` of the batch. A failing disk neither raises nor, with
        "always", prolongs the wait: `check` reports it. Raises LogWriteFailed if the log is closed.
        """
        recorder = self._recorder
        if recorder.failure is not None:
            raise recorder.failure.with_traceback(None)
        if batch.seq != self._expected_seq:
            raise ValueError(f"batch {batch.seq} was appended, but batch {self._expected_seq} was expected")
        total = self._appended_bytes + (batch_bytes(batch) if size is None else size)
        queued, queued_bytes = self._appended - recorder.done, total - recorder.done_bytes
        is_easy = (
            2 * queued <= self._easy_batches and 2 * queued_bytes <= self._max_bytes and self._lost is None
        )
        if not is_easy and not self._admit(batch.seq, total):
            return False
        self._expected_seq += 1
        self._appended_bytes = total
        self._queue.append((batch, total))
        self._appended += 1
        if recorder.asleep:
            recorder.asleep = False  # The thread may not run for a while; one call is enough to wake it.
            recorder.work.set()
        if not is_easy and self._easy_batches < 0:
            self._wait_for_last()
        return True

    def _wait_for_last(self) -> None:
        """Wait until the last batch is durable or writing fails. (In `append` the closure would cost each call.)"""
        recorder, target = self._recorder, self._appended
        self._wait(lambda: recorder.done >= target or recorder.trouble is not None, None)

    def _admit(self, seq: int, total: int) -> bool:
        """Decide about a batch that does not fit without further checks."""
        if self._lost is None:
            if self._has_room(total):
                self._recorder.hurry.set()
                return True
            if self._blocks:
                # For more room than this batch needs: taking turns with the thread batch by batch would cost more.
                self._wait(lambda: self._has_room(total, _ROOM) or self._recorder.trouble is not None, None)
                if self._has_room(total):
                    return True
            failed = self._recorder.trouble
            why = f"be written: {failed.reason}" if failed else "keep up"
            self._lost_by = f"the log could not {why}"
        elif self._gap_popped:
            self._recorder.announced = (self._lost[0], seq)
            self._lost, self._gap_popped = None, False
            return True
        self._refused += 1
        self._lost = (self._lost[0] if self._lost is not None else seq, seq)
        self._expected_seq += 1
        return False

    def _has_room(self, total: int, part: float = 0) -> bool:
        """True if the next batch fits, and leaves this fraction of the queue free."""
        recorder = self._recorder
        queued, size = self._appended - recorder.done, total - recorder.done_bytes
        kept = 1 - part
        # A batch larger than the whole queue goes through alone.
        return queued == 0 or (queued < self._max_batches * kept and size <= self._max_bytes * kept)

    def pop_gap(self) -> Gap | None:
        """Return the range of lost batches, once writing works and the queue is half empty; None: nothing to announce.

        The next batch must carry it, and the whole state; it is accepted whatever its size. To record a loss
        before closing, call `flush` first: it makes room.
        """
        if self._recorder.unencodable_seq is not None:
            self._record_unencodable()
        if self._lost is None or self._recorder.trouble is not None:
            return None
        if not self._has_room(self._appended_bytes, 0.5):
            return None
        self._gap_popped = True
        first, last = self._lost
        return Gap(first_seq=first, last_seq=last, reason=self._lost_by)

    def _record_unencodable(self) -> None:
        """Record that a batch could not be encoded, by which all batches after it are lost."""
        recorder = self._recorder
        unencodable_seq = recorder.unencodable_seq
        if unencodable_seq is not None and not recorder.is_announced(unencodable_seq):
            first = unencodable_seq if self._lost is None else min(unencodable_seq, self._lost[0])
            self._lost, self._lost_by = (first, self._expected_seq - 1), recorder.encode_error

    def check(self) -> None:
        """Raise LogWriteFailed if nothing is recorded any more or, with overflow="block", while writing fails."""
        failure = self._recorder.failure or (self._recorder.trouble if self._blocks else None)
        if failure is not None:
            raise failure.with_traceback(None)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything appended is written, and durable unless `fsync` is "never".

        `timeout` in seconds; False if it passed. Raises LogWriteFailed if writing fails, which is retried at once.
        """
        recorder = self._recorder
        # Checked before any lock is touched: in a forked child, the parent's thread may hold them for ever.
        if recorder.failure is not None:
            raise recorder.failure.with_traceback(None)
        target, failed_before = self._appended, recorder.failed_tries

        def done() -> bool:
            if recorder.trouble is not None and recorder.failed_tries > failed_before:
                raise recorder.trouble.with_traceback(None)
            # Not before writing works again: `pop_gap` checks both.
            return recorder.done >= target and recorder.trouble is None

        recorder.retry.set()
        return self._wait(done, timeout)

    def wait_durable(self, seq: int, timeout: float | None = None) -> bool:
        """Wait until batch `seq` is on disk, or the Gap that announces its loss; for any thread. Hastens nothing.

        `timeout` in seconds; False if it passed, or if that cannot be known, with `fsync` "never". Raises
        LogWriteFailed if the log ends without it. While writing fails, it keeps waiting.
        """
        if self.durable_seq >= seq:
            return True
        if self._recorder.failure is not None:
            raise self._recorder.failure.with_traceback(None)
        return self._syncs and self._wait(lambda: self.durable_seq >= seq, timeout, expedites=False)

    def _wait(self, done: Callable[[], bool], timeout: float | None, *, expedites: bool = True) -> bool:
        """Wait for the thread to make `done` true; False if the time passed."""
        recorder = self._recorder
        deadline = None if timeout is None else time.monotonic() + timeout
        with recorder.progress:
            while not done():
                if recorder.failure is not None:
                    raise recorder.failure.with_traceback(None)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if expedites:
                    recorder.expedite()
                recorder.progress.wait(left)
        return True

    def mark_incomplete(self) -> None:
        """Record that the state continues and the log does not: its end shows one more lost batch."""
        self._num_lost_at_end = 1

    def close(self) -> None:
        """Write what is queued and the mark of an orderly end; stop the thread; release the lock.

        If writing fails, it is retried once, and then LogWriteFailed is raised; the batches written before can be read,
        and the log is closed nevertheless. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        recorder = self._recorder
        recorder.end_seq = self._expected_seq + self._num_lost_at_end
        recorder.closing = True
        for event in (recorder.hurry, recorder.work, recorder.retry):
            event.set()
        self._thread.join()
        self._lock.release()
        atexit.unregister(self._drain_at_exit)
        _open_logs.discard(self)
        self._when_closed()
        if recorder.failure is not None:
            raise recorder.failure.with_traceback(None)
        recorder.failure = LogWriteFailed(self.directory, "the log is closed")
        recorder.notify_waiters()

    def _drain_at_exit(self) -> None:
        """Save the queue when the program exits without `close`. No end is marked: the log was not closed."""
        with contextlib.suppress(LogWriteFailed):
            self.flush(_EXIT_SECONDS)

    def disown(self) -> None:
        """Release the log and its lock in a forked child: they are the parent's."""
        self._closed = True
        self._recorder.failure = LogWriteFailed(self.directory, "the log belongs to the parent process")
        _open_logs.discard(self)
        self._lock.disown()
        self._recorder.output.disown()


_open_logs = weakref.WeakSet[LogWriter]()
"""Logs that a forked child must release: only the process that opened a log writes it."""


def _disown_all() -> None:
    for log in list(_open_logs):
        log.disown()


os.register_at_fork(after_in_child=_disown_all)


def _next_epoch(
    chain: Chain, new_id: bytes, lost: bool, tokens_recorded: bool, software: str
) -> EpochStarted:
    """Make `chain`, the end of the log, the beginning of the next epoch; return its first event.

    A log without segments gets `new_id`. `lost`: True if something was cut off at its end.
    """
    previous = None if chain.log_id is None else chain.epoch
    clean = not lost and (previous is None or chain.closed)
    chain.log_id, chain.epoch = chain.log_id or new_id, 0 if previous is None else previous + 1
    return EpochStarted(
        epoch=chain.epoch,
        log_id=chain.log_id,
        previous_epoch=previous,
        previous_last_seq=None if previous is None else chain.seq - 1,
        clean=clean,
        tokens_recorded=tokens_recorded,
        software=software,
    )
