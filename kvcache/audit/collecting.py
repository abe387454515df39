"""Listeners that make rows, and several listeners at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from events import types as ev
from kvcache.audit.admission import Admission
from kvcache.audit.columns import Ids
from kvcache.audit.history import History
from kvcache.audit.listener import Listener
from kvcache.audit.running import Running
from kvcache.audit.window import Window

Row = TypeVar("Row")


class Collector(Listener, Generic[Row]):
    """Keeps rows until somebody takes them."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def take(self) -> list[Row]:
        """The rows since the last call."""
        rows, self.rows = self.rows, []
        return rows

    def remaining(self, history: History) -> Iterator[list[Row]]:
        """Rows of what is not over at the log's end, some at a time."""
        yield from ()


class Several(Listener):
    """Tells several listeners."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def looked_up(self, history: History, admission: Admission) -> None:  # noqa: D102  as Listener's
        for each in self._listeners:
            each.looked_up(history, admission)

    def admitted(self, history: History, admission: Admission) -> None:  # noqa: D102
        for each in self._listeners:
            each.admitted(history, admission)

    def refused(self, history: History, event: ev.AdmissionRefused) -> None:  # noqa: D102
        for each in self._listeners:
            each.refused(history, event)

    def forked(self, history: History, child: Running) -> None:  # noqa: D102
        for each in self._listeners:
            each.forked(history, child)

    def ended(self, history: History, sequence: Running, event: ev.SequenceRemoved) -> None:  # noqa: D102
        for each in self._listeners:
            each.ended(history, sequence, event)

    def not_loaded(self, history: History, sequence: Running, tokens: int) -> None:  # noqa: D102
        for each in self._listeners:
            each.not_loaded(history, sequence, tokens)

    def counted(self, history: History, ours: tuple[int, int], theirs: tuple[int, int]) -> None:  # noqa: D102
        for each in self._listeners:
            each.counted(history, ours, theirs)

    def reused(self, history: History, window: Window, ids: Ids, level: int) -> None:  # noqa: D102
        for each in self._listeners:
            each.reused(history, window, ids, level)

    def computed_twice(self, history: History, window: Window, blocks: int) -> None:  # noqa: D102
        for each in self._listeners:
            each.computed_twice(history, window, blocks)

    def stored(self, history: History, window: Window, ids: Ids) -> None:  # noqa: D102
        for each in self._listeners:
            each.stored(history, window, ids)

    def moved(self, history: History, window: Window, event: ev.BlocksMoved) -> None:  # noqa: D102
        for each in self._listeners:
            each.moved(history, window, event)

    def evicted(self, history: History, window: Window, ids: Ids, level: int) -> None:  # noqa: D102
        for each in self._listeners:
            each.evicted(history, window, ids, level)

    def removed(self, history: History, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:  # noqa: D102
        for each in self._listeners:
            each.removed(history, window, ids, event)

    def lost(self, history: History, window: Window, ids: Ids) -> None:  # noqa: D102
        for each in self._listeners:
            each.lost(history, window, ids)

    def restarted(self, history: History) -> None:  # noqa: D102
        for each in self._listeners:
            each.restarted(history)

    def batch_ended(self, history: History) -> None:  # noqa: D102
        for each in self._listeners:
            each.batch_ended(history)
