"""Totals over all requests of a log: sources of prompt tokens, and the cost of evictions, offload and duplicates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.packed import SLOT_BYTES
from events.types import PRIMARY, EventBatch, MoveReason, Namespace, RequestId
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.contents import Ids, Window
from kvcache.audit.histogram import Ages
from kvcache.audit.history import HistoryFold, HistoryListener, RunningRequest
from kvcache.audit.reasons import CountedByReason, Reason
from kvcache.phrases import count, duration, share

PARTS = 120
"""Maximum number of parts of a timeline; when there are more, pairs of parts are merged."""
_FIRST_NS = 1_000_000_000


class Timeline:
    """Sums per part of the time since the first entry."""

    def __init__(self, columns: int) -> None:
        self.start: int | None = None
        """Wall-clock ns of the first entry."""
        self.width = _FIRST_NS
        """Width of each part, in ns."""
        self.sums = np.zeros((PARTS, columns), np.int64)
        self._used = 0

    def add(self, at: int, numbers: npt.NDArray[np.int64]) -> None:
        """Add to the part of this time; times before the first count as the first."""
        if self.start is None:
            self.start = at
        part = max(0, at - self.start) // self.width
        while part >= PARTS:
            self._join()
            part //= 2
        self.sums[part] += numbers
        self._used = max(self._used, part + 1)

    def _join(self) -> None:
        joined = self.sums[::2] + self.sums[1::2]
        self.sums[:] = 0
        self.sums[: PARTS // 2] = joined
        self.width *= 2
        self._used = -(-self._used // 2)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The parts up to the last that is not empty."""
        return self.sums[: self._used]


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """Consecutive blocks that were reused equally often, with no other reused blocks between or next to them."""

    number: int
    parent: int | None
    """Number of the prefix that it continues."""
    first: int
    stop: int
    """End of the prefix in tokens of the prompt, which starts at `first`."""
    times: int
    """Number of reuses."""
    tokens_served: int
    last_used: int
    """Wall-clock ns."""
    name: str | None
    """Name of the last block, 16 hex digits; None if the log has no names."""
    stored_by: RequestId | None
    cached: bool
    """True if it is cached at the end of the log, in any window."""


def hot_prefixes(history: HistoryFold, top: int) -> list[HotPrefix]:
    """Return the `top` prefixes that served the most tokens, in descending order, then the further ones that they
    continue.

    Reuses of a block are those of the window in which it was reused most often.
    """
    if not history.windows or not len(history.contents):
        return []
    history.reach()
    rows = len(history.contents)
    times = np.max([window.of["served"][:rows] for window in history.windows], axis=0)
    parents = history.contents.parents()
    served = np.flatnonzero(times > 0)
    children: defaultdict[int, list[int]] = defaultdict(list)
    for content, parent in zip(served.tolist(), parents[served].tolist(), strict=True):
        children[parent].append(content)
    chains = [*chains_of(children, children[-1], times.tolist().__getitem__)]
    tokens = [len(chain) * int(times[chain[0]]) for _, _, chain in chains]
    wanted = dict.fromkeys(sorted(range(len(chains)), key=lambda number: -tokens[number])[:top])
    for best in list(wanted):
        number = chains[best][0]
        while number >= 0 and number not in wanted:
            wanted[number] = None
            number = chains[number][0]
    return [_prefix(history, number, *chains[number], int(times[chains[number][2][0]])) for number in wanted]


