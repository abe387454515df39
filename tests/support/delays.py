"""Threads that are late: ``pytest --delays PATH``.

Threads are delayed at random lines, the main one at a few of each function. A test that fails only then depends on how
fast the machine is, or on which of two threads is first. Some tests take ten times as long, and those that move
thousands of batches may exceed their time limit, which means nothing; nor do counts of calls.
`TEST_SEEDS` chooses other delays.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections import Counter

# By name: tests replace the functions of the module `time`.
from time import sleep
from types import CodeType, FrameType
from typing import Any

from tests.support.places import ROOT
from tests.support.seeds import day

RATE = 0.002
"""Part of the lines at which a thread is delayed."""
MAIN_RATE, MAIN_MOST = 0.02, 3
"""The same for the main thread, and how often in a function: what it calls thousands of times is fast again soon."""
SECONDS = (0.0, 0.001, 0.01, 0.05)
_STANDARD = ("http/server.py", "queue.py", "socketserver.py")
"""Modules of the standard library that have races of their own."""
_random = random.Random(day())


class Delays:
    """Trace functions that delay threads at some of their lines, in a function up to `most` times."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate, self._most = rate, most
        self._counts = Counter[CodeType]()

    def enter(self, frame: FrameType, event: str, argument: object) -> Any:
        """Trace what the project's own code and servers of tests do."""
        path = frame.f_code.co_filename
        is_own = path.startswith(f"{ROOT}/") and "/site-packages/" not in path
        if self._counts[frame.f_code] < self._most and (is_own or path.endswith(_STANDARD)):
            return self._delay
        return None

    def _delay(self, frame: FrameType, event: str, argument: object) -> Any:
        """Delay the thread at a line or a return, now and then."""
        if event in ("line", "return") and _random.random() < self._rate:
            if self._counts[frame.f_code] >= self._most:
                return None
            self._counts[frame.f_code] += 1
            sleep(_random.choice(SECONDS))
        return self._delay


def start() -> None:
    """Delay the threads that are started from now on, and the main one, which calls this."""
    threading.settrace(Delays(RATE, math.inf).enter)
    sys.settrace(Delays(MAIN_RATE, MAIN_MOST).enter)
