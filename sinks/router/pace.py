"""How often each peer may ask: so many times a second, and as many at once after a rest."""

from __future__ import annotations

from collections.abc import Hashable

MAX_REMEMBERED = 10_000
"""Peers; beyond it those are forgotten that have rested long enough to begin anew anyway."""


class Pace:
    """A bucket of tokens for each peer. For one thread."""

    def __init__(self, per_second: float) -> None:
        """0 per second: there is no limit."""
        self._per_second = per_second
        self._most = max(1.0, per_second)
        self._left: dict[Hashable, tuple[float, float]] = {}
        """What was left for a peer, and when."""

    def allows(self, peer: Hashable, now: float) -> bool:
        """Whether it may ask once more at this time (monotonic seconds); if so, this counts."""
        if not self._per_second:
            return True
        left, at = self._left.get(peer, (self._most, now))
        left = min(self._most, left + (now - at) * self._per_second)
        allowed = left >= 1
        self._left[peer] = (left - allowed, now)
        if len(self._left) > MAX_REMEMBERED:
            self._forget(now)
        return allowed

    def _forget(self, now: float) -> None:
        full = self._most / self._per_second
        self._left = {peer: seen for peer, seen in self._left.items() if now - seen[1] < full}
