"""Everything that a feed in the native format sends for a cache at work."""

from __future__ import annotations

from collections.abc import Callable

from events.codec import encode_batch
from events.feed.changes import Batched
from events.formats.vllm import Message
from events.types import EventBatch
from kvcache.replay import Replayed
from sinks import Sink, SinkContext
from sinks.router.feed import FeedBatch, FeedSnapshot
from sinks.router.native import NativeFeed
from sinks.router.numbers import FeedNumbers
from tests.support.feeds.native import Cache

CONTEXT = SinkContext(key_bytes=32, tokens_per_block=4, fold=Replayed)


class Batches(Sink):
    """A sink that keeps what it gets."""

    needs_tokens = True

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []

    def open(self) -> None: ...

    def write(self, batch: EventBatch) -> None:
        self.batches.append(batch)

    def close(self) -> None: ...


class Sent:
    """What a feed sends, as messages, and its state behind each."""

    subscribers = 0

    def __init__(self, batches: list[EventBatch], *, tokens: bool = True) -> None:
        self.messages: list[Message] = []
        self.states: list[Message] = []
        numbers = FeedNumbers(None)
        self.feed = NativeFeed(self, numbers, CONTEXT, tokens=tokens, heartbeat_seconds=0)
        self.feed.open()
        for batch in batches:
            self.feed.write(batch)
            self.feed.tick()
            state = self._take_state()
            (change,) = state.changes
            assert isinstance(change, Batched)
            self.states.append(Message(b"t", state.seq, encode_batch(change.batch)))

    def open(self, next_seq: int, worker: object) -> None: ...

    def close(self) -> None: ...

    def tick(self, take_state: Callable[[], FeedSnapshot]) -> None:
        self._take_state = take_state

    def send(self, batch: FeedBatch) -> None:
        (change,) = batch.changes
        assert isinstance(change, Batched)
        self.messages.append(Message(b"t", batch.seq, encode_batch(change.batch)))


def sent_by_a_cache(seed: int) -> tuple[Sent, Cache]:
    kept = Batches()
    cache = Cache(kept, seed=seed)
    cache.steps(60)
    cache.close()
    return Sent(kept.batches), cache
