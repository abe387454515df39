"""Event counters, and gauges read at each flush."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from events.types import EndReason, RequestId

_GAUGES = frozenset(("blocks_total", "blocks_blank", "blocks_unreferenced", "sequences"))


class _BlockRates:
    """Rates derived from the counts of blocks."""

    __slots__ = ()

    blocks_reused_full: int
    blocks_reused_partial: int
    blocks_missed: int

    @property
    def blocks_reused(self) -> int:
        """Blocks of prompts that were reused, in full or in part."""
        return self.blocks_reused_full + self.blocks_reused_partial

    @property
    def block_hit_rate(self) -> float:
        """Share of the prompts' blocks that were reused, in full or in part."""
        looked_up = self.blocks_reused + self.blocks_missed
        return self.blocks_reused / looked_up if looked_up else 0.0


@dataclass(frozen=True, slots=True)
class Stats(_BlockRates):
    """Totals since the manager started, and the state at the last flush. Blocks are counted in all windows together.

    ``later - earlier`` is the difference of two of them: its gauges are those of the later one.
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens_primary: int = 0
    reused_tokens_secondary: int = 0
    reused_tokens_partial: int = 0
    reused_tokens_own: int = 0
    """Reused tokens that a request, removed and added again, had computed itself before."""
    encoder_tokens: int = 0
    """Tokens of the inputs of encoders."""
    reused_encoder_tokens: int = 0
    """Tokens of these in reused blocks."""
    events: int = 0
    batches: int = 0
    sequences: int = 0
    windows: dict[int, Stats] = field(default_factory=dict)
    """Counts and gauges of blocks by window, in tokens; other fields of these are 0."""
    blocks_allocated: int = 0
    blocks_allocated_decode: int = 0
    blocks_allocated_new: int = 0
    """Allocated slots that nothing had taken before since the manager started."""
    blocks_reused_full: int = 0
    """Cached blocks of prompts; in a sliding window only those inside it."""
    blocks_reused_partial: int = 0
    """Blocks of prompts with a copied start."""
    blocks_missed: int = 0
    """Blocks of prompts without any reuse."""
    blocks_stored: int = 0
    blocks_updated: int = 0
    """Blocks that were given another priority."""
    blocks_removed: int = 0
    blocks_dropped: int = 0
    """Removed blocks that had been kept in secondary to no use: evicted from there, or out of reach."""
    blocks_offloaded: int = 0
    blocks_onboarded: int = 0
    blocks_recomputed: int = 0
    """Blocks stored again while they lay in secondary."""
    blocks_deduplicated: int = 0
    """Blocks computed by two sequences at the same time; one copy was returned."""
    blocks_copied: int = 0
    bytes_offloaded: int = 0
    bytes_onboarded: int = 0
    bytes_copied: int = 0
    """Bytes of copied starts of blocks; 0 for an evicted block that was reused in place."""
    blocks_total: tuple[int, int] = (0, 0)
    """Slots per level; blank, unreferenced and held ones add up to them."""
    blocks_blank: tuple[int, int] = (0, 0)
    blocks_unreferenced: tuple[int, int] = (0, 0)
    """Unreferenced cached blocks: reusable, and evicted when room is needed."""

    def __sub__(self, earlier: Stats) -> Stats:
        """Return the changes in between: counters are differences, gauges those of the later one."""
        values: dict[str, Any] = {}
        for each in fields(self):
            mine, before = getattr(self, each.name), getattr(earlier, each.name)
            if each.name == "windows":
                values[each.name] = {
                    window: counted - before.get(window, Stats()) for window, counted in mine.items()
                }
            else:
                values[each.name] = mine if each.name in _GAUGES else mine - before
        return Stats(**values)

    @property
    def blocks_free(self) -> int:
        """Available primary slots."""
        return self.blocks_blank[0] + self.blocks_unreferenced[0]

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that needed no computing, own ones included."""
        return self.reused_tokens_primary + self.reused_tokens_secondary + self.reused_tokens_partial

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were reused, own ones excluded from both."""
        others = self.prompt_tokens - self.reused_tokens_own
        return (self.reused_tokens - self.reused_tokens_own) / others if others else 0.0


@dataclass(frozen=True, slots=True)
class RequestStats(_BlockRates):
    """One request, from its admission to its end. Blocks are counted in all windows together, as in `Stats`.

    A branch has a record of its own: it reuses and misses nothing, and was allocated what it does not share.
    """

    request_id: RequestId
    handle: int
    why: EndReason
    """Reason of its end; a preempted one has another record for each time that it returns."""
    prompt_tokens: int
    reused_tokens: int
    num_tokens: int
    """Tokens at its end, sampled ones included."""
    computed_tokens: int
    """Tokens of these with K/V."""
    blocks_allocated: int
    blocks_allocated_new: int
    blocks_reused_full: int
    blocks_reused_partial: int
    blocks_missed: int
