"""Counters of what happened, and gauges read at each flush."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from events.types import EndReason, RequestId

_GAUGES = frozenset(("blocks_total", "blocks_blank", "blocks_unreferenced", "sequences"))


class _BlockRates:
    """What follows from the counts of blocks."""

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

    ``later - earlier`` is what happened between two of them: its gauges are those of the later one.
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens_primary: int = 0
    reused_tokens_secondary: int = 0
    reused_tokens_partial: int = 0
    reused_tokens_own: int = 0
    """Of the reused ones, those that a request which was removed and added again had computed itself before."""
    encoder_tokens: int = 0
    """Of the inputs of encoders."""
    reused_encoder_tokens: int = 0
    """Of these, the ones of which blocks were reused."""
    events: int = 0
    batches: int = 0
    sequences: int = 0
    windows: dict[int, Stats] = field(default_factory=dict)
    """The counts and gauges of blocks, window by window, by its tokens; the others of these are 0."""
    blocks_allocated: int = 0
    blocks_allocated_decode: int = 0
    blocks_allocated_new: int = 0
    """Of the allocated ones, slots that nothing had taken before since the manager started."""
    blocks_reused_full: int = 0
    """Blocks of prompts that were cached; of a window that slides those that it still sees."""
    blocks_reused_partial: int = 0
    """Blocks of prompts of which the start was copied."""
    blocks_missed: int = 0
    """Blocks of prompts of which nothing was reused."""
    blocks_stored: int = 0
    blocks_updated: int = 0
    """Given another priority."""
    blocks_removed: int = 0
    blocks_dropped: int = 0
    """Of the removed ones, those that had been kept in secondary to no use: evicted from there, or out of reach."""
    blocks_offloaded: int = 0
    blocks_onboarded: int = 0
    blocks_recomputed: int = 0
    """Stored again while they lay in secondary."""
    blocks_deduplicated: int = 0
    """Computed by two sequences at a time; one copy was given back."""
    blocks_copied: int = 0
    bytes_offloaded: int = 0
    bytes_onboarded: int = 0
    bytes_copied: int = 0
    """Of the starts of blocks; nothing where a block was evicted and its slot taken as it was."""
    blocks_total: tuple[int, int] = (0, 0)
    """Slots per level; blank, unreferenced and held ones add up to them."""
    blocks_blank: tuple[int, int] = (0, 0)
    blocks_unreferenced: tuple[int, int] = (0, 0)
    """Cached blocks that no sequence holds: reusable, and evicted when room is needed."""

    def __sub__(self, earlier: Stats) -> Stats:
        """What happened in between: counters are differences, gauges those of the later one."""
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


@dataclass(frozen=True, slots=True)
class RequestStats(_BlockRates):
    """One request, from its admission to its end. Blocks are counted in all windows together, as in `Stats`.

    A branch has a record of its own: it reuses and misses nothing, and was allocated what it does not share.
    """

    request_id: RequestId
    handle: int
    why: EndReason
    """How it ended; a preempted one has another record for each time that it returns."""
    prompt_tokens: int
    reused_tokens: int
    num_tokens: int
    """At its end, sampled ones included."""
    computed_tokens: int
    """Of these, those whose K/V was there."""
    blocks_allocated: int
    blocks_allocated_new: int
    blocks_reused_full: int
    blocks_reused_partial: int
    blocks_missed: int
