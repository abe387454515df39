"""The standard streams as a command may find them: closed by whoever started it, full, or read by nobody.

The number of a closed stream would be given to the next file that is opened, so that a message for people could end up
in the middle of a log. Therefore each gets a place to go before anything else is opened.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO


def open_missing() -> None:
    """Give every standard stream that is closed a place to go: nowhere."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def complain(text: str) -> None:
    """Say something on stderr. If that cannot be, the exit code has to do."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        forget(sys.stderr)


def nobody_reads(stream: TextIO) -> bool:
    """Whether what reads the other end of a pipe has gone. Writing would tell, but there may be nothing to write."""
    try:
        poll = select.poll()
        # Linux tells of hang-ups and errors whatever is asked for, macOS only if something is. That a device cannot
        # be asked, as macOS says of /dev/null, is neither.
        poll.register(stream.fileno(), select.POLLOUT)
        return any(state & (select.POLLHUP | select.POLLERR) for _, state in poll.poll(0))
    except (OSError, ValueError):
        return False


def forget(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, or the interpreter would complain at its exit."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
