"""SIGHUP, by which those who rotate files say that they have moved one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def at_hangup(reopen: Callable[[], None], *, wanted: bool) -> Iterator[None]:
    """Call `reopen` at each SIGHUP, if that is `wanted`, on the main thread.

    Not in a process with a terminal: it is told by the same signal that the terminal has gone, and should end.
    """
    if not wanted or _has_terminal():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: reopen())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
