"""Comparison of two logs: the first divergence, and the reuse of their requests.

Both functions read batches in order, and keep no more of each log than they still need.

Where two logs diverge, the first batch of one is compared with the first one of the other, and so on. The description
of a log and its cache at the start of an epoch is no divergence: its id and number, the software, the settings
(`changed_settings` compares these). Nor are times. If the caches differ in their blocks, blank slots in exported states
and fingerprints in checkpoints differ as well; the rest of these events is compared.

For reuse, an admission in one log is paired with the admission of the same request id in the other; if an id recurs
(after preemption, or reused), the k-th with the k-th. Admissions before a gap in their batch are left
out, as in audits. The logs are read in turn, an admission at a time, so that partners follow each other closely: only
admissions still without a partner, and reported ones, are kept.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import zip_longest
from typing import Any

from msgspec.structs import replace

from events.structs import GroupCreated, RequestId
from events.types import (
    AnyEvent,
    CacheCreated,
    Checkpoint,
    EpochStarted,
    EventBatch,
    SequenceAdded,
    StateExported,
)
from kvcache.replay import known_events

_HEADERS = (EpochStarted, CacheCreated)


_NOTHING = "(none)"
"""Value of a setting that only one of the two logs has, as with logs of two versions."""


@dataclass(frozen=True)
class EventPlace:
    """An event in a log, or the end of a batch if `index` is after its last event."""

    batch: EventBatch
    index: int

    @property
    def event(self) -> AnyEvent | None:
        """The event; None at the end of the batch."""
        return self.batch.events[self.index] if self.index < len(self.batch.events) else None


@dataclass(frozen=True)
class Divergence:
    """The first place where two logs differ. None: the log has ended before."""

    a: EventPlace | None
    b: EventPlace | None

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields in which two events of one type differ; empty if there are no two such events."""
        a, b = (None if place is None else place.event for place in (self.a, self.b))
        if a is None or type(a) is not type(b):
            return ()
        return tuple(name for name in a.__struct_fields__ if getattr(a, name) != getattr(b, name))


def first_divergence(a: Iterable[EventBatch], b: Iterable[EventBatch]) -> Divergence | None:
    """Return the first difference of two logs, reading no further than that; None if they agree.

    Raises what reading them does.
    """
    alike = True
    """True if both caches have the same blocks."""
    for one, other in zip_longest(a, b):
        if one is None or other is None:
            return Divergence(*(None if each is None else EventPlace(each, 0) for each in (one, other)))
        caches = _caches(one), _caches(other)
        if any(caches):
            alike = caches[0] == caches[1]
        index = _first_difference(one, other, alike=alike)
        if index is not None:
            return Divergence(EventPlace(one, index), EventPlace(other, index))
    return None


def _caches(batch: EventBatch) -> list[tuple[GroupCreated, ...]]:
    """Return the blocks of all caches that a batch creates."""
    return [event.groups for event in batch.events if type(event) is CacheCreated]


def _first_difference(a: EventBatch, b: EventBatch, *, alike: bool) -> int | None:
    if a.events == b.events:
        return None
    for index, (one, other) in enumerate(zip_longest(a.events, b.events)):
        if one == other or (type(one) is type(other) and isinstance(one, _HEADERS)):
            continue
        if one is None or other is None or alike or _without_blocks(one) != _without_blocks(other):
            return index
    return None


def _without_blocks(event: AnyEvent) -> AnyEvent:
    """Return an event without what follows from the number of blocks."""
    if isinstance(event, Checkpoint):
        return replace(event, fingerprint=b"")
    if isinstance(event, StateExported):
        return replace(event, groups=tuple(replace(group, blank_slots=(b"", b"")) for group in event.groups))
    return event


@dataclass(frozen=True)
class ChangedSetting:
    """A setting, with its value in each log as in JSON."""

    name: str
    a: Any
    b: Any


def changed_settings(a: CacheCreated, b: CacheCreated) -> list[ChangedSetting]:
    """Return the settings in which two caches differ, and their consequences: the blocks of each window and level."""
    one, other = dict(settings_of(a)), dict(settings_of(b))
    names = [*one, *(name for name in other if name not in one)]
    pairs = ((name, one.get(name, _NOTHING), other.get(name, _NOTHING)) for name in names)
    return [ChangedSetting(*pair) for pair in pairs if pair[1] != pair[2]]


