"""`kvcache publish` inside the test's process: a small log, sinks that collect, a publisher on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from events.log import LogWriter
from events.types import EventBatch, Gap
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.publish.publisher import Publisher, PublishStats
from sinks import Sink, SinkContext, SinkURL, registry
from sinks.router.feed import FeedBatch, RouterFeed
from sinks.router.numbers import FeedNumbers

CONFIG = KVCacheConfig(
    max_sequence_length=64, tokens_per_block=2, primary_blocks=64, block_hash="v2_sha256_64", model="m"
)


def write(
    log: Path, requests: int = 5, *, first: int = 0, close: bool = True, **options: Any
) -> KVCacheManager:
    """An epoch of a log: each request stores blocks of its own, in a batch of its own."""
    writer = LogWriter(log, resume=True, **options)
    manager = KVCacheManager(CONFIG, log=writer)
    for number in range(first, first + requests):
        manager.add_sequence(number, [100 + number] * 7)
        manager.store_context_blocks(number, 7)
        manager.remove_sequence(number)
        manager.flush()
    writer.flush()
    if close:
        manager.close()
    return manager


class Collector(Sink):
    """A sink that keeps what it gets; tests tell it to fail or to hang."""

    needs_tokens: bool | None = None

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.opened = 0
        self.fail: Callable[[], None] = lambda: None
        self.reached = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def open(self) -> None:
        self.opened += 1

    def write(self, batch: EventBatch) -> None:
        self.reached.set()
        self.gate.wait()
        self.fail()
        self.batches.append(batch)

    def close(self) -> None:
        """Nothing to close."""

    @property
    def seqs(self) -> list[int]:
        return [batch.seq for batch in self.batches]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        found = [event for batch in self.batches for event in batch.events if isinstance(event, Gap)]
        return [(gap.first_seq, gap.last_seq) for gap in found]


class FoldingCollector(Collector):
    """One that needs all of an epoch, before it is opened."""

    folds = True

    def open(self) -> None:
        self.opened = len(self.batches)


class Reported:
    """A feed's transport that folds changes into what routers would hold."""

    subscribers = 0

    def __init__(self) -> None:
        self.batches: list[FeedBatch] = []
        self.opened = 0

    def open(self, next_seq: int, worker: object) -> None:
        self.opened += 1

    def send(self, batch: FeedBatch) -> None:
        self.batches.append(FeedBatch(batch.seq, batch.ts, list(batch.changes), batch.groups))

    def tick(self, take_state: object) -> None:
        """Nobody to look after."""

    def close(self) -> None:
        """Nothing to close."""

    @property
    def kinds(self) -> list[str]:
        return [type(change).__name__ for batch in self.batches for change in batch.changes]

    @property
    def names(self) -> set[int]:
        names: set[int] = set()
        for change in (change for batch in self.batches for change in batch.changes):
            if type(change).__name__ == "Cleared":
                names.clear()
                continue
            parts = [change.names[at : at + 8] for at in range(0, len(change.names), 8)]  # type: ignore[union-attr]
            reported = {int.from_bytes(part, "big") for part in parts}
            names = names | reported if type(change).__name__ == "Stored" else names - reported
        return names


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What stands for a URL: `x:a` is a `Collector`, `feed:a` a feed over `Told`; by their paths."""
    made: dict[str, Any] = {}
    factory = registry._factory

    def collector(url: SinkURL, context: SinkContext) -> Any:
        return made.setdefault(url.path, Collector())

    def feed(url: SinkURL, context: SinkContext) -> Any:
        reported = made.setdefault(url.path, Reported())
        numbers = FeedNumbers(None, first=len(reported.batches))
        return RouterFeed(reported, numbers, coalesce_seconds=0, heartbeat_seconds=0)

    def folding(url: SinkURL, context: SinkContext) -> Any:
        return made.setdefault(url.path, FoldingCollector())

    own: dict[str, Any] = {"x": collector, "feed": feed, "fold": folding}
    monkeypatch.setattr(registry, "_factory", lambda url: own.get(url.scheme) or factory(url))
    return made


class Running:
    """A publisher on a thread of its own."""

    def __init__(self, log: Path, *urls: str, **options: Any) -> None:
        self.publisher = Publisher(log, urls, **options)
        self.stopping, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.publisher.run(self.stopping.is_set)
        except BaseException as error:
            self.error = error  # type: ignore[assignment]

    def stop(self) -> PublishStats:
        self.stopping.set()
        self.thread.join()
        return self.publisher.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def once(log: Path, *urls: str, **options: Any) -> PublishStats:
    publisher = Publisher(log, urls, until="end", **options)
    publisher.run()
    return publisher.stats()
