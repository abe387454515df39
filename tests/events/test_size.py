"""The estimate of a batch's size that bounds queues in bytes."""

from __future__ import annotations

import sys
import typing
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from events.codec import encode_batch
from events.size import OBJECT_BYTES, batch_bytes, column_bytes
from events.types import (
    AnyEvent,
    BlocksFilled,
    BlocksStored,
    EventBatch,
    StateExported,
    SymbolPage,
    SymbolsInterned,
)
from tests.support.feeds.sinks import SAMPLES, make_batch

SAMPLE: dict[type, Any] = {type(event): event for event in SAMPLES}


def memory(value: Any, seen: set[int]) -> int:
    """What Python says that a value and all in it takes."""
    if value is None or id(value) in seen:
        return 0
    seen.add(id(value))
    inner = msgspec.structs.astuple(value) if isinstance(value, msgspec.Struct) else value
    return sys.getsizeof(value) + (
        sum(memory(each, seen) for each in inner) if isinstance(inner, tuple) else 0
    )


def test_samples_are_complete() -> None:
    """There is one sample of each event type."""
    assert [type(event) for event in SAMPLES] == list(typing.get_args(AnyEvent))


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
def test_each_event(event: AnyEvent) -> None:
    """An event counts as what it takes on the wire or more; what is spelled out for speed has all its columns."""
    batch = EventBatch(1, 1, (event,))
    assert batch_bytes(batch) >= len(encode_batch(batch))
    texts = sum(len(value) for value in msgspec.structs.astuple(event) if isinstance(value, str))
    space = OBJECT_BYTES + column_bytes(event.namespace) if hasattr(event, "namespace") else 0
    measured = batch_bytes(batch) - 2 * OBJECT_BYTES
    numbers = 40 * len(getattr(event, "block_hashes", ()))
    assert column_bytes(event) - texts - space <= measured <= column_bytes(event) + numbers


@pytest.mark.parametrize(
    "event",
    [
        *SAMPLES,
        replace(SAMPLE[BlocksFilled], handles=bytes(8_000), parents=bytes(8_000), keys=bytes(32_000)),
        replace(SAMPLE[BlocksStored], keys=bytes(32_000), slots=bytes(4_000)),
        SymbolsInterned(tuple(SymbolPage(number, 7, 0, bytes(32)) for number in range(1000))),
        replace(
            SAMPLE[StateExported],
            sequences=tuple(
                replace(sequence, request_id=f"chat-{number}", tokens=bytes(36), slots=(bytes(4),))
                for sequence in SAMPLE[StateExported].sequences
                for number in range(1000)
            ),
        ),
    ],
    ids=lambda event: type(event).__name__,
)
def test_near_the_memory(event: AnyEvent) -> None:
    """Whatever a batch is made of, it counts as its memory within a factor of two or so."""
    batch = EventBatch(1 << 40, 1 << 40, (event,))
    assert 0.4 <= batch_bytes(batch) / memory(batch, set()) <= 2.5


def test_follows_the_columns() -> None:
    """A column of a megabyte counts as a megabyte."""
    assert batch_bytes(make_batch(0, padding=1 << 20)) - batch_bytes(make_batch(0)) == 1 << 20
