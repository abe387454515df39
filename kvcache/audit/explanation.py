"""History of one request in a log, also in words: refusals, admissions, and the reasons why its prompt was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.types import EventBatch, Namespace, RequestId
from kvcache.audit.admission import NO_ORIGIN, ExplainedAdmission, RequestOrigin
from kvcache.audit.contents import Ids, Window
from kvcache.audit.history import HistoryFold, HistoryListener, RunningRequest
from kvcache.audit.reasons import IN_WORDS, Reason
from kvcache.errors import UsageError, shown
from kvcache.phrases import count, duration, printable, share

MOST_HOLDERS = 5
"""Maximum number of holders of blocks that are named for a refusal."""


@dataclass(frozen=True, slots=True)
class LogMoment:
    """A place in the log."""

    batch: int
    at: int
    """Wall-clock ns."""


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """A running request, and the number of blocks of its tokens."""

    request_id: RequestId
    blocks: int


@dataclass(frozen=True, slots=True)
class RefusedAdmission:
    """A refusal of a request that did not fit. Of several consecutive tries only the first is in the log."""

    moment: LogMoment
    needed: tuple[int, ...]
    """Blocks needed per window."""
    available: tuple[int, ...]
    running: int
    holders: tuple[BlockHolder, ...]
    """Requests that held the most blocks, largest first."""


@dataclass(frozen=True, slots=True)
class StoredSince:
    """First block and moment of blocks that were cached at another moment than those before them."""

    first_block: int
    moment: LogMoment


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of a prompt with the same explanation."""

    first: int
    stop: int
    """Token after the last."""
    first_block: int
    last_block: int
    reason: Reason
    window: int | None
    """Window in tokens, if the reason concerns one window of several."""
    slots: tuple[int, ...] = ()
    """Slots of reused blocks."""
    stored_by: RequestId | None = None
    stored: tuple[StoredSince, ...] = ()
    """Moments when the blocks were cached, in order; empty if unknown."""
    gone: LogMoment | None = None
    gone_for: RequestId | None = None
    """Request that needed the room."""
    computed_by: RequestId | None = None
    """Running request that was computing it."""
    group: int | None = None
    """Group that shares the pool of full attention and evicted the blocks; `gone` and `gone_for` are about it."""
    kind: str = ""
    """Kind of that group."""


@dataclass(slots=True)
class Residency:
    """Time from an admission to the request's end, or to the end of the log."""

    admitted: LogMoment
    namespace: ev.Namespace
    num_tokens: int
    reused: int
    parts: list[PromptPart] = field(default_factory=list)
    computed_again: int = 0
    """Tokens that this stay had to compute again although an earlier stay had computed them."""
    not_loaded: int = 0
    """Tokens that were to be loaded from outside and did not arrive."""
    ended: LogMoment | None = None
    tokens_at_end: int = 0
    computed_at_end: int = 0
    origin: RequestOrigin = NO_ORIGIN


@dataclass(slots=True)
class Exported:
    """A request of an exported state with which the log resumes: its admission is not in the log."""

    since: LogMoment
    """Moment of the batch with that state."""
    num_tokens: int
    """Number of prompt tokens."""
    ended: LogMoment | None = None
    tokens_at_end: int = 0
    computed_at_end: int = 0


@dataclass(slots=True)
class Explanation:
    """Everything known of a request."""

    request_id: RequestId
    refusals: list[RefusedAdmission] = field(default_factory=list)
    exported: list[Exported] = field(default_factory=list)
    stays: list[Residency] = field(default_factory=list)


