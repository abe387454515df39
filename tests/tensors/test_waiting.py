"""The line of requests in front of an engine."""

from __future__ import annotations

import numpy as np

from kvcache.workload.clock import StepClock
from kvcache.workload.traces import TraceRequest
from kvcache.workload.waiting_queue import WaitingLimits, WaitingQueue


def test_who_is_put_back_is_the_next_in_line() -> None:
    """Requests that begin again keep their order, before all others; what they have generated is in their prompts."""
    trace = [TraceRequest(0, 10, 6, (index,)) for index in range(4)]
    line = WaitingQueue(trace, WaitingLimits(64, 8, 4), StepClock(), 0, lambda *_: None)
    first = line.first(3)
    line.take(3)
    line.put_back([first[0].after(0), first[2].after(4)])
    again = line.first(9)
    assert [each.request.request_id for each in again] == [0, 2, 3]
    assert again[0] is first[0]
    before, after = (
        np.concatenate([np.asarray(each.request.tokens), each.outputs]) for each in (first[2], again[1])
    )
    assert np.array_equal(before, after)
    assert (len(again[1].request.tokens), len(again[1].outputs)) == (14, 2)
    assert again[1].blocks_to_completion == first[2].blocks_to_completion == 4
