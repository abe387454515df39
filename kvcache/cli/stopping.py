"""Ending by a signal without being torn apart: the handler notes it, the work looks at the note between two steps.

A `threading.Event` will not do: a handler runs on the main thread, possibly while that thread is inside the event
and holds its lock, which `set` would then wait for. And while that thread waits, no handler runs at all if the system
delivers the signal to another thread; therefore Python writes to a pipe at once, and waiting is reading from that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_SECONDS = 1.0
"""Launchers pass on a signal that the terminal has sent to us as well: that is not somebody losing patience."""
_LONGEST_SELECT = 3600.0
"""The system takes no wait of any length."""


class StopSignals(threading.Event):
    """Set by SIGINT and SIGTERM while it is entered as a context. To be used on the main thread.

    Where nobody looks at it, a further signal that comes a second later or more raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: signal.Signals | None = None
        """The signal that came first."""
        self.received = 0
        """How many have come."""
        self._unheeded_since: float | None = None

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._reader)
        os.close(self._writer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        self.received += 1
        now = time.monotonic()
        if self._unheeded_since is None:
            self._unheeded_since = now
        elif now - self._unheeded_since >= _PATIENCE_SECONDS:
            raise KeyboardInterrupt

    def is_set(self) -> bool:
        """Whether a signal has come."""
        self._unheeded_since = None
        return self.received > 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a signal for `timeout` seconds; returns whether one has come."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.received:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            select.select(
                [self._reader], [], [], _LONGEST_SELECT if left is None else min(left, _LONGEST_SELECT)
            )
            with contextlib.suppress(BlockingIOError):
                # Signals that are not ours wake us, too.
                os.read(self._reader, 4096)
        return self.is_set()

    @property
    def exit_code(self) -> int:
        """0, or what shells expect of a program that a signal has ended."""
        return 0 if self.first is None else 128 + self.first
