"""Removals of cached content, as rows."""

from __future__ import annotations

from events import types as ev
from events.packed import SLOT_BYTES
from events.structs import LEVEL_NAMES
from kvcache.audit.collecting import Collector
from kvcache.audit.columns import Ids
from kvcache.audit.history import History
from kvcache.audit.rows import EvictionRow
from kvcache.audit.window import Window


class Evictions(Collector[EvictionRow]):
    """A row per `BlocksRemoved`."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def removed(self, history: History, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Add a row."""
        sequence = None if event.handle is None else history.running.get(event.handle)
        row = EvictionRow(
            eviction=self._count,
            seq=history.batch,
            ts=history.now,
            window=window.created.window,
            level=LEVEL_NAMES[event.level],
            why=str(event.why),
            blocks=len(event.slots) // SLOT_BYTES,
            full_blocks=len(ids),
            never_reused=int((window.of["uses"][ids] == 0).sum()),
            for_request=None if sequence is None else sequence.request_id,
            for_admission=None if sequence is None else sequence.number,
        )
        self._count += 1
        self.rows.append(row)
