"""Why a prompt token was reused or computed; docs/audit.md defines each reason."""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """What became of a prompt token when its request was admitted."""

    PRIMARY = 0
    """Reused from primary."""
    SECONDARY = 1
    """Reused from secondary."""
    PARTIAL = 2
    """Reused: copied from a block of which only the start matched."""
    EXTERNAL = 3
    """Loaded from outside of the cache."""
    LAST_TOKEN = 4
    """The prompt's last: the model has to compute something."""
    REUSE_OFF = 5
    UNALIGNED = 6
    """In the block in which the prompt ends."""
    UNKNOWN = 7
    """The log records no tokens."""
    NOT_SERVABLE = 8
    """Cached, but a window misses what is needed before."""
    LAST_HIT = 9
    """Cached, the last block of a hit, which the engine computes again by design."""
    NOT_REUSED = 10
    """Cached, and the engine whose decisions were recorded did not take it."""
    COMPUTING_AGAIN = 11
    """Evicted, and just being computed by a running request."""
    COMPUTING_CLEARED = 12
    """Cleared, and just being computed again; those that follow likewise."""
    COMPUTING_COPY_FAILED = 13
    COMPUTING_INVALIDATED = 14
    COMPUTING_RESTARTED = 15
    EVICTED = 16
    DROPPED = 17
    """Evicted from secondary."""
    CLEARED = 18
    COPY_FAILED = 19
    INVALIDATED = 20
    RESTARTED = 21
    OUT_OF_WINDOW = 22
    """Left behind by a sliding window before it was cached."""
    SAME_STEP = 23
    """Being computed by another request, and stored in this very step, but later."""
    BEING_COMPUTED = 24
    OTHER_NAMESPACE = 25
    NEVER_SEEN = 26

    @property
    def label(self) -> str:
        """The name in tables and in JSON."""
        return self.name.lower()

    @property
    def is_reuse(self) -> bool:
        """Whether the token was found in this cache, and not computed."""
        return self <= Reason.PARTIAL

    @property
    def is_computed(self) -> bool:
        """Whether the token was computed, if what was to be loaded has come."""
        return self > Reason.EXTERNAL

    @property
    def is_lost(self) -> bool:
        """Whether the token's block had been cached before."""
        return Reason.COMPUTING_AGAIN <= self <= Reason.RESTARTED


EVICTIONS = (Reason.COMPUTING_AGAIN, Reason.EVICTED, Reason.DROPPED)
"""Of tokens that are computed again since their blocks made room for others."""
LOSSES = (
    Reason.COMPUTING_CLEARED,
    Reason.COMPUTING_COPY_FAILED,
    Reason.COMPUTING_INVALIDATED,
    Reason.COMPUTING_RESTARTED,
    Reason.CLEARED,
    Reason.COPY_FAILED,
    Reason.INVALIDATED,
    Reason.RESTARTED,
)
"""Of tokens that are computed again since their blocks were cleared, or lost."""
IN_WORDS = {
    Reason.PRIMARY: "reused from primary",
    Reason.SECONDARY: "reused from secondary",
    Reason.PARTIAL: "reused: the start of a cached block was copied",
    Reason.EXTERNAL: "loaded from outside",
    Reason.LAST_TOKEN: "the last token is always computed",
    Reason.REUSE_OFF: "block reuse is off",
    Reason.UNALIGNED: "in the block in which the prompt ends",
    Reason.UNKNOWN: "the log records no tokens",
    Reason.NOT_SERVABLE: "cached, but not what a window needs before it",
    Reason.LAST_HIT: "cached, but speculative decoding computes the last block of a hit again",
    Reason.NOT_REUSED: "cached, and the engine did not reuse it",
    Reason.COMPUTING_AGAIN: "evicted, and being computed again just then",
    Reason.COMPUTING_CLEARED: "cleared, and being computed again just then",
    Reason.COMPUTING_COPY_FAILED: "lost with a failed copy, and being computed again just then",
    Reason.COMPUTING_INVALIDATED: "invalidated, and being computed again just then",
    Reason.COMPUTING_RESTARTED: "lost with a restart or lost batches, and being computed again just then",
    Reason.EVICTED: "evicted from primary",
    Reason.DROPPED: "evicted from secondary",
    Reason.CLEARED: "the cache had been cleared",
    Reason.COPY_FAILED: "lost with a failed copy",
    Reason.INVALIDATED: "invalidated by the engine, as after a failed load",
    Reason.RESTARTED: "lost with a restart, or with lost batches",
    Reason.OUT_OF_WINDOW: "a sliding window had left it behind uncached",
    Reason.SAME_STEP: "stored later in the same step",
    Reason.BEING_COMPUTED: "being computed by a running request",
    Reason.OTHER_NAMESPACE: "cached for another LoRA adapter or salt",
    Reason.NEVER_SEEN: "never seen before",
}
"""For tables."""
