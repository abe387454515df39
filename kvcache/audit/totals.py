"""All requests of a log at once: where prompt tokens came from, and what evictions, offload and duplicates cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.packed import SLOT_BYTES
from events.types import EventBatch, MoveReason, Namespace, RequestId
from kvcache.audit.admission import Admission
from kvcache.audit.columns import Ids
from kvcache.audit.fold import HistoryFold
from kvcache.audit.histogram import Ages
from kvcache.audit.history import History
from kvcache.audit.listener import Listener
from kvcache.audit.prefixes import Prefix, hot_prefixes
from kvcache.audit.reasons import EVICTIONS, Reason
from kvcache.audit.running import Running
from kvcache.audit.timeline import Timeline
from kvcache.audit.window import Window

MOST_USES = 4
"""Blocks that were reused so often or more are counted together."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What one eviction, and those of the same step for the same request, cost later."""

    window: int
    """In tokens."""
    batch: int
    at: int
    for_request: RequestId | None
    tokens: int
    """Computed again since, whoever asked for them: as often as they were asked for."""


@dataclass(slots=True)
class LevelLives:
    """How blocks fare in one level."""

    hit_ages: Ages = field(default_factory=Ages)
    """Of reused blocks that nobody held: since their last use."""
    eviction_ages: Ages = field(default_factory=Ages)
    """Of evicted blocks (from primary to secondary, too): since their last use."""
    evicted: int = 0
    """Blocks."""
    recomputed: int = 0
    """Tokens computed again because this level had evicted their blocks for good."""


@dataclass(slots=True)
class Audit:
    """What a log says of its reuse."""

    requests: int = 0
    prompt_tokens: int = 0
    reasons: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Reason), np.int64))
    """Prompt tokens by `Reason`; their sum is `prompt_tokens`."""
    by_namespace: dict[Namespace, npt.NDArray[np.int64]] = field(default_factory=dict)
    over_time: Timeline = field(default_factory=lambda: Timeline(len(Reason)))
    refusals: int = 0
    not_loaded: int = 0
    """Of the tokens that were to be loaded from outside, those that did not come."""
    counts: tuple[tuple[int, int], tuple[int, int]] | None = None
    """Prompt tokens and reused ones since a cache was created, in the log and as its engine has counted them: where
    they differ for the first time, or else those compared last. None: there is nothing to compare."""
    lost_ages: Ages = field(default_factory=Ages)
    """Per block that was computed again because it had been evicted: since it went."""
    lost_by_priority: Counter[int] = field(default_factory=Counter)
    """Tokens computed again because of evictions, by the priority of the blocks."""
    lost_by_group: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Tokens that full attention had cached, by number and kind of the further group that had not what they need."""
    worst: list[Eviction] = field(default_factory=list)
    levels: tuple[LevelLives, LevelLives] = field(default_factory=lambda: (LevelLives(), LevelLives()))
    lifetimes: Ages = field(default_factory=Ages)
    """Of blocks that are gone: from being stored to being gone from both levels."""
    uses: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(MOST_USES + 1, np.int64))
    """Blocks that are gone by how often they were reused; the last: `MOST_USES` or more."""
    stored: int = 0
    """Full blocks."""
    never_reused: int = 0
    """Full blocks that are gone, or still cached, and that nobody reused."""
    computed_twice: int = 0
    """Tokens of full blocks that a request had computed when they were cached already, in the first window."""
    offloaded: int = 0
    onboarded: int = 0
    taken_over: int = 0
    """Blocks in secondary that a request computed nevertheless."""
    prefixes: list[Prefix] = field(default_factory=list)
    set_back: list[int] = field(default_factory=list)
    """Batches with which epochs began whose clock had begun again; `over_time` has them behind those before."""
    first_batch: int = -1
    last_batch: int = -1
    first_at: int = 0
    last_at: int = 0
    tokens_recorded: bool = True
    engine: str = ""
    """Whose decisions these are; empty: this library's manager decided."""

    @property
    def reused(self) -> int:
        """Prompt tokens that were found in the cache."""
        return int(self.reasons[: Reason.PARTIAL + 1].sum())

    @property
    def loaded(self) -> int:
        """Prompt tokens that came from outside."""
        return int(self.reasons[Reason.EXTERNAL]) - self.not_loaded


