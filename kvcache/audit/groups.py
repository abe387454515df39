"""Requests of a log by tenant, session, adapter: tokens computed and lost by each group, and groups that caused it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.types import Namespace, RemoveReason
from kvcache.audit.admission import ExplainedAdmission, RequestOrigin
from kvcache.audit.contents import NOWHERE, Ids, Window
from kvcache.audit.history import HistoryFold, HistoryListener, RunningRequest
from kvcache.audit.prefill import PrefillModel, seconds_by_reason
from kvcache.audit.reasons import CountedByReason, Reason
from kvcache.errors import UsageError, shown
from kvcache.phrases import printable

Key = str | None
"""Common value of a group's requests. None: they have none, or the request is unknown."""
_Rule = Callable[[HistoryFold, RequestOrigin, Namespace], Key]


def _label(name: str) -> _Rule:
    return lambda history, origin, namespace: (origin.labels or {}).get(name)


def _lora(history: HistoryFold, origin: RequestOrigin, namespace: Namespace) -> Key:
    number = namespace.lora_id
    return namespace.lora_name if namespace.lora_name is not None or number is None else str(number)


def _salt(history: HistoryFold, origin: RequestOrigin, namespace: Namespace) -> Key:
    return None if namespace.salt_digest is None else namespace.salt_digest.hex()


_RULES: dict[str, _Rule] = {
    "session": lambda history, origin, namespace: origin.session,
    "tenant": _label("tenant"),
    "lora": _lora,
    "salt": _salt,
    "model": lambda history, origin, namespace: (origin.labels or {}).get("model") or history.model or None,
}
_LABEL = "label:"
DIMENSIONS = (*_RULES, f"{_LABEL}NAME")
"""Names by which requests can be grouped."""


def _rule(by: str) -> _Rule:
    """Return the rule of a dimension. Raises `UsageError` for an unknown one."""
    if by.startswith(_LABEL) and by != _LABEL:
        return _label(by.removeprefix(_LABEL))
    if by in _RULES:
        return _RULES[by]
    raise UsageError(f"requests are grouped by one of {', '.join(DIMENSIONS)}, not by {shown(by)}")


@dataclass(slots=True)
class GroupTotals(CountedByReason):
    """Totals of the requests of one group, or of several."""

    requests: int = 0
    reasons: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Reason), np.int64))
    """Prompt tokens by `Reason`."""
    spent_seconds: float = 0.0
    """Seconds of its prefills, provided that loads from outside succeeded."""
    saved_seconds: float = 0.0
    """Further seconds that they would have taken without reuse."""


class CacheShares(NamedTuple):
    """Blocks cached at a moment, by the group of the storing request."""

    batch: int
    """Batch before the moment."""
    at: int
    """Wall-clock ns."""
    blocks: dict[Key, int]
    """Full blocks, in all windows and levels."""


MOMENTS = 120
"""Maximum number of moments that are sampled; when there are more, every second one is dropped."""
_FIRST_NS = 1


