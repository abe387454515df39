"""A tapped log as it is published: in other forms than vLLM's maps, and by way of brokers. Nothing of it is lost.

The streams are recordings of released publishers (`tests/test_tap_recordings.py`). Readers are compared with what the
recordings say, by rules that are written down here once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from events.brokers.subscriber import BrokerSubscriber
from events.formats.vllm import VLLMBatch
from events.subscribe.continuity import Received
from kvcache.tap.tap import Endpoint, Tap
from tests.support.feeds.publisher import Publisher
from tests.support.feeds.recordings import Block, Oracle, frozen, published
from tests.support.feeds.tapped import work_until
from tests.support.places import ROOT
from tests.support.ports import free_port
from tests.support.servers.nats_server import NATSServer
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import wait_until

STORED = (
    "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx "
    "kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership session_id lookahead_token_ids"
)
ARRAY = {
    "BlockStored": STORED.split(),
    "BlockRemoved": ["block_hashes", "medium", "group_idx", "locality", "ownership"],
    "AllBlocksCleared": [],
}
"""The fields of vLLM's last arrays, and those that came after, in order."""


class Engine:
    """Sends a recording to a tap, piece by piece."""

    def __init__(self, name: str, log: Path, resources: ExitStack) -> None:
        recording = json.loads((ROOT / "tests" / "data" / f"told_{name}.json").read_text(encoding="utf-8"))
        self._frames = [[bytes.fromhex(frame) for frame in message] for message in recording["live"]]
        self.oracle = Oracle()
        self._publisher = resources.enter_context(Publisher())
        self._tap = resources.enter_context(Tap([Endpoint(self._publisher.endpoint)], log))
        self._publisher.wait_subscribed()
        self._sent = 0

    def send(self, count: int) -> None:
        """As many batches more, until they are in the log."""
        for frames in self._frames[self._sent : self._sent + count]:
            self.oracle.take(frames[2])
            self._publisher.send_frames(*frames)
        self._sent = min(self._sent + count, len(self._frames))
        last = self._sent - 1
        work_until(self._tap, lambda: any(w.number == last for w in self._tap.state.workers.values()))
        wait_until(lambda: not self._tap.log_stats().lag_batches, "the log is not written")

    def send_rest(self) -> None:
        self.send(len(self._frames))


