"""Waiting for a state, for as long as a busy machine may need, and a clock for tests that must not wait."""

from __future__ import annotations

from collections.abc import Callable

# By name: tests replace the functions of the module `time`.
from time import monotonic, sleep

WAIT = 60.0
"""Seconds after which waiting for something is a failure."""
WAIT_MS = int(WAIT * 1000)


def pause() -> None:
    """Let other threads and processes work for a moment."""
    sleep(0.002)


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], object] = "it does not come",
    *,
    meanwhile: Callable[[], object] = pause,
    seconds: float = WAIT,
) -> None:
    """Return as soon as the condition holds.

    Args:
        condition: Called again and again until it returns something true.
        what: The message of the failure, or a function that makes it.
        meanwhile: Called between two looks at the condition, to poll for instance.
        seconds: How long that may take.
    """
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, what() if callable(what) else what
        meanwhile()


class Clock:
    """Time that stands still unless a test moves it on."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
