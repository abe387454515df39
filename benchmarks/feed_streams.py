"""How many blocks a second a feed publishes and a subscriber takes, and how long who comes late waits for all of them;
for `benchmarks/feed.py`.

Prompts of 128 blocks of 16 tokens, one per engine step, are stored in a cache that keeps all of them. What a manager
tells of that is recorded, and then:

- *published*: the feed's sink gets it as fast as it takes it, with a subscriber that only receives;
- *late join*: a process that connects then is told the whole state. From before it connects until it has decoded all
  blocks and keeps their names in a set; the first one waits for the state to be encoded, too, which the second one
  finds made. With `into_index` it keeps a `PrefixIndex` instead, which can be asked at once;
- *consumed*: the messages that were published are sent once more from memory, as fast as they are taken, to a
  process that decodes and counts them: our `Subscriber`, or a peer.

A peer is a command that is given an endpoint and the number of the last message (the first one is 0). It subscribes to
all topics, decodes each message (three frames, as of vLLM's wire), and prints ``{"blocks": …, "until": …}``: all blocks
stored, and the time (`time.time()`) at which it has decoded the last one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, Literal

import numpy as np
import zmq

from benchmarks.feed_ports import free_port
from events.formats.vllm import BlockStored, VLLMBatch
from events.subscribe.continuity import Received
from events.subscribe.subscriber import Subscriber
from events.tokens.names import ALGORITHMS
from events.types import EventBatch
from kvcache import KVCacheConfig, KVCacheManager, PrefixIndex
from sinks import Sink, SinkContext, SinkRunner, open_sink

BLOCK, SEQUENCE_BLOCKS = 16, 128
VOCABULARY = 150_000
HASH: Literal["v2_sha256_64"] = "v2_sha256_64"
UNITS = {
    "published": "blocks/s",
    "late_join": "s",
    "late_join_again": "s",
    "late_join_index": "s",
    "consumed": "blocks/s",
    "consumed_by_peer": "blocks/s",
    "ours_to_peer": "times",
}
"""Figures and their units."""
READ_MS = 500
"""So long nothing comes when everything has been read."""


class Recorder(Sink):
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []

    def open(self) -> None:
        """There is nothing to open."""

    def write(self, batch: EventBatch) -> None:
        """Keep a batch."""
        self.batches.append(batch)

    def close(self) -> None:
        """There is nothing to close."""


def record(blocks: int) -> list[EventBatch]:
    """What a manager tells that comes to hold so many blocks."""
    random, recorder = np.random.default_rng(1), Recorder()
    config = KVCacheConfig(
        max_sequence_length=SEQUENCE_BLOCKS * BLOCK + 1,
        tokens_per_block=BLOCK,
        primary_blocks=blocks + SEQUENCE_BLOCKS,
        block_hash=HASH,
    )
    keeping = SinkRunner(recorder, "recorder", max_events=1 << 40, max_bytes=1 << 40)
    with KVCacheManager(config, sinks=[keeping]) as manager:
        for number in range(blocks // SEQUENCE_BLOCKS):
            prompt = random.integers(0, VOCABULARY, SEQUENCE_BLOCKS * BLOCK, dtype=np.int32)
            manager.add_sequence(number, prompt)
            manager.store_context_blocks(number, len(prompt))
            manager.remove_sequence(number)
            manager.flush()
    return recorder.batches


def publish(port: int, blocks: int) -> None:
    """The publisher's process: prints the seconds that publishing takes, and stays for who comes late."""
    batches = record(blocks)
    context = SinkContext(ALGORITHMS[HASH].key_bytes, BLOCK)
    url = f"zmq+pub://127.0.0.1:{port}?coalesce=0&heartbeat=0&state=&hwm=1000000"
    feed: Any = open_sink(url, context)
    runner = SinkRunner(feed, "feed", max_events=1 << 40, max_bytes=1 << 40)
    runner.start()
    print("ready", flush=True)
    assert feed.wait_subscribers(1, 60)
    begun = time.perf_counter()
    for batch in batches:
        runner.put(batch)
    while runner.stats().lag_batches:
        time.sleep(0.001)
    print(time.perf_counter() - begun, flush=True)
    sys.stdin.readline()
    runner.close()


class Reader:
    """Receives what is published, and does no more than that, on a thread of its own."""

    def __init__(self, port: int) -> None:
        self.messages: list[list[bytes]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(f"tcp://127.0.0.1:{port}",))
        self._thread.start()

    def _read(self, endpoint: str) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.subscribe(b"")
            socket.connect(endpoint)
            while socket.poll(READ_MS) or not self._over.is_set():
                if socket.poll(0):
                    self.messages.append(socket.recv_multipart())

    def stop(self) -> list[list[bytes]]:
        """What was received."""
        self._over.set()
        self._thread.join()
        return self.messages


