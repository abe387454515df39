"""What released publishers of vLLM and SGLang sent, tapped and told again: nothing of it is lost.

`tests/data/told_*.json` are the frames of random events (adapters, salts, images, copies, tiers, sliding windows,
digests, pairs of tokens), live and as an answer, as `ZmqEventPublisher` of the named release sent them. They are read
here with msgpack alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvcache.publish.publisher import Publisher as Sidecar
from kvcache.tap.sources import Endpoint
from kvcache.tap.tap import Tap, state_of
from tests.chaos import free_port
from tests.events.publisher import Publisher, replaying
from tests.kvcache.test_tap import work_until
from tests.places import ROOT

PER_BLOCK = ("extra_keys", "lookahead_token_ids")
Block = tuple[Any, ...]


def frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(frozen, value))
    return frozenset((key, frozen(each)) for key, each in value.items()) if isinstance(value, dict) else value


class Oracle:
    """Which blocks are where, and all that was said of each, by counting stores and removals."""

    def __init__(self) -> None:
        self.copies: Counter[Block] = Counter()
        self.said: dict[Block, Any] = {}

    def take(self, payload: bytes) -> None:
        """Count what a payload says."""
        for event in msgspec.msgpack.decode(payload)[1]:
            self.tell(event)

    def tell(self, event: dict[str, Any]) -> None:
        kind = event.pop("type")
        if kind == "AllBlocksCleared":
            self.copies.clear()
            return
        place = (
            event.get("medium"),
            event.get("group_idx") or 0,
            event.get("locality"),
            event.get("ownership"),
        )
        keys = [(*place, name) for name in event["block_hashes"]]
        if kind == "BlockRemoved":
            self.copies.subtract(keys)
            return
        for at, key in enumerate(keys):
            if not self.copies[key]:
                self.said[key] = self._of_block(event, at)
        self.copies.update(keys)

    def _of_block(self, event: dict[str, Any], at: int) -> Any:
        hashes, size, tokens = event["block_hashes"], event["block_size"], event["token_ids"]
        said = {name: value for name, value in event.items() if value is not None and name != "block_hashes"}
        for name in PER_BLOCK:
            if name in said:
                said[name] = said[name][at]
        if len(tokens) == len(hashes) * size or not tokens:
            said["token_ids"] = tokens[at * size : (at + 1) * size]
            said["parent_block_hash"] = hashes[at - 1] if at else event["parent_block_hash"]
        return frozen({name: value for name, value in said.items() if value is not None})

    @property
    def resident(self) -> dict[Block, Any]:
        return {key: self.said[key] for key, count in self.copies.items() if count > 0}


@contextmanager
def published(log: Path, url: str | None = None) -> Iterator[str]:
    """The endpoint of a feed of the log; or that of somewhere else, named by its URL."""
    port, stop = free_port(), threading.Event()
    sidecar = Sidecar(log, [url or f"zmq+pub://127.0.0.1:{port}"])
    thread = threading.Thread(target=sidecar.run, args=(stop.is_set,))
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()


def late_router(endpoint: str, wanted: int) -> tuple[Oracle, bytes]:
    """What who comes late is told, and the topic."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(endpoint)
        oracle, topic, deadline = Oracle(), b"", time.monotonic() + 10
        while len(oracle.resident) != wanted and time.monotonic() < deadline:
            if socket.poll(100):
                topic, _, payload = socket.recv_multipart()
                oracle.take(payload)
        return oracle, topic


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_recording_is_tapped_and_told_again(tmp_path: Path, name: str) -> None:
    """Live, missed and asked for: the fold, and a router that comes late, have all that the engine said."""
    recording = json.loads((ROOT / "tests" / "data" / f"told_{name}.json").read_text(encoding="utf-8"))
    live = [[bytes.fromhex(frame) for frame in message] for message in recording["live"]]
    answers = {
        int.from_bytes(bytes.fromhex(m[2]), "big"): bytes.fromhex(m[3]) for m in recording["replay"][:-1]
    }
    missed = range(min(answers), min(answers) + 5)
    oracle = Oracle()
    with (
        Publisher() as publisher,
        replaying({}, topics=False) as server,
        Tap([Endpoint(publisher.endpoint, replay=server.endpoint)], tmp_path) as tap,
    ):
        publisher.wait_subscribed()
        server.asked.acquire(timeout=10)
        server.batches.update(answers)
        for number, frames in enumerate(live):
            oracle.take(frames[2])
            if number not in missed:
                publisher.send_frames(*frames)
        work_until(tap, lambda: any(w.number == len(live) - 1 for w in tap.state.workers.values()))
        assert tap.recorder.recovered == len(missed)
    [worker] = state_of(tmp_path).workers.values()
    found = {(*place, name) for place, there in worker.blocks.items() for name in there}
    assert found == oracle.resident.keys()
    assert worker.complete
    assert worker.unknown_removals == 0
    with published(tmp_path) as endpoint:
        router, topic = late_router(endpoint, len(oracle.resident))
    assert router.resident == oracle.resident
    assert topic == live[0][0]
