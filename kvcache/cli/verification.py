"""Replaying the log that a run has just written, and comparing what comes out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from events.log import LogReader, LogWriter
from events.types import EventBatch
from kvcache.cli.process import StopSignals
from kvcache.cli.progress import Update, progress
from kvcache.replay import Replayed, fold
from sinks.render import Known

LAST_BATCHES = 64


@dataclass(frozen=True, slots=True)
class Verification:
    """What the replay of a run's log has shown."""

    replayed: Replayed | None = None
    """None: it was interrupted, or the log is known to end before the run did, so that it cannot agree."""
    fingerprint: bytes | None = None
    differences: tuple[str, ...] = ()
    """What does not agree, in words; empty if all does."""
    seconds: float = 0.0
    last_batches: tuple[EventBatch, ...] = ()
    """The end of the log, for people to look at."""
    known: Known = field(default_factory=Known)
    """What the log has said before these."""

    @property
    def disagrees(self) -> bool:
        """Whether something is wrong."""
        return bool(self.differences)


def verify_own_log(writer: LogWriter, live: bytes, stop: StopSignals, *, shown: bool) -> Verification:
    """Fold the log and compare it with the state that the cache had; a further signal ends that."""
    started = time.perf_counter()
    last: deque[EventBatch] = deque(maxlen=LAST_BATCHES)
    known = Known()
    reader = LogReader(writer.directory)
    total = writer.next_seq + writer.batches_written
    # The signal that ended the run is not one to end this, too: the log of an interrupted run is verified.
    stop.is_set()  # noted, so that a further one is taken for impatience only where nobody looks
    before = stop.received
    with progress("replaying its log", total, shown=shown) as update:
        replayed = fold(_watched(reader, last, known, lambda: stop.received > before, update), verify=True)
    if stop.received > before:
        return Verification(seconds=time.perf_counter() - started, last_batches=tuple(last), known=known)
    replayed.end = reader.end
    found = replayed.fingerprint
    seconds = time.perf_counter() - started
    return Verification(replayed, found, _differences(replayed, live, found), seconds, tuple(last), known)


def _watched(
    batches: Iterable[EventBatch],
    last: deque[EventBatch],
    known: Known,
    interrupted: Callable[[], bool],
    update: Update,
) -> Iterator[EventBatch]:
    for batch in batches:
        if interrupted():
            return
        if len(last) == LAST_BATCHES:
            for event in last[0].events:
                known.see(event)
        last.append(batch)
        update(batch.seq + 1)
        yield batch


def _differences(replayed: Replayed, live: bytes, found: bytes) -> tuple[str, ...]:
    differences = []
    if found != live:
        differences.append(f"its replay ends in {found.hex()[:16]}, the cache ended in {live.hex()[:16]}")
    if replayed.checkpoints_failed:
        batches = ", ".join(map(str, replayed.checkpoints_failed[:5]))
        differences.append(f"{len(replayed.checkpoints_failed)} checkpoints disagree (batches {batches})")
    if replayed.end is None or replayed.end.kind != "clean":
        differences.append("it does not end with an orderly close")
    return tuple(differences)
