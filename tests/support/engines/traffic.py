"""Random requests for a manager without tensors, and the log that they leave."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from events.types import Gap
from kvcache.config import KVCacheConfig
from kvcache.errors import CapacityError
from kvcache.fold.fingerprint import fingerprint
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.inside import journal_of, sequence_of


class Traffic:
    """Random requests for a manager; the same seed gives the same commands."""

    def __init__(self, manager: KVCacheManager, seed: int) -> None:
        self.manager = manager
        self.random = random.Random(seed)
        self.running: list[str | int] = []
        self.next_id = 0

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(count)]

    def step(self) -> None:
        r, manager = self.random, self.manager
        try:
            action = r.randrange(5)
            if action < 2:
                salt = r.choice([None, "a"])
                manager.add_sequences(
                    [Request(self.next_id, self.tokens(r.randrange(1, 12)), cache_salt=salt)]
                )
                self.running.append(self.next_id)
                self.next_id += 1
            elif action == 2 and self.running:
                request_id = r.choice(self.running)
                manager.store_context_blocks(request_id, sequence_of(manager, request_id).num_tokens)
            elif action == 3 and self.running:
                manager.add_tokens(self.running, self.tokens(len(self.running)))
            elif self.running:
                manager.remove_sequence(self.running.pop(r.randrange(len(self.running))))
        except CapacityError:
            if self.running:
                manager.remove_sequence(self.running.pop(0))

    def record(self, steps: int) -> dict[int, bytes]:
        """Flush now and then; returns the fingerprint after each batch."""
        fingerprints = {}
        for _ in range(steps):
            self.step()
            if self.random.random() < 0.5:
                batch = self.manager.flush()
                if batch is not None:
                    fingerprints[batch.seq] = self.manager.fingerprint()
        return fingerprints


def config(**settings: Any) -> KVCacheConfig:
    return strategies.config(secondary_blocks=4, **settings)


def recorded(directory: Path, seed: int = 0, steps: int = 80, **settings: Any) -> dict[int, bytes]:
    """Write a log; returns the fingerprint after each of its batches."""
    manager = KVCacheManager(config(**settings), log=directory)
    first = {0: manager.fingerprint()}
    found = Traffic(manager, seed).record(steps)
    manager.close()
    return first | found | {journal_of(manager).next_seq - 1: fingerprint(manager.state)}


def lossy(manager: KVCacheManager, first: int, last: int) -> Sequence[Any]:
    """Make the manager believe that its log has lost batches, and flush."""
    outputs = journal_of(manager).outputs
    outputs.may_lose = True
    outputs.pop_gap = lambda: Gap(first, last, "the disk was too slow")  # type: ignore[method-assign]
    batch = manager.flush()
    assert batch is not None
    outputs.pop_gap = lambda: None  # type: ignore[method-assign]
    return [batch]
