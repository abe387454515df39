"""What a log says of one request: refusals, admissions, and of each part of its prompt why it was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from events import types as ev
from events.types import EventBatch, RequestId
from kvcache.audit.admission import Admission
from kvcache.audit.fold import HistoryFold
from kvcache.audit.history import History
from kvcache.audit.listener import Listener
from kvcache.audit.reasons import Reason
from kvcache.audit.running import Running
from kvcache.errors import UsageError, shown

MOST_HOLDERS = 5
"""Of a refusal, so many of the requests that held most are named."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the log."""

    batch: int
    at: int
    """Wall-clock ns."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A running request, and the blocks that its tokens take."""

    request_id: RequestId
    blocks: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request did not fit. Only the first of several tries in a row is in the log."""

    moment: Moment
    needed: tuple[int, ...]
    """Per window: blocks."""
    available: tuple[int, ...]
    running: int
    holders: tuple[Holder, ...]
    """Those that held the most, the largest first."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where blocks begin that were cached at another moment than those before them."""

    first_block: int
    moment: Moment


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of a prompt of which the same is to be said."""

    first: int
    stop: int
    """The token behind the last."""
    first_block: int
    last_block: int
    reason: Reason
    window: int | None
    """In tokens, where the reason is about one window of several."""
    slots: tuple[int, ...] = ()
    """Of its blocks, where they are reused."""
    stored_by: RequestId | None = None
    stored: tuple[Stored, ...] = ()
    """When its blocks were cached, in their order; empty where that is not known."""
    gone: Moment | None = None
    gone_for: RequestId | None = None
    """The request that needed the room."""
    computed_by: RequestId | None = None
    """The running request that was computing it."""
    group: int | None = None
    """The group that shares the pool of full attention and lost it; `gone` and `gone_for` are about what it lost."""
    kind: str = ""
    """That group's."""


@dataclass(slots=True)
class Stay:
    """From an admission to the request's end, or to the end of the log."""

    admitted: Moment
    namespace: ev.Namespace
    num_tokens: int
    reused: int
    parts: list[Part]
    computed_again: int = 0
    """Tokens that an earlier stay had computed already, and that this one had to compute again."""
    not_loaded: int = 0
    """Tokens that were to be loaded from outside, and did not come."""
    ended: Moment | None = None
    tokens_at_end: int = 0
    computed_at_end: int = 0


@dataclass(slots=True)
class Exported:
    """A request that ran in a state that the log begins anew with: its admission is not in the log."""

    since: Moment
    """The batch of that state."""
    num_tokens: int
    """Of the prompt."""
    ended: Moment | None = None
    tokens_at_end: int = 0
    computed_at_end: int = 0


@dataclass(slots=True)
class Explanation:
    """All that is known of a request."""

    request_id: RequestId
    refusals: list[Refusal] = field(default_factory=list)
    exported: list[Exported] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)


