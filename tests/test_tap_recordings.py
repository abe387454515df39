"""What released publishers of vLLM and SGLang sent, tapped and told again: nothing of it is lost.

`tests/data/told_*.json` are the frames of random events (adapters, salts, images, copies, tiers, sliding windows,
digests, pairs of tokens), live and as an answer, as `ZmqEventPublisher` of the named release sent them. They are read
here with msgpack alone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import zmq

from kvcache.tap.tap import Endpoint, Tap, state_of
from tests.support.feeds.publisher import Publisher, replaying
from tests.support.feeds.recordings import Oracle, published
from tests.support.feeds.tapped import work_until
from tests.support.places import ROOT


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
def test_a_recording_is_tapped_and_sent_again(tmp_path: Path, name: str) -> None:
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
