"""Threads that are late: ``pytest --delays PATH``.

All threads but the main one are delayed at random lines. A test that fails only then depends on how
fast the machine is, or on which of two threads is first. Some tests take ten times as long, and those that move
thousands of batches may exceed their time limit, which means nothing.
`TEST_SEEDS` chooses other delays.
"""

from __future__ import annotations

import random
import threading

# By name: tests replace the functions of the module `time`.
from time import sleep
from types import FrameType
from typing import Any

from tests.support.places import ROOT
from tests.support.seeds import day

RATE = 0.002
"""Part of the lines at which a thread is delayed."""
SECONDS = (0.0, 0.001, 0.01, 0.05)
_STANDARD = ("http/server.py", "queue.py", "socketserver.py")
"""Modules of the standard library that have races of their own."""
_random = random.Random(day())


def delay(frame: FrameType, event: str, argument: object) -> Any:
    """Delay the thread at a line or a return, now and then: a trace function of `sys.settrace`."""
    if event in ("line", "return") and _random.random() < RATE:
        sleep(_random.choice(SECONDS))
    return delay


def _enter(frame: FrameType, event: str, argument: object) -> Any:
    """Trace what the project's own code and servers of tests do in a thread."""
    path = frame.f_code.co_filename
    is_own = path.startswith(f"{ROOT}/") and "/site-packages/" not in path
    return delay if is_own or path.endswith(_STANDARD) else None


def start() -> None:
    """Delay the threads that are started from now on."""
    threading.settrace(_enter)