class Explanations(Listener):
    """Explains requests; their admissions must have details (`HistoryFold`)."""

    def __init__(self, wanted: Callable[[RequestId], bool]) -> None:
        self._wanted = wanted
        self.found: dict[RequestId, Explanation] = {}
        """By id as the engine gave it: 7 and "7" are two requests."""
        self._admitted: set[int] = set()
        """Numbers of admissions."""
        self._open: dict[int, Stay | Exported] = {}
        """What has not ended, by these numbers."""
        self._ended: list[tuple[int, ev.SequenceRemoved]] = []
        self._not_loaded: list[tuple[int, int]] = []

    def _of(self, request_id: RequestId) -> Explanation | None:
        if not self._wanted(request_id):
            return None
        return self.found.setdefault(request_id, Explanation(request_id))

    def looked_up(self, history: History, admission: Admission) -> None:
        """Note that its admission is in the log."""
        if self._wanted(admission.request_id):
            self._admitted.add(admission.number)

    def restarted(self, history: History) -> None:
        """Note who runs without an admission in the log."""
        for sequence in history.running.values():
            unknown = sequence.number not in self._admitted and sequence.number not in self._open
            if unknown and (explanation := self._of(sequence.request_id)) is not None:
                exported = Exported(Moment(history.batch, history.now), sequence.num_prompt_tokens)
                explanation.exported.append(exported)
                self._open[sequence.number] = exported

    def forked(self, history: History, child: Running) -> None:
        """A branch runs without an admission, too."""
        if (explanation := self._of(child.request_id)) is not None:
            exported = Exported(Moment(history.batch, history.now), child.num_prompt_tokens)
            explanation.exported.append(exported)
            self._open[child.number] = exported

    def refused(self, history: History, event: ev.AdmissionRefused) -> None:
        """Note a refusal, and who held the blocks."""
        explanation = self._of(event.request_id)
        if explanation is None:
            return
        held = [
            Holder(each.request_id, -(-each.num_tokens // history.tokens_per_block))
            for each in history.running.values()
        ]
        held.sort(key=lambda holder: -holder.blocks)
        moment = Moment(history.batch, history.now)
        refusal = Refusal(moment, event.needed, event.available, len(held), tuple(held[:MOST_HOLDERS]))
        explanation.refusals.append(refusal)

    def admitted(self, history: History, admission: Admission) -> None:
        """Note an admission, part by part."""
        explanation = self._of(admission.request_id)
        if explanation is None:
            return
        before = max((stay.computed_at_end for stay in explanation.stays), default=0)
        stay = Stay(
            Moment(admission.batch, admission.at),
            admission.namespace,
            admission.num_tokens,
            admission.reused,
            list(_parts(history, admission)),
            max(0, min(before, admission.num_tokens) - admission.reused - admission.external),
        )
        explanation.stays.append(stay)
        self._open[admission.number] = stay

    def not_loaded(self, history: History, sequence: Running, tokens: int) -> None:
        """Note what did not come."""
        self._not_loaded.append((sequence.number, tokens))

    def ended(self, history: History, sequence: Running, event: ev.SequenceRemoved) -> None:
        """Note an end."""
        if self._wanted(sequence.request_id):
            # Told at the batch's end: so is an admission of the same batch.
            self._ended.append((sequence.number, event))

    def batch_ended(self, history: History) -> None:
        """Tell the ends of the batch, whose admissions are known now."""
        for number, tokens in self._not_loaded:
            waited = self._open.get(number)
            if isinstance(waited, Stay):
                waited.not_loaded += tokens
        self._not_loaded.clear()
        for number, event in self._ended:
            stay = self._open.pop(number)
            stay.ended = Moment(history.batch, history.now)
            stay.tokens_at_end, stay.computed_at_end = event.num_tokens, event.computed
        self._ended.clear()


def _parts(history: History, admission: Admission) -> list[Part]:
    """The prompt's parts, joined as far as the same is to be said of them."""
    joined: list[Part] = []
    for first, stop, reason, group in admission.spans():
        part = _part(history, admission, first, stop, reason, group)
        if joined and _said(joined[-1]) == _said(part):
            before = joined[-1]
            again = before.stored and part.stored and before.stored[-1].moment == part.stored[0].moment
            joined[-1] = replace(
                before,
                stop=part.stop,
                last_block=part.last_block,
                slots=before.slots + part.slots,
                stored=before.stored if again else before.stored + part.stored,
            )
        else:
            joined.append(part)
    return joined


def _said(part: Part) -> tuple[object, ...]:
    return (
        part.reason,
        part.window,
        part.stored_by,
        part.gone,
        part.gone_for,
        part.computed_by,
        part.group,
    )


def _part(history: History, admission: Admission, first: int, stop: int, reason: Reason, group: int) -> Part:
    block = first // admission.tokens_per_block
    window = history.windows[group].created.window if group >= 0 and len(history.windows) > 1 else None
    last = (stop - 1) // admission.tokens_per_block
    if block >= len(admission.facts["slot"]) or reason in (
        Reason.LAST_TOKEN,
        Reason.PARTIAL,
        Reason.EXTERNAL,
    ):
        return Part(first, stop, block, last, reason, window)
    facts = {name: int(column[block]) for name, column in admission.facts.items()}
    known = reason.is_reuse or reason.is_lost or reason in _CACHED
    lost = reason.is_lost
    lacking = admission.lacking if reason == Reason.NOT_SERVABLE else None
    if lacking is not None:
        lost = lacking.gone_batch >= 0
        facts |= {"gone_batch": lacking.gone_batch, "gone_at": lacking.gone_at, "gone_by": lacking.gone_by}
    return Part(
        first,
        stop,
        block,
        last,
        reason,
        window,
        slots=(facts["slot"],) if reason.is_reuse and facts["slot"] >= 0 else (),
        stored_by=_request(history, facts["stored_by"]) if known else None,
        stored=(Stored(block, Moment(facts["stored_batch"], facts["stored_at"])),) if known else (),
        gone=Moment(facts["gone_batch"], facts["gone_at"]) if lost else None,
        gone_for=_request(history, facts["gone_by"]) if lost else None,
        computed_by=_request(history, facts["computed_by"]),
        group=None if lacking is None else lacking.group,
        kind="" if lacking is None else lacking.kind,
    )


_CACHED = (Reason.NOT_SERVABLE, Reason.LAST_HIT, Reason.NOT_REUSED)
"""Of blocks that were cached, and not reused."""


def _request(history: History, number: int) -> RequestId | None:
    return history.requests[number] if number >= 0 else None


def explain_request(batches: Iterable[EventBatch], request_id: str) -> list[Explanation]:
    """Explain a request of a log: several, if the engine used the id both as a number and as text.

    Raises `UsageError` if the log knows no such request.
    """

    def wanted(other: RequestId) -> bool:
        return str(other) == request_id

    watch = Explanations(wanted)
    history = HistoryFold(watch, wanted)
    for batch in batches:
        history.fold(batch)
    if not watch.found:
        raise UsageError(f"no request {shown(request_id)} was admitted or refused in the log, or ran in it")
    return list(watch.found.values())
