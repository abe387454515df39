"""Many feeds that connect to one reader, in clear and encrypted: the reader knows exactly what each cache holds."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Self

import pytest
import zmq

from events.formats.vllm import Hash
from events.subscribe import sockets
from events.subscribe.continuity import HELD_MAX
from events.subscribe.endpoints import EndpointError, InsecureEndpoint
from events.subscribe.fan_in import FanInSubscriber, replay_in_topic
from events.subscribe.fan_in import Worker as FeedWorker
from events.subscribe.index import Index
from events.subscribe.sockets import Curve
from tests.support.feeds.keys import Keys
from tests.support.feeds.publisher import ReplayServer, batch, stored
from tests.support.feeds.workers import Worker, connecting, resident
from tests.support.waiting import wait_until


class Router:
    """A bound reader with an index for each worker."""

    def __init__(self, port: int, **options: object) -> None:
        self.subscriber = FanInSubscriber(f"tcp://127.0.0.1:{port}", **options)  # type: ignore[arg-type]
        self.indexes: dict[FeedWorker, Index] = defaultdict(Index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.subscriber.close()

    def receive(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for worker, report in self.subscriber.poll(int(left * 1000) + 1):
                self.indexes[worker].fold(report)

    def of(self, topic: str) -> Index:
        [index] = [index for worker, index in self.indexes.items() if worker.topic == topic]
        return index

    def reported(self) -> dict[str, set[Hash]]:
        """Of each pod the blocks that it is said to have."""
        return {worker.topic.split("@")[1]: index.resident() for worker, index in self.indexes.items()}

    def knows(self, workers: dict[str, Worker]) -> bool:
        return self.reported() == {name: resident(worker) for name, worker in workers.items()}

    def receives(self, condition: Callable[[], bool]) -> bool:
        wait_until(condition, self.reported, meanwhile=lambda: self.receive(0.02))
        return True


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr(sockets, "LOOK_SECONDS", 0)
    keys = Keys(tmp_path)
    keys.make("router", "a", "b", "other")
    return keys


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("replay", [False, True])
def test_each_worker_is_known_exactly(port: int, keys: Keys, replay: bool, encrypted: bool) -> None:
    """Three workers store and remove at random while the router is restarted; at the end nothing is missing or left."""
    for name in ("a", "b", "other", "router"):
        keys.allow(name)
    curves = dict.fromkeys(("a", "b", "other"), "")
    if encrypted:
        curves = {
            name: f"&curve_key={keys.secret(name)}&curve_server={keys.public('router')}"
            + f"&curve_clients={keys.clients}" * replay
            for name in curves
        }
    more = "&replay=0&ring=2KiB&max_batch=2KiB" if replay else ""
    workers = {
        name: connecting(port, f"topic=kv@{name}@unknown{more}{curve}") for name, curve in curves.items()
    }
    find = (
        (lambda received: workers[received.topic.split("@")[1]].transport.replay_endpoint) if replay else None
    )
    curve = keys.serves("router") if encrypted else None
    random_ = random.Random(7)
    try:
        for worker in workers.values():
            worker.__enter__()
        for _ in range(3):
            with Router(port, replay=find, curve=curve) as router:
                for _ in range(60):
                    worker = random_.choice(list(workers.values()))
                    handles = list(worker.source.slots)
                    if len(handles) > 5 and random_.random() < 0.5:
                        worker.put(worker.source.remove(random_.choice(handles)))
                    else:
                        worker.put(worker.source.store(worker.source.seq, random_.randint(1, 4)))
                    router.receive(0.004)
                router.receives(lambda: router.knows(workers))
                assert router.reported() == {name: resident(worker) for name, worker in workers.items()}
                for index in router.indexes.values():
                    assert (index.orphans, index.unknown_removals, index.missed_batches) == (0, 0, 0)
    finally:
        for worker in workers.values():
            worker.runner.close()


@pytest.mark.parametrize("flood", [10, HELD_MAX + 1000])
def test_who_does_not_answer_holds_up_nobody_else(port: int, flood: int) -> None:
    """One worker's replay hangs while it floods the router: another one is heard at once all the same."""
    with (
        closing(ReplayServer({}, silent=True)) as silent,
        Router(
            port,
            replay=lambda received: silent.endpoint if received.topic == "silent" else None,
            replay_timeout=3600.0,
        ) as router,
        zmq.Context() as context,
        context.socket(zmq.PUB) as publisher,
    ):
        publisher.sndhwm = publisher.linger = 0
        publisher.connect(f"tcp://127.0.0.1:{port}")
        payload = batch(stored(1))
        router.receives(
            lambda: publisher.send_multipart([b"first", bytes(8), payload]) is None and bool(router.indexes)
        )
        for seq in range(1, flood):
            publisher.send_multipart([b"silent", seq.to_bytes(8, "big"), payload])
        publisher.send_multipart([b"other", bytes(8), payload])
        assert router.receives(lambda: any(received.topic == "other" for received in router.indexes))
        assert not any(received.topic == "silent" for received in router.indexes)


def test_the_replay_is_found_in_the_topic(port: int) -> None:
    """Without topic= a worker that connects is called by the address of its replay, where it answers."""
    with connecting(port, "replay=0") as worker:
        worker.put(worker.source.store(1, 3))
        worker.settle()
        with Router(port, replay=replay_in_topic) as router:
            assert router.receives(lambda: len(router.indexes) == 1)
            [received] = router.indexes
            assert worker.transport.replay_endpoint == f"tcp://{received.topic.split('@')[1]}"
            assert router.receives(lambda: router.of(received.topic).resident() == resident(worker))
            server = worker.transport.replay
            assert server is not None
            wait_until(lambda: server.answered == 1)


