"""State of a cache in another process for a sink's queries: folded from its log, in the sink's process.

A manager answers such queries from its own state (`kvcache.record.counting`). Here the same counters receive the same
events, and gauges are those of the same fold. Data that is not in a log is unknown: step times, batches that wait to be
written, and refusals by the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from events.bus import EventBus
from events.log import LogReader
from events.types import EventBatch, Gap
from kvcache.record.counting import StatsCounter
from kvcache.replay import Replayed
from kvcache.stats import Stats
from sinks import SinkStats
from sinks.histogram import Histogram


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
