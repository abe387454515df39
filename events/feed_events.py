"""The events of a log of kind `feed`: what engines told of their caches, as `kvcache tap` heard it.

They are folded in `events.told`; `events.feed` has nothing to do with them, but makes such a feed of a cache's events.

The words are the wire's own: blocks are known by the hashes, and levels by the names, that the engine gives them.
Numbers are those of the publisher, not of the log.

An epoch begins with `EpochStarted` and `FeedStarted`. Behind a `FeedStarted` nothing is known but what follows. Of a
worker that is taken over from the epoch before, that is its `WorkerSeen` and `FeedStored`s in a batch to come; behind
a `Gap`, those of all workers in the same batch.
"""

from __future__ import annotations

from typing import Annotated

from events.packed import Tokens
from events.structs import Event, Spelled

Hash = Annotated[int | bytes, Spelled("hash")]
"""As the engine gave it: 64 bits, signed or not, or a whole digest."""
Fields = Annotated[bytes, Spelled("fields")]
"""A msgpack map of further fields of the wire, those that are not known here among them; empty: none."""


class FeedStarted(Event, frozen=True):
    """A log of what engines tell begins, or goes on: nothing is known but what follows."""

    endpoints: tuple[str, ...]
    """That are listened to."""


class WorkerSeen(Event, frozen=True):
    """A worker was heard for the first time in this epoch, or calls itself otherwise than before."""

    worker: int
    """Its number in this log; the same in all epochs."""
    source: str
    """Where its publisher is: the endpoint or, where publishers connect to a bound one, its topic and key."""
    topic: str
    rank: int | None
    """The data-parallel rank that it gives."""
    complete: bool = True
    """Whether all that is resident in it will be known; False: since a loss it is unknown what else is."""


class FeedReceived(Event, frozen=True):
    """A batch was received; its events follow."""

    worker: int
    number: int
    published_ts: int
    """Nanoseconds since 1970, by the publisher's clock; 0 if that cannot be a time."""
    replayed: bool
    """Whether it was asked for, having been missed."""


class FeedStored(Event, frozen=True):
    """Consecutive blocks of one prefix became resident in a worker."""

    worker: int
    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    tokens: Tokens
    """Of all these blocks, or of a longer span that they are from; empty where the engine does not say, or `more` has
    them (``token_ids``) because they are no plain numbers."""
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    locality: str | None = None
    ownership: str | None = None
    more: Fields = b""


class FeedRemoved(Event, frozen=True):
    """Blocks are not resident any more; where there are several copies, one of each."""

    worker: int
    block_hashes: tuple[Hash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    more: Fields = b""


class FeedCleared(Event, frozen=True):
    """A worker told that nothing is resident any more."""

    worker: int


class FeedGap(Event, frozen=True):
    """Batches of a worker are lost for good: what was resident before may be gone, so nothing is known."""

    worker: int
    first: int
    last: int
    reason: str


class FeedRestarted(Event, frozen=True):
    """A worker's publisher began anew: its numbers went back, and nothing that it said before holds."""

    worker: int
    last: int
    """The last number before."""
    first: int
    """The first one that was heard after."""


class FeedUnknown(Event, frozen=True):
    """A note: a worker told something of a type that was not known here."""

    worker: int
    name: str


FEED_EVENTS = (
    FeedStarted,
    WorkerSeen,
    FeedReceived,
    FeedStored,
    FeedRemoved,
    FeedCleared,
    FeedGap,
    FeedRestarted,
    FeedUnknown,
)
"""All of them."""