def test_who_is_not_allowed_says_nothing_until_he_is(port: int, keys: Keys) -> None:
    """Both ends count the refusals, nothing of the worker is heard; once its key is on the list, all is, unasked."""
    keys.allow("a")
    url = f"topic=kv@b@unknown&curve_key={keys.secret('b')}&curve_server={keys.public('router')}"
    with connecting(port, url) as worker, Router(port, curve=keys.serves("router")) as router:
        worker.put(worker.source.store(1, 3))
        assert router.receives(lambda: router.subscriber.refused > 0 and worker.transport.refused > 0)
        assert router.indexes == {}
        keys.allow("b")
        assert router.receives(
            lambda: bool(router.indexes) and router.of("kv@b@unknown").resident() == resident(worker)
        )


def test_a_worker_in_clear_is_not_received(port: int, keys: Keys) -> None:
    """An encrypted router takes nothing from who has no key, nor from who takes another one for the router."""
    keys.allow("a")
    right = f"topic=kv@right@unknown&curve_key={keys.secret('a')}&curve_server={keys.public('router')}"
    wrong = f"topic=kv@a@unknown&curve_key={keys.secret('a')}&curve_server={keys.public('other')}"
    for options in ("topic=kv@a@unknown", wrong):
        with connecting(port, options) as worker, Router(port, curve=keys.serves("router")) as router:
            worker.put(worker.source.store(1, 3))
            assert router.receives(lambda: router.subscriber.refused > 0)
            with connecting(port, right) as other:
                other.put(other.source.store(1, 2))
                assert router.receives(lambda: bool(router.reported().get("right")))
            assert [*router.reported()] == ["right"]


def test_nobody_speaks_for_another_key(port: int, keys: Keys) -> None:
    """Two allowed workers under one topic stay two."""
    keys.allow("a")
    keys.allow("b")
    server = f"topic=same&curve_server={keys.public('router')}"
    with (
        connecting(port, f"{server}&curve_key={keys.secret('a')}") as first,
        connecting(port, f"{server}&curve_key={keys.secret('b')}") as second,
        Router(port, curve=keys.serves("router")) as router,
    ):
        first.put(first.source.store(1, 1))
        second.put(second.source.store(2, 2))
        assert router.receives(
            lambda: sorted(len(index.resident()) for index in router.indexes.values()) == [1, 2]
        )
        assert len({worker.key for worker in router.indexes}) == 2
        router.subscriber.forget(next(iter(router.subscriber.workers)))
        assert len(router.subscriber.workers) == 1


def test_workers_beyond_the_limit_are_ignored(port: int) -> None:
    """Topics cost memory, and whoever connects makes them up."""
    with (
        connecting(port, "topic=kv@a@unknown"),
        connecting(port, "topic=kv@b@unknown"),
        Router(port, max_workers=1) as router,
    ):
        assert router.receives(lambda: router.subscriber.ignored > 2)
        assert len(router.indexes) == 1


def test_a_worker_that_was_silent_for_long_gives_way(port: int) -> None:
    """As at rolling restarts; that is a loss, and if it comes again it is a new one."""
    with Router(port, max_workers=1, forget_seconds=0.3) as router:
        with connecting(port, "topic=kv@a@unknown") as first:
            first.put(first.source.store(1, 3))
            assert router.receives(lambda: any(index.resident() for index in router.indexes.values()))
        router.receive(0.4)
        with connecting(port, "topic=kv@b@unknown") as second:
            second.put(second.source.store(1, 2))
            assert router.receives(lambda: router.reported().get("b") == resident(second))
        assert [worker.topic for worker in router.subscriber.workers] == ["kv@b@unknown"]
        assert router.of("kv@a@unknown").missed_batches == 1
        router.receive(0.4)
        with connecting(port, "topic=kv@a@unknown") as again:
            again.put(again.source.store(1, 1))
            assert router.receives(lambda: router.of("kv@a@unknown").resident() == resident(again))


@pytest.mark.parametrize("endpoint", ["tcp://*:0", "tcp://0.0.0.0:0"])
def test_binding_beyond_loopback_needs_keys(endpoint: str, keys: Keys) -> None:
    """Anybody could invent residency; the error says both ways out, and both are."""
    keys.allow("a")
    with pytest.raises(InsecureEndpoint, match=r"give keys .*insecure"):
        FanInSubscriber(endpoint)
    FanInSubscriber(endpoint, insecure=True).close()
    FanInSubscriber(endpoint, curve=keys.serves("router")).close()


def test_binding_encrypted_needs_a_list(keys: Keys) -> None:
    """Without one, nobody would be let in, silently."""
    with pytest.raises(EndpointError, match="the keys of the allowed clients"):
        FanInSubscriber("tcp://127.0.0.1:0", curve=Curve.read(keys.secret("router")))


@pytest.mark.parametrize(
    ("topic", "endpoint"),
    [
        ("kv@10.0.0.1:5558@org/m", "tcp://10.0.0.1:5558"),
        ("kv@[::1]:5558@m", "tcp://[::1]:5558"),
        ("kv@pod@m", None),
        ("kv@a:1@m@n", None),
        ("", None),
    ],
)
def test_only_an_address_in_a_topic_is_called(topic: str, endpoint: str | None) -> None:
    """A pod's name alone is none."""
    assert replay_in_topic(FeedWorker(topic)) == endpoint
