"""Publishers of events, and counters of their anomalies."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import msgspec

RANKS_MAX = 1024
"""Batches of this rank and above are ignored: no worker has as many, and each rank takes memory."""


class WorkerRank(NamedTuple):
    """Publisher of events."""

    worker: Hashable
    rank: int
    """Rank of data parallelism, each of which has a cache of its own."""


class Counts(msgspec.Struct):
    """Counters of one publisher, from its first event on."""

    batches: int = 0
    events: int = 0
    unknown_events: int = 0
    """Events of an unknown type."""
    ignored_events: int = 0
    """Events about blocks that lie elsewhere (`locality`), or about groups with another kind of attention than those
    followed."""
    orphans: int = 0
    """Stores after an unknown block. Their blocks count under their names only."""
    stores_without_tokens: int = 0
    """Stores without the tokens of each block, as notices about lower levels. Their blocks count under their names
    only."""
    contradictions: int = 0
    """Names that were given to another content while in use; the newer one holds."""
    aliases: int = 0
    """Blocks that were given a second name."""
    repeated_stores: int = 0
    """Blocks that were stored again at the same place."""
    unknown_removals: int = 0
    """Blocks that were removed from a place without them."""
    missed_batches: int = 0
    """Lost batches: the known state of the publisher may be wrong since."""
    recovered_batches: int = 0
    restated: int = 0
    """Times that the publisher sent its whole state in place of missed batches."""
    restarts: int = 0
