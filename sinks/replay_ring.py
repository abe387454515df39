"""The latest batches of a feed as they were sent, for readers that missed some."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

ENTRY_BYTES = 100
"""Counted per batch besides its payload, so that a ring of heartbeats is bounded too."""


class ReplayRing:
    """Payloads of consecutive batches, at most `max_bytes` of them. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._bytes = 0
        self._next = 0
        self._lock = threading.Lock()

    def start(self, seq: int) -> None:
        """Forget everything; the next batch is `seq`."""
        with self._lock:
            self._payloads.clear()
            self._bytes = 0
            self._next = seq

    def append(self, seq: int, payload: bytes) -> None:
        """Add a batch; the oldest give way. After a hole in the numbers everything before it is forgotten."""
        if seq != self._next:
            self.start(seq)
        with self._lock:
            self._payloads.append(payload)
            self._bytes += len(payload) + ENTRY_BYTES
            self._next = seq + 1
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._payloads.popleft()) + ENTRY_BYTES

    def since(self, seq: int) -> list[tuple[int, bytes]] | None:
        """All batches from `seq` on; none if it is in the future, None if the ring does not reach back to it."""
        with self._lock:
            first = self._next - len(self._payloads)
            if seq < first:
                return None
            payloads = list(islice(self._payloads, min(seq, self._next) - first, None))
        return list(enumerate(payloads, seq))

    @property
    def bytes_held(self) -> int:
        """Size of what is held, as counted against `max_bytes`."""
        return self._bytes
