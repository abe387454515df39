"""Outputs of flushed batches: the log and the sinks. The manager's only contact with files, threads and sockets."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from events.errors import LogWriteFailed
from events.log import LogWriter
from events.log.retention import Limits
from events.size import batch_bytes
from events.types import EventBatch, Gap
from kvcache._version import __version__
from kvcache.config import LogConfig
from kvcache.errors import UsageError
from kvcache.maintenance.maintainer import LogMaintainer
from sinks import Sink, SinkContext, SinkRunner, SinkStats, SinkURL, open_sink
from sinks.base import Probe
from sinks.router.feed import RouterFeed

_ROOM_SECONDS = 2.0
_SEGMENTS_KEPT = 8
"""Least number of segments in the retained part of a log, since it is cut only between them."""
_LEAST_BYTES = 4096
LogTarget = LogWriter | str | PathLike[str] | None


class Outputs:
    """Non-blocking output of batches (unless the log is configured to block rather than drop)."""

    def __init__(
        self, log: LogWriter | None, runners: Sequence[SinkRunner], *, tokens_by_default: bool = True
    ) -> None:
        self.log = log
        self._runners = list(runners)
        for runner in self._runners:
            if runner.sink.needs_tokens is None:
                runner.hides_tokens = not tokens_by_default
        feeds = [(runner, runner.sink) for runner in self._runners if isinstance(runner.sink, RouterFeed)]
        self._feeds = tuple(feeds)
        self.feeds = tuple(feed for _, feed in feeds if feed.feeds_routers)
        self.may_lose = log is not None or bool(feeds)
        """True if something may be lost that the manager must make good."""

    @classmethod
    def open(
        cls, log: LogTarget, sinks: Sequence[str | Sink | SinkRunner], context: SinkContext, config: LogConfig
    ) -> Outputs:
        """Open the log and start the sinks. If one cannot be opened, those before it are closed again."""
        for sink in sinks:
            # Before anything is opened: later it would be a sink that fails for ever.
            if not isinstance(sink, str | Sink | SinkRunner):
                raise UsageError(
                    f"a sink must be a URL or a subclass of sinks.Sink; {type(sink).__name__} is neither"
                )
        writer = log if isinstance(log, LogWriter) or log is None else open_log(log_directory(log), config)
        if writer is not None:
            context = replace(context, state_dir=writer.directory)
        runners: list[SinkRunner] = []
        try:
            for sink in sinks:
                runners.append(_runner(sink, context))
                runners[-1].start()
        except BaseException:
            for runner in runners:
                runner.close()
            if writer is not None and writer is not log:
                writer.close()
            raise
        records = config.record_tokens if writer is None else writer.epoch_started.tokens_recorded
        return cls(writer, runners, tokens_by_default=records)

    def attach_probe(self, probe: Probe) -> bool:
        """Pass the probe to those sinks that use one; returns True if there is one."""
        probing = [runner.sink for runner in self._runners if runner.sink.watches]
        for sink in probing:
            sink.watch(probe)
        return bool(probing)

    @property
    def records_tokens(self) -> bool:
        """True if the log, if there is one, records prompts, so that nothing relies on names."""
        return self.log is None or self.log.epoch_started.tokens_recorded

    def publish(self, batch: EventBatch) -> None:
        """Hand over a batch. Never raises: `LogWriter.check` does for a failed log."""
        if self.log is None and not self._runners:
            return
        size = batch_bytes(batch)
        if self.log is not None:
            # A frame for `contextlib.suppress` would be made in each step.
            try:  # noqa: SIM105
                self.log.append(batch, size)
            except LogWriteFailed:
                pass
        for runner in self._runners:
            runner.put(batch, size)

    def make_room(self) -> None:
        """Wait briefly for a log that has lost batches, so that the loss can be recorded before it is closed."""
        if self.log is not None and self.log.has_lost:
            with contextlib.suppress(LogWriteFailed):
                self.log.flush(_ROOM_SECONDS)

    def pop_gap(self) -> Gap | None:
        """Return the log's losses, once there is room again."""
        return self.log.pop_gap() if self.log is not None else None

    def wait_subscribers(self, count: int, timeout: float, stop: Callable[[], bool]) -> bool:
        """Wait until each feed for routers has `count` subscribers; False after `timeout` or once `stop()` is True."""
        deadline = time.monotonic() + timeout
        return all(sink.wait_subscribers(count, deadline - time.monotonic(), stop) for sink in self.feeds)

    @property
    def resync_after_seq(self) -> int:
        """The last batch lost by a sink's fold, which needs the whole state in a later one; -1: none.

        A quarantined sink would not get it.
        """
        lost = -1
        for runner, feed in self._feeds:
            seq = feed.resync_after_seq  # read once: the sink's thread may clear it
            if seq is not None and seq > lost and runner.state == "running":
                lost = seq
        return lost

    def reopen(self) -> None:
        """Reopen the files of sinks."""
        for runner in self._runners:
            runner.reopen()

    def sink_stats(self) -> tuple[SinkStats, ...]:
        """Progress, lag and drops per sink."""
        return tuple(runner.stats() for runner in self._runners)

    def close(self) -> None:
        """Drain and close everything, all sinks concurrently; the log's failure is raised last."""
        closing = [threading.Thread(target=runner.close) for runner in self._runners]
        for thread in closing:
            thread.start()
        try:
            for thread in closing:
                thread.join()
        finally:
            if self.log is not None:
                self.log.close()


def open_log(
    directory: Path, config: LogConfig, *, log_id: bytes | None = None, resume: bool = False
) -> LogWriter:
    """Open a log writer as configured. Raises as `LogWriter` does."""
    written = config.model_dump()
    limits = Limits(*(written.pop(f"retain_{unit}") for unit in ("bytes", "seconds", "segments")))
    if written.pop("snapshots") or limits:
        maintainer = LogMaintainer(directory, limits)
        written["segment_begun"], written["closed"] = maintainer.look, maintainer.close
        written["segment_seconds"] = limits.seconds and limits.seconds / _SEGMENTS_KEPT
    if limits.bytes is not None:
        written["segment_bytes"] = min(
            config.segment_bytes, max(limits.bytes // _SEGMENTS_KEPT, _LEAST_BYTES)
        )
    return LogWriter(directory, resume=resume, software=f"kvcache {__version__}", log_id=log_id, **written)


def log_directory(log: object) -> Path:
    """Return the directory of a log. Raises `UsageError` if the value names none."""
    if not isinstance(log, str | PathLike):
        raise UsageError(f"log must be the path of a directory or a LogWriter, not {type(log).__name__}")
    try:
        path = Path(log)
        if b"\0" not in os.fsencode(path):
            return path
    except Exception as error:  # noqa: BLE001
        raise UsageError(f"log is not a directory name: {type(error).__name__}") from None
    raise UsageError("log is not a directory name: it contains a NUL character")


def _runner(sink: str | Sink | SinkRunner, context: SinkContext) -> SinkRunner:
    if isinstance(sink, SinkRunner):
        return sink
    if isinstance(sink, str):
        # A URL may hold a password; its printed form does not.
        return SinkRunner(open_sink(sink, context), str(SinkURL.parse(sink)))
    return SinkRunner(sink, type(sink).__name__)
