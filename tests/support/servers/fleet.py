"""Workers that feed a stream, readers of it, and what the latter must know: worked out from what the former did."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from events.brokers.subscriber import BrokerSubscriber
from events.subscribe.continuity import Missed, Report
from events.subscribe.fan_in import Worker
from events.subscribe.index import Index
from sinks import SinkContext, SinkRunner, open_sink
from sinks.brokers import BrokerTransport
from sinks.router.feed import RouterFeed
from tests.support.feeds.feed_source import Source, name
from tests.support.waiting import WAIT, wait_until

CONTEXT = SinkContext(key_bytes=8, tokens_per_block=4)


class FeedingWorker:
    """A cache, as far as routers see one, whose feed goes to a stream behind its runner."""

    def __init__(
        self,
        url: str,
        worker: str,
        *,
        min_bytes: int | None = None,
        block: int = 4,
        drain_seconds: float = WAIT,
    ) -> None:
        self.name = worker
        joint = "&" if "?" in url else "?"
        sink = open_sink(f"{url}{joint}worker={worker}&heartbeat=200ms&coalesce=5ms", CONTEXT)
        assert isinstance(sink, RouterFeed)
        assert isinstance(sink.transport, BrokerTransport)
        self.feed, self.transport = sink, sink.transport
        if min_bytes is not None:
            self.transport.settings = replace(self.transport.settings, min_bytes=min_bytes)
        self.source = Source(block)
        self.runner = SinkRunner(
            sink,
            worker,
            drain_seconds=drain_seconds,
            max_errors=4,
            backoff_seconds=0.05,
            retry_seconds=0.2,
            retry_seconds_max=0.5,
        )
        self._next = 1

    def __enter__(self) -> Self:
        self.runner.put(self.source.created())
        self.runner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    def store(self, blocks: int) -> None:
        self.runner.put(self.source.store(self._next, blocks))
        self._next += 1

    def step(self, rng: random.Random) -> None:
        """A prompt comes, or an old one goes."""
        held = list(self.source.slots)
        if held and rng.random() < len(held) / 60:
            self.runner.put(self.source.remove(rng.choice(held)))
        else:
            self.store(rng.randrange(1, 12))

    @property
    def resident(self) -> set[int]:
        """What must be known of it, by what it stored and removed."""
        slots = self.source.slots.items()
        return {int.from_bytes(name(handle, block)) for handle, held in slots for block in range(len(held))}

    def settle(self) -> int:
        """Wait until all is in the stream; returns the last number that is."""
        runner, feed = self.runner, self.feed

        def settled() -> bool:
            idle = runner.stats().lag_batches == 0 and feed.is_settled
            return idle and feed.resync_after_seq is None and runner.state == "running"

        wait_until(settled, lambda: f"{self.name} does not come to rest: {runner.stats()}")
        return feed.last_seq


class StreamReader:
    """A router: an index for each worker."""

    def __init__(self, url: str) -> None:
        self.subscriber = BrokerSubscriber(url)
        self.indexes: dict[str, Index] = defaultdict(Index)
        self.reports: dict[str, list[Report]] = defaultdict(list)
        self.seq: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.subscriber.close()

    def read(self, timeout_ms: int = 20) -> None:
        for worker, report in self.subscriber.poll(timeout_ms):
            assert isinstance(worker, Worker)
            self.indexes[worker.topic].fold(report)
            self.reports[worker.topic].append(report)
            self.seq[worker.topic] = max(self.seq.get(worker.topic, -1), getattr(report, "seq", -1))

    def read_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: (self.seq, self.subscriber.unavailable), meanwhile=self.read)

    def catch_up(self, *workers: FeedingWorker) -> None:
        """Read until all is known that these have in the stream."""
        last = {worker.name: worker.settle() for worker in workers}
        self.read_until(lambda: all(self.seq.get(name, -1) >= seq for name, seq in last.items()))

    def check(self, *workers: FeedingWorker) -> None:
        """What is known is what is so, and nothing on the way did not fit."""
        self.catch_up(*workers)
        for worker in workers:
            index = self.indexes[worker.name]
            assert index.resident() == worker.resident, worker.name
            assert (index.orphans, index.repeated_stores, index.unknown_removals) == (0, 0, 0)
            assert index.missed_batches == 0, lost(self.reports[worker.name])


def lost(reports: list[Report]) -> list[Report]:
    return [report for report in reports if isinstance(report, Missed) and not report.recovered]
