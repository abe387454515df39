"""Several listeners of one history."""

from __future__ import annotations

from events import types as ev
from kvcache.audit.admission import Admission
from kvcache.audit.columns import Ids
from kvcache.audit.history import History
from kvcache.audit.listener import Listener
from kvcache.audit.reasons import Reason
from kvcache.audit.running import Running
from kvcache.audit.window import Window


class Several(Listener):
    """Tells each of them everything."""

    def __init__(self, *listeners: Listener) -> None:
        self._all = listeners

    def looked_up(self, history: History, admission: Admission) -> None:
        """As `Listener` says; so are all others."""
        for each in self._all:
            each.looked_up(history, admission)

    def admitted(self, history: History, admission: Admission) -> None:
        """Pass it on."""
        for each in self._all:
            each.admitted(history, admission)

    def refused(self, history: History, event: ev.AdmissionRefused) -> None:
        """Pass it on."""
        for each in self._all:
            each.refused(history, event)

    def ended(self, history: History, sequence: Running, event: ev.SequenceRemoved) -> None:
        """Pass it on."""
        for each in self._all:
            each.ended(history, sequence, event)

    def reused(self, history: History, window: Window, ids: Ids, level: int) -> None:
        """Pass it on."""
        for each in self._all:
            each.reused(history, window, ids, level)

    def computed_twice(self, history: History, blocks: int) -> None:
        """Pass it on."""
        for each in self._all:
            each.computed_twice(history, blocks)

    def stored(self, history: History, window: Window, ids: Ids) -> None:
        """Pass it on."""
        for each in self._all:
            each.stored(history, window, ids)

    def moved(self, history: History, window: Window, event: ev.BlocksMoved) -> None:
        """Pass it on."""
        for each in self._all:
            each.moved(history, window, event)

    def removed(self, history: History, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Pass it on."""
        for each in self._all:
            each.removed(history, window, ids, event)

    def cleared(self, history: History, event: ev.CacheCleared, why: Reason) -> None:
        """Pass it on."""
        for each in self._all:
            each.cleared(history, event, why)

    def restarted(self, history: History, before: list[Ids]) -> None:
        """Pass it on."""
        for each in self._all:
            each.restarted(history, before)

    def batch_ended(self, history: History) -> None:
        """Pass it on."""
        for each in self._all:
            each.batch_ended(history)
