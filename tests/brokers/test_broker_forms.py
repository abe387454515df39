"""Feeds by way of brokers in all forms: readers are not told which, and know what each worker has."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import pytest

from events.brokers.records import StreamRecord
from tests.support.servers.fleet import FeedingWorker, StreamReader
from tests.support.servers.server import Server

FORMS = ["format=vllm", "format=vllm-array", "format=sglang"]


@pytest.mark.parametrize("form", FORMS)
def test_readers_of_any_form_know_what_workers_have(broker: Server, form: str) -> None:
    """One from the start, and one that comes when the state was told in pieces; nothing is odd on the way."""
    rng = random.Random(f"{broker.scheme} {form}")
    with ExitStack() as stack:
        early = stack.enter_context(StreamReader(broker.url))
        worker = stack.enter_context(FeedingWorker(f"{broker.url}?{form}", "w", min_bytes=4000))
        for _ in range(12):
            for _ in range(30):
                worker.step(rng)
            early.catch_up(worker)
        late = stack.enter_context(StreamReader(broker.url))
        late.catch_up(worker)
        for reader in (early, late):
            index = reader.indexes["w"]
            assert {name % 2**64 for name in index.resident() if isinstance(name, int)} == worker.resident
            assert (index.orphans, index.repeated_stores, index.unknown_removals) == (0, 0, 0)
            assert index.missed_batches == 0
        assert worker.transport.attempts > 1
        assert worker.runner.stats().errors == 0


def test_form_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, broker: Server) -> None:
    """Arrays and SGLang's maps, read as plain msgpack, in batches that keep their bound."""
    for form in FORMS:
        with FeedingWorker(f"{broker.url}?{form}&max_batch=2KiB", "w") as worker:
            sent: list[bytes] = []
            stream = worker.transport.stream
            append = stream.append

            def keep(record: StreamRecord, append: Callable[[StreamRecord], str] = append) -> str:
                sent.append(record.payload)  # noqa: B023
                return append(record)

            monkeypatch.setattr(stream, "append", keep)
            worker.store(300)
            worker.settle()
        events = [event for payload in sent for event in msgspec.msgpack.decode(payload)[1]]
        stored = [
            event
            for event in events
            if "BlockStored" in (event if isinstance(event, list) else event.values())
        ]
        assert len(stored) > 1
        if form == "format=vllm-array":
            assert all(isinstance(event, list) and len(event[1]) == 1 for event in stored)
        else:
            signed = any(name < 0 for event in stored for name in event["block_hashes"])
            assert signed == (form == "format=sglang")
        assert max(map(len, sent)) <= 2048
