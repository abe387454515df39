"""A router that is fed by way of a broker answers as the manager itself would, for each prompt that the engine saw."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from events.brokers.subscriber import BrokerSubscriber
from events.log import LogReader, LogWriter
from events.types import SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager, PrefixIndex
from kvcache.replay import replay
from kvcache.workload.chats import generate_chats
from kvcache.workload.driver import Engine
from kvcache.workload.traces import TraceRequest
from tests.support.servers.server import Server
from tests.support.waiting import WAIT, wait_until

REQUESTS, AT_ONCE = 300, 60
BLOCK = 16
CONFIG = KVCacheConfig(
    max_sequence_length=16_384,
    max_attention_window=(16_384,),
    tokens_per_block=BLOCK,
    primary_blocks=2000,
    secondary_blocks=1500,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    block_hash="v2_sha256_64",
)
Match = tuple[int, int]
"""Tokens of a prompt in primary, and in primary or secondary."""


class Router:
    """A prefix index, fed from a stream."""

    def __init__(self, url: str) -> None:
        self.subscriber, self.index = BrokerSubscriber(url), PrefixIndex()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.subscriber.close()

    def read(self) -> None:
        for worker, report in self.subscriber.poll(50):
            self.index.fold(worker.topic, report)

    def match(self, prompt: list[int]) -> Match:
        found = list(self.index.match(prompt).values())
        return (found[0].primary, found[0].secondary) if found else (0, 0)

    def complaints(self) -> dict[str, int]:
        """What no honest publisher says."""
        counts = [self.index.counts(*publisher) for publisher in self.index.publishers]
        return {
            name: sum(getattr(each, name) for each in counts)
            for name in ("orphans", "unknown_removals", "missed_batches")
        }


def truth(manager: KVCacheManager, prompt: list[int]) -> Match:
    """What the manager would reuse of whole blocks, by its own tree."""
    levels = [block.level for block in manager.match([*prompt, 2**31 - 2]).blocks]
    leading = next((at for at, level in enumerate(levels) if level), len(levels))
    return leading * BLOCK, len(levels) * BLOCK


def prompts(log: Path) -> list[list[int]]:
    return [
        list(array("i", event.tokens))
        for batch in LogReader(log)
        for event in batch.events
        if isinstance(event, SequenceAdded)
    ]


def manager_on(log: Path, url: str) -> KVCacheManager:
    """A new one, or one that goes on from a log that is there."""
    if not any(log.glob("*.kvlog")):
        return KVCacheManager(CONFIG, log=LogWriter(log), sinks=[url])
    return KVCacheManager.resume(replay(log).state, log=LogWriter(log, resume=True), sinks=[url])


def test_every_prompt_is_answered_as_by_the_manager(server: Server, tmp_path: Path) -> None:
    """Some hundred requests; broker and engine are restarted, the broker comes back empty, and routers join late."""
    requests = generate_chats(150, seed=3)[:REQUESTS]
    log, url = tmp_path / "log", f"{server.url}?worker=w&heartbeat=200ms&restate=500ms&retain=1min"
    parts = [requests[begin : begin + AT_ONCE] for begin in range(0, REQUESTS, AT_ONCE)]
    with ExitStack() as stack:
        routers = [stack.enter_context(Router(server.url))]
        manager = manager_on(log, url)
        stack.callback(lambda: manager.close())
        for number, part in enumerate(parts):
            if number == 1:
                server.kill()  # while the engine works
            if number == 3:
                manager.close()
                manager = manager_on(log, url)
                server.lose_all()
            play(manager, part, routers)
            if number in (1, 3):
                server.start()
            if number in (2, 4):
                routers.append(stack.enter_context(Router(server.url)))
        manager.flush()
        assert manager.wait_durable(WAIT)
        asked = prompts(log)
        assert len(asked) >= REQUESTS
        expected = [truth(manager, prompt) for prompt in asked]
        assert sum(primary > 0 for primary, _ in expected) > REQUESTS // 4
        assert sum(secondary > primary for primary, secondary in expected) > REQUESTS // 20

        def agree() -> bool:
            manager.flush()
            for router in routers:
                router.read()
            return all([router.match(prompt) for prompt in asked] == expected for router in routers)

        wait_until(agree, "routers do not get to know what the manager has")
        for router in routers:
            assert not any(router.complaints().values()), router.complaints()


def play(manager: KVCacheManager, requests: list[TraceRequest], routers: list[Router]) -> None:
    result = Engine(manager, requests).run()
    assert result.requests == len(requests)
    for router in routers:
        router.read()
