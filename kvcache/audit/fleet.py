"""Several workers' logs together: what one of them computed although another one had it cached at that moment.

Contents are compared by their names, so all logs must name blocks in the same way, and times by the workers' clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.log import LogEnd, LogReader
from events.tokens.names import NAMED_BY_ENGINE
from events.types import EventBatch
from kvcache.audit.admission import Admission
from kvcache.audit.collecting import Several
from kvcache.audit.columns import Columns, Ids
from kvcache.audit.fold import HistoryFold
from kvcache.audit.history import History
from kvcache.audit.listener import Listener
from kvcache.audit.reasons import Reason
from kvcache.audit.spread import Computed, Spread, computed, spread
from kvcache.audit.totals import Audit, Totals
from kvcache.audit.window import Window
from kvcache.errors import Unsupported
from kvcache.replay import Unreplayable

_Names = npt.NDArray[np.uint64]
_Times = npt.NDArray[np.int64]
_Tokens = npt.NDArray[np.int64]
_FOREVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class WorkerAudit:
    """One worker's log; of its first window what was cached when, and what was asked for in vain."""

    name: str
    audit: Audit
    tokens_per_block: int
    algorithm: str
    """By which blocks are named, and of how many tokens they are."""
    lives: tuple[_Names, _Times, _Times]
    """Of cached full blocks: names, from when, until when."""
    misses: tuple[_Names, _Times, _Tokens]
    """Full blocks of prompts that were computed: names, when they were asked for, how many tokens of each."""
    computed: Computed | None = None
    """The different ones of these, with what they continue."""
    end: LogEnd | None = None
    """How its log ended when it was read."""