def chains_of(
    children: dict[int, list[int]], roots: Iterable[int], value: Callable[[int], object]
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the blocks of a tree in chains of one value, parents before children: (number of the chain that it
    continues or -1, blocks before it, its blocks).
    """
    stack, number = [(-1, 0, root) for root in roots], 0
    while stack:
        above, depth, block = stack.pop()
        chain = [block]
        while len(after := children.get(chain[-1], [])) == 1 and value(after[0]) == value(block):
            chain += after
        yield above, depth, chain
        stack += [(number, depth + len(chain), child) for child in children.get(chain[-1], ())]
        number += 1


def _prefix(
    history: HistoryFold, number: int, above: int, depth: int, chain: list[int], times: int
) -> HotPrefix:
    size, first = history.tokens_per_block, chain[0]
    stored_by = next(
        (by for window in history.windows if (by := int(window.of["stored_by"][first])) >= 0), -1
    )
    return HotPrefix(
        number,
        above if above >= 0 else None,
        depth * size,
        (depth + len(chain)) * size,
        times,
        times * len(chain) * size,
        max(int(window.of["used_at"][chain].max()) for window in history.windows),
        name.hex() if (name := history.names["name"][chain[-1]].tobytes()).strip(b"\0") else None,
        history.request_id(stored_by),
        any(bool((window.of["level"][chain] >= 0).all()) for window in history.windows),
    )


MOST_USES = 4
"""Number of reuses from which on blocks are counted together."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Later cost of one eviction, and of those of the same step for the same request."""

    window: int
    """Window, in tokens."""
    batch: int
    at: int
    for_request: RequestId | None
    tokens: int
    """Tokens computed again since, by any request, counted each time."""


@dataclass(slots=True)
class LevelLives:
    """Lives of blocks in one level."""

    hit_ages: Ages = field(default_factory=Ages)
    """Ages of reused blocks that no request held: time since their last use."""
    eviction_ages: Ages = field(default_factory=Ages)
    """Ages of evicted blocks, also from primary to secondary: time since their last use."""
    evicted: int = 0
    """Evicted blocks."""
    recomputed: int = 0
    """Tokens computed again because this level had evicted their blocks for good."""


@dataclass(slots=True)
class Audit(CountedByReason):
    """Reuse in a log, as totals."""

    requests: int = 0
    reasons: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Reason), np.int64))
    """Prompt tokens by `Reason`; their sum is `prompt_tokens`."""
    by_namespace: dict[Namespace, npt.NDArray[np.int64]] = field(default_factory=dict)
    over_time: Timeline = field(default_factory=lambda: Timeline(len(Reason)))
    refusals: int = 0
    not_loaded: int = 0
    """Tokens that were to be loaded from outside and did not arrive."""
    counts: tuple[tuple[int, int], tuple[int, int]] | None = None
    """Prompt and reused tokens since a cache was created, by the log and by its engine: at the first difference, or
    else at the last comparison. None: there is nothing to compare."""
    lost_ages: Ages = field(default_factory=Ages)
    """Per block that was computed again because it had been evicted: time since the eviction."""
    lost_by_priority: Counter[int] = field(default_factory=Counter)
    """Tokens computed again because of evictions, by the priority of the blocks."""
    lost_by_group: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Tokens that full attention had cached and a further group lacked, by that group's number and kind."""
    worst: list[Eviction] = field(default_factory=list)
    levels: tuple[LevelLives, LevelLives] = field(default_factory=lambda: (LevelLives(), LevelLives()))
    lifetimes: Ages = field(default_factory=Ages)
    """Lifetimes of blocks that are gone: from being stored to being gone from both levels."""
    uses: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(MOST_USES + 1, np.int64))
    """Blocks that are gone by number of reuses; the last entry: `MOST_USES` or more."""
    stored: int = 0
    """Full blocks stored."""
    never_reused: int = 0
    """Full blocks, gone or still cached, that were never reused."""
    computed_twice: int = 0
    """Tokens of full blocks that a request computed although they were already cached, in the first window."""
    offloaded: int = 0
    onboarded: int = 0
    taken_over: int = 0
    """Blocks in secondary that a request computed nevertheless."""
    prefixes: list[HotPrefix] = field(default_factory=list)
    set_back: list[int] = field(default_factory=list)
    """Batches that began an epoch with a clock set back; `over_time` shifts them after the preceding ones."""
    first_batch: int = -1
    last_batch: int = -1
    first_at: int = 0
    last_at: int = 0
    tokens_recorded: bool = True
    engine: str = ""
    """Engine that decided; empty: this library's manager."""
    created: ev.CacheCreated | None = None
    """The last cache of the log."""

    @property
    def loaded(self) -> int:
        """Prompt tokens loaded from outside."""
        return int(self.reasons[Reason.EXTERNAL]) - self.not_loaded


