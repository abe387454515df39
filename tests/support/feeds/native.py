"""A cache at random work whose events go out in the native format, and readers that fold what they get."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from events.log import LogWriter
from events.subscribe.continuity import NativeReport, ReceivedBatch
from events.types import EventBatch
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.errors import CapacityError, OutOfBlocks
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed
from sinks import Sink, SinkRunner
from tests.support.waiting import wait_until


def config(**more: Any) -> KVCacheConfig:
    """A small cache with a secondary level, that tells its fingerprint often."""
    return KVCacheConfig.load(
        max_sequence_length=64,
        tokens_per_block=4,
        primary_blocks=24,
        secondary_blocks=12,
        checkpoint_spacing=1,
        **more,
    )


class Cache:
    """A manager and what it is asked, by chance."""

    def __init__(
        self,
        *sinks: str | Sink | SinkRunner,
        seed: int = 1,
        log: Path | LogWriter | None = None,
        tokens: tuple[int, ...] = (5, 6, 7),
        **settings: Any,
    ) -> None:
        self.manager = KVCacheManager(config(**settings), log=log, sinks=sinks)
        self._rng = random.Random(seed)
        self._tokens = tokens
        self._held: list[int] = []
        self._next = 1

    def step(self) -> None:
        """Requests come, go on, branch and end."""
        rng, manager = self._rng, self.manager
        if self._held and rng.random() < len(self._held) / 4:
            manager.remove_sequence(self._held.pop(rng.randrange(len(self._held))))
        else:
            tokens = rng.choices(self._tokens[:3], k=rng.randrange(4, 20))
            with suppress(OutOfBlocks):
                manager.add_sequence(self._next, tokens, cache_salt=rng.choice((None, "s")))
                manager.store_context_blocks(self._next, len(tokens))
                self._held.append(self._next)
            self._next += 1
        if self._held and rng.random() < 0.7:
            with suppress(CapacityError):
                manager.add_tokens([rng.choice(self._held)], [rng.choice(self._tokens)])
        manager.flush()

    def steps(self, count: int) -> None:
        """Many of them."""
        for _ in range(count):
            self.step()

    @property
    def last_seq(self) -> int:
        """The last batch that was flushed."""
        return self.manager._journal.next_seq - 1

    @property
    def fingerprint(self) -> bytes:
        """Of the live state."""
        return fingerprint(self.manager.state)

    def close(self) -> None:
        """End it in order."""
        self.manager.close()


class Polled(Protocol):
    """What a reader asks for reports."""

    def close(self) -> None:
        """Listen no more."""

    def poll(self, timeout_ms: int | None = None) -> list[Any]:
        """Reports, or pairs of a worker and a report."""


class FoldingReader:
    """Folds what it hears of one cache, and compares each fingerprint that is told on the way."""

    def __init__(self, subscriber: Polled) -> None:
        self.subscriber = subscriber
        self.reports: list[NativeReport] = []
        self.replayed = Replayed(CacheState())

    def close(self) -> None:
        """Listen no more."""
        self.subscriber.close()

    def take(self, reports: Iterable[NativeReport]) -> None:
        """What comes next."""
        for report in reports:
            self.reports.append(report)
            if isinstance(report, ReceivedBatch):
                self.replayed.fold(report.batch, verify=True)

    def read(self, timeout_ms: int = 20) -> None:
        """Hear what there is."""
        polled = self.subscriber.poll(timeout_ms)
        self.take(each[1] if isinstance(each, tuple) else each for each in polled)

    def read_until(self, condition: Callable[[], bool], what: str = "it does not come") -> None:
        """Hear until it is so."""
        wait_until(condition, lambda: (what, self.replayed.last_seq, self.others), meanwhile=self.read)

    def check(self, cache: Cache) -> None:
        """Hear all that there is, and know what the manager knows."""
        self.read_until(lambda: self.replayed.last_seq >= cache.last_seq, f"batch {cache.last_seq}")
        assert self.replayed.last_seq == cache.last_seq
        assert self.replayed.fingerprint == cache.fingerprint
        self.replayed.check()
        assert self.replayed.checkpoints_failed == []

    @property
    def batches(self) -> list[EventBatch]:
        """Those that it heard."""
        return [report.batch for report in self.reports if isinstance(report, ReceivedBatch)]

    @property
    def others(self) -> list[NativeReport]:
        """What it heard besides."""
        return [report for report in self.reports if not isinstance(report, ReceivedBatch)]
