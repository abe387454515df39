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


class Lives(Collector[BlockLife]):
    """A row when a block is gone; at the log's end those that are cached still."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[Columns, Columns] = {}
        """By what is known of a window's contents: how often each was copied in its life, and when last."""
        self._evictions = 0

    def _copies_of(self, window: Window, ids: Ids) -> Columns:
        copies = self._copies.get(window.of)
        if copies is None:
            copies = self._copies[window.of] = Columns(
                offloads=(np.int32, 0),
                offloaded_ts=(np.int64, 0),
                onboards=(np.int32, 0),
                onboarded_ts=(np.int64, 0),
            )
        copies.reach(int(ids.max(initial=-1)) + 1)
        return copies

    def moved(self, history: History, window: Window, event: ev.BlocksMoved) -> None:
        """Count copies."""
        names = _COPIES.get(event.why)
        if names is not None:
            ids = window.contents(event.to_level, event.to_slots)
            ids = ids[ids >= 0]
            copies = self._copies_of(window, ids)
            copies[names[0]][ids] += 1
            copies[names[1]][ids] = history.now

    def removed(self, history: History, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Lives end for want of room."""
        self._end(history, window, ids, self._evictions)
        self._evictions += 1

    def lost(self, history: History, window: Window, ids: Ids) -> None:
        """Lives end with the cache."""
        self._end(history, window, ids)

    def remaining(self, history: History) -> Iterator[list[BlockLife]]:
        """What is cached."""
        for window in history.windows:
            ids = np.flatnonzero(window.of["level"] != NOWHERE)
            for begin in range(0, len(ids), _MOST):
                some = ids[begin : begin + _MOST]
                yield _rows(history, window, self._copies_of(window, some), some, None)

    def _end(self, history: History, window: Window, ids: Ids, eviction: int | None = None) -> None:
        if len(ids):
            copies = self._copies_of(window, ids)
            self.rows += _rows(history, window, copies, ids, eviction)
            copies["offloads"][ids] = copies["onboards"][ids] = 0


_MOST = 1 << 13
"""Rows that are made at once."""
_COPIES = {
    MoveReason.OFFLOAD: ("offloads", "offloaded_ts"),
    MoveReason.ONBOARD: ("onboards", "onboarded_ts"),
}


def _rows(
    history: History, window: Window, copies: Columns, ids: Ids, eviction: int | None
) -> list[BlockLife]:
    """The lives of these blocks, as they are now."""
    known = window.of
    level = known["level"][ids]
    gone = level == NOWHERE
    requests = history.requests
    by, gone_by = known["stored_by"][ids].tolist(), np.where(gone, known["gone_by"][ids], NOWHERE).tolist()
    offloads, onboards = copies["offloads"][ids], copies["onboards"][ids]
    count = len(ids)
    columns: list[list[Any]] = [
        [window.created.window] * count,
        ids.tolist(),
        [history.tokens_per_block] * count,
        [_request(requests, number) for number in by],
        [None if number < 0 else number for number in by],
        known["stored_batch"][ids].tolist(),
        known["stored_at"][ids].tolist(),
        known["priority"][ids].tolist(),
        known["uses"][ids].tolist(),
        known["used_at"][ids].tolist(),
        offloads.tolist(),
        _where(offloads > 0, copies["offloaded_ts"][ids]),
        onboards.tolist(),
        _where(onboards > 0, copies["onboarded_ts"][ids]),
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
