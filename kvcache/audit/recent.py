"""Recent activity in a log, by its own clock: counts over the last seconds and minutes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.types import RequestId
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.contents import Ids, Window
from kvcache.audit.history import HistoryFold, HistoryListener, RunningRequest
from kvcache.audit.reasons import Reason

_PARTS = 3600
"""Number of parts of the longest time: batches closer together than a part are merged."""
_STEPS, _ADMITTED, _REFUSED, _PREEMPTED, _EVICTED = range(5)
_REASONS = _EVICTED + 2
"""Start of the columns for reasons, after one for each level's evictions."""
_COLUMNS = _REASONS + len(Reason)


@dataclass(frozen=True, slots=True)
class RecentTotals:
    """Counts over a time that ends with the last batch or later."""

    seconds: float
    """Length in seconds; less than requested if less was read."""
    first_seq: int | None
    """First batch that counts; None if none does."""
    steps: int
    """Number of batches."""
    admitted: int
    """Requests admitted."""
    refused: int
    """Refusals; a request may have several."""
    preempted: int
    """Requests preempted."""
    evicted: tuple[int, int]
    """Full blocks evicted from primary (also to secondary) and from secondary."""
    reasons: npt.NDArray[np.int64]
    """Prompt tokens of admitted requests, by `Reason`."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of admitted requests."""
        return int(self.reasons.sum())

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return int(self.reasons[: Reason.PARTIAL + 1].sum())


@dataclass(slots=True)
class _Part:
    first_seq: int
    at: int
    """Time of its first batch."""
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_COLUMNS, np.int64))


class Recent(HistoryListener):
    """Counts over a moving time, of which the last `longest` ns are kept."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.last_at = 0
        """Time of the last batch in ns; later than those before it (`EpochClock`)."""
        self.began_at: int | None = None
        """Time of the first batch; None if there was none."""
        self._parts: deque[_Part] = deque()
        self._now = np.zeros(_COLUMNS, np.int64)
        """Counts of the batch being folded."""
        self._waiting: dict[RequestId, int] = {}
        """Time of the last refusal or preemption of requests that were not admitted since."""

    def over(self, length: int, until: int) -> RecentTotals:
        """Return counts over the `length` ns up to `until`, which is no earlier than the last batch."""
        since = until - length
        parts = [part for part in self._parts if part.at >= since]
        begun = until if self.began_at is None else self.began_at
        counts = np.sum([part.counts for part in parts], axis=0) if parts else np.zeros(_COLUMNS, np.int64)
        first = parts[0].first_seq if parts else None
        steps, admitted, refused, preempted, *evicted = counts[:_REASONS].tolist()
        return RecentTotals(
            min(length, max(until - begun, 0)) / 1e9,
            first,
            steps,
            admitted,
            refused,
            preempted,
            (evicted[0], evicted[1]),
            counts[_REASONS:],
        )

    def waiting(self, until: int) -> int:
        """Return the requests refused or preempted in the longest time up to `until`, and not admitted since."""
        return sum(at >= until - self.longest for at in self._waiting.values())

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Stop waiting; later events of the step may start it again."""
        self._waiting.pop(admission.request_id, None)

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Count a prompt."""
        self._now[_ADMITTED] += 1
        self._now[_REASONS:] += admission.counts

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """Count a refusal."""
        self._now[_REFUSED] += 1
        self._waiting[event.request_id] = history.epochs.of(history.now)

    def ended(self, history: HistoryFold, request: RunningRequest, event: ev.SequenceRemoved) -> None:
        """Count a preemption."""
        if event.why == ev.EndReason.PREEMPTED:
            self._now[_PREEMPTED] += 1
            self._waiting[request.sequence.request_id] = history.epochs.of(history.now)

    def evicted(self, history: HistoryFold, window: Window, ids: Ids, level: int) -> None:
        """Count evicted blocks."""
        self._now[_EVICTED + level] += len(ids)

    def restarted(self, history: HistoryFold) -> None:
        """Drop the requests that waited; they may be refused again."""
        self._waiting.clear()

    def batch_ended(self, history: HistoryFold) -> None:
        """Add the batch to a part, and drop parts that are too old."""
        self._now[_STEPS] += 1
        self.last_at = at = max(self.last_at, history.epochs.of(history.now))
        if self.began_at is None:
            self.began_at = at
        if not self._parts or at - self._parts[-1].at >= self.longest // _PARTS:
            self._parts.append(_Part(history.batch, at))
            self._forget(at - self.longest)
        self._parts[-1].counts += self._now
        self._now[:] = 0

    def _forget(self, before: int) -> None:
        while self._parts[0].at < before:
            self._parts.popleft()
        self._waiting = {request: at for request, at in self._waiting.items() if at >= before}
