"""Random sinks, random load: the laws of the runner hold for whatever a seed comes up with."""

from __future__ import annotations

import random
import threading
from typing import get_args

import pytest
from structlog.testing import capture_logs

from events.types import EventBatch
from sinks import SinkRunner
from sinks.base import Overflow
from tests.support.feeds.sinks import RecordingSink, check_stream, gaps, make_batch
from tests.support.waiting import WAIT


class RandomSink(RecordingSink):
    """Is quick, slow, raises, exits, or stops until the engine has put some more; as its seed has it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.trouble = self.random.choice([0.0, 0.02, 0.3])
        self.go_on = threading.Event()
        self.failed = False
        """Whether its last call did."""

    def write(self, batch: EventBatch) -> None:
        self.failed = True
        if self.random.random() < self.trouble:
            self.misbehave()
        super().write(batch)
        self.failed = False

    def misbehave(self) -> None:
        what = self.random.randrange(4)
        if what == 0:
            raise OSError(5, "Input/output error")
        if what == 1:
            raise SystemExit
        if what == 2:
            self.go_on.clear()
            self.go_on.wait(0.02)
        else:
            self.go_on.wait(0.0005)


@pytest.mark.parametrize("overflow", get_args(Overflow))
@pytest.mark.parametrize("seed", range(12))
def test_streams_are_whole_and_accounts_balance(seed: int, overflow: Overflow) -> None:
    """Delivered batches and gaps cover all that was put, in order; counters agree with the stream."""
    choose = random.Random(f"{seed} {overflow}")
    sink = RandomSink(seed)
    max_events, max_bytes = choose.choice([4, 50, 1000]), choose.choice([3000, 100_000])
    runner = SinkRunner(
        sink, "random", max_events=max_events, max_bytes=max_bytes, overflow=overflow,
        drain_seconds=choose.choice([0.0, 0.05, 1.0]), max_errors=100_000, backoff_seconds=0.0,
    )  # fmt: skip
    put = 3000
    with capture_logs():
        runner.start()
        for seq in range(put):
            runner.put(make_batch(seq, choose.choice([1, 1, 1, 3, 60]), choose.choice([0, 0, 100, 5000])))
            if seq % 97 == 0:
                sink.go_on.set()
                stats = runner.stats()
                assert stats.batches + stats.dropped_batches + stats.lag_batches == seq + 1
                assert stats.lag_batches <= max_events + 2
        runner.close()
    assert sink.closed.wait(WAIT)
    whole = [batch for batch in sink.stream if not gaps([batch])]
    stats = runner.stats()
    # A sink may have raised at its very last gap; then the runner still owes it.
    check_stream(sink.stream, sink.stream[-1].seq + 1 if sink.failed else put)
    assert stats.batches == len(whole)
    assert stats.events == sum(len(batch.events) for batch in whole)
    assert (stats.batches + stats.dropped_batches, stats.lag_batches) == (put, 0)