def join(endpoint: str, blocks: int, *, into_index: bool) -> float:
    """Seconds from before a reader connects until it has all blocks."""
    names: set[Any] = set()
    index = PrefixIndex()
    begun = time.perf_counter()
    with Subscriber(endpoint) as subscriber:
        for report in subscriber:
            if into_index:
                index.fold(0, report)
                known = index.resident(0)[0]
            else:
                names.update(_names(report.batch) if isinstance(report, Received) else ())
                known = len(names)
            if known >= blocks:
                break
        return time.perf_counter() - begun


def consume(endpoint: str, last: int) -> dict[str, float]:
    """Take what is published up to the message `last`, and count its blocks."""
    blocks = 0
    with Subscriber(endpoint) as subscriber:
        for report in subscriber:
            assert isinstance(report, Received)
            blocks += len(_names(report.batch))
            if report.seq == last:
                break
        return {"blocks": blocks, "until": time.time()}


def _names(batch: VLLMBatch) -> list[Any]:
    return [name for event in batch.events if isinstance(event, BlockStored) for name in event.block_hashes]


def speak(messages: list[list[bytes]], command: list[str]) -> tuple[int, float]:
    """How many blocks a consumer finds in these messages, and the seconds from when the first one is sent."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        words = [*command, f"tcp://127.0.0.1:{port}", str(len(messages) - 1)]
        consumer = subprocess.Popen(words, stdout=subprocess.PIPE)
        if not socket.poll(60_000):
            raise SystemExit(f"nobody has subscribed within a minute: {shlex.join(words)}")
        socket.recv()
        begun = time.time()
        for number, (topic, _, payload) in enumerate(messages):
            socket.send_multipart([topic, number.to_bytes(8, "big"), payload])
        out, _ = consumer.communicate()
    said = json.loads(out)
    return said["blocks"], said["until"] - begun


def measure(blocks: int, repeat: int, peer: str | None) -> dict[str, float]:
    """All figures: medians, in blocks per second and seconds; ratios are medians of pairs."""
    blocks -= blocks % SEQUENCE_BLOCKS
    runs: list[dict[str, float]] = []
    messages: list[list[bytes]] = []
    for _ in range(repeat):
        figures, messages = _publish_and_join(blocks)
        runs.append(figures)
    ours, theirs = [], []
    for _ in range(repeat):
        ours.append(_consumed(messages, [sys.executable, __file__, "--consume"], blocks))
        if peer is not None:
            theirs.append(_consumed(messages, shlex.split(peer), blocks))
    result = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    result["consumed"] = statistics.median(ours)
    if theirs:
        result["consumed_by_peer"] = statistics.median(theirs)
        result["ours_to_peer"] = statistics.median(own / its for own, its in zip(ours, theirs, strict=True))
    return result


def _publish_and_join(blocks: int) -> tuple[dict[str, float], list[list[bytes]]]:
    port = free_port()
    command = [sys.executable, __file__, "--publish", str(port), str(blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdout is not None
        publisher.stdout.readline()
        reader = Reader(port)
        seconds = float(publisher.stdout.readline())
        messages = reader.stop()
        late = {
            name: _joined(port, blocks, *options)
            for name, options in {
                "late_join": (),
                "late_join_again": (),
                "late_join_index": ("--into-index",),
            }.items()
        }
        publisher.communicate("over\n")
    return {"published": blocks / seconds, **late}, messages


def _joined(port: int, blocks: int, *options: str) -> float:
    command = [sys.executable, __file__, "--join", f"tcp://127.0.0.1:{port}", str(blocks), *options]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _consumed(messages: list[list[bytes]], command: list[str], blocks: int) -> float:
    found, seconds = speak(messages, command)
    if found != blocks:
        raise SystemExit(f"{shlex.join(command)} has heard of {found} blocks instead of {blocks}")
    return blocks / seconds


def main() -> None:
    """The other processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--publish", nargs=2, type=int)
    parser.add_argument("--join", nargs=2)
    parser.add_argument("--into-index", action="store_true")
    parser.add_argument("--consume", nargs=2)
    arguments = parser.parse_args()
    if arguments.publish:
        publish(*arguments.publish)
    elif arguments.join:
        endpoint, blocks = arguments.join
        print(join(endpoint, int(blocks), into_index=arguments.into_index))
    else:
        endpoint, last = arguments.consume
        print(json.dumps(consume(endpoint, int(last))))


if __name__ == "__main__":
    main()