class RequestGroups(HistoryListener):
    """Listener that counts by group. The counts of all groups together equal those of an audit.

    Args:
        by: One of `DIMENSIONS`. Raises `UsageError` for another one.
        model: Prefill time; None: seconds are not counted.
    """

    def __init__(self, by: str, model: PrefillModel | None = None) -> None:
        self.by, self._rule, self._model = by, _rule(by), model
        self.totals: dict[Key, GroupTotals] = {}
        """Totals of groups with admitted requests."""
        self.evicted_blocks: Counter[tuple[Key, Key]] = Counter()
        """Full blocks evicted, by the groups of the storing request and of the one that needed the room."""
        self.recomputed_tokens: Counter[tuple[Key, Key]] = Counter()
        """Tokens computed again because of that, by the groups of the computing request and that which needed the
        room."""
        self._keys: dict[Key, int] = {None: 0}
        self._names: list[Key] = [None]
        self._of = array("i", [0])
        """Index into `_names` of each request, by its admission number plus 1."""
        self._moments: dict[int, CacheShares] = {}
        """First sample of each part of the time."""
        self._start: int | None = None
        self._width = _FIRST_NS

    def _know(self, history: HistoryFold, number: int, namespace: Namespace) -> Key:
        """Record the group of a request."""
        key = self._rule(history, history.origins[number], namespace)
        place = self._keys.setdefault(key, len(self._names))
        if place == len(self._names):
            self._names.append(key)
        self._of.extend([0] * (number + 2 - len(self._of)))
        self._of[number + 1] = place
        return key

    def _counted(self, requests: npt.NDArray[Any]) -> Iterator[tuple[Key, int]]:
        """Yield the groups of these requests, given by number, with their counts."""
        places, counts = np.unique(np.frombuffer(self._of, np.int32)[requests + 1], return_counts=True)
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            yield self._names[place], count

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Record the request's group, and charge the groups that caused its recomputed tokens."""
        key = self._know(history, admission.number, admission.namespace)
        for window, ids, lost in history.evicted_blocks(admission) if self.counting else ():
            for by, tokens in zip(window.of["gone_by"][ids].tolist(), lost.tolist(), strict=True):
                self.recomputed_tokens[key, self._names[self._of[by + 1]]] += tokens

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Count a prompt."""
        if self.counting:
            key = self._names[self._of[admission.number + 1]]
            totals = self.totals.setdefault(key, GroupTotals())
            totals.requests += 1
            totals.reasons += admission.counts
            if self._model is not None:
                seconds = seconds_by_reason(self._model, admission)
                totals.spent_seconds += self._model.start + float(seconds[Reason.EXTERNAL + 1 :].sum())
                totals.saved_seconds += float(seconds[: Reason.PARTIAL + 1].sum())

    def forked(self, history: HistoryFold, child: RunningRequest) -> None:
        """Record the child in its parent's group."""
        self._know(history, child.number, child.sequence.namespace)

    def restarted(self, history: HistoryFold) -> None:
        """Record requests without an admission in the log, of which only the namespace is known."""
        for request in history.running.values():
            self._know(history, request.number, request.sequence.namespace)

    def removed(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Count evicted blocks."""
        if self.counting and len(ids) and event.why != RemoveReason.INVALIDATED:
            needed_by = self._names[self._of[int(window.of["gone_by"][ids[0]]) + 1]]
            for owner, blocks in self._counted(window.of["stored_by"][ids]):
                self.evicted_blocks[owner, needed_by] += blocks

    def batch_ended(self, history: HistoryFold) -> None:
        """Sample the cache if a new part of the time has begun."""
        if not self.counting:
            return
        now = history.epochs.of(history.now)
        if self._start is None:
            self._start = now
        while (part := (now - self._start) // self._width) >= MOMENTS:
            self._width *= 2
            halved = dict[int, CacheShares]()
            for number, shares in self._moments.items():
                halved.setdefault(number // 2, shares)
            self._moments = halved
        if part not in self._moments:
            self._moments[part] = self.shares(history)

    def shares(self, history: HistoryFold) -> CacheShares:
        """Return the currently cached blocks by group."""
        self._of.extend([0] * (len(history.requests) + 1 - len(self._of)))
        blocks = Counter[Key]()
        for window in history.windows:
            ids = np.flatnonzero(window.of["level"] != NOWHERE)
            blocks.update(dict(self._counted(window.of["stored_by"][ids])))
        return CacheShares(history.batch, history.epochs.of(history.now), dict(blocks))

    @property
    def moments(self) -> list[CacheShares]:
        """Cached blocks over time, at most `MOMENTS` samples."""
        return list(self._moments.values())


def _mean_shares(groups: RequestGroups, until: int) -> dict[Key, float]:
    """Return the mean share of each group in the cached blocks, up to time `until` (ns)."""
    moments = groups.moments
    areas = Counter[Key]()
    for shares, end in zip(moments, [*(each.at for each in moments[1:]), until], strict=True):
        for key, blocks in shares.blocks.items():
            areas[key] += blocks * max(0, end - shares.at)
    if not (total := areas.total()):
        areas = Counter(moments[-1].blocks) if moments else areas
        total = areas.total()
    return {key: area / total for key, area in areas.items()} if total else {}


def others(number: int) -> str:
    """Format the number of groups that have no row of their own."""
    return f"{number:,} other" + "s" * (number > 1)


class GroupRow(NamedTuple):
    """Row of a group, or of all groups that have no row of their own."""

    name: str
    totals: GroupTotals
    evicted: int
    """Full blocks stored by its requests that were evicted."""
    evicted_for_it: int
    """Full blocks evicted to make room for its requests."""
    share: float
    """Mean share over time of the cached blocks that its requests had stored."""


_NONE = "(none)"
_DIGITS = 16
"""Digits of a salt's digest that are shown."""


class TopGroups:
    """The groups with the most prompt tokens, and all others as one.

    Args:
        groups: All groups.
        until: The end of the time, wall-clock ns.
        top: Number of named groups.
    """

    def __init__(self, groups: RequestGroups, until: int, top: int) -> None:
        self.groups = groups
        self.named = sorted(groups.totals, key=lambda key: -groups.totals[key].prompt_tokens)[:top]
        self.shares = _mean_shares(groups, until)
        self._shown = set(self.named)
        self.rest = self._rest()

    def _rest(self) -> GroupTotals | None:
        """Return all groups without a row of their own as one; None if there are none."""
        rest = [totals for key, totals in self.groups.totals.items() if key not in self._shown]
        if not rest:
            # Requests of no known group only have, or have evicted, blocks.
            with_blocks = {*self.shares, *(key for pair in self.groups.evicted_blocks for key in pair)}
            return GroupTotals() if None in with_blocks - self._shown else None
        reasons = np.sum([each.reasons for each in rest], axis=0)
        spent, saved = sum(each.spent_seconds for each in rest), sum(each.saved_seconds for each in rest)
        return GroupTotals(sum(each.requests for each in rest), reasons, spent, saved)

    def is_named(self, key: Key) -> bool:
        """Return True if the group has a row of its own."""
        return key in self._shown

    def unnamed(self, numbers: dict[Key, Any]) -> Any:
        """Return the sum over all groups without a row of their own."""
        return sum(each for key, each in numbers.items() if key not in self._shown)

    def name_of(self, key: Key) -> str:
        """Format a group's name."""
        if key is None:
            return _NONE
        return printable(key[:_DIGITS] if self.groups.by == "salt" else key)

    def rows(self) -> list[GroupRow]:
        """Return the named groups, then all others as one, if there are any."""
        suffered, caused = self._evictions()
        rows = [
            GroupRow(
                self.name_of(key),
                self.groups.totals[key],
                suffered[key],
                caused[key],
                self.shares.get(key, 0),
            )
            for key in self.named
        ]
        if self.rest is not None:
            number = len(self.groups.totals) - len(self.named)
            sums = [self.unnamed(numbers) for numbers in (suffered, caused, self.shares)]
            rows.append(GroupRow(others(number) if number else _NONE, self.rest, *sums))
        return rows

    def _evictions(self) -> tuple[Counter[Key], Counter[Key]]:
        """Return blocks by storing group, and by the group that needed their room."""
        suffered, caused = Counter[Key](), Counter[Key]()
        for (owner, needed_by), blocks in self.groups.evicted_blocks.items():
            suffered[owner] += blocks
            caused[needed_by] += blocks
        return suffered, caused

    def pairs(self) -> list[tuple[Key, Key, int, int]]:
        """Return (group of the blocks, group that needed the room, blocks, tokens computed again), costliest first."""
        evicted, recomputed = self.groups.evicted_blocks, self.groups.recomputed_tokens
        pairs = [(*pair, evicted[pair], recomputed[pair]) for pair in evicted.keys() | recomputed.keys()]
        return sorted(pairs, key=lambda pair: (-pair[3], -pair[2], str(pair[:2])))
