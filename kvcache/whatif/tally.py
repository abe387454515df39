"""What became of the requests: counted from events, those of a log and those of a manager alike."""

from __future__ import annotations

from dataclasses import dataclass

from events.packed import SLOT_BYTES
from events.types import (
    PRIMARY,
    AdmissionRefused,
    AnyEvent,
    BlocksMoved,
    BlocksRemoved,
    EndReason,
    Event,
    MoveReason,
    RemoveReason,
    SequenceAdded,
    SequenceRemoved,
)


@dataclass(slots=True)
class Tally:
    """Blocks are counted over all attention windows."""

    requests: int = 0
    """Admitted; one that comes again after it was preempted is none."""
    prompt_tokens: int = 0
    """Of all of these."""
    reused_primary: int = 0
    """Prompt tokens in full blocks that lay in primary in all windows."""
    reused_secondary: int = 0
    """Those that some window had to bring back from secondary."""
    reused_partial: int = 0
    """Tokens copied from a block of which only the start matched."""
    waited: int = 0
    """Requests that did not fit when the log had them admitted; as recorded, refusals that the log notes."""
    waited_batches: int = 0
    """How many batches later they were admitted, over all of them."""
    preempted: int = 0
    """How often a running request was removed to make room, to be admitted again."""
    recomputed_tokens: int = 0
    """Tokens that preempted requests had to compute again."""
    cut_short: int = 0
    """Requests that were ended before their end, since they alone were larger than the cache."""
    too_long: int = 0
    """Requests whose prompt is larger than the cache."""
    unserved: int = 0
    """Requests that still waited when nothing was left that would end."""
    unserved_tokens: int = 0
    """Prompt tokens of requests that were never admitted, too long or unserved."""
    offloaded_blocks: int = 0
    """Evicted from primary, kept in secondary."""
    onboarded_blocks: int = 0
    """Brought back from secondary."""
    removed_primary: int = 0
    """Blocks evicted from primary for good."""
    removed_secondary: int = 0
    """Blocks evicted from secondary."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that needed no computing."""
        return self.reused_primary + self.reused_secondary + self.reused_partial

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed, and what was computed again."""
        return self.prompt_tokens - self.reused_tokens + self.recomputed_tokens

    @property
    def hit_rate(self) -> float:
        """The reused part of the prompt tokens of all requests, from 0 to 1; who is never admitted reuses nothing."""
        asked = self.prompt_tokens + self.unserved_tokens
        return self.reused_tokens / asked if asked else 0.0

    def count(self, event: AnyEvent | Event) -> None:
        """Follow any event of a log."""
        if isinstance(event, AdmissionRefused):
            self.waited += 1
        else:
            self.follow(event)

    def follow(self, event: AnyEvent | Event) -> None:
        """Follow what happens to requests and blocks, but for refusals: who is refused may be tried again and again."""
        if isinstance(event, SequenceAdded):
            self._admitted(event)
        elif isinstance(event, SequenceRemoved):
            self.preempted += event.why == EndReason.PREEMPTED
        elif isinstance(event, BlocksMoved):
            self._moved(event)
        elif isinstance(event, BlocksRemoved):
            self._removed(event)

    def _admitted(self, event: SequenceAdded) -> None:
        if event.resumed:
            self.recomputed_tokens += event.num_tokens - event.reused
            return
        secondary = max(event.reused_secondary)
        self.requests += 1
        self.prompt_tokens += event.num_tokens
        self.reused_primary += event.reused - event.reused_partial - secondary
        self.reused_secondary += secondary
        self.reused_partial += event.reused_partial

    def _moved(self, event: BlocksMoved) -> None:
        blocks = len(event.from_slots) // SLOT_BYTES
        if event.why == MoveReason.OFFLOAD:
            self.offloaded_blocks += blocks
        elif event.why == MoveReason.ONBOARD:
            self.onboarded_blocks += blocks

    def _removed(self, event: BlocksRemoved) -> None:
        if event.why in (RemoveReason.SUPERSEDED, RemoveReason.CLEARED):
            return
        blocks = len(event.slots) // SLOT_BYTES
        if event.level == PRIMARY:
            self.removed_primary += blocks
        else:
            self.removed_secondary += blocks
