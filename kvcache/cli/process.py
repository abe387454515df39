"""The process of a command: signals, and standard streams that are closed or that nobody reads any more."""

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
"""Launchers pass on a signal that the terminal has sent to us as well: that is not somebody losing patience."""
_NAP_SECONDS = 0.05
"""Python runs handlers on the main thread, which sleeps on if the system has woken another one."""


class StopSignals(threading.Event):
    """Set by SIGINT and SIGTERM while it is entered as a context, on the main thread.

    Where nobody looks at it, a further signal that comes a second later or more raises KeyboardInterrupt. It does
    without the lock of the base class: a handler would wait for it forever if it interrupts the holder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: signal.Signals | None = None
        """The signal that came first."""
        self.received = 0
        """How many have come."""
        self._unheeded_since = math.inf

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def at_hangup(self, reopen: Callable[[], None]) -> None:
        """Call `reopen` at SIGHUP, by which files are rotated, unless it would say that the terminal has gone."""
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
        """Whether a signal has come."""
        self._unheeded_since = math.inf
        return self.received > 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a signal for `timeout` seconds; returns whether one has come."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.received and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))
        return self.is_set()

    @property
    def exit_code(self) -> int:
        """0, or what shells expect of a program that a signal has ended."""
        return 0 if self.first is None else 128 + self.first


@contextmanager
def leaving_at_sigterm() -> Iterator[None]:
    """At SIGTERM leave what is entered here in good order, as at Ctrl-C, and then the process, with exit code 143."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # what is being cleared away is not to be left halfway
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def open_missing() -> None:
    """Give each standard stream that is closed a place to go, or the next file that is opened would have its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def nobody_reads(stream: TextIO) -> bool:
    """Whether what reads the other end of a pipe has gone. Writing would tell, but there may be nothing to write."""
    poll = select.poll()
    with suppress(OSError, ValueError):  # closed, or none of the system's
        # Something must be asked for, or macOS does not tell of hang-ups.
        poll.register(stream.fileno(), select.POLLOUT)
        return any(state & (select.POLLHUP | select.POLLERR) for _, state in poll.poll(0))
    return False


def forget(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, or the interpreter would complain at its exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
