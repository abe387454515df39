"""Records live streams of KV events into a log, which it begins or continues.

::

    with Tap([Endpoint("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558")], "/data/taps") as tap:
        while True:
            tap.work(0.5)
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from events.log import LogReader, LogStats, LogWriter
from events.log.segments import is_log, segment_paths
from events.told.state import FeedState
from kvcache._version import __version__
from kvcache.replay import fold_told
from kvcache.tap.lines import SCHEME, LineListener
from kvcache.tap.recorder import FeedRecorder
from kvcache.tap.sources import Endpoint, Hears, Last, Listener, Sources


class Tap:
    """Listens at endpoints and records what is said there.

    With `resume` a log that is there is continued: what it knows of an engine holds on if the engine proves to be the
    one that it was, and is forgotten otherwise. `record_tokens` False leaves out what the blocks hold.

    Raises EndpointError, InsecureEndpoint, KeyFileError, and what `LogWriter` and `LogReader` raise.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        log: str | os.PathLike[str],
        *,
        resume: bool = False,
        record_tokens: bool = True,
    ) -> None:
        writer = LogWriter(
            Path(log),
            resume=resume,
            record_tokens=record_tokens,
            software=f"kvcache {__version__}",
            kind="feed",
        )
        try:
            before = state_of(Path(log)) if resume else None
            addresses = tuple(endpoint.address for endpoint in endpoints)
            self._recorder = FeedRecorder(writer, addresses, before)
            last = self._recorder.last_heard()
            listeners: list[Hears] = []
            try:
                listeners += (_listener(endpoint, last) for endpoint in endpoints)
            except BaseException:
                for listener in listeners:
                    listener.close()
                raise
        except BaseException:
            writer.close()
            raise
        self._log, self.endpoints = writer, tuple(listener.address for listener in listeners)
        self._sources = Sources(listeners)
        self._recorder.begin()
        self._sources.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> FeedState:
        """What is known now."""
        return self._recorder.state

    @property
    def recorder(self) -> FeedRecorder:
        """What was heard, in numbers."""
        return self._recorder

    @property
    def silent(self) -> frozenset[str]:
        """The endpoints at which nothing was heard yet."""
        return frozenset(self._sources.silent)

    @property
    def ignored(self) -> int:
        """Messages of engines that were too many to be followed, where many connect."""
        return self._sources.ignored

    def log_stats(self) -> LogStats:
        """How the log gets on."""
        return self._log.stats()

    def work(self, seconds: float) -> None:
        """Record what is heard, for so long. Raises what listening raises, and LogWriteFailed if the log has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            heard = self._sources.take(min(left, 0.05))
            self._recorder.catch_up()
            if heard is not None:
                self._recorder.hear(*heard)

    def close(self) -> None:
        """Stop listening, and close the log in order. Raises LogWriteFailed if the disk refuses its end."""
        self._sources.close()
        self._recorder.catch_up()
        self._log.close()


def _listener(endpoint: Endpoint, last: Mapping[str, Last]) -> Hears:
    if endpoint.address.startswith(SCHEME):
        return LineListener(endpoint.address)
    return Listener(endpoint, last)


def state_of(log: Path, at: int | None = None) -> FeedState:
    """What a log of kind `feed` knows, after batch `at` or at its end. Raises what `LogReader` raises,
    and `Unreplayable`.
    """
    state = FeedState()
    if is_log(log) and segment_paths(log):
        for batch in LogReader(log, kind="feed"):
            if at is not None and batch.seq > at:
                break
            fold_told(state, batch)
    return state
