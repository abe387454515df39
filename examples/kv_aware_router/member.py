"""A worker as the balancer sees it: by what it has sent there, and by what it heard."""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.kv_aware_router.fleet import Place

REQUEST_TOKENS = 64
"""What a running request weighs beside its prompt: it takes a part of each step, and of the cache."""


@dataclass(slots=True)
class Member:
    """One worker."""

    name: str
    place: Place
    up: bool = True
    to_compute: dict[int, int] = field(default_factory=dict)
    """Prompt tokens that requests without a first token are expected to compute, by the number of the request."""
    running: int = 0
    """Requests there."""
    stats: dict[str, float] = field(default_factory=dict)
    """What it says of itself."""

    @property
    def load(self) -> int:
        """Prompt tokens that are computed there before those of the next request, or as much work."""
        return sum(self.to_compute.values()) + REQUEST_TOKENS * self.running
