"""Counts and latencies of a round's requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.kv_aware_router.balancer import Served


@dataclass(slots=True)
class Tally:
    """Counts and latencies of a round. Times are simulated."""

    workers: int = 1
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_ms: list[int] = field(default_factory=list)
    """Time to first token of each request."""
    refused: int = 0
    """Requests that no worker can ever serve."""
    lost: int = 0
    """Requests without an answer."""
    retried: int = 0
    """Requests served after a retry on another worker."""
    computed_by: Counter[str] = field(default_factory=Counter)
    """Computed prompt tokens by worker."""

    def served(self, served: Served, arrival_ms: int) -> None:
        """Count an answer."""
        self.requests += 1
        self.prompt_tokens += served.prompt_tokens
        self.cached_tokens += served.cached_tokens
        self.first_token_ms.append(served.first_token_ms - arrival_ms)
        self.retried += served.attempts > 1
        self.computed_by[served.worker] += served.prompt_tokens - served.cached_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the time to first token."""
        return float(np.percentile(self.first_token_ms, percent)) if self.first_token_ms else 0.0

    @property
    def imbalance(self) -> float:
        """Tokens computed by the busiest worker, as a multiple of the mean."""
        tokens = self.computed_by.values()
        return max(tokens) * self.workers / sum(tokens) if sum(tokens) else 1.0

    def summary(self) -> dict[str, Any]:
        """Return the counts for the page."""
        return {
            "requests": self.requests,
            "lost": self.lost,
            "refused": self.refused,
            "retried": self.retried,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "hit_rate": self.hit_rate,
            "ttft_ms": {str(percent): round(self.percentile_ms(percent)) for percent in (50, 90, 99)},
            "imbalance": self.imbalance,
            "computed_by": dict(sorted(self.computed_by.items())),
        }
