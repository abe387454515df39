"""Waiting for a tap."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.tap.tap import Tap
from tests.support.waiting import wait_until


def work_until(tap: Tap, done: Callable[[], bool]) -> None:
    """Have the tap work until it is so."""
    wait_until(done, "the tap does not get there", meanwhile=lambda: tap.work(0.02))
