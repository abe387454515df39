"""What each request went through: when it waited, computed its prompt, decoded, and what its tokens cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.types import RequestId
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.history import HistoryFold, HistoryListener, RunningRequest
from kvcache.audit.reasons import EVICTIONS, LOSSES, Reason


class Phase(IntEnum):
    """What a request does."""

    WAITING = 0
    """Refused, and not admitted yet. A log knows of no other waiting."""
    PREFILL = 1
    DECODE = 2
    AWAY = 3
    """Between two stays: preempted, or its id is used again. Behind the last stay: over."""


@dataclass(slots=True)
class Lane:
    """One request, over all its stays."""

    request_id: RequestId
    marks: list[tuple[Phase, int]] = field(default_factory=list)
    """What it does from when on: wall-clock ns."""
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Reason), np.int64))
    """Prompt tokens by `Reason`, of all admissions."""
    stays: int = 0

    def enter(self, phase: Phase, now: int) -> None:
        """Note a phase, unless it is in it."""
        if not self.marks or self.marks[-1][0] != phase:
            self.marks.append((phase, now))

    @property
    def by_kind(self) -> tuple[int, int, int, int, int]:
        """Tokens that were reused from primary, from secondary, computed again since they had been evicted, since they
        had been cleared or lost, and computed else.
        """
        secondary = int(self.tokens[Reason.SECONDARY])
        primary = int(self.tokens[Reason.PRIMARY] + self.tokens[Reason.PARTIAL])
        evicted, lost = (int(self.tokens[list(reasons)].sum()) for reasons in (EVICTIONS, LOSSES))
        others = int(self.tokens.sum()) - primary - secondary - evicted - lost
        return primary, secondary, evicted, lost, others

    @property
    def computed_again(self) -> int:
        """Prompt tokens that had been cached before."""
        return sum(self.by_kind[2:4])

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return sum(self.by_kind[2:])


class Lanes(HistoryListener):
    """Follows all requests."""

    def __init__(self) -> None:
        self.of: dict[RequestId, Lane] = {}
        self._running: dict[int, Lane] = {}
        """By number of the admission."""
        self._computing: dict[int, Lane] = {}
        """Of the running ones, those whose prompt is not computed yet."""

    def _lane(self, request_id: RequestId) -> Lane:
        return self.of.setdefault(request_id, Lane(request_id))

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """It waits, unless it was preempted."""
        lane = self._lane(event.request_id)
        if not lane.marks:
            lane.enter(Phase.WAITING, history.now)

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """It runs from now on."""
        lane = self._lane(admission.request_id)
        lane.enter(Phase.PREFILL, history.now)
        lane.stays += 1
        self._running[admission.number] = self._computing[admission.number] = lane

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Count its prompt."""
        self.of[admission.request_id].tokens += admission.counts

    def ended(self, history: HistoryFold, request: RunningRequest, event: ev.SequenceRemoved) -> None:
        """It is over, for now."""
        lane = self._running.pop(request.number, None)
        self._computing.pop(request.number, None)
        if lane is not None:
            lane.enter(Phase.AWAY, history.now)

    def restarted(self, history: HistoryFold) -> None:
        """What does not go on is over."""
        alive = {request.number for request in history.running.values()}
        for number in self._running.keys() - alive:
            self._computing.pop(number, None)
            self._running.pop(number).enter(Phase.AWAY, history.now)

    def batch_ended(self, history: HistoryFold) -> None:
        """Whose prompt is computed decodes."""
        if not self._computing:
            return
        for request in history.running.values():
            if (
                request.computed >= request.sequence.num_prompt_tokens
                and (lane := self._computing.pop(request.number, None)) is not None
            ):
                lane.enter(Phase.DECODE, history.now)
