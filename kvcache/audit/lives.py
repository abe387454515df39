"""The lives of cached full blocks, as rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from events import types as ev
from events.structs import LEVEL_NAMES
from events.types import MoveReason, RequestId
from kvcache.audit.collecting import Collector
from kvcache.audit.columns import Columns, Ids
from kvcache.audit.history import History
from kvcache.audit.reasons import Reason
from kvcache.audit.rows import BlockLife
from kvcache.audit.window import NOWHERE, Window


class _Alive:
    """The blocks of one window that are cached, and what is known of their lives. Rows are contents."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.of = Columns(
            alive=(np.bool_, False),
            by=(np.int32, NOWHERE),
            batch=(np.int64, NOWHERE),
            ts=(np.int64, 0),
            reused=(np.int32, 0),
            offloads=(np.int32, 0),
            offloaded_ts=(np.int64, 0),
            onboards=(np.int32, 0),
            onboarded_ts=(np.int64, 0),
        )

    def begin(self, ids: Ids, by: Any, batch: int, ts: int) -> None:
        """Blocks are cached from now on."""
        of = self.of
        of.reach(int(ids.max(initial=-1)) + 1)
        of["alive"][ids], of["by"][ids], of["batch"][ids], of["ts"][ids] = True, by, batch, ts
        for name in ("reused", "offloads", "onboards"):
            of[name][ids] = 0

    def known(self) -> Ids:
        """All that are cached."""
        return np.flatnonzero(self.of["alive"])

    def lost(self) -> Ids:
        """Those that are cached no more, of which nobody has told yet."""
        ids = self.known()
        gone: Ids = ids[self.window.of["level"][ids] == NOWHERE]
        return gone


class Lives(Collector[BlockLife]):
    """A row when a block is gone; at the log's end those that are cached still."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: list[_Alive] = []
        self._evictions = 0

    def _of(self, history: History, window: Window) -> _Alive:
        self._reach(history)
        return self._windows[history.windows.index(window)]

    def _reach(self, history: History) -> None:
        self._windows += [_Alive(window) for window in history.windows[len(self._windows) :]]

    def stored(self, history: History, window: Window, ids: Ids) -> None:
        """Lives begin."""
        self._of(history, window).begin(ids, window.of["stored_by"][ids], history.batch, history.now)

    def reused(self, history: History, window: Window, ids: Ids, level: int) -> None:
        """Count."""
        self._of(history, window).of["reused"][ids] += 1

    def moved(self, history: History, window: Window, event: ev.BlocksMoved) -> None:
        """Count copies."""
        names = _COPIES.get(event.why)
        if names is not None:
            ids = window.contents(event.to_level, event.to_slots)
            ids, of = ids[ids >= 0], self._of(history, window).of
            of[names[0]][ids] += 1
            of[names[1]][ids] = history.now

    def removed(self, history: History, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Lives end for want of room."""
        self._end(history, self._of(history, window), ids, self._evictions)
        self._evictions += 1

    def cleared(self, history: History, event: ev.CacheCleared, why: Reason) -> None:
        """All lives end."""
        for alive in self._windows:
            self._end(history, alive, alive.lost())

    def restarted(self, history: History, before: list[Ids]) -> None:
        """Lives end but for what the exported state has; what it has besides begins to be known."""
        for alive in self._windows:
            self._end(history, alive, alive.lost())
        self._reach(history)
        for alive, window in zip(self._windows, history.windows, strict=False):
            alive.window = window
            cached = np.flatnonzero(window.of["level"] != NOWHERE)
            alive.of.reach(len(window.of["level"]))
            alive.begin(cached[~alive.of["alive"][cached]], NOWHERE, history.batch, history.now)

    def remaining(self, history: History) -> Iterator[list[BlockLife]]:
        """What is cached."""
        for alive in self._windows:
            ids = alive.known()
            for begin in range(0, len(ids), _MOST):
                yield _rows(history, alive, ids[begin : begin + _MOST], None)

    def _end(self, history: History, alive: _Alive, ids: Ids, eviction: int | None = None) -> None:
        if len(ids):
            self.rows += _rows(history, alive, ids, eviction)
            alive.of["alive"][ids] = False


_MOST = 1 << 13
"""Rows that are made at once."""
_COPIES = {
    MoveReason.OFFLOAD: ("offloads", "offloaded_ts"),
    MoveReason.ONBOARD: ("onboards", "onboarded_ts"),
}


def _rows(history: History, alive: _Alive, ids: Ids, eviction: int | None) -> list[BlockLife]:
    """The lives of these blocks, as they are now."""
    mine, known = alive.of, alive.window.of
    level = known["level"][ids]
    gone = level == NOWHERE
    requests = history.requests
    by, gone_by = mine["by"][ids].tolist(), np.where(gone, known["gone_by"][ids], NOWHERE).tolist()
    offloads, onboards = mine["offloads"][ids], mine["onboards"][ids]
    count = len(ids)
    columns: list[list[Any]] = [
        [alive.window.created.window] * count,
        ids.tolist(),
        [history.tokens_per_block] * count,
        [_request(requests, number) for number in by],
        [None if number < 0 else number for number in by],
        mine["batch"][ids].tolist(),
        mine["ts"][ids].tolist(),
        known["priority"][ids].tolist(),
        mine["reused"][ids].tolist(),
        # What is known from before a restart may be older than the life.
        np.maximum(known["used_at"][ids], mine["ts"][ids]).tolist(),
        offloads.tolist(),
        _where(offloads > 0, mine["offloaded_ts"][ids]),
        onboards.tolist(),
        _where(onboards > 0, mine["onboarded_ts"][ids]),
        [None if each < 0 else LEVEL_NAMES[each] for each in level.tolist()],
        _where(gone, known["gone_batch"][ids]),
        _where(gone, known["gone_at"][ids]),
        [None if why is None else _LABELS[why] for why in _where(gone, known["why"][ids])],
        [_request(requests, number) for number in gone_by],
        [None if number < 0 else number for number in gone_by],
        [eviction] * count,
    ]
    return list(map(BlockLife._make, zip(*columns, strict=True)))


_LABELS = [reason.label for reason in Reason]


def _request(requests: list[RequestId], number: int) -> RequestId | None:
    return requests[number] if number >= 0 else None


def _where(there: Any, values: Any) -> list[int | None]:
    """The values that there are; None elsewhere."""
    return [
        value if is_there else None for value, is_there in zip(values.tolist(), there.tolist(), strict=True)
    ]
