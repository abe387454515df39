"""Data of a report, read from a log in two passes: the second examines what the first one selected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from heapq import nlargest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.log import LogEnd, LogReader
from events.structs import LEVEL_NAMES
from events.types import PRIMARY, SECONDARY, RequestId
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.diff import settings_of
from kvcache.audit.explanation import Explanation, Explanations
from kvcache.audit.groups import RequestGroups, TopGroups
from kvcache.audit.history import EpochClock, HistoryFold, HistoryListener, RunningRequest, laid_out
from kvcache.audit.reasons import EVICTIONS, LOSSES, Reason
from kvcache.audit.tables import occupancy
from kvcache.audit.totals import Audit, AuditTotals, Eviction
from kvcache.audit.turns import SessionTurns

MOST_LANES = 20_000
"""Maximum number of requests with a lane: those that computed most."""
MOST_EXPLAINED = 500
"""Maximum number of these that are explained part by part, and of those that computed most again."""
MOST_EVICTIONS = 50
MOST_PREFIXES = 150
MOST_GROUPS = 12
"""Maximum number of tenants, or sessions, that are named: those with the most prompt tokens."""
PARTS = 400
"""Maximum number of intervals of a log's time with an occupancy sample; beyond it, pairs of intervals are merged."""
_FIRST_NS = 1_000_000
Progress = Callable[[int], None]


class Phase(IntEnum):
    """Phase of a request."""

    WAITING = 0
    """Refused, and not admitted yet. A log has no other waiting."""
    PREFILL = 1
    DECODE = 2
    AWAY = 3
    """Between two stays: preempted, or its id is used again. After the last stay: over."""


@dataclass(slots=True)
class Lane:
    """One request, over all its stays."""

    request_id: RequestId
    marks: list[tuple[Phase, int]] = field(default_factory=list)
    """Phases with their start: wall-clock ns."""
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Reason), np.int64))
    """Prompt tokens by `Reason`, over all admissions."""
    stays: int = 0

    def enter(self, phase: Phase, now: int) -> None:
        """Enter a phase, unless it is the current one."""
        if not self.marks or self.marks[-1][0] != phase:
            self.marks.append((phase, now))

    @property
    def by_kind(self) -> tuple[int, int, int, int, int]:
        """Tokens reused from primary, reused from secondary, computed again after eviction, computed again after
        clearing or loss, and otherwise computed.
        """
        secondary = int(self.tokens[Reason.SECONDARY])
        primary = int(self.tokens[Reason.PRIMARY] + self.tokens[Reason.PARTIAL])
        evicted, lost = (int(self.tokens[list(reasons)].sum()) for reasons in (EVICTIONS, LOSSES))
        others = int(self.tokens.sum()) - primary - secondary - evicted - lost
        return primary, secondary, evicted, lost, others

    @property
    def computed_again(self) -> int:
        """Prompt tokens computed although they had been cached before."""
        return sum(self.by_kind[2:4])

    @property
    def computed(self) -> int:
        """Prompt tokens computed."""
        return sum(self.by_kind[2:])


class Lanes(HistoryListener):
    """Listener that tracks all requests."""

    def __init__(self) -> None:
        self.of: dict[RequestId, Lane] = {}
        self._running: dict[int, Lane] = {}
        """Running requests by admission number."""
        self._computing: dict[int, Lane] = {}
        """Running requests with a prompt not computed yet."""

    def _lane(self, request_id: RequestId) -> Lane:
        return self.of.setdefault(request_id, Lane(request_id))

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """Mark the request as waiting, unless it was preempted."""
        lane = self._lane(event.request_id)
        if not lane.marks:
            lane.enter(Phase.WAITING, history.now)

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Mark the request as running."""
        lane = self._lane(admission.request_id)
        lane.enter(Phase.PREFILL, history.now)
        lane.stays += 1
        self._running[admission.number] = self._computing[admission.number] = lane

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Count the prompt."""
        self.of[admission.request_id].tokens += admission.counts

    def ended(self, history: HistoryFold, request: RunningRequest, event: ev.SequenceRemoved) -> None:
        """Mark the request as over, for now."""
        lane = self._running.pop(request.number, None)
        self._computing.pop(request.number, None)
        if lane is not None:
            lane.enter(Phase.AWAY, history.now)

    def restarted(self, history: HistoryFold) -> None:
        """Mark requests that do not continue as over."""
        alive = {request.number for request in history.running.values()}
        for number in self._running.keys() - alive:
            self._computing.pop(number, None)
            self._running.pop(number).enter(Phase.AWAY, history.now)

    def batch_ended(self, history: HistoryFold) -> None:
        """Mark requests with a computed prompt as decoding."""
        if not self._computing:
            return
        for request in history.running.values():
            if (
                request.computed >= request.sequence.num_prompt_tokens
                and (lane := self._computing.pop(request.number, None)) is not None
            ):
                lane.enter(Phase.DECODE, history.now)


