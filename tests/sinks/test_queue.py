"""The bounded queue: what gives way, where losses stand, and that nothing is uncounted."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.size import batch_bytes
from events.types import EventBatch
from sinks.base import Overflow
from sinks.runner import BatchQueue, LostBatches
from tests.support.feeds.sinks import check_stream, gaps, make_batch


def take_all(queue: BatchQueue) -> list[EventBatch]:
    """Everything in the queue, losses as the batches that a sink gets for them."""
    taken = []
    while (item := queue.take()) is not None:
        taken.append(item.as_batch() if isinstance(item, LostBatches) else item[0])
    return taken


def waiting(queue: BatchQueue) -> tuple[int, int]:
    """Events and bytes of the batches in the queue, as counted."""
    return queue._put_events - queue._left_events, queue._put_bytes - queue._left_bytes


def filled(overflow: Overflow, count: int, max_events: int = 3) -> BatchQueue:
    queue = BatchQueue(max_events, 1 << 20, overflow)
    for seq in range(count):
        queue.put(make_batch(seq))
    return queue


def test_drop_oldest_keeps_the_newest_after_one_gap() -> None:
    """The losses of one overflow are one gap, before what survived."""
    stream = take_all(filled("drop_oldest", 10))
    assert [batch.seq for batch in stream] == [6, 7, 8, 9]
    assert [(gap.first_seq, gap.last_seq, gap.reason) for gap in gaps(stream)] == [(0, 6, "overflow")]


def test_drop_newest_keeps_the_oldest_before_one_gap() -> None:
    """The gap stands behind what survived, and before what is accepted later."""
    queue = filled("drop_newest", 10)
    first = queue.take()
    assert first is not None
    assert not isinstance(first, LostBatches)
    assert first[0].seq == 0
    queue.put(make_batch(10))
    stream = take_all(queue)
    assert [batch.seq for batch in stream] == [1, 2, 9, 10]
    assert [(gap.first_seq, gap.last_seq) for gap in gaps(stream)] == [(3, 9)]


def test_a_gap_has_the_time_of_the_last_lost_batch() -> None:
    """Gaps are made of what was lost, not of a clock."""
    assert take_all(filled("drop_oldest", 10))[0].ts == make_batch(6).ts


def test_bytes_bound_it() -> None:
    """Few events that are large overflow as well."""
    big = make_batch(0, padding=1000)
    queue = BatchQueue(1000, 3 * batch_bytes(big), "drop_oldest")
    for seq in range(10):
        queue.put(make_batch(seq, padding=1000))
    assert [batch.seq for batch in take_all(queue)] == [6, 7, 8, 9]


@pytest.mark.parametrize("overflow", get_args(Overflow))
def test_an_empty_queue_takes_one_batch_of_any_size(overflow: Overflow) -> None:
    """A batch larger than the bound is delivered if nothing else waits."""
    queue = BatchQueue(2, 100, overflow)
    queue.put(make_batch(0, events=50, padding=5000))
    assert [batch.seq for batch in take_all(queue)] == [0]
    assert queue.dropped_batches == 0


def test_drop_newest_takes_a_large_batch_when_only_a_gap_waits() -> None:
    """A loss in the queue takes up no room."""
    queue = BatchQueue(2, 1 << 20, "drop_newest")
    queue.refuse("quarantined")
    queue.put(make_batch(0))
    queue.accept("quarantined")
    queue.put(make_batch(1, events=9))
    assert [batch.seq for batch in take_all(queue)] == [0, 1]
    assert queue.dropped_batches == 1


def test_wait_ends_when_half_full() -> None:
    """Half a queue wakes the taker before its time."""
    queue = filled("drop_oldest", 1, max_events=4)
    assert not queue.wait(0)
    queue.put(make_batch(1))
    assert not queue.wait(0)
    queue.put(make_batch(2))
    assert queue.wait(0)


def test_drop_all_leaves_gaps_where_batches_were() -> None:
    """Earlier losses keep their reason and place."""
    queue = filled("drop_oldest", 5)
    queue.drop_all("closed")
    stream = take_all(queue)
    check_stream(stream, 5)
    assert [(gap.first_seq, gap.last_seq, gap.reason) for gap in gaps(stream)] == [
        (0, 1, "overflow"),
        (2, 4, "closed"),
    ]


@pytest.mark.parametrize(("events", "size"), [(0, 1), (1, 0), (-1, 5)])
def test_bounds_must_be_positive(events: int, size: int) -> None:
    """A queue that can hold nothing is refused."""
    with pytest.raises(ValueError, match="at least 1"):
        BatchQueue(events, size, "drop_oldest")


def test_policy_must_be_known() -> None:
    """A misspelled policy names the known ones."""
    with pytest.raises(ValueError, match="drop_oldest, drop_newest"):
        BatchQueue(1, 1, "drop")  # type: ignore[arg-type]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 5), st.integers(0, 900)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS, stop_at=st.integers(0, 80), overflow=st.sampled_from(["drop_oldest", "drop_newest"]))
def test_any_order_of_steps_loses_nothing_uncounted(
    steps: list[tuple[str, int, int]], stop_at: int, overflow: Overflow
) -> None:
    """Whatever happens, the stream covers all that was put, the counts add up, and the bounds hold."""
    max_events, max_bytes = 8, 4000
    queue = BatchQueue(max_events, max_bytes, overflow)
    stream: list[EventBatch] = []
    put = put_events = 0
    for index, (what, events, padding) in enumerate(steps):
        if index == stop_at:
            queue.refuse("closed")
            queue.drop_all("closed")
        if what == "put":
            queue.put(make_batch(put, events, padding))
            put += 1
            put_events += events
        elif (item := queue.take()) is not None:
            stream.append(item.as_batch() if isinstance(item, LostBatches) else item[0])
        assert waiting(queue)[1] <= max_bytes
        assert waiting(queue)[0] <= max_events
        assert len(queue) <= 2 * max_events + 2
    expected = waiting(queue)
    rest = take_all(queue)
    waited = [batch for batch in rest if not gaps([batch])]
    assert expected == (sum(len(batch.events) for batch in waited), sum(map(batch_bytes, waited)))
    stream += rest
    check_stream(stream, put)
    delivered = [batch for batch in stream if not gaps([batch])]
    assert len(delivered) + queue.dropped_batches == queue.put_batches == put
    assert sum(len(batch.events) for batch in delivered) + queue.dropped_events == put_events
