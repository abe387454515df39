"""All that a report tells of a log, read in two passes: the second one looks closely at what the first one found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from events.log import LogEnd, LogReader
from events.types import RequestId
from kvcache.audit.explanation import Explanation, Explanations
from kvcache.audit.history import EpochClock, HistoryFold, laid_out
from kvcache.audit.totals import Audit, AuditTotals
from kvcache.diff import settings_of
from kvcache.report.lanes import Lane, Lanes
from kvcache.report.occupancy import Occupancy
from kvcache.report.payers import Bill, Payers

MOST_LANES = 20_000
"""Requests that have a lane: those that computed most."""
MOST_EXPLAINED = 500
"""Of these, so many are explained part by part; as many that computed most again as well."""
MOST_EVICTIONS = 50
MOST_PREFIXES = 150
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a log says."""

    first_at: int
    """Wall-clock ns of the first batch."""
    last_at: int
    end: LogEnd
    """How the log ended when it was read."""
    set_back: list[int]
    """Batches with which epochs began whose clock had begun again: they are shifted behind those before them."""
    audit: Audit
    settings: list[tuple[str, Any]]
    """(dotted name, JSON value) of each setting of the cache, of the last epoch."""
    occupancy: Occupancy
    num_lanes: int
    """Of all requests, those without a lane here included."""
    lanes: list[Lane]
    """What computed most first."""
    explanations: dict[RequestId, Explanation]
    bills: list[Bill]
    """Of the evictions that cost most, the worst first."""


def gather(log: Path, progress: Progress = lambda _: None) -> Gathered:
    """Read a log; `progress` is called with the batches read, of both passes.

    Raises what `LogReader` raises for a damaged, newer or missing log, and `Unreplayable`.
    """
    totals, lanes, occupancy = AuditTotals(), Lanes(), Occupancy()
    history = HistoryFold(totals, lanes)
    times, reader, clock = _Times(), LogReader(log), EpochClock()
    for batch in laid_out(reader, clock):
        history.fold(batch)
        occupancy.add(history.replayed.state, batch.ts)
        times.note(batch.ts)
        progress(batch.seq)
    end = reader.end
    created = history.replayed.state.created
    audit = totals.finish(history, max(MOST_EVICTIONS, MOST_PREFIXES))
    # What it no longer needs is most of the memory.
    del history
    ordered = sorted(lanes.of.values(), key=lambda lane: -lane.computed)
    chosen = _chosen(ordered)
    payers, explanations = Payers(audit.worst[:MOST_EVICTIONS]), Explanations(chosen.__contains__)
    again = HistoryFold(payers, explanations, details=chosen.__contains__)
    for batch in laid_out(LogReader(log), EpochClock()):
        if batch.seq > audit.last_batch:  # written meanwhile
            break
        again.fold(batch)
        progress(audit.last_batch + batch.seq)
    return Gathered(
        first_at=times.first,
        last_at=times.last,
        end=end,
        set_back=clock.set_back,
        audit=audit,
        settings=[] if created is None else list(settings_of(created)),
        occupancy=occupancy,
        num_lanes=len(ordered),
        lanes=ordered[:MOST_LANES],
        explanations=explanations.found,
        bills=payers.bills,
    )


def _chosen(lanes: list[Lane]) -> set[RequestId]:
    """Whom to explain, of lanes in order of what they computed."""
    again = nlargest(MOST_EXPLAINED, lanes[:MOST_LANES], key=lambda lane: lane.computed_again)
    return {lane.request_id for lane in [*lanes[:MOST_EXPLAINED], *again]}


class _Times:
    def __init__(self) -> None:
        self.first = self.last = 0
        self._any = False

    def note(self, ts: int) -> None:
        if not self._any:
            self.first, self._any = ts, True
        self.last = max(self.last, ts)
