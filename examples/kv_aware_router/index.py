"""Which worker has which blocks, folded from the feeds of all workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from events.subscribe.continuity import Report
from kvcache import PrefixIndex


class Overlaps(Protocol):
    """Interface of an index as the balancer uses it. Workers are identified by the topics of their feeds."""

    def fold(self, worker: str, report: Report) -> None:
        """Take in what a worker's feed says."""

    def drop(self, worker: str) -> None:
        """Forget a worker that has gone, and what may still be heard of it."""

    def overlap(self, tokens: list[int]) -> Mapping[str, int]:
        """Leading tokens of a prompt that each worker has in whole blocks; a worker that has none may be missing."""

    def blocks(self, worker: str) -> int:
        """How many blocks a worker has, as far as is known."""


class FleetIndex:
    """Thread-safe `kvcache.PrefixIndex` that ignores reports of removed workers."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._lock = threading.Lock()
        self._gone: set[str] = set()

    def fold(self, worker: str, report: Report) -> None:
        """Take in what a worker's feed says."""
        with self._lock:
            # What a worker has sent before its death may be read after it.
            if worker not in self._gone:
                self._index.fold(worker, report)

    def drop(self, worker: str) -> None:
        """Forget a worker that has gone, and what may still be heard of it."""
        with self._lock:
            self._gone.add(worker)
            self._index.remove_worker(worker)

    def overlap(self, tokens: list[int]) -> Mapping[str, int]:
        """Return the leading tokens of a prompt that each worker has in whole blocks, on the GPU or in host memory."""
        with self._lock:
            # A last token is always computed, and with it the block that it ends.
            found = self._index.match(tokens[:-1])
        return {str(publisher.worker): overlap.secondary for publisher, overlap in found.items()}

    def blocks(self, worker: str) -> int:
        """How many blocks a worker has, as far as is known."""
        with self._lock:
            return sum(self._index.resident(worker))

    def faults(self) -> int:
        """Return the number of inconsistent reports and missed batches."""
        with self._lock:
            return sum(
                counts.orphans + counts.repeated_stores + counts.unknown_removals + counts.missed_batches
                for counts in (self._index.counts(*publisher) for publisher in self._index.publishers)
            )
