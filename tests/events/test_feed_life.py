"""The life of a block as routers see it: events do to slots what the table allows, and nothing of it is idle."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from events.feed.fold import Feed
from events.types import BlocksMoved, CacheCreated, Event, EventBatch
from tests.support.engines.lives import Witness, explore, occasion_name, steps_of
from tests.support.feeds.life import LIFE, Visibility
from tests.support.seeds import seeds

ALLOWED = steps_of(LIFE)
OCCASIONS = {step.event for step in ALLOWED}
MANIFOLD = (9, 224, 1, 522)
"""Programs that meet all entries of the table between them."""


class FeedWitness(Witness):
    """Looks at what the feed knows of each slot. An event that the table does not have must change nothing."""

    levels = ("", "")
    kind = Visibility

    def __init__(self, created: CacheCreated) -> None:
        super().__init__(created)
        self.feed = Feed()
        self.seq = 0
        self.apply(created)

    def apply(self, event: Event) -> None:
        self.feed.fold(EventBatch(self.seq, 0, (event,)))  # type: ignore[arg-type]
        self.seq += 1

    def states(self) -> list[list[int]]:
        return [columns._state.tolist() for columns in self.feed._columns[self.group]]

    def named(self, event: Event) -> Iterable[tuple[int, bytes]]:
        occasion = event.why if isinstance(event, BlocksMoved) else type(event)
        return super().named(event) if occasion_name(occasion) in OCCASIONS else ()


def test_what_routers_may_see_lives_as_the_table_says() -> None:
    """Each entry of the table is needed. Where these programs do not meet all any more, others are tried."""
    assert explore(FeedWitness, ALLOWED, MANIFOLD, range(900)) == ALLOWED


@pytest.mark.parametrize("first", seeds(range(0, 900, 20), quick=1))
def test_nothing_else_becomes_of_what_routers_may_see(first: int) -> None:
    """Whatever happens, each event takes each slot to a state that the table names."""
    explore(FeedWitness, ALLOWED, range(first, first + 20), ())
