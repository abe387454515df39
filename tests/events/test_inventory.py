"""What is cached, as a fold: names that other events have given, in windows of which one slides."""

from __future__ import annotations

from events.feed.changes import Cached, Created, Uncached, Updated
from events.feed.inventory import Inventory
from events.ids import BlockIndex, GroupIndex, Handle
from events.tokens.rich import RichTokens
from events.types import (
    PRIMARY,
    SECONDARY,
    AnyEvent,
    BlocksReused,
    CacheCreated,
    EventBatch,
    GroupCreated,
    Namespace,
)
from tests.support.columns import pack_i32
from tests.support.feeds.batches import (
    FULL,
    SIZE,
    SLIDES,
    added,
    filled,
    names,
    offloaded,
    onboarded,
    removed,
    stored,
    tokens,
)


class Reported:
    """An inventory of these windows, and what it says of events."""

    def __init__(self, *groups: GroupCreated) -> None:
        self.inventory = Inventory()
        self.seq = -1
        self.apply(CacheCreated("{}", SIZE, groups, "xxh3_64", 8, "c"))

    def apply(self, *events: AnyEvent) -> list[object]:
        self.seq += 1
        return [*self.inventory.fold(EventBatch(self.seq, 0, events))]


def cached(first: int, count: int, group: int = 0, level: int = PRIMARY) -> Cached:
    above = names(first - 1) if first else b""
    spelled = RichTokens(tokens(first, count))
    return Cached(group, level, 35, names(*range(first, first + count)), above, spelled, SIZE, Namespace())


def test_a_block_is_where_it_is_meant_to_be() -> None:
    """Moves are told when they begin, not when they land."""
    reported = Reported(FULL)
    assert reported.apply(added(1), stored(0, [3, 4])) == [cached(0, 2)]
    assert reported.apply(offloaded([1], [4], [5], 7)) == [Updated(0, names(1), level=(PRIMARY, SECONDARY))]
    first = [change for change in reported.inventory.snapshot() if isinstance(change, Cached)]
    assert first == [cached(0, 1), cached(1, 1, level=SECONDARY)]
    assert reported.apply(removed([0], [3])) == [Uncached(0, names(0))]
    assert next(iter(reported.inventory.snapshot())) == Created((FULL,), "xxh3_64")


def test_names_that_a_move_has_given() -> None:
    """One that takes back what was offloaded knows the names of these blocks, for the other window's event."""
    reported = Reported(SLIDES, FULL)
    reported.apply(added(1), stored(0, [0, 1]), offloaded([0, 1], [0, 1], [4, 5], 7), added(2))
    reported.apply(onboarded(0, 4, 8, 8, 2), onboarded(1, 5, 9, 9, 2))
    assert reported.apply(stored(0, [5, 6], group=1, handle=2, keys=b"")) == [cached(0, 2, group=1)]


def test_names_that_a_reuse_has_given() -> None:
    """Those of blocks in front that the window does not see, too."""
    reported = Reported(SLIDES, FULL)
    reused = BlocksReused(Handle(2), GroupIndex(0), PRIMARY, BlockIndex(2), pack_i32([2]), names(0, 1, 2))
    reported.apply(added(1), stored(0, [0, 1, 2]), added(2), reused)
    assert reported.apply(stored(0, [5, 6, 7], group=1, handle=2, keys=b"")) == [cached(0, 3, group=1)]


def test_names_of_filled_blocks() -> None:
    """Given with the first window's event, not with the second's."""
    reported = Reported(SLIDES, FULL)
    reported.apply(added(1), stored(0, [3]), stored(0, [3], group=1, keys=b""))
    assert reported.apply(filled(1, 9, 0, names(1)), filled(1, 9, 1, b"")) == [
        cached(1, 1),
        cached(1, 1, group=1),
    ]
