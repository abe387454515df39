"""Who tells events, and what of it was odd."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import msgspec

RANKS_MAX = 1024
"""Batches of higher ranks are ignored: nobody has as many, and what is noted of a rank takes memory."""


class WorkerRank(NamedTuple):
    """Who tells events."""

    worker: Hashable
    rank: int
    """Of data parallelism: each rank has a cache of its own."""


class Counts(msgspec.Struct):
    """Counters of one publisher, from when the index first heard of it."""

    batches: int = 0
    events: int = 0
    unknown_events: int = 0
    """Of a type that is not known here."""
    ignored_events: int = 0
    """About blocks that lie elsewhere (`locality`), or about groups whose kind of attention is not followed."""
    orphans: int = 0
    """Stores behind a block that is not known. Their blocks count under their names only."""
    untold: int = 0
    """Stores that do not say which tokens are in which block, as notices about lower levels do. Likewise."""
    contradictions: int = 0
    """Names that were given to another content while they were in use; the newer one holds."""
    aliases: int = 0
    """Blocks that were given a second name."""
    repeated_stores: int = 0
    """Blocks that were stored where they were already."""
    unknown_removals: int = 0
    """Blocks that were removed from where they were not."""
    missed_batches: int = 0
    """Batches that are lost: what is known of the publisher may be wrong since."""
    recovered_batches: int = 0
    restated: int = 0
    """Times that the publisher told its whole state in place of what was missed."""
    restarts: int = 0
