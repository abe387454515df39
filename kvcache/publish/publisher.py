"""Publishes a log that another process writes: follows it to its end, and runs the sinks here.

::

    Publisher("/data/log", ["zmq+pub://127.0.0.1:5557?replay=5558", "file:e.jsonl?tokens=1"]).run()

The engine pays for its log only. Whoever publishes may come before it and after it, and come again: sinks go on where
they were (`kvcache.publish.start`), and routers are told the whole state.
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
"""How long closing waits for sinks; one that hangs is left behind."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class PublishStats:
    """One moment."""

    head: Head | None
    """The end of the log; None: there is no log yet."""
    sinks: tuple[Progress, ...]


class Publisher:
    """Follows the log in a directory and gives it to the sinks that are named by their URLs.

    - `state_dir`: where it is kept which batches each sink has had, and the numbers of feeds; the log's directory.
    - `until`: "stopped", "end" (what is there now) or "closed" (until the log's writer closes it in order).
    - `poll_seconds`: how often each sink's thread looks for more.
    - `clock`: by which sinks that hang at the end are left behind.

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
                reason = "two sinks are told apart by scheme, host, port and path: give one of them to another process"
                raise NotPublishable(name, f"{reason}, with a --state of its own")
        self._look_for_log()
        self._head_reader = LogHead(self._directory)
        self._head: Head | None = None
        self._waits = until != "end"

    def run(
        self, stop: Callable[[], bool] = lambda: False, tell: Callable[[PublishStats], None] = lambda _: None
    ) -> None:
        """Publish until all is done, or `stop()` says so; `tell` is called about 20 times a second.

        Then sinks take the batch at work and what they held back, and are closed. Raises what one of them raised when
        it was opened first (SinkError, OSError), what reading the log raises, NoTokens, BeginningRemoved, LogReplaced.
        """
        try:
            if self._await_log(stop, tell):
                for follower in self._followers:
                    follower.start()
                while not stop() and self._go_on():
                    tell(self.stats())
                    time.sleep(_LOOK_SECONDS)
        finally:
            self._close()
        tell(self.stats())
        for follower in self._followers:
            if follower.failure is not None:
                raise follower.failure

    def stats(self) -> PublishStats:
        """How far each sink is. For any thread."""
        head = self._head
        return PublishStats(head, tuple(follower.stats(head) for follower in self._followers))

    def _sink_stats(self) -> tuple[SinkStats, ...]:
        """What a sink may ask of all."""
        return tuple(progress.as_sink_stats() for progress in self.stats().sinks)

    def _await_log(self, stop: Callable[[], bool], tell: Callable[[PublishStats], None]) -> bool:
        """Wait until there is a log; False if that is not wanted any more. Raises NotALog."""
        while not stop():
            if self._look_for_log():
                self._head = self._head_reader.look()
            if self._head is not None:
                return True
            if not self._waits:
                raise NotALog(self._directory)
            tell(self.stats())
            time.sleep(_LOOK_SECONDS)
        return False

    def _look_for_log(self) -> bool:
        """Whether it is there. Raises NotALog if something else is."""
        directory = self._directory
        if is_log(directory):
            return True
        if os.path.lexists(directory) and (not directory.is_dir() or holds_foreign_files(directory)):
            raise NotALog(directory)
        return False

    def _go_on(self) -> bool:
        """Whether there is still something to do. Raises LogReplaced."""
        head = self._head_reader.look()
        if head is not None:
            if self._head is not None and head.log_id != self._head.log_id:
                raise LogReplaced(self._directory)
            self._head = head
        followers = self._followers
        return not all(each.has_ended for each in followers) and not any(each.failure for each in followers)

    def _close(self) -> None:
        """Let all sinks end, each in its own time, and together in no more than `_CLOSE_SECONDS`."""
        self._head_reader.close()
        for follower in self._followers:
            follower.ask_to_stop()
        deadline = self._clock() + _CLOSE_SECONDS
        for follower in self._followers:
            if follower.has_started and not follower.join(max(0.0, deadline - self._clock())):
                _log.error(
                    "sink_hangs", sink=follower.name, reason="it was left behind in the middle of its work"
                )