def settings_of(created: CacheCreated) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, JSON value) of each setting of a cache, and of the blocks that follow from them."""
    try:
        config = json.loads(created.config)
    except (ValueError, RecursionError):
        config = created.config
    yield from settings_in("", config)
    yield "windows", [[group.window, *group.num_blocks] for group in created.groups]
    yield "key_bytes", created.key_bytes
    yield "hash_algorithm", created.hash_algorithm
    if created.engine:
        yield "engine", created.engine


def settings_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted name, as in ``log.fsync``."""
    if not isinstance(value, dict):
        yield name or "config", value
        return
    for key, inner in value.items():
        yield from settings_in(f"{name}.{key}" if name else key, inner)


@dataclass(frozen=True)
class Admitted:
    """One admission of a request."""

    seq: int
    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class ReuseChange:
    """Reuse of one request in both logs."""

    request_id: RequestId
    a: Admitted
    b: Admitted

    @property
    def reused_tokens(self) -> int:
        """Reused tokens in B minus those in A."""
        return self.b.reused_tokens - self.a.reused_tokens


@dataclass
class ReuseTotals:
    """Sums over admissions."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    first: list[tuple[RequestId, Admitted]] = field(default_factory=list)
    """First admissions, of those that the other log does not have."""

    def add(self, admitted: Admitted) -> None:
        """Add one admission."""
        self.requests += 1
        self.prompt_tokens += admitted.prompt_tokens
        self.reused_tokens += admitted.reused_tokens


@dataclass
class ReuseDifference:
    """Result of the comparison. A and B are the two logs; requests are admissions, several of which may have one id."""

    a: ReuseTotals = field(default_factory=ReuseTotals)
    """Totals in A of the requests in both logs."""
    b: ReuseTotals = field(default_factory=ReuseTotals)
    changed: int = 0
    """Number of these that reused more or fewer tokens in B."""
    other_prompts: int = 0
    """Number of these with a prompt of another length."""
    largest: list[ReuseChange] = field(default_factory=list)
    """Requests with the largest change of reuse, either way; the first among equals."""
    only_a: ReuseTotals = field(default_factory=ReuseTotals)
    """Totals of the requests in A alone."""
    only_b: ReuseTotals = field(default_factory=ReuseTotals)


def compare_reuse(a: Iterable[EventBatch], b: Iterable[EventBatch], top: int = 10) -> ReuseDifference:
    """Compare request by request; list `top` of each kind. Raises what reading the logs does."""
    result = ReuseDifference()
    alone: tuple[_Alone, _Alone] = {}, {}
    changed = (pair for pair in _pairs(a, b, alone, result) if pair.reused_tokens)
    result.largest = nlargest(max(top, 1), changed, key=lambda pair: abs(pair.reused_tokens))[:top]
    for only, waiting in zip((result.only_a, result.only_b), alone, strict=True):
        rest = [(name, each) for name, those in waiting.items() for each in those]
        rest.sort(key=lambda entry: entry[1].seq)
        for _, admitted in rest:
            only.add(admitted)
        only.first = rest[:top]
    return result


_Alone = dict[RequestId, deque[Admitted]]
"""Admissions of one log that are still without a partner; an id is in at most one of the two."""


def _pairs(
    a: Iterable[EventBatch], b: Iterable[EventBatch], alone: tuple[_Alone, _Alone], result: ReuseDifference
) -> Iterator[ReuseChange]:
    """Yield the requests in both logs, and count them; `alone` keeps the others."""
    for found in zip_longest(_admissions(a), _admissions(b)):
        for side, (request_id, admitted) in ((side, each) for side, each in enumerate(found) if each):
            waiting = alone[1 - side].get(request_id)
            if waiting is None:
                alone[side].setdefault(request_id, deque()).append(admitted)
                continue
            partner = waiting.popleft()
            if not waiting:
                del alone[1 - side][request_id]
            pair = ReuseChange(request_id, *((admitted, partner) if side == 0 else (partner, admitted)))
            result.a.add(pair.a)
            result.b.add(pair.b)
            result.changed += bool(pair.reused_tokens)
            result.other_prompts += pair.a.prompt_tokens != pair.b.prompt_tokens
            yield pair


def _admissions(batches: Iterable[EventBatch]) -> Iterator[tuple[RequestId, Admitted]]:
    for batch in batches:
        for event in known_events(batch):
            if type(event) is SequenceAdded:
                yield event.request_id, Admitted(batch.seq, event.num_tokens, event.reused)
