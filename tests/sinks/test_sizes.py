"""The size estimate that bounds queues in bytes."""

from __future__ import annotations

import typing

from events.codec import encode_batch
from events.types import AnyEvent, EventBatch
from sinks.sizes import OBJECT_BYTES, batch_bytes, column_bytes
from tests.sinks.helpers import SAMPLES, make_batch


def test_samples_are_complete() -> None:
    """There is one sample of each event type."""
    assert [type(event) for event in SAMPLES] == list(typing.get_args(AnyEvent))


def test_fast_measures_agree_with_the_walk_over_fields() -> None:
    """Types that are spelled out for speed count all columns that the generic walk finds."""
    for event in SAMPLES:
        texts = sum(len(value) for value in (getattr(event, name) for name in event.__struct_fields__)
                    if isinstance(value, str))  # fmt: skip
        names = 0 if not hasattr(event, "namespace") else column_bytes(event.namespace)
        measured = batch_bytes(EventBatch(0, 0, (event,))) - 2 * OBJECT_BYTES
        assert column_bytes(event) - texts - names <= measured <= column_bytes(event), type(event)


def test_never_below_the_encoded_size() -> None:
    """What the queue counts is at least what the batch takes on the wire."""
    for event in SAMPLES:
        batch = EventBatch(1, 1, (event,))
        assert batch_bytes(batch) >= len(encode_batch(batch)), type(event)


def test_follows_the_columns() -> None:
    """A column of a megabyte counts as a megabyte."""
    assert batch_bytes(make_batch(0, padding=1 << 20)) - batch_bytes(make_batch(0)) == 1 << 20
