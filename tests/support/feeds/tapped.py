"""Waiting for a tap."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcache.tap.tap import Tap

WAIT = 30.0


def work_until(tap: Tap, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not done():
        assert time.monotonic() < deadline, "the tap does not get there"
        tap.work(0.02)
