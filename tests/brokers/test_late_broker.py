"""A sidecar whose broker is not there when it starts, or takes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis

from events.brokers.subscriber import BrokerSubscriber
from events.log import LogReader
from events.subscribe.index import Index
from kvcache.fold.state import resident_names
from sinks import SinkError
from sinks.base import SinkURLError
from tests.support.feeds.publishing import Running, once, write
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import WAIT, wait_until


def read_until_known(url: str, names: set[int]) -> None:
    """A reader of the stream learns what worker w has."""
    index = Index()
    with BrokerSubscriber(url) as subscriber:

        def read() -> None:
            for _, report in subscriber.poll(20):
                index.fold(report)

        wait_until(lambda: index.resident() == names, index.resident, meanwhile=read)


@pytest.mark.needs("redis-server")
def test_a_broker_that_comes_late(tmp_path: Path) -> None:
    """The others have theirs meanwhile; then it is fed like any other."""
    log = tmp_path / "log"
    names = resident_names(write(log).state, 0)
    server = RedisServer(tmp_path)
    with Running(log, f"{server.url}?worker=w", f"file:{tmp_path}/e.jsonl") as running:
        publisher = running.publisher
        wait_until(lambda: publisher.stats().sinks[1].lag_batches == 0, "the file is held up")
        wait_until(lambda: publisher.stats().sinks[0].state == "failing", "it is not told")
        [lag, _] = publisher.stats().sinks
        assert lag.lag_batches == len(list(LogReader(log)))
        assert "127.0.0.1" in str(lag.last_error)
        with server:
            wait_until(lambda: publisher.stats().sinks[0].lag_batches == 0, "it is not connected to")
            read_until_known(server.url, names)


@pytest.mark.needs("redis-server")
def test_a_broker_that_takes_nothing(tmp_path: Path) -> None:
    """A key of another kind stands in the way: `--once` is not done before that is gone."""
    log = tmp_path / "log"
    names = resident_names(write(log).state, 0)
    with RedisServer(tmp_path) as server, Redis(port=server.port) as client:
        client.set("kvcache:w", "x")
        with Running(log, f"{server.url}?worker=w", until="end") as running:
            wait_until(lambda: running.publisher.stats().sinks[0].errors > 1, "it does not fail")
            assert "WRONGTYPE" in str(running.publisher.stats().sinks[0].last_error)
            client.delete("kvcache:w")
            running.thread.join(WAIT)
            assert not running.thread.is_alive()
        read_until_known(server.url, names)


@pytest.mark.needs("redis-server")
def test_what_time_does_not_change(tmp_path: Path) -> None:
    """A password that is wrong is no broker that is away; and the name of Redis's own set is none for a worker."""
    write(tmp_path / "log")
    with RedisServer(tmp_path, "--requirepass", "right") as server:
        url = server.url.replace("//", "//default:wrong@")
        with pytest.raises(SinkError, match="wrong user or password"):
            once(tmp_path / "log", f"{url}?worker=w")
        with pytest.raises(SinkURLError, match="set another worker="):
            once(tmp_path / "log", f"{url}?worker=workers")


@pytest.mark.needs("redis-server")
@pytest.mark.parametrize("kind", ["string", "the set itself", "later"])
def test_a_key_of_another_kind_blinds_nobody(tmp_path: Path, kind: str) -> None:
    """Whatever stands under a worker's name, the other workers are read."""
    with RedisServer(tmp_path) as server, Redis(port=server.port) as client:
        names = resident_names(write(tmp_path / "log").state, 0)
        once(tmp_path / "log", f"{server.url}?worker=w")
        client.sadd("kvcache:workers", "workers" if kind == "the set itself" else "evil")
        if kind == "string":
            client.set("kvcache:evil", "x")
        if kind != "later":
            read_until_known(server.url, names)
            return
        client.xadd("kvcache:evil", {"record": "0", "payload": "x"})
        with BrokerSubscriber(server.url) as subscriber:
            wait_until(
                lambda: {worker.topic for worker, _ in subscriber.poll(100)} != set(), "nothing is heard"
            )
            client.delete("kvcache:evil")
            client.set("kvcache:evil", "x")
            client.delete("kvcache:w")
            once(tmp_path / "log", f"{server.url}?worker=w")
            wait_until(
                lambda: any(worker.topic == "w" for worker, _ in subscriber.poll(100)), "w is not heard"
            )
            assert subscriber.unavailable is None
