"""Feeds in all forms: a reader that comes late, and one that asks for a replay, end with what the manager holds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from events.subscribe.index import Index
from events.subscribe.subscriber import Subscriber
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.fold.state import resident_names
from sinks import SinkContext, SinkURLError, open_sink
from sinks.router.zmq import ZMQTransport
from tests.support.engines import strategies
from tests.support.waiting import wait_until

FORMS = [
    form + tokens
    for form in ("format=vllm", "format=vllm-array", "format=sglang")
    for tokens in ("", "&tokens=0")
]
WINDOWS = [None, (6, strategies.LIMIT)]


def config(windows: Any) -> KVCacheConfig:
    layers = len(windows or (1,))
    return strategies.config(
        max_attention_window=windows, num_layers=layers, secondary_blocks=6, primary_blocks=14
    )


def work(manager: KVCacheManager, chance: random.Random, requests: int, first: int) -> None:
    for number in range(first, first + requests):
        prompt = [chance.choice((3, 4)) for _ in range(chance.randint(3, 9))]
        space: dict[str, Any] = chance.choice([{}, {"lora_name": "style"}, {"cache_salt": "tenant"}])
        manager.add_sequence(number, prompt, **space)
        manager.store_context_blocks(number, len(prompt))
        manager.add_tokens([number], [5])
        manager.remove_sequence(number)
        manager.flush()


def follow(index: Index, subscriber: Subscriber, manager: KVCacheManager, *, signed: bool) -> None:
    """Read until the index holds what the manager holds, by group and level."""
    groups = range(len(manager.state.groups))

    def held(group: int, level: int) -> set[Any]:
        names = resident_names(manager.state, level, group)
        return {name - 2**64 if signed and name >= 2**63 else name for name in names}

    def agrees() -> bool:
        for report in subscriber.poll(20):
            index.fold(report)
        if signed:  # it does not tell groups apart
            return all(
                set().union(*(held(group, level) for group in groups)) == index.resident(0, level)
                for level in (0, 1)
            )
        return all(held(group, level) == index.resident(group, level) for group in groups for level in (0, 1))

    wait_until(agrees, "the reader holds other blocks than the manager")


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("form", FORMS)
def test_readers_end_with_what_the_manager_holds(form: str, windows: Any) -> None:
    """One from the start, one that comes late, one that asks for all numbers; nothing is an orphan or unknown."""
    signed = form.startswith("format=sglang")
    if signed and windows is not None:
        pytest.skip("SGLang's form says nothing of groups")
    chance = random.Random(form)
    url = f"zmq+pub://127.0.0.1:0?replay=0&coalesce=0&heartbeat=50ms&first=0&{form}"
    with KVCacheManager(config(windows), sinks=[url]) as manager:
        transport = manager.feeds[0].transport
        assert isinstance(transport, ZMQTransport)
        work(manager, chance, 5, 0)
        with (
            Subscriber(transport.endpoint) as early,
            Subscriber(transport.endpoint, replay=transport.replay_endpoint, start=0) as asking,
        ):
            index, replayed = Index(), Index()
            follow(index, early, manager, signed=signed)
            work(manager, chance, 60, 5)
            follow(index, early, manager, signed=signed)
            follow(replayed, asking, manager, signed=signed)
            with Subscriber(transport.endpoint) as late:
                late_reader = Index()
                follow(late_reader, late, manager, signed=signed)
        for each in (index, replayed, late_reader):
            counts = (each.orphans, each.unknown_removals, each.repeated_stores, each.unknown_events)
            assert counts == (0, 0, 0, 0), counts
        assert index.count(0) > 0


def test_batches_of_arrays_keep_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each block is an event of its own."""
    url = "zmq+pub://127.0.0.1:0?coalesce=0&max_batch=2KiB&format=vllm-array&replay=0&first=0"
    settings = strategies.config(tokens_per_block=1, primary_blocks=600, max_sequence_length=600)
    with KVCacheManager(settings, sinks=[url]) as manager:
        transport = manager.feeds[0].transport
        assert isinstance(transport, ZMQTransport)
        with Subscriber(transport.endpoint, replay=transport.replay_endpoint, start=0) as reader:
            index = Index()
            follow(index, reader, manager, signed=False)
            sent: list[int] = []
            publish = transport.publisher.send

            def counting(seq: int, payload: bytes) -> None:
                sent.append(len(payload))
                publish(seq, payload)

            monkeypatch.setattr(transport.publisher, "send", counting)
            manager.add_sequence(1, list(range(500)))
            manager.store_context_blocks(1, 500)
            manager.flush()
            follow(index, reader, manager, signed=False)
    assert len(sent) > 10
    assert max(sent) <= 2048


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("format=avro", "format must be one of vllm, vllm-array, sglang"),
        ("style=array", "unknown option"),
    ],
)
def test_unknown_forms_are_refused(options: str, reason: str) -> None:
    """With those that there are."""
    with pytest.raises(SinkURLError, match=reason):
        open_sink(f"zmq+pub://127.0.0.1:0?{options}", SinkContext(32, 4))
