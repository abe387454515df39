"""How much of their prompts the requests of two logs reused.

An admission in one log belongs to the admission of the same request id in the other; of an id that comes several times
(after preemption, or used again), the k-th to the k-th. Admissions before a gap in their batch are left out, as in
audits. The log with fewer admissions up to now is read on, so that
partners come soon after each other: kept are the admissions whose partner has not come, and those that are told of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappush, heappushpop

from events.structs import RequestId
from events.types import EventBatch, SequenceAdded
from kvcache.replay import known_events


@dataclass(frozen=True)
class Admitted:
    """One admission of a request."""

    seq: int
    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class Change:
    """A request in both logs."""

    request_id: RequestId
    a: Admitted
    b: Admitted

    @property
    def reused_tokens(self) -> int:
        """By how much more it reused in B; below 0: by how much less."""
        return self.b.reused_tokens - self.a.reused_tokens


@dataclass
class Totals:
    """Admissions, added up."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0

    def add(self, admitted: Admitted) -> None:
        """Count one more."""
        self.requests += 1
        self.prompt_tokens += admitted.prompt_tokens
        self.reused_tokens += admitted.reused_tokens


@dataclass
class Only(Totals):
    """Admissions that the other log does not have, and the first of them."""

    first: list[tuple[RequestId, Admitted]] = field(default_factory=list)


@dataclass
class ReuseDifference:
    """What comes out. A and B are the two logs; requests are admissions, which may be several of one id."""

    a: Totals = field(default_factory=Totals)
    """Of the requests that both have, in A."""
    b: Totals = field(default_factory=Totals)
    changed: int = 0
    """How many of these reused more or fewer tokens in B."""
    other_prompts: int = 0
    """How many of these have a prompt of another length."""
    largest: list[Change] = field(default_factory=list)
    """Those whose reuse changed most, either way; of equal ones, the first."""
    only_a: Only = field(default_factory=Only)
    only_b: Only = field(default_factory=Only)


def compare_reuse(a: Iterable[EventBatch], b: Iterable[EventBatch], top: int = 10) -> ReuseDifference:
    """Compare request by request; `top` is how many are listed of each kind. Raises what reading the logs does."""
    pairing = _Pairing(top)
    sides = [_admissions(a), _admissions(b)]
    read = [0, 0]
    reading = {0, 1}
    while reading:
        side = min(reading, key=lambda each: read[each])
        found = next(sides[side], None)
        if found is None:
            reading.discard(side)
        else:
            read[side] += 1
            pairing.add(side, *found)
    return pairing.finish()


def _admissions(batches: Iterable[EventBatch]) -> Iterator[tuple[RequestId, Admitted]]:
    for batch in batches:
        for event in known_events(batch):
            if type(event) is SequenceAdded:
                yield event.request_id, Admitted(batch.seq, event.num_tokens, event.reused)


class _Pairing:
    """Brings the admissions of two logs together."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._result = ReuseDifference()
        self._alone: tuple[dict[RequestId, deque[Admitted]], ...] = ({}, {})
        """Of each log, admissions whose partner has not come: of one id at most in one log."""
        self._largest: list[tuple[int, int, Change]] = []
        """A heap; the smallest change, and of equal ones the last, is first."""

    def add(self, side: int, request_id: RequestId, admitted: Admitted) -> None:
        """Take the next admission of a log."""
        waiting = self._alone[1 - side].get(request_id)
        if waiting is None:
            self._alone[side].setdefault(request_id, deque()).append(admitted)
            return
        partner = waiting.popleft()
        if not waiting:
            del self._alone[1 - side][request_id]
        self._compare(Change(request_id, *((admitted, partner) if side == 0 else (partner, admitted))))

    def _compare(self, pair: Change) -> None:
        result = self._result
        result.a.add(pair.a)
        result.b.add(pair.b)
        result.other_prompts += pair.a.prompt_tokens != pair.b.prompt_tokens
        if not pair.reused_tokens:
            return
        result.changed += 1
        entry = (abs(pair.reused_tokens), -result.a.requests, pair)
        if len(self._largest) < self._top:
            heappush(self._largest, entry)
        elif self._top:
            heappushpop(self._largest, entry)

    def finish(self) -> ReuseDifference:
        """What came out; whoever is alone now stays so."""
        result = self._result
        result.largest = [pair for *_, pair in sorted(self._largest, reverse=True)]
        for only, alone in zip((result.only_a, result.only_b), self._alone, strict=True):
            rest = [(name, each) for name, waiting in alone.items() for each in waiting]
            rest.sort(key=lambda entry: entry[1].seq)
            for _, admitted in rest:
                only.add(admitted)
            only.first = rest[: self._top]
        return result
