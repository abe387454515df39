"""Ctrl-C while a command is still loading what it needs: the process ends at once, with one line.

Raising KeyboardInterrupt would not do: Python's import machinery runs callbacks in which exceptions are shown and
forgotten, and some libraries turn one that meets them half loaded into another. Nothing is open yet that wants closing.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def begin() -> None:
    """From here on Ctrl-C ends the process, unless it was told to ignore it. To be called on the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def done() -> None:
    """Everything is loaded: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"kvcache: interrupted\n")
    finally:
        os._exit(128 + number)