@dataclass(slots=True)
class Fleet:
    """All workers."""

    workers: list[WorkerAudit]
    elsewhere: list[int]
    """Per worker: tokens that it computed while another worker had their blocks cached."""
    computed_on: dict[int, int]
    """How many different blocks were computed on so many workers."""
    spread: list[Spread]
    """The prefixes of which most was computed by several workers, the most first."""

    @property
    def reasons(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of all by `Reason`."""
        reasons = np.zeros(len(Reason), np.int64)
        for worker in self.workers:
            reasons += worker.audit.reasons
        return reasons


class _Presence(Listener):
    """Lives and misses of the first window, as content numbers and times."""

    def __init__(self) -> None:
        self.lives: list[tuple[Ids, _Times, int]] = []
        self.misses: list[tuple[Ids, int, _Tokens]] = []

    def looked_up(self, history: History, admission: Admission) -> None:
        blocks = len(admission.ids)
        missed = np.flatnonzero(admission.reasons[:blocks] > Reason.LAST_TOKEN)
        self.misses.append((admission.ids[missed], history.now, admission.tokens()[missed]))

    def removed(self, history: History, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        self._end(history, window, ids, history.now)

    def lost(self, history: History, window: Window, ids: Ids) -> None:
        self._end(history, window, ids, history.now)

    def _end(self, history: History, window: Window, ids: Ids, now: int) -> None:
        if len(ids) and window.of is history.windows[0].of:
            self.lives.append((ids, window.of["stored_at"][ids], now))

    def finish(self, history: History) -> None:
        """What is cached at the end of the log is there for ever."""
        for window in history.windows[:1]:
            self._end(history, window, np.flatnonzero(window.of["level"] >= 0), _FOREVER)


def audit_worker(path: Path, top: int = 10) -> WorkerAudit:
    """Audit one log of a fleet. Raises `Unsupported` for one without names or tokens, `Unreplayable`."""
    totals, presence = Totals(), _Presence()
    history = HistoryFold(Several([totals, presence]))
    history.names = Columns(name=(np.uint64, 0))
    algorithm = ""
    reader = LogReader(path)
    for batch in reader:
        _fold(history, batch, path)
        for event in batch.events:
            if isinstance(event, ev.CacheCreated):
                of = f" of {event.engine}" if event.hash_algorithm in NAMED_BY_ENGINE.values() else ""
                algorithm = f"{event.hash_algorithm}{of}, blocks of {event.tokens_per_block} tokens"
    if algorithm and (not history.key_bytes or not history.tokens_recorded):
        raise Unsupported(
            f"comparing {path} with other logs", "record tokens and names of blocks (block_hash)"
        )
    presence.finish(history)
    history.names.reach(len(history.contents))
    names = history.names["name"]
    missed = _joined([ids for ids, _, _ in presence.misses])
    at = np.repeat([now for _, now, _ in presence.misses], [len(ids) for ids, _, _ in presence.misses])
    tokens = _joined([tokens for _, _, tokens in presence.misses])
    known = names[missed] != 0
    return WorkerAudit(
        path.name,
        totals.finish(history, top),
        history.tokens_per_block,
        algorithm,
        _lives(presence, names),
        (names[missed][known], at[known].astype(np.int64), tokens[known]),
        computed(missed, names, history.contents),
        reader.end,
    )


def _fold(history: HistoryFold, batch: EventBatch, path: Path) -> None:
    """Fold a batch; what does not follow is told with the log that says it."""
    try:
        history.fold(batch)
    except Unreplayable as error:
        raise Unreplayable(error.seq, error.reason, str(path)) from error


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A log that cannot be read. The others can be audited without it."""

    path: Path
    reason: str
    """In the words of the system."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> LeftOut:
        """Why the system refuses a log."""
        return cls(path, error.strerror or str(error))


def audit_or_leave_out(path: Path, top: int = 10) -> WorkerAudit | LeftOut:
    """The same, but for a log that the system does not let us read."""
    try:
        return audit_worker(path, top)
    except OSError as error:
        return LeftOut.of(path, error)


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate([np.empty(0, np.intp), *parts])


def _lives(presence: _Presence, names: _Names) -> tuple[_Names, _Times, _Times]:
    ids = _joined([ids for ids, _, _ in presence.lives])
    begins = np.concatenate([np.empty(0, np.int64), *(begin for _, begin, _ in presence.lives)])
    ends = np.repeat([end for _, _, end in presence.lives], [len(ids) for ids, _, _ in presence.lives])
    return names[ids], begins, ends.astype(np.int64)


def together(workers: Iterable[WorkerAudit], top: int = 10) -> Fleet:
    """Compare workers, and name the `top` prefixes that several of them computed.

    Raises `Unsupported` if their blocks cannot be compared by name.
    """
    workers = sorted(workers, key=lambda worker: worker.name)
    # A log that has just been begun has no cache yet.
    kinds = sorted({worker.algorithm for worker in workers} - {""})
    if len(kinds) > 1:
        what = f"comparing blocks that are named differently ({'; '.join(kinds)})"
        raise Unsupported(what, "audit the logs one by one")
    elsewhere = [
        int(worker.misses[2][_covered(worker, [other for other in workers if other is not worker])].sum())
        for worker in workers
    ]
    asked = np.concatenate([np.empty(0, np.uint64), *(np.unique(worker.misses[0]) for worker in workers)])
    _, times = np.unique(asked, return_counts=True)
    numbers, blocks = np.unique(times, return_counts=True)
    size = max((worker.tokens_per_block for worker in workers), default=0)
    known = [(worker.name, worker.computed) for worker in workers if worker.computed is not None]
    on = dict(zip(numbers.tolist(), blocks.tolist(), strict=True))
    return Fleet(workers, elsewhere, on, spread(known, size, top))


def _covered(worker: WorkerAudit, others: list[WorkerAudit]) -> npt.NDArray[np.bool_]:
    """Of each miss whether one of the others had the block cached then."""
    asked, at, _ = worker.misses
    names = np.concatenate([np.empty(0, np.uint64), *(other.lives[0] for other in others)])
    begins = np.concatenate([np.empty(0, np.int64), *(other.lives[1] for other in others)])
    ends = np.concatenate([np.empty(0, np.int64), *(other.lives[2] for other in others)])
    found = np.zeros(len(asked), np.bool_)
    if not len(names):
        return found
    order = np.lexsort([begins, names])
    names, begins, ends = names[order], begins[order], ends[order]
    # The lives of one name stand together, by their begin: of those that began before, the latest end counts.
    starts = np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]]))
    first = np.searchsorted(names, asked, "left")
    last = np.searchsorted(names, asked, "right")
    latest = _latest(ends, starts)
    for number in np.flatnonzero(first < last).tolist():
        begun = first[number] + int(
            np.searchsorted(begins[first[number] : last[number]], at[number], "right")
        )
        found[number] = begun > first[number] and latest[begun - 1] > at[number]
    return found


def _latest(ends: _Times, starts: Ids) -> _Times:
    """The latest end so far, anew from each start."""
    latest = ends.copy()
    for begin, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(ends)], strict=True):
        if stop - begin > 1:
            latest[begin:stop] = np.maximum.accumulate(ends[begin:stop])
    return latest
