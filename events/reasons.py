"""Why slots are taken, and why blocks are moved and removed: part of the events."""

from __future__ import annotations

from enum import StrEnum


class AllocateReason(StrEnum):
    """Why slots are not blank any more."""

    PROMPT = "prompt"
    DECODE = "decode"
    COPY = "copy"
    FORK = "fork"
    """For a branch of a sequence: what it does not share."""
    REWIND = "rewind"
    """Instead of a cached block in which a sequence goes on otherwise."""
    RESERVE = "reserve"
    """For tokens that are not known yet, or for the next ones of a prompt that had not got all its slots."""


class MoveReason(StrEnum):
    """Why blocks changed their level."""

    OFFLOAD = "offload"
    """Evicted from primary, kept in secondary."""
    ONBOARD = "onboard"
    """Reused by a sequence, so copied back to primary."""
    RECOMPUTED = "recomputed"
    """A sequence computed a block that lay in secondary: its own primary slot takes over, nothing is copied."""


class EndReason(StrEnum):
    """Why a sequence does not run any more."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    """It gave up its room, and will be admitted again."""
    ABORTED = "aborted"
    """Nobody waits for the rest of it."""


class UpdateReason(StrEnum):
    """Why blocks have another priority, or are kept for another time."""

    SET = "set"
    """`set_priority`."""
    RETENTION = "retention"
    """A request that reuses them states how long they are to be kept."""
    EXPIRED = "expired"
    """The time is over for which they were to be kept after they were let go of."""


class RemoveReason(StrEnum):
    """Why cached content is gone."""

    CAPACITY = "capacity"
    SUPERSEDED = "superseded"
    """A stored block begins with the same tokens as this shorter one."""
    UNREACHABLE = "unreachable"
    """An ancestor was removed."""
    CLEARED = "cleared"
    INVALIDATED = "invalidated"
    """What an engine had cached is not what it should be, as after a failed load, or continues what is not."""
