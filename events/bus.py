"""The internal bus: applied events go to their subscribers, in order, on the engine's thread.

Subscribers may only append to their own lists. Slow work (files, sockets, copies) happens elsewhere, later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events.types import AnyEvent, Event

Subscriber = Callable[[Any], None]


_KINDS: tuple[type[Event], ...] = AnyEvent.__args__
"""All types of events."""


class EventBus:
    """The events of a step, each passed on to its subscribers."""

    __slots__ = ("pending", "subscribers")

    def __init__(self) -> None:
        self.pending: list[Event] = []
        """Events published since the last `take_events`."""
        self.subscribers: dict[type[Event], list[Subscriber]] = {kind: [] for kind in _KINDS}

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        """Subscribe to events of these types (none named: to every event)."""
        for kind in kinds or _KINDS:
            self.subscribers[kind].append(subscriber)

    def publish(self, event: Event) -> None:
        """Publish an applied event."""
        self.pending.append(event)
        for subscriber in self.subscribers[type(event)]:
            subscriber(event)

    def take_events(self) -> tuple[Any, ...]:
        """Return the events since the last call."""
        events = tuple(self.pending)
        self.pending.clear()
        return events
