"""Every batch is accounted for: appended = durable + in flight + dropped, of each log that a test writes.

The writer's own counters are compared with what was given to it, which is counted here, and with what is in its files
in the end, which an oracle counts that shares no code with the writer. Subclasses of it are left alone: tests make
them to meddle with what is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from unittest.mock import patch

from events.errors import LogOutdated, LogTooNew, LogWriteFailed, ZstdMissing
from events.log import LogWriter
from events.types import EventBatch
from tests.oracles.log_scan import Found, Scan

_LONGEST = 4 << 20
"""Of longer logs the files are not counted: that would take longer than the tests."""


@dataclass
class Account:
    """What a log was given."""

    log: LogWriter
    counts: bool
    appended: int = 0
    refused: int = 0
    closed: bool = False

    def reported(self) -> int:
        """How many batches were appended, by the log's own counters."""
        stats = self.log.stats()
        return stats.batches + stats.dropped_batches + stats.lag_batches

    def is_balanced(self) -> None:
        """The counters of this moment; for the thread that appends."""
        stats = self.log.stats()
        assert self.reported() == self.appended, f"{stats} after {self.appended} appended batches"
        assert stats.dropped_batches >= self.refused
        assert stats.durable_seq < self.log.next_seq + self.appended

    def is_at_rest(self) -> None:
        """Nothing is in flight."""
        self.is_balanced()
        assert not self.log.stats().lag_batches

    def is_in_files(self) -> None:
        """What is counted as written is there, no more and no less; what is called durable is the last of it."""
        paths = list(self.log.directory.glob("*.kvlog"))
        if sum(path.stat().st_size for path in paths) > _LONGEST:
            return
        try:
            found = list(Scan(self.log.directory)) if paths else []
        except (ZstdMissing, LogOutdated, LogTooNew):
            return  # The test has hidden it, or wrote of what is to come.
        if not all(isinstance(each, Found) for each in found):
            return  # The test has done something to the files.
        seqs = [
            each.frame.seq
            for each in found
            if isinstance(each, Found)
            and each.batch is not None
            and each.header.epoch == self.log.epoch_started.epoch
        ]
        assert len(seqs) == self.log.stats().batches
        assert self.log.durable_seq == (seqs[-1] if seqs else self.log.next_seq - 1)


@contextmanager
def accounted() -> Iterator[None]:
    """While it is entered, each log that is written is."""
    accounts: dict[int, Account] = {}
    append, flush, close = LogWriter.append, LogWriter.flush, LogWriter.close

    def account(log: LogWriter) -> Account:
        return accounts.setdefault(id(log), Account(log, type(log) is LogWriter))

    def counting_append(log: LogWriter, batch: EventBatch, size: int | None = None) -> bool:
        counted = account(log)
        try:
            taken = append(log, batch, size)
        except LogWriteFailed:
            counted.appended += counted.reported() > counted.appended  # It failed later than it was taken.
            raise
        counted.appended += 1
        counted.refused += not taken
        return taken

    def checking_flush(log: LogWriter, timeout: float | None = None) -> bool:
        flushed = flush(log, timeout)
        if flushed and account(log).counts:
            account(log).is_at_rest()
        return flushed

    def checking_close(log: LogWriter) -> None:
        counted = account(log)
        was_closed, counted.closed = counted.closed, True
        try:
            close(log)
        except LogWriteFailed:
            if counted.counts:
                counted.is_balanced()
            raise
        if not was_closed and counted.counts:
            counted.is_at_rest()
            counted.is_in_files()

    with (
        patch.object(LogWriter, "append", counting_append),
        patch.object(LogWriter, "flush", checking_flush),
        patch.object(LogWriter, "close", checking_close),
    ):
        yield
    # Caches that died in a test leave logs open whose threads would run as long as the process does.
    for left in accounts.values():
        if not left.closed:
            with suppress(LogWriteFailed):
                close(left.log)
