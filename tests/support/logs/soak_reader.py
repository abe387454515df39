"""Reads a log from another process, for `tests.test_log_soak`, and prints what it saw as JSON.

`follow` reads all that comes until the file `done` lies beside the log; `late` reads what is kept, again and again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from events.log import LogReader
from events.types import EventBatch, Gap
from kvcache.replay import replay


class Checked:
    """Looks whether each batch is there, or told to be missing."""

    def __init__(self) -> None:
        self.batches = self.events = self.missing = 0
        self.unannounced: list[tuple[int, int]] = []
        self._next: int | None = None

    def take(self, batch: EventBatch) -> None:
        """The next one."""
        gaps = [event for event in batch.events if isinstance(event, Gap)]
        if self._next is not None and batch.seq != self._next:
            reported = any(gap.first_seq <= self._next and batch.seq - 1 <= gap.last_seq + 1 for gap in gaps)
            if not reported:
                self.unannounced.append((self._next, batch.seq))
            self.missing += batch.seq - self._next
        self._next = batch.seq + 1
        self.batches += 1
        self.events += len(batch.events)


def follow(log: Path) -> Checked:
    """To the end."""
    checked = Checked()
    for batch in LogReader(log, follow=True, stop=log.with_name("done").exists):
        checked.take(batch)
    return checked


def late(log: Path) -> Checked:
    """What is there, as often as there is time; its state is that of a replay."""
    checked = Checked()
    while not log.with_name("done").exists():
        checked = Checked()
        for batch in LogReader(log):
            checked.take(batch)
        replay(log)
    return checked


if __name__ == "__main__":
    result = {"follow": follow, "late": late}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({name: value for name, value in vars(result).items() if not name.startswith("_")}))