class AuditTotals(HistoryListener):
    """Listener that counts what happens while it listens."""

    def __init__(self) -> None:
        self.audit = Audit()
        self._lost: Counter[tuple[int, int, int, int]] = Counter()
        """Tokens by (window, batch, time, number of the request that needed the room)."""

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Charge evictions with the tokens that are computed again."""
        for group, (window, ids, tokens) in enumerate(history.evicted_blocks(admission)):
            of = window.of
            self.audit.lost_ages.add(history.now - of["gone_at"][ids])
            for why, lives in zip((Reason.EVICTED, Reason.DROPPED), self.audit.levels, strict=True):
                lives.recomputed += int(tokens[of["why"][ids] == why].sum())
            priorities = of["priority"][ids]
            for priority in np.unique(priorities).tolist():
                self.audit.lost_by_priority[priority] += int(tokens[priorities == priority].sum())
            columns = (of[name][ids].tolist() for name in ("gone_batch", "gone_at", "gone_by"))
            for *row, recomputed in zip(*columns, tokens.tolist(), strict=True):
                self._lost[group, *row] += recomputed

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Count a prompt."""
        audit = self.audit
        audit.requests += 1
        audit.reasons += admission.counts
        audit.by_namespace.setdefault(admission.namespace, np.zeros(len(Reason), np.int64))[:] += (
            admission.counts
        )
        if (lacking := admission.lacking) is not None:
            lost = (lacking.stop_block - lacking.first_block) * admission.tokens_per_block
            audit.lost_by_group[lacking.group, lacking.kind] += lost
        audit.over_time.add(history.epochs.of(admission.at), admission.counts)

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """Count a refusal."""
        self.audit.refusals += 1

    def not_loaded(self, history: HistoryFold, request: RunningRequest, tokens: int) -> None:
        """Count tokens that did not arrive."""
        self.audit.not_loaded += tokens

    def counted(self, history: HistoryFold, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        """Keep the first counts that differ."""
        before = self.audit.counts
        if before is None or before[0] == before[1]:
            self.audit.counts = ours, theirs

    def reused(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksReused) -> None:
        """Record idle times of reused blocks."""
        idle = ids[window.of["holders"][ids] == 0]
        self.audit.levels[event.level].hit_ages.add(history.now - window.of["used_at"][idle])

    def computed_twice(self, history: HistoryFold, window: Window, blocks: int) -> None:
        """Count tokens computed twice, in the first window only, because other windows mostly repeat it."""
        if window is history.windows[0]:
            self.audit.computed_twice += blocks * history.tokens_per_block

    def stored(self, history: HistoryFold, window: Window, ids: Ids) -> None:
        """Count stored blocks."""
        self.audit.stored += len(ids)

    def moved(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksMoved) -> None:
        """Count traffic between the levels."""
        audit, blocks = self.audit, len(event.to_slots) // SLOT_BYTES
        if event.why == MoveReason.ONBOARD:
            audit.onboarded += blocks
        elif event.why == MoveReason.RECOMPUTED:
            audit.taken_over += blocks
            self.computed_twice(history, window, len(ids))
        else:
            audit.offloaded += blocks

    def evicted(self, history: HistoryFold, window: Window, ids: Ids, level: int) -> None:
        """Count evicted blocks, and record their idle times."""
        self.audit.levels[level].eviction_ages.add(history.now - window.of["used_at"][ids])
        self.audit.levels[level].evicted += len(ids)

    def lost(self, history: HistoryFold, window: Window, ids: Ids) -> None:
        """Record the lives of blocks that are gone."""
        self.audit.lifetimes.add(history.now - window.of["stored_at"][ids])
        uses = np.minimum(window.of["uses"][ids], MOST_USES)
        counts = np.bincount(uses, minlength=MOST_USES + 1)
        self.audit.uses += counts
        self.audit.never_reused += int(counts[0])

    def batch_ended(self, history: HistoryFold) -> None:
        """Record the latest counts."""
        audit = self.audit
        if audit.first_batch < 0:
            audit.first_batch, audit.first_at = history.batch, history.now
        audit.last_batch, audit.last_at = history.batch, history.now

    def finish(self, history: HistoryFold, top: int) -> Audit:
        """Return the audit, with the `top` worst evictions and hottest prefixes."""
        audit = self.audit
        audit.tokens_recorded, audit.set_back = history.tokens_recorded, history.epochs.set_back
        audit.engine, audit.created = history.engine, history.replayed.state.created
        for window in history.windows:
            ids = np.flatnonzero(window.of["level"] >= 0)
            audit.never_reused += int((window.of["uses"][ids] == 0).sum())
        sizes = [window.created.window for window in history.windows]
        audit.worst = [
            Eviction(sizes[group], batch, at, history.request_id(by), tokens)
            for (group, batch, at, by), tokens in self._lost.most_common(top)
        ]
        audit.prefixes = hot_prefixes(history, top)
        return audit


def audit_batches(
    batches: Iterable[tuple[EventBatch, bool]],
    *counting: HistoryListener,
    top: int = 10,
    others: Sequence[HistoryListener] = (),
) -> Audit:
    """Audit a log's batches from the first one on; each comes with a flag that says if it counts.

    `top` is the number of worst evictions and of hottest prefixes that are named. `counting` receive what counts,
    `others` everything.
    """
    totals, history = AuditTotals(), HistoryFold()
    for batch, counts in batches:
        for each in others:
            each.counting = counts
        history.listeners = (*others, totals, *counting) if counts else (*others,)
        history.fold(batch)
    return totals.finish(history, top)


WORTH = 0.01
"""Least part of all prompt tokens that evictions must cost for a larger level to pay."""
_FEW = 20
"""Number of hits below which ages are not significant."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on the size of one level."""

    level: int
    size: Literal["too_small", "large_enough", "unknown"]
    """Size by the cost of its evictions; unknown if the log has no tokens."""
    recomputed: int
    """Tokens computed again because this level had evicted them."""
    prompt_tokens: int
    hits: int
    """Number of hits behind the ages."""
    evictions: int
    early_eviction: float | None
    """First decile of the ages of evicted blocks, in seconds."""
    late_hit: float | None
    """Last decile of the ages of reused blocks, in seconds."""
    offloaded: int
    """Blocks moved to secondary instead of being dropped."""
    onboarded: int

    @property
    def crosses(self) -> bool:
        """True if late hits are as late as early evictions."""
        late, early = self.late_hit, self.early_eviction
        return late is not None and early is not None and late >= early

    def in_words(self) -> list[str]:
        """Return one sentence each on the cost, the ages, and offloaded blocks."""
        said = [self._cost()]
        if self.late_hit is not None and self.early_eviction is not None:
            said.append(self._ages(self.late_hit, self.early_eviction))
        if self.offloaded:
            moved = count(self.offloaded, "block")
            said.append(f"evictions to secondary: {moved} offloaded, {self.onboarded:,} onboarded again")
        return said

    def _cost(self) -> str:
        if self.size == "unknown":
            return "cost of evictions unknown: the log does not record tokens"
        name = self.size.replace("_", " ")
        if not self.recomputed:
            return f"{name}: nothing evicted was computed again"
        part = share(self.recomputed / max(self.prompt_tokens, 1))
        tokens = count(self.recomputed, "token")
        return f"{name}: {tokens} were computed again after eviction, {part} of all prompt tokens"

    def _ages(self, late_hit: float, early_eviction: float) -> str:
        few = " (too few to be significant)" if self.hits < _FEW else ""
        rests = f"10 % of {count(self.hits, 'hit')}{few} come after {duration(late_hit)} or more"
        evicted = f"10 % of {count(self.evictions, 'eviction')} within {duration(early_eviction)}"
        return f"{rests}, {evicted}: the curves {'cross' if self.crosses else 'do not cross'}"


def verdict_on(audit: Audit, level: int) -> Verdict | None:
    """Return the verdict on a level; None if it has evicted nothing."""
    lives = audit.levels[level]
    if not lives.eviction_ages.total:
        return None
    costly = lives.recomputed >= WORTH * audit.prompt_tokens and lives.recomputed
    known: Literal["too_small", "large_enough"] = "too_small" if costly else "large_enough"
    return Verdict(
        level,
        known if audit.tokens_recorded else "unknown",
        lives.recomputed,
        audit.prompt_tokens,
        lives.hit_ages.total,
        lives.eviction_ages.total,
        lives.eviction_ages.quantile(0.1),
        lives.hit_ages.quantile(0.9),
        audit.offloaded if level == PRIMARY else 0,
        audit.onboarded,
    )
