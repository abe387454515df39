"""The life of a block as routers see it: events do to slots what the table allows, and nothing of it is idle."""

from __future__ import annotations

from collections.abc import Iterable

from events.feed.fold import Feed
from events.feed.life import LIFE, Visibility
from events.types import CacheCreated, Event, EventBatch
from tests.support.engines.lives import Witness, explore, steps_of


class FeedWitness(Witness):
    """Looks at what the feed knows of each slot. An event of which it does not hear must change nothing."""

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
        return super().named(event) if type(event) in self.feed._handlers else ()


def test_what_routers_may_see_lives_as_the_table_says() -> None:
    """Whatever happens, each event takes each slot to a state that the table names; and each entry is needed."""
    allowed = steps_of(LIFE)
    assert explore(FeedWitness, allowed, range(200), range(200, 900)) == allowed
