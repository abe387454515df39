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
    LAST_TOKEN = 3
    """The prompt's last: the model has to compute something."""
    REUSE_OFF = 4
    UNALIGNED = 5
    """In the block in which the prompt ends."""
    UNKNOWN = 6
    """The log records no tokens."""
    NOT_SERVABLE = 7
    """Cached, but a window misses what is needed before."""
    NOT_REUSED = 8
    """Cached, and the engine whose decisions were recorded did not take it."""
    COMPUTING_AGAIN = 9
    """Evicted, and just being computed by a running request."""
    COMPUTING_CLEARED = 10
    """Cleared, and just being computed again; those that follow likewise."""
    COMPUTING_COPY_FAILED = 11
    COMPUTING_RESTARTED = 12
    EVICTED = 13
    DROPPED = 14
    """Evicted from secondary."""
    CLEARED = 15
    COPY_FAILED = 16
    RESTARTED = 17
    OUT_OF_WINDOW = 18
    """Left behind by a sliding window before it was cached."""
    SAME_STEP = 19
    """Being computed by another request, and stored in this very step, but later."""
    BEING_COMPUTED = 20
    OTHER_NAMESPACE = 21
    NEVER_SEEN = 22

    @property
    def label(self) -> str:
        """The name in tables and in JSON."""
        return self.name.lower()

    @property
    def is_reuse(self) -> bool:
        """Whether the token was not computed."""
        return self <= Reason.PARTIAL

    @property
    def is_lost(self) -> bool:
        """Whether the token's block had been cached before."""
        return Reason.COMPUTING_AGAIN <= self <= Reason.RESTARTED


EVICTIONS = (Reason.COMPUTING_AGAIN, Reason.EVICTED, Reason.DROPPED)
"""Of tokens that are computed again since their blocks made room for others."""
LOSSES = (
    Reason.COMPUTING_CLEARED,
    Reason.COMPUTING_COPY_FAILED,
    Reason.COMPUTING_RESTARTED,
    Reason.CLEARED,
    Reason.COPY_FAILED,
    Reason.RESTARTED,
)
"""Of tokens that are computed again since their blocks were cleared, or lost."""
IN_WORDS = {
    Reason.PRIMARY: "reused from primary",
    Reason.SECONDARY: "reused from secondary",
    Reason.PARTIAL: "reused: the start of a cached block was copied",
    Reason.LAST_TOKEN: "the last token is always computed",
    Reason.REUSE_OFF: "block reuse is off",
    Reason.UNALIGNED: "in the block in which the prompt ends",
    Reason.UNKNOWN: "the log records no tokens",
    Reason.NOT_SERVABLE: "cached, but not what a window needs before it",
    Reason.NOT_REUSED: "cached, and the engine did not reuse it",
    Reason.COMPUTING_AGAIN: "evicted, and being computed again just then",
    Reason.COMPUTING_CLEARED: "cleared, and being computed again just then",
    Reason.COMPUTING_COPY_FAILED: "lost with a failed copy, and being computed again just then",
    Reason.COMPUTING_RESTARTED: "lost with a restart or lost batches, and being computed again just then",
    Reason.EVICTED: "evicted from primary",
    Reason.DROPPED: "evicted from secondary",
    Reason.CLEARED: "the cache had been cleared",
    Reason.COPY_FAILED: "lost with a failed copy",
    Reason.RESTARTED: "lost with a restart, or with lost batches",
    Reason.OUT_OF_WINDOW: "a sliding window had left it behind uncached",
    Reason.SAME_STEP: "stored later in the same step",
    Reason.BEING_COMPUTED: "being computed by a running request",
    Reason.OTHER_NAMESPACE: "cached for another LoRA adapter or salt",
    Reason.NEVER_SEEN: "never seen before",
}
"""For tables."""