class Explanations(HistoryListener):
    """Listener that explains requests."""

    def __init__(self, wanted: Callable[[RequestId], bool]) -> None:
        self._wanted = wanted
        self.found: dict[RequestId, Explanation] = {}
        """Explanations by the engine's request id: 7 and "7" are two requests."""
        self._looked_up: dict[int, tuple[Residency, _Facts]] = {}
        """Stays that begin in this batch, with facts known at the lookup, by handle."""
        self._open: dict[int, Residency | Exported] = {}
        """Stays and exported requests that have not ended, by admission number."""

    def _of(self, request_id: RequestId) -> Explanation | None:
        if not self._wanted(request_id):
            return None
        return self.found.setdefault(request_id, Explanation(request_id))

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Begin a stay, and record what is known of each block at the lookup."""
        explanation = self._of(admission.request_id)
        if explanation is None:
            return
        before = max((stay.computed_at_end for stay in explanation.stays), default=0)
        stay = Residency(
            LogMoment(admission.batch, admission.at),
            admission.namespace,
            admission.num_tokens,
            admission.reused,
            computed_again=max(0, min(before, admission.num_tokens) - admission.reused - admission.external),
            origin=admission.origin,
        )
        explanation.stays.append(stay)
        self._open[admission.number] = stay
        self._looked_up[admission.handle] = stay, _facts_of(history, admission)

    def reused(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksReused) -> None:
        """Add slots and storing requests of reused blocks; the first window that has them counts."""
        if event.handle not in self._looked_up:
            return
        _, facts = self._looked_up[event.handle]
        slots, contents = np.frombuffer(event.slots, np.int32), window.contents(event.level, event.slots)
        at = np.arange(event.first_block, event.first_block + len(slots))
        new = facts["slot"][at] < 0
        facts["slot"][at[new]] = slots[new]
        for name in ("stored_by", "stored_batch", "stored_at"):
            facts[name][at[new & (contents >= 0)]] = window.of[name][contents[new & (contents >= 0)]]

    def restarted(self, history: HistoryFold) -> None:
        """Record the requests that run without an admission in the log."""
        for request in history.running.values():
            if request.number not in self._open:
                self.forked(history, request)

    def forked(self, history: HistoryFold, child: RunningRequest) -> None:
        """Record the child, which also runs without an admission."""
        if (explanation := self._of(child.sequence.request_id)) is not None:
            exported = Exported(LogMoment(history.batch, history.now), child.sequence.num_prompt_tokens)
            explanation.exported.append(exported)
            self._open[child.number] = exported

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """Record a refusal, and the holders of the blocks."""
        explanation = self._of(event.request_id)
        if explanation is None:
            return
        held = [
            BlockHolder(each.sequence.request_id, -(-each.sequence.num_tokens // history.tokens_per_block))
            for each in history.running.values()
        ]
        held.sort(key=lambda holder: -holder.blocks)
        moment = LogMoment(history.batch, history.now)
        needed, available = (each[: len(history.windows)] for each in (event.needed, event.available))
        refusal = RefusedAdmission(moment, needed, available, len(held), tuple(held[:MOST_HOLDERS]))
        explanation.refusals.append(refusal)

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Explain an admission, part by part."""
        if admission.handle in self._looked_up:
            stay, facts = self._looked_up.pop(admission.handle)
            stay.parts += _parts(history, admission, facts)

    def not_loaded(self, history: HistoryFold, request: RunningRequest, tokens: int) -> None:
        """Record tokens that did not arrive."""
        waited = self._open.get(request.number)
        if isinstance(waited, Residency):
            waited.not_loaded += tokens

    def ended(self, history: HistoryFold, request: RunningRequest, event: ev.SequenceRemoved) -> None:
        """Record an end."""
        if (stay := self._open.pop(request.number, None)) is not None:
            stay.ended = LogMoment(history.batch, history.now)
            stay.tokens_at_end, stay.computed_at_end = event.num_tokens, event.computed


_Facts = dict[str, npt.NDArray[np.int64]]
_PENDING = (*range(Reason.COMPUTING_AGAIN, Reason.COMPUTING_RESTARTED + 1), Reason.BEING_COMPUTED)


def _facts_of(history: HistoryFold, admission: ExplainedAdmission) -> _Facts:
    """Return what each block's window knows of it now: numbers of requests and batches, times in ns, or -1."""
    names = ("stored_by", "stored_batch", "stored_at", "gone_batch", "gone_at", "gone_by")
    size = len(admission.ids)
    blocks = (admission.num_tokens - 1) // admission.tokens_per_block
    facts = {name: np.full(blocks, -1, np.int64) for name in (*names, "slot", "computed_by")}
    windows = admission.windows[:size]
    for group, window in enumerate(history.windows):
        at = (windows == group) | ((windows < 0) & (group == 0))
        for name in names:
            facts[name][:size][at] = window.of[name][admission.ids[at]]
    for block in np.flatnonzero(np.isin(admission.reasons[:size], _PENDING)).tolist():
        facts["computed_by"][block] = history.computing(int(admission.ids[block]), block)
    return facts


def _parts(history: HistoryFold, admission: ExplainedAdmission, facts: _Facts) -> Iterator[PromptPart]:
    """Yield the prompt's parts, with equal neighbours joined."""
    parts = [_part(history, admission, facts, *span) for span in admission.spans()]
    for _, same in groupby(parts, _said):
        own = list(same)
        stored = [each for part in own for each in part.stored]
        moments = [next(those) for _, those in groupby(stored, lambda each: each.moment)]
        yield replace(
            own[0],
            stop=own[-1].stop,
            last_block=own[-1].last_block,
            slots=tuple([slot for part in own for slot in part.slots]),
            stored=tuple(moments),
        )


def _said(part: PromptPart) -> PromptPart:
    """Return the part without its place: equal ones are joined."""
    return replace(part, first=0, stop=0, first_block=0, last_block=0, slots=(), stored=())