class Totals(Listener):
    """Counts, while it is `counting`."""

    def __init__(self) -> None:
        self.audit = Audit()
        self.counting = True
        """Whether what happens counts; it is known in any case."""
        self._lost: Counter[tuple[int, int, int, int]] = Counter()
        """(window, batch, time, number of the request that needed the room) → tokens."""

    def looked_up(self, history: History, admission: Admission) -> None:
        """Charge evictions with what is computed again."""
        lost = np.flatnonzero(np.isin(admission.reasons, EVICTIONS))
        if not len(lost) or not self.counting:
            return
        tokens_of = admission.tokens()
        for group, window in enumerate(history.windows):
            blocks = lost[admission.windows[lost] == group]
            ids, tokens, of = admission.ids[blocks], tokens_of[blocks], window.of
            self.audit.lost_ages.add(history.now - of["gone_at"][ids])
            for why, lives in zip((Reason.EVICTED, Reason.DROPPED), self.audit.levels, strict=True):
                lives.recomputed += int(tokens[of["why"][ids] == why].sum())
            for priority in np.unique(of["priority"][ids]):
                self.audit.lost_by_priority[int(priority)] += int(
                    tokens[of["priority"][ids] == priority].sum()
                )
            columns = (of[name][ids].tolist() for name in ("gone_batch", "gone_at", "gone_by"))
            for *row, count in zip(*columns, tokens.tolist(), strict=True):
                self._lost[group, *row] += count

    def admitted(self, history: History, admission: Admission) -> None:
        """Count a prompt."""
        if not self.counting:
            return
        audit = self.audit
        audit.requests += 1
        audit.prompt_tokens += admission.num_tokens
        audit.reasons += admission.counts
        audit.by_namespace.setdefault(admission.namespace, np.zeros(len(Reason), np.int64))[:] += (
            admission.counts
        )
        if (lacking := admission.lacking) is not None:
            lost = (lacking.stop_block - lacking.first_block) * admission.tokens_per_block
            audit.lost_by_group[lacking.group, lacking.kind] += lost
        audit.over_time.add(history.epochs.of(admission.at), admission.counts)

    def refused(self, history: History, event: ev.AdmissionRefused) -> None:
        """Count a refusal."""
        self.audit.refusals += self.counting

    def not_loaded(self, history: History, sequence: Running, tokens: int) -> None:
        """Count what did not come."""
        self.audit.not_loaded += tokens * self.counting

    def counted(self, history: History, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        """Keep what differs."""
        before = self.audit.counts
        if self.counting and (before is None or before[0] == before[1]):
            self.audit.counts = ours, theirs

    def reused(self, history: History, window: Window, ids: Ids, level: int) -> None:
        """Note how long reused blocks had been idle."""
        if self.counting:
            idle = ids[window.of["holders"][ids] == 0]
            self.audit.levels[level].hit_ages.add(history.now - window.of["used_at"][idle])

    def computed_twice(self, history: History, window: Window, blocks: int) -> None:
        """Count work done twice; what is so in one window mostly is in others."""
        if self.counting and window is history.windows[0]:
            self.audit.computed_twice += blocks * history.tokens_per_block

    def stored(self, history: History, window: Window, ids: Ids) -> None:
        """Count stored blocks."""
        self.audit.stored += len(ids) * self.counting

    def moved(self, history: History, window: Window, event: ev.BlocksMoved) -> None:
        """Count traffic between the levels."""
        if not self.counting:
            return
        audit, blocks = self.audit, len(event.to_slots) // SLOT_BYTES
        if event.why == MoveReason.ONBOARD:
            audit.onboarded += blocks
        elif event.why == MoveReason.RECOMPUTED:
            audit.taken_over += blocks
            ids = window.contents(event.to_level, event.to_slots)
            self.computed_twice(history, window, int((ids >= 0).sum()))
        else:
            audit.offloaded += blocks

    def evicted(self, history: History, window: Window, ids: Ids, level: int) -> None:
        """Count evicted blocks, and note how long they had been idle."""
        if self.counting:
            self.audit.levels[level].eviction_ages.add(history.now - window.of["used_at"][ids])
            self.audit.levels[level].evicted += len(ids)

    def removed(self, history: History, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Note how blocks that are gone had lived."""
        self.lost(history, window, ids)

    def lost(self, history: History, window: Window, ids: Ids) -> None:
        """Note how blocks that are gone had lived."""
        if self.counting:
            self.audit.lifetimes.add(history.now - window.of["stored_at"][ids])
            self._count_uses(window, ids)

    def _count_uses(self, window: Window, ids: Ids) -> None:
        uses = np.minimum(window.of["uses"][ids], MOST_USES)
        counts = np.bincount(uses, minlength=MOST_USES + 1)
        self.audit.uses += counts
        self.audit.never_reused += int(counts[0])

    def batch_ended(self, history: History) -> None:
        """Note how far the counts reach."""
        if not self.counting:
            return
        audit = self.audit
        if audit.first_batch < 0:
            audit.first_batch, audit.first_at = history.batch, history.now
        audit.last_batch, audit.last_at = history.batch, history.now

    def finish(self, history: History, top: int) -> Audit:
        """The audit, with the `top` worst evictions and hottest prefixes."""
        audit = self.audit
        audit.tokens_recorded, audit.set_back = history.tokens_recorded, history.epochs.set_back
        audit.engine = history.engine
        for window in history.windows:
            ids = np.flatnonzero(window.of["level"] >= 0)
            audit.never_reused += int((window.of["uses"][ids] == 0).sum())
        audit.worst = [
            Eviction(
                history.windows[group].created.window,
                batch,
                at,
                history.requests[by] if by >= 0 else None,
                tokens,
            )
            for (group, batch, at, by), tokens in self._lost.most_common(top)
        ]
        audit.prefixes = hot_prefixes(history, top)
        return audit


def audit_batches(batches: Iterable[tuple[EventBatch, bool]], *, top: int = 10) -> Audit:
    """Audit a log's batches, from its first one on; of each is given whether it counts.

    `top` of the worst evictions and of the prefixes that served most are named.
    """
    totals = Totals()
    history = HistoryFold(totals)
    for batch, totals.counting in batches:
        history.fold(batch)
    return totals.finish(history, top)
