"""Process of a command: signals, and standard streams that are closed or without a reader."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self, TextIO

PATIENCE_SECONDS = 1.0
"""Seconds within which a second signal does not count: launchers pass on signals that the terminal has already sent."""
_NAP_SECONDS = 0.05
"""Longest sleep: Python runs handlers on the main thread, which sleeps on if the system wakes another one."""


class StopSignals(threading.Event):
    """Event set by SIGINT and SIGTERM while it is entered as a context, on the main thread.

    If it is not checked, a further signal a second later or more raises KeyboardInterrupt. It does not use the lock of
    the base class: a handler that interrupts the holder would wait for it forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: signal.Signals | None = None
        """First signal received."""
        self.received = 0
        """Number of signals received."""
        self._unheeded_since = math.inf

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def at_hangup(self, reopen: Callable[[], None]) -> None:
        """Call `reopen` at SIGHUP, by which files are rotated, unless SIGHUP would mean that the terminal is gone."""
        try:
            os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        except OSError:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: reopen())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        self.received += 1
        now = time.monotonic()
        if now - self._unheeded_since >= PATIENCE_SECONDS:
            raise KeyboardInterrupt
        self._unheeded_since = min(self._unheeded_since, now)

    def is_set(self) -> bool:
        """Return True if a signal was received."""
        self._unheeded_since = math.inf
        return self.received > 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for a signal; return True if one was received."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.received and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))
        return self.is_set()

    @property
    def exit_code(self) -> int:
        """Exit code: 0, or the shells' convention for a program ended by a signal."""
        return 0 if self.first is None else 128 + self.first


@contextmanager
def leaving_at_sigterm() -> Iterator[None]:
    """Exit cleanly on SIGTERM, as on Ctrl-C: leave the contexts entered here, then the process, with code 143."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # cleanup must not be interrupted
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def open_missing() -> None:
    """Open each closed standard stream, because the next opened file would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def reader_is_gone(stream: TextIO) -> bool:
    """Return True if the reader of a pipe is gone. Writing would show it, but there may be nothing to write."""
    poll = select.poll()
    with suppress(OSError, ValueError):  # closed, or no file descriptor
        # Some event must be requested, or macOS does not report hang-ups.
        poll.register(stream.fileno(), select.POLLOUT)
        return any(state & (select.POLLHUP | select.POLLERR) for _, state in poll.poll(0))
    return False


def forget(stream: TextIO) -> None:
    """Discard what is still buffered, or the interpreter would report an error at its exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
