"""Publisher of a log that another process writes: it follows the log to its end, and runs the sinks in this process.

::

    Publisher("/data/log", ["zmq+pub://127.0.0.1:5557?replay=5558", "file:e.jsonl?tokens=1"]).run()

The engine pays for its log only. A publisher may start before it and outlive it, and may be restarted: sinks continue
where they were (`kvcache.publish.start`), and routers receive the whole state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from events.diagnostics import get_logger
from events.errors import NotALog
from events.log.reader import Head, LogHead
from events.log.segments import holds_foreign_files, is_log
from kvcache.publish.errors import LogReplaced, NotPublishable
from kvcache.publish.follower import Progress, SinkFollower, Until
from sinks import SinkStats

_LOOK_SECONDS = 0.05
_CLOSE_SECONDS = 5.0
"""Longest wait for sinks when closing; one that hangs is abandoned."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class PublishStats:
    """Progress at one moment."""

    head: Head | None
    """End of the log; None if there is no log yet."""
    sinks: tuple[Progress, ...]


class Publisher:
    """Follower of the log in a directory that delivers it to sinks, given by their URLs.

    - `state_dir`: directory of the sinks' positions and the numbers of feeds; by default the log's directory.
    - `until`: "stopped", "end" (the current end) or "closed" (until the log's writer closes it in order).
    - `poll_seconds`: how often each sink's thread looks for more.
    - `clock`: clock of the timeout for sinks that hang at the end.

    Raises SinkURLError for a URL, NotPublishable, UsageError, NotALog. To be run once.
    """

    def __init__(
        self,
        log: str | os.PathLike[str],
        sinks: Sequence[str],
        *,
        state_dir: Path | None = None,
        until: Until = "stopped",
        poll_seconds: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._clock = Path(log), clock
        state_dir = self._directory if state_dir is None else state_dir
        self._followers = [
            SinkFollower(
                self._directory,
                url,
                state_dir,
                until=until,
                poll_seconds=poll_seconds,
                sink_stats=self._sink_stats,
            )
            for url in sinks
        ]
        names = [follower.name for follower in self._followers]
        for name in names:
            if names.count(name) > 1:
                reason = (
                    "sinks are identified by scheme, host, port and path, and two of them are equal: "
                    "publish one of them from another process"
                )
                raise NotPublishable(name, f"{reason}, with a --state of its own")
        self._look_for_log()
        self._head_reader = LogHead(self._directory)
        self._head: Head | None = None
        self._waits = until != "end"

    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[PublishStats], None] = lambda _: None,
    ) -> None:
        """Publish until all is done, or `stop()` is true; `tell` is called about 20 times a second.

        Then sinks finish the current batch and what they held back, and are closed. Raises what one of them raised when
        it was opened first (SinkError, OSError), what reading the log raises, NoTokens, BeginningRemoved, LogReplaced.
        """
        try:
            if self._await_log(stop, on_progress):
                for follower in self._followers:
                    follower.start()
                while not stop() and self._run_once():
                    on_progress(self.stats())
                    time.sleep(_LOOK_SECONDS)
        finally:
            self._close()
        on_progress(self.stats())
        for follower in self._followers:
            if follower.failure is not None:
                raise follower.failure

    def stats(self) -> PublishStats:
        """Return the progress of each sink. Thread-safe."""
        head = self._head
        return PublishStats(head, tuple(follower.stats(head) for follower in self._followers))

    def _sink_stats(self) -> tuple[SinkStats, ...]:
        """Return the progress of all sinks, for one of them."""
        return tuple(progress.as_sink_stats() for progress in self.stats().sinks)

    def _await_log(self, stop: Callable[[], bool], on_progress: Callable[[PublishStats], None]) -> bool:
        """Wait until there is a log; return False if stopped before. Raises NotALog."""
        while not stop():
            if self._look_for_log():
                self._head = self._head_reader.look()
            if self._head is not None:
                return True
            if not self._waits:
                raise NotALog(self._directory)
            on_progress(self.stats())
            time.sleep(_LOOK_SECONDS)
        return False

    def _look_for_log(self) -> bool:
        """Return True if the log exists. Raises NotALog if something else is in its place."""
        directory = self._directory
        if is_log(directory):
            return True
        if os.path.lexists(directory) and (not directory.is_dir() or holds_foreign_files(directory)):
            raise NotALog(directory)
        return False

    def _run_once(self) -> bool:
        """Return True if work is left. Raises LogReplaced."""
        head = self._head_reader.look()
        if head is not None:
            if self._head is not None and head.log_id != self._head.log_id:
                raise LogReplaced(self._directory)
            self._head = head
        followers = self._followers
        return not all(each.has_ended for each in followers) and not any(each.failure for each in followers)

    def _close(self) -> None:
        """Let all sinks end, each at its own pace, and together in no more than `_CLOSE_SECONDS`."""
        self._head_reader.close()
        for follower in self._followers:
            follower.stopping.set()
        deadline = self._clock() + _CLOSE_SECONDS
        for follower in self._followers:
            if not follower.join(max(0.0, deadline - self._clock())):
                _log.error(
                    "sink_hangs", sink=follower.name, reason="it did not stop in time and was abandoned"
                )
