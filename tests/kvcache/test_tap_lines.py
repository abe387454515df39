"""Files of TensorRT-LLM's dicts, recorded while they grow: what is known is what the cache has, that wrote them."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from events.formats.vllm import decode_batch, encode_batch
from events.log import LogReader
from events.subscribe.endpoints import EndpointError
from events.subscribe.index import Index, level_of
from events.subscribe.workers import WorkerFeed
from events.types import FeedGap, FeedRestarted
from kvcache import KVCacheManager, PrefixIndex
from kvcache.fold.state import resident_names
from kvcache.tap.tap import Endpoint, Tap, state_of
from sinks.router.feed import RouterFeed
from sinks.router.numbers import FeedNumbers
from tests.support.engines import strategies
from tests.support.feeds.feed_source import RecordingTransport
from tests.support.feeds.strict import NoBytes
from tests.support.feeds.tapped import work_until
from tests.support.feeds.trtllm_events import STREAM, WINDOWS, BusyEngine, Held, config, held_by, work


def known(tap: Tap) -> Held:
    """By group and level what the tap's only worker holds."""
    held: Held = {}
    for worker in tap.state.workers.values():
        for (medium, group, *_), blocks in worker.blocks.items():
            if blocks:
                held.setdefault((group, level_of(medium)), set()).update(
                    name for name in blocks if isinstance(name, int)
                )
    return held


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_file_that_grows(tmp_path: Path, windows: Any) -> None:
    """The tap begins before there is a file, follows it, and its log folds to what the manager has."""
    path = tmp_path / "e.jsonl"
    with Tap([Endpoint(f"file:{path}?format=trtllm")], tmp_path / "tap") as tap:
        with KVCacheManager(
            config(windows), copier=NoBytes(), sinks=[f"file:{path}?format=trtllm"]
        ) as manager:
            for seed in range(3):
                engine = work(manager, seed, 60)
                work_until(tap, lambda: known(tap) == held_by(manager))
                for number in engine.running:
                    manager.remove_sequence(number)
                manager.flush()
            held = held_by(manager)
        work_until(tap, lambda: known(tap) == held)
    (worker,) = state_of(tmp_path / "tap").workers.values()
    assert worker.complete
    assert {type(e) for batch in LogReader(tmp_path / "tap", kind="feed") for e in batch.events}.isdisjoint(
        {FeedGap, FeedRestarted}
    )
    assert sum(map(len, held.values())) > 5


def test_full_blocks_feed_routers(tmp_path: Path) -> None:
    """With `block_size=` a router that is fed from the tap's log has just the full blocks, with their tokens."""
    path, settings = tmp_path / "e.jsonl", config((6, strategies.LIMIT), tokens_per_block=2)
    with KVCacheManager(settings, sinks=[f"file:{path}?format=trtllm"]) as manager:
        work(manager, 4)
        held = {
            (group, level): resident_names(manager.state, level, group)
            for group in (0, 1)
            for level in (0, 1)
        }
    with Tap([Endpoint(f"file:{path}?block_size=2")], tmp_path / "tap") as tap:
        wanted = {place: names for place, names in held.items() if names}
        work_until(tap, lambda: known(tap) == wanted)
    transport, index, prefixes = RecordingTransport(), Index(), PrefixIndex()
    feed = RouterFeed(transport, FeedNumbers(None), coalesce_seconds=0, feed=WorkerFeed())
    for batch in LogReader(tmp_path / "tap", kind="feed"):
        feed.write(batch)
    feed.open()
    feed.tick()
    for sent in transport.sent:
        index.apply(decode_batch(encode_batch(sent.changes, 1.0)))
        prefixes.apply("w", decode_batch(encode_batch(sent.changes, 1.0)))
    assert {place: set(index.resident(*place)) for place in wanted} == wanted
    assert all(len(block.tokens) == 2 for blocks in index.blocks.values() for block in blocks.values())
    prefixes.check()
    counts = prefixes.counts("w", 0)
    assert (counts.stores_without_tokens, counts.contradictions) == (0, 0)


def test_resumed_tap_and_engine_that_restarts(tmp_path: Path) -> None:
    """Each time all of the file is read; numbers that go back mean that nothing from before holds."""
    path, url = tmp_path / "e.jsonl", Endpoint(f"file:{tmp_path}/e.jsonl")
    for seed in range(3):
        sink = f"file:{path}?format=trtllm&append=1"
        with KVCacheManager(config(None), copier=NoBytes(), sinks=[sink]) as manager:
            work(manager, seed)
            held = held_by(manager)
        with Tap([url], tmp_path / "tap", resume=seed > 0) as tap:
            work_until(tap, partial(lambda tap, held: known(tap) == held, tap, held))
    last = [e for batch in LogReader(tmp_path / "tap", kind="feed") for e in batch.events]
    assert sum(isinstance(event, FeedRestarted) for event in last) == 0 + 1 + 2


def test_another_file_takes_the_place(tmp_path: Path) -> None:
    """One that is rotated from outside goes on in the new one."""
    path, rng = tmp_path / "e.jsonl", random.Random(2)
    with (
        Tap([Endpoint(f"file:{path}")], tmp_path / "tap") as tap,
        KVCacheManager(config(None), copier=NoBytes(), sinks=[f"file:{path}?format=trtllm"]) as manager,
    ):
        engine = BusyEngine(manager, rng)
        for number in range(3):
            for _ in range(30):
                engine.step()
                manager.flush()
            work_until(tap, lambda: known(tap) == held_by(manager))
            path.rename(tmp_path / f"old{number}")
            manager.reopen_sinks()


def test_begins_in_the_middle_and_holes(tmp_path: Path) -> None:
    """What was not heard may have been anything: it is a loss, and a line that is none is like one."""
    path = tmp_path / "e.jsonl"
    lines = [json.dumps(event) for event in STREAM]
    path.write_text("\n".join([lines[1], "{}", "rubbish", lines[3], ""]))
    with Tap([Endpoint(f"file:{path}")], tmp_path / "tap") as tap:
        work_until(tap, lambda: tap.recorder.batches == 2)
        assert known(tap) == {}
    events = [e for batch in LogReader(tmp_path / "tap", kind="feed") for e in batch.events]
    gaps = [(event.first, event.last) for event in events if isinstance(event, FeedGap)]
    assert gaps == [(0, 0), (2, 2)]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("file:", "write file:"),
        ("file://host/x", "write file:"),
        ("file:x?format=vllm", "valid options are format=trtllm"),
        ("file:x?block_size=0", "of at least 1"),
        ("file:x?block_size=a", "valid options are"),
        ("file:x?speed=1", "valid options are"),
    ],
)
def test_addresses_of_no_file(tmp_path: Path, address: str, why: str) -> None:
    """What is wrong is said before anything is recorded."""
    with pytest.raises(EndpointError, match=why):
        Tap([Endpoint(address)], tmp_path / "tap")