@pytest.fixture(params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with ExitStack() as resources:
        yield Engine(request.param, tmp_path / "log", resources)


class Router:
    """Hears a feed from now on."""

    def __init__(self, endpoint: str, resources: ExitStack) -> None:
        context = resources.enter_context(zmq.Context())
        self._socket = resources.enter_context(context.socket(zmq.SUB))
        self._socket.linger = 0
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self.oracle = Oracle()
        self.events: list[Any] = []

    def receive_until(self, wanted: dict[Block, Any]) -> None:
        """Until it knows exactly this."""

        def knows() -> bool:
            while self._socket.poll(5):
                for event in msgspec.msgpack.decode(self._socket.recv_multipart()[2])[1]:
                    self.events.append(event)
                    self.oracle.announce(as_map(event))
            return self.oracle.resident == wanted

        try:
            wait_until(knows, "the router knows something else")
        except AssertionError:
            assert self.oracle.resident == wanted
            raise


def as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return dict(event)
    return {"type": event[0], **dict(zip(ARRAY[event[0]], event[1:], strict=False))}


def in_arrays(resident: dict[Block, Any]) -> dict[Block, Any]:
    """What arrays can say of it: a salt is the extra key of a prompt's first block."""
    said = {}
    for key, fields in resident.items():
        block = dict(fields)
        salt = block.pop("cache_salt", None)
        if salt is not None and "parent_block_hash" not in block:
            block["extra_keys"] = (salt,)
        said[key] = frozen({name: value for name, value in block.items() if name in ARRAY["BlockStored"]})
    return said


def in_sglang(resident: dict[Block, Any]) -> dict[Block, Any]:
    """Hashes are signed."""
    said = {}
    for (*place, name), fields in resident.items():
        block = dict(fields)
        if "parent_block_hash" in block:
            block["parent_block_hash"] = signed(block["parent_block_hash"])
        said[(*place, signed(name))] = frozen(block)
    return said


def signed(name: Any) -> Any:
    return (
        int.from_bytes(name.to_bytes(8, "big"), "big", signed=True)
        if isinstance(name, int) and name >= 0
        else name
    )


FORMS: dict[str, Callable[[dict[Block, Any]], dict[Block, Any]]] = {
    "format=vllm": lambda resident: resident,
    "format=vllm-array": in_arrays,
    "format=sglang": in_sglang,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(engine: Engine, tmp_path: Path, form: str) -> None:
    """A router that came in the middle, and one at the end, know all that the engine said, as the form says it."""
    url = f"zmq+pub://127.0.0.1:{(port := free_port())}?{form}"
    with ExitStack() as resources:
        resources.enter_context(published(tmp_path / "log", url))
        engine.send(25)
        routers = [Router(f"tcp://127.0.0.1:{port}", resources)]
        routers[0].receive_until(FORMS[form](engine.oracle.resident))
        for _ in range(3):
            engine.send(10)
        engine.send_rest()
        routers.append(Router(f"tcp://127.0.0.1:{port}", resources))
        for router in routers:
            router.receive_until(FORMS[form](engine.oracle.resident))
        assert len(engine.oracle.resident) > 10
        kind = list if form == "format=vllm-array" else dict
        assert all(isinstance(event, kind) for router in routers for event in router.events)


def test_arrays_hold_a_block_each(engine: Engine, tmp_path: Path) -> None:
    """Some readers take an event's parent for that of all its blocks; only where nobody knows whose tokens are whose,
    one event holds all.
    """
    url = f"zmq+pub://127.0.0.1:{(port := free_port())}?format=vllm-array"
    with ExitStack() as resources:
        resources.enter_context(published(tmp_path / "log", url))
        engine.send_rest()
        router = Router(f"tcp://127.0.0.1:{port}", resources)
        router.receive_until(in_arrays(engine.oracle.resident))
        stores = [as_map(event) for event in router.events if event[0] == "BlockStored"]
        assert stores
        for store in stores:
            whole = len(store["token_ids"]) == len(store["block_hashes"]) * store["block_size"]
            assert len(store["block_hashes"]) == 1 or not whole


class Reader:
    """Reads a stream from its beginning."""

    def __init__(self, url: str, resources: ExitStack) -> None:
        self._subscriber = BrokerSubscriber(url)
        resources.callback(self._subscriber.close)
        self.oracle = Oracle()

    def read_until(self, wanted: dict[Block, Any]) -> None:
        """Until it knows exactly this."""

        def knows() -> bool:
            for _, report in self._subscriber.poll(20):
                if isinstance(report, Received):
                    self._take(report.batch)
            return self.oracle.resident == wanted

        try:
            wait_until(knows, "the reader knows something else")
        except AssertionError:
            assert self.oracle.resident == wanted, self._subscriber.unavailable
            raise

    def _take(self, batch: VLLMBatch) -> None:
        for event in batch.events:
            fields = msgspec.structs.asdict(event)
            more = fields.pop("more", None) or {}
            self.oracle.announce({"type": type(event).__name__, **fields, **more})


@contextmanager
def nats(directory: Path) -> Iterator[str]:
    pytest.importorskip("nats")
    with NATSServer(directory) as server:
        yield server.url


@contextmanager
def redis(directory: Path) -> Iterator[str]:
    pytest.importorskip("redis")
    with RedisServer(directory) as server:
        yield server.url


@contextmanager
def kafka(directory: Path) -> Iterator[str]:
    """Librdkafka's own mock cluster."""
    pytest.importorskip("confluent_kafka")
    from tests.support.servers.kafka_cluster import MockCluster

    with MockCluster(directory) as cluster:
        yield f"kafka://127.0.0.1:{cluster.port}"


BROKERS = [
    pytest.param(nats, marks=pytest.mark.needs("nats-server"), id="nats"),
    pytest.param(redis, marks=pytest.mark.needs("redis-server"), id="redis"),
    pytest.param(kafka, id="kafka"),
]


@pytest.mark.parametrize("broker", BROKERS)
def test_brokers(engine: Engine, tmp_path: Path, broker: Any) -> None:
    """Readers from the start and at the end, over a restart of the publisher in which the engine goes on."""
    (tmp_path / "server").mkdir()
    with ExitStack() as resources:
        url = resources.enter_context(broker(tmp_path / "server"))
        sink = f"{url}/kv?worker=w&coalesce=5ms&heartbeat=200ms"
        engine.send(20)
        with published(tmp_path / "log", sink):
            early = Reader(f"{url}/kv", resources)
            early.read_until(engine.oracle.resident)
            engine.send(10)
            early.read_until(engine.oracle.resident)
        engine.send(10)
        with published(tmp_path / "log", sink):
            early.read_until(engine.oracle.resident)
            engine.send_rest()
            early.read_until(engine.oracle.resident)
            Reader(f"{url}/kv", resources).read_until(engine.oracle.resident)
