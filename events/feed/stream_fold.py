"""A fold of a stream of batches into changes, which knows when it has missed some."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from events import types as ev
from events.feed.changes import AnyChange
from events.types import GroupCreated

Change_co = TypeVar("Change_co", bound=AnyChange, covariant=True)


class StreamFold(ABC, Generic[Change_co]):
    """Hands each event to the handler for its type; handlers add to `_changes`.

    A fold that has missed a batch can never be right again until all is said anew, and hears of nothing else before.
    """

    groups: tuple[GroupCreated, ...] = ()
    """Of the cache that the stream is of; none where that is not known."""
    _heard_when_lost: ClassVar[tuple[type, ...]] = ()

    def __init__(self) -> None:
        self.lost = False
        """Batches are missing: nothing is said until the stream says anew all that there is."""
        self.last_seq: int | None = None
        self._beginning = False
        """In this batch the stream began anew."""
        self._changes: list[Any] = []
        self._handlers: dict[type, Callable[[Any], None]] = {ev.Gap: self._meet_gap}

    def fold(self, batch: ev.EventBatch) -> list[Change_co]:
        """What the batch changes, in order."""
        if self.last_seq is not None and batch.seq != self.last_seq + 1:
            self.lost = True
        handlers = self._handlers
        for event in batch.events:
            handler = handlers.get(type(event))
            if handler is not None and (not self.lost or type(event) in self._heard_when_lost):
                handler(event)
        self.last_seq, self._beginning = batch.seq, False
        changes, self._changes = self._changes, []
        return changes

    @abstractmethod
    def snapshot(self) -> Iterator[Change_co]:
        """All that there is at the time of this call, parents first; what is folded later changes nothing."""

    def _meet_gap(self, gap: ev.Gap) -> None:
        """A log's own loss does not concern a fold that has seen those batches."""
        if self.last_seq is None or gap.last_seq > self.last_seq:
            self.lost = True

    def _begin(self) -> None:
        """What was before does not matter any more, nor what is missing of it."""
        self.lost, self._beginning = False, True
