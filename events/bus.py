"""The internal bus: what happened goes to whoever must act on it, in order, on the engine's thread.

Subscribers may only append to their own lists. Whatever takes time (files, sockets, copies) happens
elsewhere, later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events.types import AnyEvent, Event

Subscriber = Callable[[Any], None]


_KINDS: tuple[type[Event], ...] = AnyEvent.__args__
"""All types of events."""


class EventBus:
    """Collects the events of a step and passes each on to its subscribers."""

    __slots__ = ("pending", "subscribers")

    def __init__(self) -> None:
        self.pending: list[Event] = []
        """Published since the last `take`."""
        self.subscribers: dict[type[Event], list[Subscriber]] = {kind: [] for kind in _KINDS}

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        """Call `subscriber` with each event of these types (none named: with every event)."""
        for kind in kinds or _KINDS:
            self.subscribers[kind].append(subscriber)

    def publish(self, event: Event) -> None:
        """Pass an applied event on."""
        self.pending.append(event)
        for subscriber in self.subscribers[type(event)]:
            subscriber(event)

    def take_events(self) -> tuple[Any, ...]:
        """The events since the last call."""
        events = tuple(self.pending)
        self.pending.clear()
        return events
