"""Turns of sessions: the relation of each prompt to that of the previous turn, and its reuse.

The previous turn is the last admission of the same session with the same label ``agent`` and in the same namespace:
subagents have prompts of their own. docs/how-to/audit.md defines the kinds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from events import types as ev
from events.types import EventBatch, Namespace, RequestId
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.contents import Ids, leading_alike
from kvcache.audit.groups import GroupTotals
from kvcache.audit.history import HistoryFold, HistoryListener, RunningRequest
from kvcache.errors import UsageError, shown

MOST_END, _PART = 512, 8
"""Tokens at the end of a prompt, and the divisor for a short one, that may differ in the next turn: the template's text
before an answer, and in traces the rest of a block, with a number that never recurs."""


class TurnKind(StrEnum):
    """Relation of a prompt to that of the previous turn."""

    FIRST = "first"
    EXTENDS = "extends"
    DIVERGES = "diverges"
    COMPACTION = "compaction"
    RESUMED = "resumed"
    """Same turn, resumed after a preemption."""
    UNKNOWN = "unknown"
    """The log records no tokens."""


KINDS_IN_WORDS = {
    TurnKind.FIRST: "first turn",
    TurnKind.EXTENDS: "extends the previous turn",
    TurnKind.DIVERGES: "diverges from the previous turn",
    TurnKind.COMPACTION: "compaction: diverges, and is shorter",
    TurnKind.RESUMED: "resumed after a preemption",
    TurnKind.UNKNOWN: "unknown: the log does not record tokens",
}
"""Texts for tables."""


@dataclass(slots=True)
class Turn:
    """One admission of a session."""

    number: int
    """Number in its session, from 1."""
    kind: TurnKind
    admission: ExplainedAdmission
    before: RequestId | None = None
    """Previous turn."""
    before_tokens: int | None = None
    """Tokens of the previous turn's prompt."""
    common_tokens: int | None = None
    """Leading tokens in common with the previous turn, including its output by then."""
    differs_at: int | None = None
    """First token that differs; None if one of the two ends before."""

    @property
    def block(self) -> int | None:
        """Block in which that token is."""
        return None if self.differs_at is None else self.differs_at // self.admission.tokens_per_block

    @property
    def differs_in_output(self) -> bool:
        """True if the prompt contains the whole previous prompt, and differs from that turn's output."""
        at, before = self.differs_at, self.before_tokens
        return at is not None and before is not None and at >= before


@dataclass(slots=True)
class _LastTurn:
    request_id: RequestId
    handle: int
    num_tokens: int
    """Tokens of the prompt."""
    ids: Ids
    """Contents of its full blocks."""
    tokens: bytes = b""
    """Packed tokens, only of a session that is examined closely: of the prompt, and at the turn's end of everything."""


_Chain = tuple[str, str | None, Namespace]
"""Session, agent and namespace."""


class SessionTurns(HistoryListener):
    """Listener that tracks the turns of all sessions.

    `closely` is the session of which each turn is kept, with the first token that differs; None: no session.
    """

    def __init__(self, closely: Callable[[str], bool] = lambda _: False) -> None:
        self.turns: list[Turn] = []
        self.by_kind: defaultdict[TurnKind, GroupTotals] = defaultdict(GroupTotals)
        self._closely = closely
        self._last: dict[_Chain, _LastTurn] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._kinds: dict[int, TurnKind] = {}
        """Kinds of the batch's admissions, by admission number."""
        self._kept: dict[int, _LastTurn] = {}
        """Running turns with their tokens, by admission number."""

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Compare a prompt with the previous one."""
        session = admission.origin.session
        if session is None:
            return
        agent = (admission.origin.labels or {}).get("agent")
        chain = session, agent, admission.namespace
        before = self._last.get(chain)
        kind = self._kind(history, admission, before)
        self._kinds[admission.number] = kind
        if kind != TurnKind.RESUMED:
            self._numbers[session] += 1
        turn = Turn(self._numbers[session], kind, admission)
        now = _LastTurn(admission.request_id, admission.handle, admission.num_tokens, admission.ids)
        if before is not None and kind == TurnKind.RESUMED:
            now.num_tokens, now.ids = before.num_tokens, before.ids
        if self._closely(session):
            sequence = history.replayed.state.sequences[admission.handle]
            if history.tokens_recorded:
                now.tokens = sequence.packed(0, admission.num_tokens)
            self._kept[admission.number] = now
            self.turns.append(turn)
            if before is not None:
                _compare(history, turn, now, before)
        self._last[chain] = now

    def _kind(
        self, history: HistoryFold, admission: ExplainedAdmission, before: _LastTurn | None
    ) -> TurnKind:
        if admission.resumed:
            return TurnKind.RESUMED
        if before is None:
            return TurnKind.FIRST
        if not history.tokens_recorded:
            return TurnKind.UNKNOWN
        common = leading_alike(admission.ids, before.ids)
        end = before.num_tokens - min(MOST_END, before.num_tokens // _PART)
        if (common + 1) * admission.tokens_per_block > end:
            return TurnKind.EXTENDS
        shorter = admission.num_tokens < before.num_tokens
        return TurnKind.COMPACTION if shorter else TurnKind.DIVERGES

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Count the admission by kind."""
        kind = self._kinds.pop(admission.number, None)
        if kind is not None and self.counting:
            self.by_kind[kind].requests += 1
            self.by_kind[kind].reasons += admission.counts

    def ended(self, history: HistoryFold, request: RunningRequest, event: ev.SequenceRemoved) -> None:
        """Record the output."""
        if (kept := self._kept.pop(request.number, None)) is not None and history.tokens_recorded:
            kept.tokens = request.sequence.packed(0, event.num_tokens)


def _compare(history: HistoryFold, turn: Turn, now: _LastTurn, before: _LastTurn) -> None:
    """Find the first token that differs."""
    turn.before, turn.before_tokens = before.request_id, before.num_tokens
    if not history.tokens_recorded:
        return
    running = history.running.get(before.handle)
    tokens = before.tokens if running is None else running.sequence.packed(0, running.sequence.num_tokens)
    one, other = np.frombuffer(now.tokens, np.int32), np.frombuffer(tokens, np.int32)
    turn.common_tokens = common = leading_alike(one, other)
    turn.differs_at = common if common < min(len(one), len(other)) else None


def turns_of(batches: Iterable[EventBatch], session: str) -> list[Turn]:
    """Return all turns of a session in a log, in order. Raises `UsageError` if there is none."""
    turns = SessionTurns(lambda other: other == session)
    history = HistoryFold(turns)
    for batch in batches:
        history.fold(batch)
    if not turns.turns:
        raise UsageError(f"no request of session {shown(session)} was admitted in the log")
    return turns.turns
