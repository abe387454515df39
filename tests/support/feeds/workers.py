"""A worker's feed over real sockets, and a router made of plain sockets."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self
from urllib.parse import parse_qsl, urlencode

import msgspec
import zmq

from events.formats.vllm import Hash
from events.types import EventBatch
from sinks import SinkContext, SinkRunner, open_sink
from sinks.router.feed import RouterFeed
from sinks.router.zmq import ZMQTransport
from tests.support.feeds.feed_source import (
    Reader,
    Source,
    names,
    split,
)
from tests.support.ports import free_port
from tests.support.waiting import WAIT, WAIT_MS, wait_until

CONTEXT = SinkContext(key_bytes=8, tokens_per_block=4)
END = [b"", b"", b"\xff" * 8, b""]


class Worker:
    """A feed behind its runner, as the manager has it, at free ports."""

    def __init__(
        self, options: str = "", context: SinkContext = CONTEXT, feed: RouterFeed | None = None
    ) -> None:
        defaults = {"replay": "0", "first": "0", "heartbeat": "0"}
        url = f"zmq+pub://127.0.0.1:0?{urlencode(defaults | dict(parse_qsl(options, strict_parsing=bool(options))))}"
        sink = feed or open_sink(url, context)
        assert isinstance(sink, RouterFeed)
        self.feed = sink
        transport = sink.transport
        assert isinstance(transport, ZMQTransport)
        self.transport = transport
        self.source = Source()
        self.runner = SinkRunner(sink, "feed")

    def __enter__(self) -> Self:
        # The first thing that the runner finds, so that one batch has all of the start.
        self.put(self.source.created())
        self.runner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()
        assert self.runner.stats().errors == 0, self.runner.stats().last_error

    def put(self, *batches: EventBatch) -> None:
        for batch in batches:
            self.runner.put(batch)

    def settle(self) -> None:
        """Wait until what was put is sent."""
        wait_until(lambda: self.runner.stats().lag_batches == 0)
        wait_until(lambda: self.feed.is_settled)


class Router:
    """Plain sockets that a router would have."""

    def __init__(self) -> None:
        self.context: zmq.Context = zmq.Context()
        self.reader = Reader()
        self.seqs: list[int] = []
        self.sockets: list[zmq.Socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def socket(self, kind: int) -> zmq.Socket:
        # Kept, because a socket that nobody refers to warns that it was not closed.
        self.sockets.append(self.context.socket(kind))
        return self.sockets[-1]

    def subscribe(self, worker: Worker, topic: bytes = b"") -> None:
        """Connect and wait until the worker knows."""
        before = worker.feed.subscribers
        self.live = self.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, topic)
        self.live.connect(worker.transport.endpoint)
        assert worker.feed.wait_subscribers(before + 1, WAIT)

    def welcome(self) -> list[bytes]:
        """What a newcomer is told first."""
        frames = self.receive()
        _, events, _ = msgspec.msgpack.decode(frames[2])
        assert events[0]["type"] == "AllBlocksCleared"
        return frames

    def receive(self) -> list[bytes]:
        assert self.live.poll(WAIT_MS), "nothing came"
        return self.live.recv_multipart()

    def follow(self, until: int) -> None:
        """Fold live batches up to the number `until`."""
        while not self.seqs or self.seqs[-1] < until:
            _, seq, payload = self.receive()
            self.seqs.append(int.from_bytes(seq, "big"))
            self.reader.take_payload(payload)

    def dealer(self, worker: Worker, **options: int) -> zmq.Socket:
        dealer = self.socket(zmq.DEALER)
        for option, value in options.items():
            dealer.set(getattr(zmq, option), value)
        assert worker.transport.replay_endpoint is not None
        dealer.connect(worker.transport.replay_endpoint)
        return dealer

    def ask(self, worker: Worker, start: bytes) -> list[list[bytes]]:
        """The frames of a replay, without the end marker."""
        dealer = self.dealer(worker)
        dealer.send_multipart([b"", start])
        return read_answer(dealer)

    def replay(self, worker: Worker, start: int) -> list[int]:
        """Fold a replay into an empty reader; returns its numbers."""
        self.reader = Reader()
        seqs = []
        for empty, topic, seq, payload in self.ask(worker, start.to_bytes(8, "big")):
            assert (empty, topic) == (b"", worker.transport.topic)
            seqs.append(int.from_bytes(seq, "big"))
            self.reader.take_payload(payload)
        return seqs


def read_answer(dealer: zmq.Socket) -> list[list[bytes]]:
    answer: list[list[bytes]] = []
    while True:
        assert dealer.poll(WAIT_MS), "the replay stopped"
        frames = dealer.recv_multipart()
        if frames == END:
            return answer
        answer.append(frames)


def churn(worker: Worker, count: int, first: int = 1) -> None:
    """Stores, and every third sequence removed again."""
    for handle in range(first, first + count):
        worker.put(worker.source.store(handle, 3))
        if (handle - first) % 3 == 2:
            worker.put(worker.source.remove(handle - 1))


def last_seq(worker: Worker) -> int:
    return worker.feed.last_seq


@contextmanager
def port_in_use() -> Iterator[int]:
    """A port of loopback on which something listens inside the context."""
    with sockets.create_server(("127.0.0.1", free_port())) as subscribed:
        yield int(subscribed.getsockname()[1])


def connecting(port: int, options: str) -> Worker:
    sink = open_sink(f"zmq+pub://127.0.0.1:{port}?connect=1&heartbeat=50ms&coalesce=5ms&{options}", CONTEXT)
    assert isinstance(sink, RouterFeed)
    return Worker(feed=sink)


def resident(worker: Worker) -> set[Hash]:
    """What is in the cache, from the cache's own books."""
    return {
        int.from_bytes(name, "big")
        for handle, slots in worker.source.slots.items()
        for name in split(names(handle, len(slots)), 8)
    }