class Filled(NamedTuple):
    """Blocks of one level of one window."""

    held: int
    """Blocks held by running requests."""
    free: int
    """Blocks that are cached and held by no request: reusable, and evicted when room is needed."""
    blank: int


Shelf = tuple[int, int]
"""Window in tokens, and level."""


class Sample(NamedTuple):
    """Occupancy at one moment."""

    at: int
    """Wall-clock ns."""
    filled: dict[Shelf, Filled]
    held: int
    """Blocks held in all primary levels."""


class Occupancy(HistoryListener):
    """Listener that keeps, per part of the time, the moment at which running requests held most."""

    def __init__(self) -> None:
        self._parts: dict[int, Sample] = {}
        self._width = _FIRST_NS
        self.first_at: int | None = None
        """Wall-clock ns of the first batch, and the latest of any; None if there was none."""
        self.last_at = 0

    def batch_ended(self, history: HistoryFold) -> None:
        """Sample the state after a batch."""
        now, state = history.now, history.replayed.state
        if self.first_at is None:
            self.first_at = now
        self.last_at = max(self.last_at, now)
        while (part := max(0, now - self.first_at) // self._width) >= PARTS:
            self._width *= 2
            known, self._parts = self._parts, {}
            for number, sample in known.items():
                self._keep(number // 2, sample)
        levels = [group.levels[0] for group in state.groups]
        held = sum(level.size - len(level.blank) - level.unreferenced for level in levels)
        if part not in self._parts or self._parts[part].held < held:
            filled = {
                (each.window, LEVEL_NAMES.index(each.level)): Filled(each.held, each.unreferenced, each.blank)
                for each in occupancy(state)
            }
            self._parts[part] = Sample(now, filled, held)

    def _keep(self, part: int, sample: Sample) -> None:
        if part not in self._parts or self._parts[part].held < sample.held:
            self._parts[part] = sample

    @property
    def samples(self) -> list[Sample]:
        """Samples in order of time."""
        return [self._parts[part] for part in sorted(self._parts)]


@dataclass(slots=True)
class EvictionCost:
    """Cost of one eviction, by request."""

    eviction: Eviction
    level: int = PRIMARY
    """Level from which most of it was evicted."""
    payers: Counter[RequestId] = field(default_factory=Counter)
    """Tokens by the request that computed them again."""


class EvictionCosts(HistoryListener):
    """Listener that attributes the cost of chosen evictions; it counts as `kvcache.audit.totals` does."""

    def __init__(self, evictions: Iterable[Eviction]) -> None:
        self.bills = [EvictionCost(each) for each in evictions]
        self._by_key = {
            (each.eviction.window, each.eviction.batch, each.eviction.for_request): each
            for each in self.bills
        }
        self._batches = np.array(sorted({each.eviction.batch for each in self.bills}), np.int64)

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Charge the request for the chosen evictions."""
        for window, evicted, lost in history.evicted_blocks(admission):
            chosen = np.isin(window.of["gone_batch"][evicted], self._batches)
            columns = (window.of[name][evicted[chosen]].tolist() for name in ("gone_batch", "gone_by", "why"))
            for batch, by, why, tokens in zip(*columns, lost[chosen].tolist(), strict=True):
                key = (window.created.window, batch, history.request_id(by))
                bill = self._by_key.get(key)
                if bill is not None:
                    bill.payers[admission.request_id] += tokens
                    bill.level = SECONDARY if why == Reason.DROPPED else PRIMARY


@dataclass(frozen=True)
class ReportData:
    """Data gathered from a log."""

    first_at: int
    """Wall-clock ns of the first batch."""
    last_at: int
    end: LogEnd
    """End of the log when it was read."""
    set_back: list[int]
    """Batches that began an epoch with a clock set back: they are shifted after the preceding ones."""
    audit: Audit
    settings: dict[str, Any]
    """JSON values of each setting of the cache, by dotted name, of the last epoch."""
    samples: list[Sample]
    num_lanes: int
    """Number of all requests, including those without a lane here."""
    lanes: list[Lane]
    """Lanes, those that computed most first."""
    explanations: dict[RequestId, Explanation]
    bills: list[EvictionCost]
    """Costs of the evictions that cost most, the worst first."""
    groups: list[TopGroups]
    """Requests by tenant and by session, if the log has any."""
    turns: SessionTurns

    @cached_property
    def shelves(self) -> list[Shelf]:
        """Levels that ever had blocks, in the order of the log's groups, primary first."""
        filled = (each for sample in self.samples for each in sample.filled.items())
        return list({shelf: None for shelf, blocks in filled if sum(blocks)})

    def level_name(self, window: int, level: int) -> str:
        """Return the name of a level, with its window if there are several."""
        several = len({window for window, _ in self.shelves}) > 1
        return LEVEL_NAMES[level] + (f", window of {window:,} tokens" if several else "")

    def most(self, shelf: Shelf) -> tuple[int, int, int]:
        """Return the largest numbers of blocks: of all, in use, and held by requests."""
        filled = [sample.filled[shelf] for sample in self.samples if shelf in sample.filled]
        used = max(each.held + each.free for each in filled)
        return max(map(sum, filled)), used, max(each.held for each in filled)


def read_report_data(log: Path, progress: Progress = lambda _: None, *others: HistoryListener) -> ReportData:
    """Read a log; `progress` is called with the batches read, in both passes. `others` listen in the first one.

    Raises what `LogReader` raises for a damaged, newer or missing log, and `Unreplayable`.
    """
    totals, lanes, filling = AuditTotals(), Lanes(), Occupancy()
    history = HistoryFold(totals, lanes, filling, *others)
    reader, clock = LogReader(log), EpochClock()
    for batch in laid_out(reader, clock):
        history.fold(batch)
        progress(batch.seq)
    end = reader.end
    created = history.replayed.state.created
    audit = totals.finish(history, max(MOST_EVICTIONS, MOST_PREFIXES))
    tenants = any("tenant" in (each.labels or {}) for each in history.origins)
    sessions = any(each.session is not None for each in history.origins)
    groups = [RequestGroups(by) for by, there in (("tenant", tenants), ("session", sessions)) if there]
    turns = SessionTurns()
    # Data no longer needed is most of the memory.
    del history
    ordered = sorted(lanes.of.values(), key=lambda lane: -lane.computed)
    again = nlargest(MOST_EXPLAINED, ordered[:MOST_LANES], key=lambda lane: lane.computed_again)
    chosen = {lane.request_id for lane in (*ordered[:MOST_EXPLAINED], *again)}
    payers, explanations = EvictionCosts(audit.worst[:MOST_EVICTIONS]), Explanations(chosen.__contains__)
    closer = HistoryFold(payers, explanations, *groups, turns)
    for batch in laid_out(LogReader(log), EpochClock()):
        if batch.seq > audit.last_batch:  # written in the meantime
            break
        closer.fold(batch)
        progress(audit.last_batch + batch.seq)
    return ReportData(
        first_at=filling.first_at or 0,
        last_at=filling.last_at,
        end=end,
        set_back=clock.set_back,
        audit=audit,
        settings={} if created is None else dict(settings_of(created)),
        samples=filling.samples,
        num_lanes=len(ordered),
        lanes=ordered[:MOST_LANES],
        explanations=explanations.found,
        groups=[TopGroups(each, filling.last_at, MOST_GROUPS) for each in groups],
        turns=turns,
        bills=payers.bills,
    )
