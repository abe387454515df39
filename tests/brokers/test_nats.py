"""Feeds by way of NATS JetStream, on a real server that is killed, filled and trimmed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.brokers.fleet import FeedingWorker, StreamReader
from tests.brokers.nats_server import NATSServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NATSServer]:
    with NATSServer(tmp_path) as server:
        yield server


def test_what_workers_have_is_what_readers_know(server: NATSServer) -> None:
    """Three workers of one stream at random work: a reader from the start, and a late one, know what each has."""
    rng = random.Random(1)
    with ExitStack() as stack, StreamReader(server.url) as early:
        workers = [stack.enter_context(FeedingWorker(server.url, f"w{number}")) for number in range(3)]
        for _ in range(300):
            for worker in workers:
                worker.step(rng)
            early.read(0)
        early.check(*workers)
        with StreamReader(server.url) as late:
            late.check(*workers)
        with StreamReader(f"{server.url}?worker=w1") as one:
            one.check(workers[1])
            assert list(one.indexes) == ["w1"]
        assert [worker.runner.stats().errors for worker in workers] == [0, 0, 0]
