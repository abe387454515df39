"""How often a peer may ask."""

from __future__ import annotations

import time

import pytest

from sinks.router.pace import MAX_REMEMBERED, Pace
from tests.sinks.test_zmq import Router, Worker, read_answer


def allowed(pace: Pace, peer: str, times: list[float]) -> int:
    return sum(pace.allows(peer, now) for now in times)


@pytest.mark.parametrize("rate", [1, 5, 20])
def test_over_any_time_there_are_as_many_as_the_rate_allows(rate: int) -> None:
    """Asked ten times as often: at once those of a second, then the rate; after a rest again those of a second."""
    pace = Pace(rate)
    tenths = [number / (10 * rate) for number in range(100 * rate)]
    assert abs(allowed(pace, "a", tenths) - 11 * rate) <= 1
    assert allowed(pace, "a", [1000.0] * 100) == rate
    assert allowed(pace, "b", [1000.0] * 100) == rate


def test_no_limit() -> None:
    """0 allows everything and remembers nobody."""
    pace = Pace(0)
    assert allowed(pace, "a", [0.0] * 1000) == 1000


def test_who_has_rested_is_forgotten() -> None:
    """Peers that come and go do not pile up."""
    pace = Pace(10)
    for number in range(3 * MAX_REMEMBERED):
        assert pace.allows(number, number / 1000)
    assert len(pace._left) <= MAX_REMEMBERED + 1


def test_who_asks_too_often_waits_and_others_do_not() -> None:
    """Five answers at once, further ones at five a second, and none is left out; another reader is answered at once."""
    with Worker("coalesce=0&replay_rate=5") as worker, Router() as router:
        worker.settle()
        greedy, begun = router.dealer(worker), time.monotonic()
        for number in range(8):
            greedy.send_multipart([b"", bytes(8)])
            assert len(read_answer(greedy)) == 1
            if number == 4:
                assert time.monotonic() - begun < 0.6
        took = time.monotonic() - begun
        assert 0.5 < took < 3
        greedy.send_multipart([b"", bytes(8)])
        begun = time.monotonic()
        assert router.ask(worker, bytes(8))
        assert time.monotonic() - begun < 0.15
