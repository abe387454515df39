"""A worker as the balancer sees it: the requests routed there, and its last statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.kv_aware_router.fleet import Place

REQUEST_TOKENS = 64
"""Load of a running request in addition to its prompt, in tokens: it takes part of each step and of the cache."""


@dataclass(slots=True)
class Member:
    """One worker."""

    name: str
    place: Place
    up: bool = True
    to_compute: dict[int, int] = field(default_factory=dict)
    """Prompt tokens still to compute, by request number; removed at the first token."""
    running: int = 0
    """Number of running requests."""
    stats: dict[str, float] = field(default_factory=dict)
    """Its last answer to ``/stats``."""

    @property
    def load(self) -> int:
        """Work before the next request's, in prompt tokens."""
        return sum(self.to_compute.values()) + REQUEST_TOKENS * self.running
