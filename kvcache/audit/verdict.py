"""Whether a level is too small: what its evictions cost, and whether hits come as late as evictions do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from events.types import PRIMARY
from kvcache.audit.phrases import count, duration, share
from kvcache.audit.totals import Audit

WORTH = 0.01
"""The part of all prompt tokens from which on what evictions cost is worth a larger level."""
_FEW = 20
"""Hits below which ages say little."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one level."""

    level: int
    size: Literal["too_small", "large_enough", "unknown"]
    """By what its evictions cost; unknown: the log has no tokens, so nobody can tell."""
    recomputed: int
    """Tokens that were computed again because this level had evicted them."""
    prompt_tokens: int
    hits: int
    """That the ages rest on."""
    evictions: int
    early_eviction: float | None
    """In seconds: a tenth of the evictions come sooner."""
    late_hit: float | None
    """A tenth of the hits come later."""
    offloaded: int
    """Blocks that it moved to secondary rather than lose them."""
    onboarded: int

    @property
    def crosses(self) -> bool:
        """Whether late hits come as late as early evictions."""
        return None not in (self.late_hit, self.early_eviction) and self.late_hit >= self.early_eviction  # type: ignore[operator]

    def in_words(self) -> list[str]:
        """One sentence on the cost, one on the ages, one on what went to secondary."""
        said = [self._cost()]
        if self.late_hit is not None and self.early_eviction is not None:
            said.append(self._ages(self.late_hit, self.early_eviction))
        if self.offloaded:
            moved = count(self.offloaded, "block")
            said.append(
                f"what it evicts is not lost where secondary takes it: {moved} went there, {self.onboarded:,} came back"
            )
        return said

    def _cost(self) -> str:
        if self.size == "unknown":
            return "what its evictions cost is not known: the log records no tokens"
        name = self.size.replace("_", " ")
        if not self.recomputed:
            return f"{name}: nothing that it evicted was computed again"
        part = share(self.recomputed / max(self.prompt_tokens, 1))
        tokens = count(self.recomputed, "token")
        return (
            f"{name}: {tokens} were computed again because it had evicted them, {part} of all prompt tokens"
        )

    def _ages(self, late_hit: float, early_eviction: float) -> str:
        few = " (few: they say little)" if self.hits < _FEW else ""
        rests = f"of {count(self.hits, 'hit')}{few} a tenth come after {duration(late_hit)}"
        evicted = f"of {count(self.evictions, 'eviction')} a tenth before {duration(early_eviction)}"
        return f"{rests}, {evicted}: the curves {'cross' if self.crosses else 'do not cross'}"


def verdict_on(audit: Audit, level: int) -> Verdict | None:
    """The verdict on a level; None if it has evicted nothing."""
    lives = audit.levels[level]
    if not lives.eviction_ages.total:
        return None
    costly = lives.recomputed >= WORTH * audit.prompt_tokens and lives.recomputed
    known: Literal["too_small", "large_enough"] = "too_small" if costly else "large_enough"
    return Verdict(
        level,
        known if audit.tokens_recorded else "unknown",
        lives.recomputed,
        audit.prompt_tokens,
        lives.hit_ages.total,
        lives.eviction_ages.total,
        lives.eviction_ages.quantile(0.1),
        lives.hit_ages.quantile(0.9),
        audit.offloaded if level == PRIMARY else 0,
        audit.onboarded,
    )
