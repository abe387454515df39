"""The latest batches of a feed as they were sent, for readers that missed some."""

from __future__ import annotations

ENTRY_BYTES = 100
"""Counted per batch besides its payload, so that a ring of heartbeats is bounded too."""


class ReplayRing:
    """Payloads of consecutive batches, at most `max_bytes` of them. One thread writes, any may read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.start(0)

    def start(self, seq: int) -> None:
        """Forget everything; the next batch is `seq`."""
        self._payloads: dict[int, bytes] = {}
        self._bytes = 0
        self.next_seq = seq
        """The number of the batch that comes next."""

    def append(self, seq: int, payload: bytes) -> None:
        """Add a batch; the oldest give way. After a hole in the numbers everything before it is forgotten."""
        if seq != self.next_seq:
            self.start(seq)
        self._payloads[seq] = payload
        self._bytes += len(payload) + ENTRY_BYTES
        self.next_seq = seq + 1
        while self._bytes > self._max_bytes:
            oldest = self._payloads.pop(self.next_seq - len(self._payloads))
            self._bytes -= len(oldest) + ENTRY_BYTES

    def get(self, seq: int) -> bytes | None:
        """The payload of a batch; None if it is not held."""
        return self._payloads.get(seq)
