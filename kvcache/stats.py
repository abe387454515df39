"""Counters of what happened, and gauges read at each flush."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the manager started, and the state at the last flush. Blocks are counted in all windows together."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens_primary: int = 0
    reused_tokens_secondary: int = 0
    reused_tokens_partial: int = 0
    reused_tokens_own: int = 0
    """Of the reused ones, those that a request which was removed and added again had computed itself before."""
    blocks_allocated: int = 0
    blocks_allocated_decode: int = 0
    blocks_stored: int = 0
    blocks_updated: int = 0
    """Given another priority."""
    blocks_removed: int = 0
    blocks_offloaded: int = 0
    blocks_onboarded: int = 0
    blocks_recomputed: int = 0
    """Stored again while they lay in secondary."""
    blocks_deduplicated: int = 0
    """Computed by two sequences at a time; one copy was given back."""
    blocks_copied: int = 0
    events: int = 0
    batches: int = 0
    blocks_total: tuple[int, int] = (0, 0)
    """Slots per level, of all windows; blank, unreferenced and held ones add up to them."""
    blocks_blank: tuple[int, int] = (0, 0)
    blocks_unreferenced: tuple[int, int] = (0, 0)
    """Cached blocks that no sequence holds: reusable, and evicted when room is needed."""
    sequences: int = 0

    @property
    def blocks_free(self) -> int:
        """Primary slots that can be had."""
        return self.blocks_blank[0] + self.blocks_unreferenced[0]

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that needed no computing, own ones included."""
        return self.reused_tokens_primary + self.reused_tokens_secondary + self.reused_tokens_partial

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were reused, own ones left out of both."""
        others = self.prompt_tokens - self.reused_tokens_own
        return (self.reused_tokens - self.reused_tokens_own) / others if others else 0.0
