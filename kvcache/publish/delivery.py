"""A sink that is given batches until it takes them: what fails is tried again, after pauses, without end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from events.diagnostics import get_logger
from events.types import EventBatch
from sinks import Sink
from sinks.base import SinkUnavailable
from sinks.runner import BACKOFF_SECONDS_MAX, describe

_FIRST_PAUSE_SECONDS = 0.1
_REOPEN_AFTER = 5
"""Failures in a row after which a sink is closed and opened again."""

_log = get_logger(__name__)


class Delivery:
    """One sink. All is called on one thread; `stopping` ends what waits. What counts is for any thread to read.

    A batch whose write has failed is offered again: nothing is lost, and half of it may come twice.
    """

    def __init__(self, name: str, stopping: threading.Event) -> None:
        self._name, self._stopping = name, stopping
        self._sink: Sink | None = None
        self._tick: Callable[[], None] | None = None
        self.is_open = False
        self._opened_before = False
        self.errors = 0
        """Times that the sink raised."""
        self.failures = 0
        """The last ones in a row; 0: it works."""
        self.last_error: str | None = None

    def use(self, sink: Sink) -> None:
        """Serve this sink from now on; what was used before is closed."""
        self.close()
        self._sink, self._tick = sink, getattr(sink, "tick", None)

    def open(self) -> bool:
        """Open the sink; False if it was told to stop. Raises what the sink does, the first time.

        What does not answer at the moment is tried again all the same (SinkUnavailable).
        """
        assert self._sink is not None
        if not self._opened_before:
            try:
                self._sink.open()
                self.is_open = True
            except SinkUnavailable as error:
                self._note(error)
            self._opened_before = True
        return self._until_done(lambda: None)

    def write(self, batch: EventBatch) -> bool:
        """Have the sink take a batch; False if it was told to stop before it did."""
        assert self._sink is not None
        write = self._sink.write
        return self._until_done(lambda: write(batch))

    def tick(self) -> bool:
        """To be called after each batch, and all the time while there is none; False if the sink failed."""
        if self._tick is not None or not self.is_open:
            return self._try(self._tick or (lambda: None))
        return True

    def close(self) -> None:
        """Close the sink, if it is open; what it raises is reported."""
        if self.is_open and self._sink is not None:
            self.is_open = False
            try:
                self._sink.close()
            except BaseException as error:  # noqa: BLE001  a sink may raise anything
                self._note(error)

    def _until_done(self, action: Callable[[], None]) -> bool:
        while not self._try(action):
            if self._stopping.is_set():
                return False
        return True

    def _try(self, action: Callable[[], None]) -> bool:
        """Do it once, opening the sink if need be; if that fails, wait a moment."""
        try:
            if not self.is_open:
                self._open_again()
            action()
        except BaseException as error:  # noqa: BLE001  a sink's sys.exit() must not end the thread unnoticed
            self._note(error)
            if self.failures % _REOPEN_AFTER == 0:
                self.close()
            doublings = min(self.failures - 1, 16)
            self._stopping.wait(min(_FIRST_PAUSE_SECONDS * 2**doublings, BACKOFF_SECONDS_MAX))
            return False
        if self.failures:
            self.failures = 0
            _log.warning("sink_recovered", sink=self._name)
        return True

    def _open_again(self) -> None:
        assert self._sink is not None
        self._sink.open()
        self.is_open = True

    def _note(self, error: BaseException) -> None:
        self.errors += 1
        self.failures += 1
        self.last_error = describe(error)
        if self.failures == 1:
            _log.error("sink_fails", sink=self._name, reason=self.last_error)