def _part(
    history: HistoryFold,
    admission: ExplainedAdmission,
    facts_of: _Facts,
    first: int,
    stop: int,
    reason: Reason,
    group: int,
) -> PromptPart:
    block = first // admission.tokens_per_block
    window = history.windows[group].created.window if group >= 0 and len(history.windows) > 1 else None
    last = (stop - 1) // admission.tokens_per_block
    if block >= len(facts_of["slot"]) or reason in _UNKNOWN:
        return PromptPart(first, stop, block, last, reason, window)
    facts = {name: int(column[block]) for name, column in facts_of.items()}
    known = reason.is_reuse or reason.is_lost or reason in _CACHED
    lost = reason.is_lost
    lacking = admission.lacking if reason == Reason.NOT_SERVABLE else None
    if lacking is not None:
        lost = lacking.gone_batch >= 0
        facts |= {"gone_batch": lacking.gone_batch, "gone_at": lacking.gone_at, "gone_by": lacking.gone_by}
    return PromptPart(
        first,
        stop,
        block,
        last,
        reason,
        window,
        slots=(facts["slot"],) if reason.is_reuse and facts["slot"] >= 0 else (),
        stored_by=history.request_id(facts["stored_by"]) if known else None,
        stored=(StoredSince(block, LogMoment(facts["stored_batch"], facts["stored_at"])),) if known else (),
        gone=LogMoment(facts["gone_batch"], facts["gone_at"]) if lost else None,
        gone_for=history.request_id(facts["gone_by"]) if lost else None,
        computed_by=history.request_id(facts["computed_by"]),
        group=None if lacking is None else lacking.group,
        kind="" if lacking is None else lacking.kind,
    )


_UNKNOWN = (Reason.LAST_TOKEN, Reason.PARTIAL, Reason.EXTERNAL)
"""Reasons without further explanation."""
_CACHED = (Reason.NOT_SERVABLE, Reason.LAST_HIT, Reason.NOT_REUSED)
"""Reasons of blocks that were cached and not reused."""


_MOST_ALIKE = 4


def explain_request(batches: Iterable[EventBatch], request_id: str) -> list[Explanation]:
    """Explain a request of a log; several, if the engine used the id both as a number and as text.

    Raises `UsageError` if the log has no such request; it names some with that prefix, because vLLM's ids begin with
    those that its clients receive.
    """
    alike = dict[str, None]()

    def wanted(other: RequestId) -> bool:
        name = str(other)
        if name.startswith(request_id) and len(alike) < _MOST_ALIKE:
            alike[name] = None
        return name == request_id

    watch = Explanations(wanted)
    history = HistoryFold(watch)
    for batch in batches:
        history.fold(batch)
    if not watch.found:
        hint = f"; did you mean {', '.join(map(shown, alike))}?" if alike else ""
        raise UsageError(f"no request {shown(request_id)} in the log{hint}")
    return list(watch.found.values())


_MOST_RANGES = 4
"""Maximum number of ranges of slots that are listed, because most slots are scattered."""
When = Callable[[int], str]
"""Formatter of a wall clock in ns for readers."""


@dataclass(frozen=True, slots=True)
class ExplanationView:
    """View of one refusal or one request without an admission (both without a table), or of one stay of a request."""

    heading: str
    facts: list[tuple[str, str]]
    columns: list[str]
    rows: list[list[str]]

    RIGHT = ("count", "window")
    """Columns of numbers, right-aligned."""


def views_of(found: Explanation, when: When) -> list[ExplanationView]:
    """Return the views of an explanation: refusals, requests without an admission, then stays."""
    name = printable(str(found.request_id))
    return [
        *(_refusal(name, refusal, when) for refusal in found.refusals),
        *(_exported(name, exported, when) for exported in found.exported),
        *(_stay(name, stay, when) for stay in found.stays),
    ]


def _refusal(name: str, refusal: RefusedAdmission, when: When) -> ExplanationView:
    needed, available = (
        "/".join(f"{blocks:,}" for blocks in each) for each in (refusal.needed, refusal.available)
    )
    holders = ", ".join(f"{printable(str(each.request_id))} ({each.blocks:,})" for each in refusal.holders)
    facts = [
        ("needed", f"{needed} blocks, {available} available"),
        ("running", f"{count(refusal.running, 'request')}; most blocks: {holders or 'none'}"),
    ]
    return ExplanationView(f"request {name}: refused in {_moment(refusal.moment, when)}", facts, [], [])


def _exported(name: str, exported: Exported, when: When) -> ExplanationView:
    facts = [("prompt", count(exported.num_tokens, "token")), _end(exported, when)]
    since = f"already running in {_moment(exported.since, when)}; its admission is not in the log"
    return ExplanationView(f"request {name}: {since}", facts, [], [])


