"""The internal bus: what happened goes to whoever must act on it, in order, on the engine's thread.

Subscribers may only append to their own lists. Whatever takes time (files, sockets, copies) happens
elsewhere, later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events.types import Event

Subscriber = Callable[[Any], None]


_NOBODY: tuple[Subscriber, ...] = ()


class EventBus:
    """Collects the events of a step and passes each on to its subscribers."""

    __slots__ = ("_by_type", "_subscribers", "pending")

    def __init__(self) -> None:
        self.pending: list[Event] = []
        """Published since the last `take`."""
        self._by_type: dict[type[Event], list[Subscriber]] = {}
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber, *event_types: type[Event]) -> None:
        """Call `subscriber` with each event of these types (none named: with every event)."""
        if not event_types:
            self._subscribers.append(subscriber)
        for event_type in event_types:
            self._by_type.setdefault(event_type, []).append(subscriber)

    def publish(self, event: Event) -> None:
        """Pass an applied event on."""
        self.pending.append(event)
        for subscriber in self._by_type.get(type(event), _NOBODY):
            subscriber(event)
        for subscriber in self._subscribers:
            subscriber(event)

    def take(self) -> tuple[Any, ...]:
        """The events since the last call."""
        events = tuple(self.pending)
        self.pending.clear()
        return events
