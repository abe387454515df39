"""A bounded buffer of recent events in TensorRT-LLM's shape, for programs that poll `get_latest_events`.

Flushed events are visible at once; beyond `max_size` dicts the oldest are dropped, which a reader sees as a gap in
`event_id`. Reading empties the buffer, from any thread.
"""

from __future__ import annotations

import threading
from collections import deque

from events.feed.inventory import Inventory
from events.formats.trtllm import Data, EventDicts
from events.types import EventBatch


class LatestEvents:
    """Buffer of the last `max_size` unread dicts."""

    def __init__(self, max_size: int) -> None:
        self._inventory, self._dicts = Inventory(), EventDicts()
        self._visible: deque[Data] = deque(maxlen=max_size)
        self._changed = threading.Condition()

    def get(self, timeout: float | None) -> list[Data]:
        """Return and remove everything visible; wait for something for `timeout` seconds (None: for ever)."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._visible), timeout)
            events = list(self._visible)
            self._visible.clear()
            return events

    def publish(self, batch: EventBatch) -> None:
        """Make the events of a batch visible."""
        changes = self._inventory.fold(batch)
        with self._changed:
            self._visible.extend(self._dicts.dicts(changes))
            self._dicts.settle()
            self._changed.notify_all()
