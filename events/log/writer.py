"""The log's writing end: a queue that the engine fills, and a thread that empties it to disk.

The engine thread pays for a sum over the batch's events and a deque append; encoding, checksums, writing and
syncing happen on the thread. The thread sleeps while there is nothing to do; woken, it lets batches gather
for a moment, so that one write and one sync serve many. There is no lock around the queue: each counter is
written by one of the two threads only, and what is queued is the difference of two counters.

What the engine hands over is written in order, or the log says what is missing: a full queue makes the engine
wait ("block") or loses batches ("drop"). From the first lost batch on everything is refused, until there is
room and the manager has taken the `Gap`, because a batch without those before it could not be folded. A
failed write is final, and every later call says so: disks that failed once are not to be trusted.

    appended = written + dropped + queued        (batches; `queued` is 0 after flush and close)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from events.durable import give_back
from events.errors import LogWriteFailed
from events.log.output import LogOutput
from events.log.recovery import claim, recover
from events.log.weight import batch_weight
from events.types import EpochStarted, EventBatch, Gap

_GATHER_SECONDS = 0.01
_GROUP_BYTES = 4 << 20
"""What is encoded before it is written; bounds the thread's memory beside the queue."""
_EXIT_SECONDS = 2.0


class LogWriter:
    """Appends batches to a log directory. One process, one writer; `append` and `flush` from one thread.

    Opening raises NotALog, LogExists, LogLocked; with `resume` also LogDamaged and LogTooNew. With `resume` a
    log is continued by a new epoch: a torn tail is put into `quarantine/` and cut off. The manager begins its
    first batch with `epoch_started` and numbers it `next_seq`.

    - `record_tokens`: whether token ids, that is the users' prompts, go to disk.
    - `overflow`: what `append` does when `max_queued_batches` or `max_queued_bytes` wait: "block" or "drop".
    - `segment_bytes`: where a new file begins. A larger batch has a file of its own.
    - `fsync`: "group" makes each group of batches durable; "never" leaves that to the system.
    - `log_id`: 16 bytes; random by default. A continued log keeps its own.
    """

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
        fsync: Literal["group", "never"] = "group",
        software: str = "kvcache",
        log_id: bytes | None = None,
    ) -> None:
        if min(max_queued_batches, max_queued_bytes, segment_bytes) < 1:
            raise ValueError("the limits of a log must be at least 1")
        if log_id is not None and len(log_id) != 16:
            raise ValueError("a log_id has 16 bytes")
        self.directory = Path(directory)
        self._blocks = overflow == "block"
        self._max_batches = max_queued_batches
        self._max_bytes = max_queued_bytes
        self._lock = claim(self.directory, resume)
        try:
            self._open(record_tokens, segment_bytes, fsync == "group", software, log_id)
        except BaseException:
            give_back(self._lock)
            raise
        self._start()

    def _open(
        self, tokens: bool, segment_bytes: int, sync: bool, software: str, log_id: bytes | None
    ) -> None:
        chain, cut = recover(self.directory)
        if chain.log_id is None:
            chain.log_id = log_id or os.urandom(16)
            previous = None
        else:
            previous = chain.epoch
            chain.epoch += 1
        self.epoch_started = EpochStarted(
            epoch=chain.epoch,
            log_id=chain.log_id,
            previous_epoch=previous,
            previous_last_seq=None if previous is None else chain.seq - 1,
            clean=not cut and (previous is None or chain.closed),
            tokens_recorded=tokens,
            software=software,
        )
        self.next_seq = chain.seq
        self._output = LogOutput(
            self.directory, chain, record_tokens=tokens, segment_bytes=segment_bytes, sync=sync
        )

    def begin_epoch(self, at_least: int) -> EpochStarted:
        """What the epoch begins with; before the first batch, it is made `at_least` this one.

        For a state whose sequences and copies have numbers of a later epoch, from another log: numbers given out from
        now on must be new to both.
        """
        if at_least > self.epoch_started.epoch:
            if self._appended:
                raise ValueError("the epoch has begun already")
            self.epoch_started = msgspec.structs.replace(self.epoch_started, epoch=at_least)
            self._output.set_epoch(at_least)
        return self.epoch_started

    def _start(self) -> None:
        # Written by the engine thread only.
        self._expected_seq = self.next_seq
        self._appended = 0
        self._appended_bytes = 0
        self._refused = 0
        self._lost: tuple[int, int] | None = None
        self._gap_taken = False
        self._easy_batches = 0
        self._easy_bytes = 0
        self._closing = False
        self._closed = False
        # Written by the writer thread only.
        self._done = 0
        self._done_bytes = 0
        # Set by the writer thread, taken back by whoever wakes it.
        self._asleep = False
        # Written once, by whoever fails first.
        self._failure: LogWriteFailed | None = None
        self._queue: deque[tuple[EventBatch, int]] = deque()
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._progress = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-log", daemon=True)
        self._thread.start()
        _open_writers.add(self)
        atexit.register(self._drain_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bytes_written(self) -> int:
        """Bytes in the files of this epoch."""
        return self._output.bytes_written

    @property
    def batches_written(self) -> int:
        """Batches in the files of this epoch."""
        return self._output.batches_written

    @property
    def dropped_batches(self) -> int:
        """Batches given to `append` that are not in the log and never will be."""
        if self._failure is None:
            return self._refused
        return self._refused + self._appended - self._output.batches_written

    # --- engine thread ------------------------------------------------------------------------------

    def append(self, batch: EventBatch) -> bool:
        """Hand over the next batch; False if it was dropped. The log keeps a reference until it is written.

        Raises LogWriteFailed if an earlier batch could not be written, or the log is closed.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if batch.seq != self._expected_seq:
            raise ValueError(f"batch {batch.seq} was appended, the next one is {self._expected_seq}")
        total = self._appended_bytes + batch_weight(batch)
        if (total > self._easy_bytes or self._appended >= self._easy_batches) and not self._admit(
            batch.seq, total
        ):
            return False
        self._expected_seq += 1
        self._appended_bytes = total
        self._queue.append((batch, total))
        self._appended += 1
        if self._asleep:
            self._asleep = False  # The thread may not run for a while; one call is enough to wake it.
            self._work.set()
        return True

    def _admit(self, seq: int, total: int) -> bool:
        """Decide about a batch that does not go without saying."""
        if self._lost is not None:
            if self._gap_taken:
                self._lost, self._gap_taken = None, False
                return True
        else:
            # Up to half a queue from here, nobody needs to look at what the thread has done meanwhile.
            self._easy_batches = self._done + self._max_batches // 2
            self._easy_bytes = self._done_bytes + self._max_bytes // 2
            if self._appended < self._easy_batches and total <= self._easy_bytes:
                return True
            self._hurry.set()
            if self._blocks:
                return self._wait(lambda: self._has_room(total), None)
            if self._has_room(total):
                return True
            self._easy_batches = 0
        self._refused += 1
        self._lost = (seq if self._lost is None else self._lost[0], seq)
        self._expected_seq += 1
        return False

    def _has_room(self, total: int) -> bool:
        queued = self._appended - self._done
        # A batch larger than the whole queue goes through alone.
        return queued == 0 or (queued < self._max_batches and total - self._done_bytes <= self._max_bytes)

    def take_gap(self) -> Gap | None:
        """The range of lost batches, once the queue is half empty again; None if there is nothing to say.

        The next batch must carry it, and the whole state; it is accepted whatever its size. To record a loss
        before closing, call `flush` first: it makes room.
        """
        if self._lost is None or 2 * (self._appended - self._done) > self._max_batches:
            return None
        if 2 * (self._appended_bytes - self._done_bytes) > self._max_bytes:
            return None
        self._gap_taken = True
        return Gap(*self._lost, reason="the log could not keep up")

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything appended is written, and durable if `fsync` is "group".

        `timeout` in seconds; False if it passed. Raises LogWriteFailed.
        """
        # Asked before any lock is touched: in a forked child, the parent's thread may hold them for ever.
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        target = self._appended
        return self._wait(lambda: self._done >= target, timeout)

    def _wait(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for the writer thread to make `done` true; False if the time passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._progress.clear()
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if done():
                return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._hurry.set()
            self._progress.wait(left)

    def close(self) -> None:
        """Write what is queued and the mark of an orderly end; stop the thread; release the lock.

        Raises LogWriteFailed if not everything could be written; the log is closed nevertheless. A second call
        does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._closing = True
        self._hurry.set()
        self._work.set()
        self._thread.join()
        give_back(self._lock)
        atexit.unregister(self._drain_at_exit)
        _open_writers.discard(self)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        self._failure = LogWriteFailed(self.directory, "the log is closed")

    def _drain_at_exit(self) -> None:
        """Save what is queued when the program ends without `close`. No end is marked: nobody closed it."""
        with contextlib.suppress(LogWriteFailed):
            self.flush(_EXIT_SECONDS)

    def _disown(self) -> None:
        """In a forked child: the log is the parent's, and its lock must not outlive the parent in us."""
        self._closed = True
        self._failure = LogWriteFailed(self.directory, "the process that writes it is the parent of this one")
        os.close(self._lock)
        self._output.disown()

    # --- writer thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._queue or not self._closing:
                self._await_work()
                self._drain()
            self._output.close(self._expected_seq)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine must hear of it
            self._fail(error)

    def _await_work(self) -> None:
        """Sleep until something is queued, then let more gather."""
        self._asleep = True
        # Asked only after saying so: an append after this question sees that we sleep and wakes us.
        if not self._queue and not self._closing:
            self._work.wait()
        self._asleep = False
        self._work.clear()
        self._hurry.wait(_GATHER_SECONDS)
        self._hurry.clear()

    def _drain(self) -> None:
        """Write all that is queued, in groups."""
        queue = self._queue
        while queue:
            group: list[EventBatch] = []
            total = self._done_bytes
            while queue and total - self._done_bytes < _GROUP_BYTES:
                batch, total = queue.popleft()
                group.append(batch)
            self._output.write(group)
            self._done += len(group)
            self._done_bytes = total
            self._progress.set()

    def _fail(self, error: BaseException) -> None:
        self._output.abandon()
        if isinstance(error, OSError) and error.errno is not None:
            failure = LogWriteFailed(self.directory, os.strerror(error.errno), error.errno)
        else:
            # Not its message: that could quote what it failed to encode.
            failure = LogWriteFailed(self.directory, f"a batch cannot be written ({type(error).__name__})")
        self._failure = failure
        self._queue.clear()
        self._progress.set()


_open_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _disown_all() -> None:
    for writer in list(_open_writers):
        writer._disown()


os.register_at_fork(after_in_child=_disown_all)
