"""The clock of a played trace."""

from __future__ import annotations

import threading

import pytest

from kvcache.errors import UsageError
from kvcache.workload.clock import START_NS, StepClock, parse_speed

MS = 1_000_000


class Time:
    """Real time that passes only by waiting, and a stop flag that notes how long it was waited for."""

    def __init__(self) -> None:
        self.ns = 5_000 * MS
        self.waits: list[float] = []
        self.stop = threading.Event()
        self.stop.wait = self._wait  # type: ignore[method-assign]

    def _wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(round(timeout, 6))
        self.ns += round(timeout * 1e9)
        return False

    def clock(self, speed: float | None) -> StepClock:
        return StepClock(speed, real_ns=lambda: self.ns + 7, real_monotonic_ns=lambda: self.ns)


@pytest.mark.parametrize(("text", "speed"), [("real", 1.0), ("max", None), ("10", 10.0), ("0.5", 0.5)])
def test_speeds_that_are_understood(text: str, speed: float | None) -> None:
    """A speed is real, max, or a factor."""
    assert parse_speed(text) == speed


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "fast"])
def test_speeds_that_are_refused(text: str) -> None:
    """Anything else is refused, with what is accepted."""
    with pytest.raises(UsageError, match="is not real, max, or a number above 0"):
        parse_speed(text)


def test_without_speed_time_is_the_number_of_steps() -> None:
    """At full speed the clock follows the steps alone, everything has arrived, and nothing is waited for."""
    time = Time()
    clock = time.clock(None)
    assert clock.has_arrived(10**12)
    for _ in range(3):
        clock.advance(time.stop, until_ms=10**12)
        time.ns += 123
    assert (clock.now_ms, clock.wall_ns()) == (60, START_NS + 60 * MS)
    assert time.waits == []


def test_without_speed_no_step_is_earlier_than_its_requests() -> None:
    """Who is admitted takes the wall clock along to its arrival, never back; what no log could hold is cut."""
    clock = StepClock(None)
    clock.reach(1_000)
    assert clock.wall_ns() == START_NS + 1_000 * MS
    clock.reach(900)
    clock.advance(threading.Event())
    assert clock.wall_ns() == START_NS + 1_020 * MS
    assert clock.trace_ns() == 1_020 * MS
    clock.reach(2**63 - 1)
    assert START_NS < clock.wall_ns() < 2**63


def test_speed_waits_for_real_time() -> None:
    """A step lasts step_ms / speed in all; what the work took of it is not waited for again."""
    time = Time()
    clock = time.clock(2.0)
    clock.advance(time.stop)
    time.ns += 4 * MS  # work
    clock.advance(time.stop)
    time.ns += 25 * MS  # more than two steps take
    for _ in range(3):
        clock.advance(time.stop)
    assert time.waits == [0.006, 0.005]
    assert clock.wall_ns() == time.ns + 7


def test_idle_engine_waits_for_the_next_arrival() -> None:
    """Time can go on to an arrival, is waited for, and does not run backwards."""
    time = Time()
    clock = time.clock(10.0)
    clock.advance(time.stop)
    assert not clock.has_arrived(1000)
    clock.advance(time.stop, until_ms=1000)
    assert clock.has_arrived(1000)
    assert time.waits == [0.098]
    clock.advance(time.stop, until_ms=5)
    assert clock.now_ms == 1020


def test_stop_ends_the_waiting() -> None:
    """A stop flag that is set is not slept through, however long the wait would be."""
    stop = threading.Event()
    clock = StepClock(1.0)
    clock.advance(stop)
    stop.set()
    clock.advance(stop, until_ms=10**9)  # the test's time limit is the proof


def test_step_must_take_time() -> None:
    """Steps of no length would never reach an arrival."""
    with pytest.raises(UsageError, match="at least 1 ms"):
        StepClock(step_ms=0)


@pytest.mark.parametrize(("speed", "until_ms"), [(1e-300, 0), (5e-324, 10**18), (1.0, 2**63 - 1)])
def test_waits_of_any_length_are_ended_by_a_stop(speed: float, until_ms: int) -> None:
    """What is due in more years than a system can count is waited for in pieces that it takes, until the stop."""
    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            return len(waits) == 3

    clock = StepClock(speed)
    clock.advance(Stop())
    clock.advance(Stop(), until_ms=until_ms)
    assert waits == [3600.0] * 3
