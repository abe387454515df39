"""An hour of a busy feed, as fast as it goes, on a small cache: what it costs to be old."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from events.packed import NAME_BYTES
from events.subscribe.index import Index
from events.subscribe.subscriber import Subscriber
from kvcache import KVCacheConfig, KVCacheManager
from sinks.router.feed import RouterFeed
from sinks.router.zmq import ZMQTransport
from tests.support.memory import STATM, resident_bytes
from tests.support.waiting import WAIT, wait_until

BATCHES = 72_000
"""Twenty a second."""
CONFIG = KVCacheConfig(
    max_sequence_length=512, tokens_per_block=4, primary_blocks=256, secondary_blocks=256, num_layers=1
)


def step(manager: KVCacheManager, rng: random.Random, number: int) -> None:
    """One request from a tree of prompts: it always changes something."""
    prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(8, 40))]
    manager.add_sequence(number, [*prompt, number])
    manager.store_context_blocks(number, len(prompt))
    manager.remove_sequence(number)
    manager.flush()


def joined(feed: ZMQTransport, *, replay: bool, last: int) -> tuple[Index, float]:
    """What a late router knows, and after how many seconds."""
    begun = time.monotonic()
    index, seq = Index(), -1
    endpoint = feed.replay_endpoint if replay else None
    with Subscriber(feed.endpoint, replay=endpoint, start=0 if replay else None) as subscriber:
        while seq < last:
            assert time.monotonic() - begun < WAIT
            for report in subscriber.poll(10):
                index.fold(report)
                seq = max(seq, getattr(report, "seq", -1))
    return index, time.monotonic() - begun


def reported(manager: KVCacheManager, level: int) -> set[int]:
    found = set()
    key_bytes = manager.state.hashing.key_bytes
    for run in manager.state.groups[0].tree.runs.values():
        full = len(run.slots) - bool(run.partial)
        if run.level == level:
            found |= {
                int.from_bytes(run.keys[at * key_bytes : at * key_bytes + NAME_BYTES], "big")
                for at in range(full)
            }
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not STATM.exists(), reason="how much memory a process has is read from /proc")
def test_an_hour_of_a_feed_makes_it_no_slower_to_join_and_no_larger(tmp_path: Path) -> None:
    """After 72,000 batches under high numbers a late router knows all within 2 s, and memory has stopped to grow."""
    url = f"zmq+pub://127.0.0.1:0?replay=0&coalesce=0&ring=4MiB&state={tmp_path / 'numbers'}"
    rng = random.Random(0)
    with KVCacheManager(CONFIG, sinks=[url]) as manager:
        (feed,) = manager.feeds
        assert isinstance(feed, RouterFeed)
        transport = feed.transport
        assert isinstance(transport, ZMQTransport)
        feed._numbers.next = feed._numbers._reserved = 3_000_000_000
        sizes = []
        for number in range(BATCHES):
            step(manager, rng, number)
            wait_until(lambda: manager.sink_stats()[0].lag_batches <= 50, "the sink does not keep up")
            if number % (BATCHES // 8) == BATCHES // 8 - 1:
                joined(transport, replay=True, last=0)
                sizes.append(resident_bytes())
        wait_until(lambda: not manager.sink_stats()[0].lag_batches, "the sink does not come to rest")
        manager.poll()
        manager.flush()
        wait_until(lambda: not manager.sink_stats()[0].lag_batches, "the sink does not come to rest")
        last = feed._numbers.next - 1
        assert last > 3_000_000_000 + BATCHES // 2
        for replay in (False, True):
            index, seconds = joined(transport, replay=replay, last=last)
            assert seconds < 2
            assert [index.resident(0, level) for level in (0, 1)] == [
                reported(manager, 0),
                reported(manager, 1),
            ]
            assert (index.orphans, index.missed_batches) == (0, 0)
        assert manager.sink_stats()[0].dropped_batches == 0
        assert max(sizes[4:]) - sizes[3] < 16 << 20, sizes
