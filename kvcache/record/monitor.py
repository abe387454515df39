"""What any thread may ask of a manager: progress and what was flushed, never the state itself."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from events.log import LogStats
from kvcache.errors import Unsupported, UsageError
from kvcache.inputs.arguments import checked_integer
from kvcache.record.journal import Journal
from kvcache.record.request_counting import RequestCounter
from kvcache.stats import RequestStats, Stats
from sinks import SinkStats
from sinks.histogram import STEP_SECONDS, Histogram

if TYPE_CHECKING:
    from sinks.router.feed import RouterFeed

_LONGEST_WAIT_MS = 1e12
"""30 years: platforms refuse to wait for much longer."""


class Monitor:
    """What is not bound to the manager's thread."""

    def __init__(self, journal: Journal, requests_kept: int = 0) -> None:
        self._journal = journal
        created = journal.state.created
        assert created is not None
        self._requests = RequestCounter(journal.bus, created, requests_kept) if requests_kept else None
        self.step_times: Histogram | None = None
        """What the manager's calls take of each engine step; None while no sink has asked for it."""

    def measure_steps(self) -> Callable[[int], None]:
        """Begin to count step times; returns what they are to be told to."""
        self.step_times = Histogram(STEP_SECONDS)
        return self.step_times.add

    def stats(self) -> Stats:
        """Counters and gauges as of the last flush; may be called from any thread."""
        return self._journal.counter.read()

    def take_request_stats(self) -> list[RequestStats]:
        """The records of requests that ended since the last call, oldest first; may be called from any thread.

        Raises `Unsupported` if none are kept, since `request_stats` is 0.
        """
        if self._requests is None:
            raise Unsupported(
                "take_request_stats() of a manager that keeps none",
                "make it with request_stats, the number of records to keep for it",
            )
        return self._requests.take()

    def sink_stats(self) -> tuple[SinkStats, ...]:
        """Progress, lag and drops per sink; may be called from any thread."""
        return self._journal.outputs.sink_stats()

    def log_stats(self) -> LogStats | None:
        """Progress, lag and losses of the log, and whether the disk refuses it; None without a log. For any thread."""
        log = self._journal.outputs.log
        return None if log is None else log.stats()

    def wait_durable(self, timeout: float = float("inf")) -> bool:
        """Wait until all that was flushed so far is on disk; for any thread. Without a log there is nothing to wait.

        A batch that the log has lost is waited for as well: until the `Gap` that tells of it is there. False after
        `timeout` seconds, or if the log is never synced (`log.fsync` "never"). Raises `events.LogWriteFailed` if the
        log has ended without it.
        """
        seconds = _up_to(_LONGEST_WAIT_MS / 1000, timeout, "timeout must be a number")
        log, last = self._journal.outputs.log, self._journal.next_seq - 1
        return log is None or log.wait_durable(last, seconds)

    def reopen_sinks(self) -> None:
        """Let sinks that have files open them again, as after their rotation; may be called in a signal handler."""
        self._journal.outputs.reopen()

    def wait_subscribers(
        self, count: int, timeout: float = float("inf"), stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until each feed for routers has `count` readers; False after `timeout` seconds or once `stop()`.

        May be called from any thread.
        """
        count = checked_integer(count, "count")
        if not callable(stop):
            raise UsageError(f"stop must be a function, not {type(stop).__name__}")
        seconds = _up_to(_LONGEST_WAIT_MS / 1000, timeout, "timeout must be a number")
        return self._journal.outputs.wait_subscribers(count, seconds, stop)

    @property
    def feeds(self) -> tuple[RouterFeed, ...]:
        """The sinks that feed routers."""
        return self._journal.outputs.feeds

    def get_latest_events(self, timeout_ms: float | None = 0) -> list[dict[str, Any]]:
        """Take the events flushed since the last call, as TensorRT-LLM's dicts; may be called from any thread.

        Waits up to `timeout_ms` (None: for ever) for some. Raises Unsupported if no events are kept, since
        `event_buffer_max_size` is 0.
        """
        timeout = _seconds(timeout_ms)
        if self._journal.latest is None:
            raise Unsupported(
                "get_latest_events() without a buffer",
                "set event_buffer_max_size to the number of events that are to be kept for it",
            )
        return self._journal.latest.get(timeout)


def _seconds(timeout_ms: Any) -> float | None:
    if timeout_ms is None:
        return None
    return _up_to(_LONGEST_WAIT_MS, timeout_ms, "timeout_ms must be a number or None") / 1000


def _up_to(longest: float, wait: Any, must: str) -> float:
    """A wait from 0 to the longest one; raises UsageError, saying what it `must` be."""
    number: Any = wait if isinstance(wait, Real) else None
    # NaN is neither.
    if number is not None and (number <= 0 or number > 0):
        return float(max(0, min(number, longest)))
    raise UsageError(f"{must}, not {type(wait).__name__} or NaN")
