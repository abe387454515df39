"""Reasons why prompt tokens were reused or computed; docs/how-to/audit.md defines each."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class Reason(IntEnum):
    """Reason why a prompt token was reused or computed when its request was admitted."""

    words: str
    """Text for tables."""

    def __new__(cls, number: int, words: str = "") -> Self:  # noqa: D102  as int has it
        reason = int.__new__(cls, number)
        reason._value_, reason.words = number, words
        return reason

    PRIMARY = 0, "reused from primary"
    SECONDARY = 1, "reused from secondary"
    PARTIAL = 2, "reused: the start of a cached block was copied"
    EXTERNAL = 3, "loaded from outside"
    LAST_TOKEN = 4, "the last token is always computed"
    REUSE_OFF = 5, "block reuse is off"
    UNALIGNED = 6, "in the block in which the prompt ends"
    UNKNOWN = 7, "the log records no tokens"
    NOT_SERVABLE = 8, "cached, but not what a window needs before it"
    LAST_HIT = 9, "cached, but speculative decoding computes the last block of a hit again"
    NOT_REUSED = 10, "cached, and the engine did not reuse it"
    COMPUTING_AGAIN = 11, "evicted, and being computed again just then"
    COMPUTING_CLEARED = 12, "cleared, and being computed again just then"
    COMPUTING_COPY_FAILED = 13, "lost with a failed copy, and being computed again just then"
    COMPUTING_INVALIDATED = 14, "invalidated, and being computed again just then"
    COMPUTING_RESTARTED = 15, "lost with a restart or lost batches, and being computed again just then"
    EVICTED = 16, "evicted from primary"
    DROPPED = 17, "evicted from secondary"
    CLEARED = 18, "the cache had been cleared"
    COPY_FAILED = 19, "lost with a failed copy"
    INVALIDATED = 20, "invalidated by the engine, as after a failed load"
    RESTARTED = 21, "lost with a restart, or with lost batches"
    OUT_OF_WINDOW = 22, "a sliding window had left it behind uncached"
    SAME_STEP = 23, "stored later in the same step"
    """Computed by another request, and stored later in the same step."""
    BEING_COMPUTED = 24, "being computed by a running request"
    OTHER_NAMESPACE = 25, "cached for another LoRA adapter or salt"
    NEVER_SEEN = 26, "never seen before"

    @property
    def label(self) -> str:
        """Name in tables and in JSON."""
        return self.name.lower()

    @property
    def is_reuse(self) -> bool:
        """True if the token was found in this cache, and not computed."""
        return self <= Reason.PARTIAL

    @property
    def is_computed(self) -> bool:
        """True if the token was computed, provided that loads from outside succeeded."""
        return self > Reason.EXTERNAL

    @property
    def is_lost(self) -> bool:
        """True if the token's block had been cached before."""
        return Reason.COMPUTING_AGAIN <= self <= Reason.RESTARTED


EVICTIONS = (Reason.COMPUTING_AGAIN, Reason.EVICTED, Reason.DROPPED)
"""Reasons of tokens that are computed again because their blocks made room for others."""
LOSSES = tuple(reason for reason in Reason if reason.is_lost and reason not in EVICTIONS)
"""Reasons of tokens that are computed again because their blocks were cleared, or lost."""
IN_WORDS = {reason: reason.words for reason in Reason}
"""Texts for tables."""
