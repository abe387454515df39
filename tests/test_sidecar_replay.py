"""Replay requests at `kvcache publish` over its restarts, asked by a bare ZeroMQ client.

The sidecar is a process of its own; what a reader knows is folded from the wire with msgpack alone, and compared with
what the manager holds.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.engines.sidecars import LoggingEngine, Sidecar
from tests.support.feeds.chaos import Reported, Site
from tests.support.feeds.recordings import Oracle
from tests.support.ports import free_port
from tests.support.waiting import pause, wait_until

END = b"\xff" * 8
WAIT_MS = 20_000
Numbered = tuple[int, bytes]
LEVELS = {"GPU": 0, "CPU": 1}


def known(oracle: Oracle) -> Reported:
    """What a reader knows to be resident, as the manager has it."""
    blocks = [(key, dict(said)) for key, said in oracle.resident.items()]
    return {
        (group, LEVELS[medium], name, said.get("parent_block_hash"), said["token_ids"])
        for (medium, group, _, _, name), said in blocks
    }


def begins_with_cleared(payload: bytes) -> bool:
    events = events_of(payload)
    return bool(events) and events[0]["type"] == "AllBlocksCleared"


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """None: a heartbeat."""
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return events


class Client:
    """Subscribes, and keeps what comes; asks for more on a socket of its own each time."""

    def __init__(self, site: Site) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay = site.replay_endpoint
        self._live = self._context.socket(zmq.SUB)
        self._live.rcvhwm = 0
        self._live.subscribe(b"")
        self._live.connect(site.endpoint)
        self.oracle = Oracle()
        self.live: list[Numbered] = []
        """As they came; heartbeats and what a newcomer is told are among them."""

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, timeout_ms: int = 0) -> None:
        """Take in all that is there."""
        while self._live.poll(timeout_ms):
            _, seq, payload = self._live.recv_multipart()
            self.live.append((int.from_bytes(seq, "big"), payload))
            self.oracle.take(payload)

    def receive_until_known(self, resident: Reported) -> None:
        """Until what is known is what is resident."""

        def is_known() -> bool:
            self.receive(5)
            return known(self.oracle) == resident

        wait_until(is_known, "what is told live is not what is resident")

    def ask(self, start: int) -> list[Numbered]:
        """The batches of one answer."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._replay)
            socket.send_multipart([b"", struct.pack(">Q", start)])
            answer: list[Numbered] = []
            while True:
                assert socket.poll(WAIT_MS), "the answer has no end"
                empty, _, seq, payload = socket.recv_multipart()
                assert empty == b""
                if seq == END:
                    return answer
                answer.append((int.from_bytes(seq, "big"), payload))


class Scene:
    """An engine here, whose log a sidecar follows, and a client."""

    def __init__(self, directory: Path, seed: int, options: str, resources: ExitStack) -> None:
        self.rng, self.log = random.Random(seed), directory / "log"
        where = f"max_batch=1KiB&coalesce=2ms&{options}"
        self.site = Site(free_port(), free_port(), str(directory / "feed.numbers"), where)
        self.engine = LoggingEngine(self.log, self.rng, [])
        self.client = Client(self.site)
        resources.callback(self.client.close)
        resources.callback(lambda: self.engine.manager.close())
        self.sidecar = Sidecar(self.log, self.site.url)
        resources.callback(lambda: self.sidecar.kill())

    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.client.receive()
            pause()

    def rest(self) -> Reported:
        """Until the client knows what the engine has, which does nothing then."""
        resident, _ = self.engine.settle()
        self.client.receive_until_known(resident)
        return resident

    def restart(self, how: str) -> None:
        """The sidecar, the engine, or both, while more is done in between."""
        if how != "engine":
            (self.sidecar.kill if "kill" in how else self.sidecar.stop)()
        self.work(20)
        if "engine" in how:
            self.engine.manager.close()
            self.engine = LoggingEngine(self.log, self.rng, [])
        if how != "engine":
            self.sidecar = Sidecar(self.log, self.site.url)


@contextmanager
def scene_of(directory: Path, seed: int, options: str) -> Iterator[Scene]:
    with ExitStack() as resources:
        yield Scene(directory, seed, options, resources)


OPTIONS = ["ring=1MiB", "ring=0B", "ring=1MiB&pad=1&first=0"]
WAYS = ["stop", "kill", "engine", "stop, engine", "kill, engine"]


@pytest.mark.parametrize(
    ("how", "options"),
    # Each way and all options are in the quick run, and the pairs in the long one.
    [
        pytest.param(way, option, marks=[] if at % 3 == which else pytest.mark.long)
        for at, way in enumerate(WAYS)
        for which, option in enumerate(OPTIONS)
    ],
)
def test_answers_after_a_restart(tmp_path: Path, how: str, options: str) -> None:
    """Who asks from a batch of any life before gets what was sent, or the state behind "cleared": it knows all then."""
    with scene_of(tmp_path, 3, options) as scene:
        client = scene.client
        known_at = [(-1, Oracle())]
        for _ in range(2):
            scene.work(25)
            scene.rest()
            last = client.live[-1][0]
            known_at.append((last, copy.deepcopy(client.oracle)))
            scene.restart(how)
            resident = scene.rest()
            assert client.live[-1][0] > last, "numbers of before are used again"
            for number, oracle in known_at:
                check(client.ask(number + 1), client, number + 1, copy.deepcopy(oracle), resident)


def check(answer: list[Numbered], client: Client, start: int, oracle: Oracle, resident: Reported) -> None:
    """What `oracle` was before batch `start` knows all with the answer, which says so if it is no continuation."""
    numbers = [number for number, _ in answer]
    assert numbers == list(range(numbers[0], numbers[0] + len(answer)))
    assert numbers[0] >= start
    assert numbers[-1] >= client.live[-1][0]
    is_state = begins_with_cleared(answer[0][1])
    if not is_state:
        assert numbers[0] == start, "batches are left out, and nothing says so"
        assert_as_sent(answer, client)
    for _, payload in answer:
        oracle.take(payload)
    assert known(oracle) == resident


def assert_as_sent(answer: list[Numbered], client: Client) -> None:
    """Byte by byte, as far as they have come live; a newcomer's state has the number of the batch before it."""
    reported = set(client.live)
    assert all(each in reported for each in answer if each[0] <= client.live[-1][0])


@pytest.mark.parametrize("how", ["stop", "kill", "stop, engine"])
def test_answers_within_a_life(tmp_path: Path, how: str) -> None:
    """After a restart, too, each batch sent since can be had again, byte by byte; from the next one on, none."""
    with scene_of(tmp_path, 4, "ring=1MiB") as scene:
        client = scene.client
        scene.work(25)
        scene.rest()
        for _ in range(2):
            scene.restart(how)
            scene.rest()
            begun = len(client.live)
            scene.work(30)
            resident = scene.rest()
            sent = client.live[begun:]
            assert len(sent) > 5
            for index in range(len(sent)):
                answer = client.ask(sent[index][0])
                assert answer[: len(sent) - index] == sent[index:]
                assert not any(events_of(payload) for _, payload in answer[len(sent) - index :])
            assert not any(events_of(payload) for _, payload in client.ask(sent[-1][0] + 1))
            oracle = Oracle()
            for _, payload in client.ask(0):
                oracle.take(payload)
            assert known(oracle) == resident
