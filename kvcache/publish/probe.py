"""What a sink may ask of a cache that lives in another process: the state as its log has it, folded beside the sink.

A manager answers such questions from what it holds (`kvcache.record.counting`). Here the same counters hear the same
events, and gauges are those of the same fold. What never gets into a log is not known: step times, batches that wait
to be written, and whether the disk refuses them.
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
    """Of `events.log.LogStats` what the log itself tells."""

    batches: int
    """That were read of it, from the beginning of an epoch on."""
    dropped_batches: int
    """Lost to the log, by the gaps in it."""
    bytes: int
    """Read."""
    lag_batches: None = None
    durable_seq: None = None
    state: None = None
    """Only the writer knows these three."""


class LogProbe:
    """A fold of a log from the beginning of an epoch on. One thread folds, any asks (`sinks.base.Probe`).

    - `replayed`: the cache after the batches so far, folded by whoever gives them to `note`.
    - `reader`: what reads the log, if it has begun.
    - `sink_stats`: progress of all sinks of this process.
    """

    step_times: Histogram | None = None
    """No log tells what the manager takes of a step."""

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
        """Count what the last batch tells."""
        for event in batch.events:
            self._bus.publish(event)
            if type(event) is Gap:
                self._lost += event.last_seq - event.first_seq + 1
        self._counter.publish(self._replayed.state, len(self._bus.take_events()))

    def stats(self) -> Stats:
        """Counters and gauges as of the last batch."""
        return self._counter.read()

    def log_stats(self) -> ReadLog:
        """What was read of the log."""
        reader = self._reader()
        return ReadLog(self._replayed.batches, self._lost, 0 if reader is None else reader.bytes_read)

    def sink_stats(self) -> tuple[SinkStats, ...]:
        """Progress of the sinks of this process."""
        return self._sink_stats()
