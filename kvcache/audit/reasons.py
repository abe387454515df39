"""Reasons why prompt tokens were reused or computed; docs/how-to/audit.md defines each."""

from __future__ import annotations

from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt


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
    NOT_LOOKED_UP = 6, "the request reads nothing from the cache"
    UNALIGNED = 7, "in the block in which the prompt ends"
    UNKNOWN = 8, "the log records no tokens"
    NOT_SERVABLE = 9, "cached, but a window lacks what it needs before it"
    LAST_HIT = 10, "cached, but speculative decoding computes the last block of a hit again"
    NOT_REUSED = 11, "cached, but not reused by the engine"
    COMPUTING_AGAIN = 12, "evicted, and already being computed again"
    COMPUTING_CLEARED = 13, "cleared, and already being computed again"
    COMPUTING_COPY_FAILED = 14, "lost with a failed copy, and already being computed again"
    COMPUTING_INVALIDATED = 15, "invalidated, and already being computed again"
    COMPUTING_RESTARTED = 16, "lost with a restart or lost batches, and already being computed again"
    EVICTED = 17, "evicted from primary"
    DROPPED = 18, "evicted from secondary"
    CLEARED = 19, "the cache had been cleared"
    COPY_FAILED = 20, "lost with a failed copy"
    INVALIDATED = 21, "invalidated by the engine, as after a failed load"
    RESTARTED = 22, "lost with a restart, or with lost batches"
    OUT_OF_WINDOW = 23, "released uncached by a sliding window"
    SAME_STEP = 24, "stored later in the same step"
    """Computed by another request, and stored later in the same step."""
    BEING_COMPUTED = 25, "being computed by a running request"
    OTHER_NAMESPACE = 26, "cached for another LoRA adapter or salt"
    NEVER_SEEN = 27, "never seen before"

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
IS_EVICTION = np.isin(list(Reason), EVICTIONS)
"""True for these, by reason."""
LOSSES = tuple(reason for reason in Reason if reason.is_lost and reason not in EVICTIONS)
"""Reasons of tokens that are computed again because their blocks were cleared, or lost."""
IN_WORDS = {reason: reason.words for reason in Reason}
"""Texts for tables."""


class CountedByReason:
    """Base of totals with prompt tokens by `Reason`."""

    __slots__ = ()

    reasons: npt.NDArray[np.int64]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.reasons.sum())

    @property
    def reused(self) -> int:
        """Prompt tokens found in the cache."""
        return int(self.reasons[: Reason.PARTIAL + 1].sum())

    @property
    def evicted(self) -> int:
        """Tokens computed again because of evictions."""
        return int(self.reasons[list(EVICTIONS)].sum())

    @property
    def lost(self) -> int:
        """Tokens computed again because they had been cleared or lost."""
        return int(self.reasons[list(LOSSES)].sum())