def _stay(name: str, stay: Residency, when: When) -> ExplanationView:
    several = any(part.window is not None for part in stay.parts)
    rows = [
        [
            _range(part.first_block, part.last_block),
            _range(part.first, part.stop - 1),
            f"{part.stop - part.first:,}",
            *([f"{part.window:,}" if part.window is not None else ""] * several),
            _what(part),
            _details(part, stay.admitted, when),
        ]
        for part in stay.parts
    ]
    columns = ["blocks", "tokens", "count", *(["window"] * several), "what", "details"]
    heading = f"request {name}: {stay.num_tokens:,} prompt tokens, admitted in {_moment(stay.admitted, when)}"
    return ExplanationView(heading, _facts(stay, when), columns, rows)


def _what(part: PromptPart) -> str:
    if part.group is None:
        return IN_WORDS[part.reason]
    return f"cached, but lost in {group_in_words(part.group, part.kind)}"


def _facts(stay: Residency, when: When) -> list[tuple[str, str]]:
    facts = [("reused", f"{count(stay.reused, 'token')}: {share(stay.reused / stay.num_tokens)}")]
    if stay.not_loaded:
        facts.append(("not loaded", f"{count(stay.not_loaded, 'token')} failed to load from outside"))
    if namespace := namespace_in_words(stay.namespace):
        facts.append(("namespace", namespace))
    if stay.origin.session is not None:
        facts.append(("session", printable(stay.origin.session)))
    if stay.origin.labels:
        labels = (f"{printable(name)} {printable(value)}" for name, value in stay.origin.labels.items())
        facts.append(("labels", ", ".join(labels)))
    if stay.computed_again:
        facts.append(
            ("again", f"{count(stay.computed_again, 'token')} that it had computed before it was preempted")
        )
    return [*facts, _end(stay, when)]


def _end(stay: Residency | Exported, when: When) -> tuple[str, str]:
    if stay.ended is None:
        return "ended", "not in this log"
    outcome = f"with {count(stay.tokens_at_end, 'token')}, {stay.computed_at_end:,} computed"
    return "ended", f"in {_moment(stay.ended, when)}, {outcome}"


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _moment(moment: LogMoment, when: When) -> str:
    return f"batch {moment.batch:,} ({when(moment.at)})"


def _moments(stored: tuple[StoredSince, ...], when: When) -> str:
    """Format one moment, or the first and last of several."""
    moments = sorted({each.moment for each in stored}, key=lambda moment: moment.batch)
    first, last = moments[0], moments[-1]
    if first == last:
        return _moment(first, when)
    return f"batches {first.batch:,} to {last.batch:,} ({when(first.at)} to {when(last.at)})"


def _details(part: PromptPart, now: LogMoment, when: When) -> str:
    said = []
    if part.group is not None and part.gone is None:
        said.append("the blocks needed there were never cached")
    if part.gone is not None:
        said.append(f"{duration(max(0, now.at - part.gone.at) / 1e9)} before, in {_moment(part.gone, when)}")
        if part.gone_for is not None:
            said.append(f"to make room for request {printable(str(part.gone_for))}")
    if part.computed_by is not None:
        said.append(f"by request {printable(str(part.computed_by))}")
    if part.stored and part.stored_by is not None:
        stored = f"stored by request {printable(str(part.stored_by))} in {_moments(part.stored, when)}"
        said.append(f"{_slots(part.slots)}, {stored}" if part.slots else stored)
    return ", ".join(said)


def _slots(slots: tuple[int, ...]) -> str:
    """Format slots as ranges in block order, the first ones if there are many."""
    ranges: list[list[int]] = []
    for slot in slots:
        if ranges and slot == ranges[-1][1] + 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    said = ", ".join(_range(first, last) for first, last in ranges[:_MOST_RANGES])
    noun = "slot" if len(slots) == 1 else "slots"
    return f"{noun} {said}" + ", …" * (len(ranges) > _MOST_RANGES)


def group_in_words(group: int, kind: str) -> str:
    """Format a group that shares the pool of full attention."""
    return f"group {group} ({kind})"


def namespace_in_words(namespace: Namespace) -> str:
    """Format LoRA adapter and salt; empty for the namespace without either."""
    said = []
    if namespace.lora_id is not None:
        said.append(f"LoRA {namespace.lora_id}")
    if namespace.lora_name is not None:
        said.append(f"LoRA {printable(namespace.lora_name)}")
    if namespace.salt_digest is not None:
        said.append(f"salt {namespace.salt_digest.hex()[:8]}")
    return ", ".join(said)
