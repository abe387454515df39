"""The latest batches of a feed as they were sent, for readers that missed some."""

from __future__ import annotations

import threading

ENTRY_BYTES = 100
"""Counted per batch besides its payload, so that a ring of heartbeats is bounded too."""


class ReplayRing:
    """Payloads of consecutive batches, at most `max_bytes` of them. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._payloads: dict[int, bytes] = {}
        self._bytes = 0
        self._next = 0
        self._lock = threading.Lock()

    @property
    def next_seq(self) -> int:
        """The number of the batch that comes next."""
        return self._next

    @property
    def bytes_held(self) -> int:
        """Size of what is held, as counted against `max_bytes`."""
        return self._bytes

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
            self._payloads[seq] = payload
            self._bytes += len(payload) + ENTRY_BYTES
            self._next = seq + 1
            while self._bytes > self._max_bytes:
                oldest = self._payloads.pop(self._next - len(self._payloads))
                self._bytes -= len(oldest) + ENTRY_BYTES

    def get(self, seq: int) -> bytes | None:
        """The payload of a batch; None if it is not held."""
        with self._lock:
            return self._payloads.get(seq)
