"""Where two logs first say something else.

The first batch of one is compared with the first one of the other, and so on. What a log says of itself and of its
cache when an epoch begins is no divergence: its id and number, the software, the settings (`kvcache.diff.settings`
compares these). Nor is when something happened. Where the caches differ in their blocks, that makes other blank slots
in every exported state and another fingerprint in every checkpoint; what else these say is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from msgspec.structs import replace

from events.structs import GroupCreated
from events.types import AnyEvent, CacheCreated, Checkpoint, EpochStarted, EventBatch, StateExported

_HEADERS = (EpochStarted, CacheCreated)


@dataclass(frozen=True)
class Place:
    """An event in a log; or, with `index` behind its last one, the end of a batch."""

    batch: EventBatch
    index: int

    @property
    def event(self) -> AnyEvent | None:
        """The event; None at the end of the batch."""
        return self.batch.events[self.index] if self.index < len(self.batch.events) else None


@dataclass(frozen=True)
class Divergence:
    """The first place where two logs differ. None: the log has ended before."""

    a: Place | None
    b: Place | None

    @property
    def fields(self) -> tuple[str, ...]:
        """What two events of one type differ in; empty where there are no two such events."""
        a, b = (None if place is None else place.event for place in (self.a, self.b))
        if a is None or type(a) is not type(b):
            return ()
        return tuple(name for name in a.__struct_fields__ if getattr(a, name) != getattr(b, name))


def first_divergence(a: Iterable[EventBatch], b: Iterable[EventBatch]) -> Divergence | None:
    """Compare two logs up to the first difference, which is read to and no further; None: they say the same.

    Raises what reading them does.
    """
    alike = True
    """Whether both caches have the same blocks."""
    for one, other in zip_longest(a, b):
        if one is None or other is None:
            return Divergence(_start(one), _start(other))
        caches = _caches(one), _caches(other)
        if any(caches):
            alike = caches[0] == caches[1]
        index = next(_differences(one, other, alike=alike), None)
        if index is not None:
            return Divergence(Place(one, index), Place(other, index))
    return None


def _start(batch: EventBatch | None) -> Place | None:
    return None if batch is None else Place(batch, 0)


def _caches(batch: EventBatch) -> list[tuple[GroupCreated, ...]]:
    """The blocks of all caches that a batch creates."""
    return [event.groups for event in batch.events if type(event) is CacheCreated]


def _differences(a: EventBatch, b: EventBatch, *, alike: bool) -> Iterator[int]:
    if a.events == b.events:
        return
    for index, (one, other) in enumerate(zip_longest(a.events, b.events)):
        if one is None or other is None or not _same(one, other, alike=alike):
            yield index


def _same(a: AnyEvent, b: AnyEvent, *, alike: bool) -> bool:
    if a == b or (type(a) is type(b) and isinstance(a, _HEADERS)):
        return True
    return not alike and _without_blocks(a) == _without_blocks(b)


def _without_blocks(event: AnyEvent) -> AnyEvent:
    """What an event says that does not follow from the number of blocks."""
    if isinstance(event, Checkpoint):
        return replace(event, fingerprint=b"")
    if isinstance(event, StateExported):
        return replace(event, groups=tuple(replace(group, blank_slots=(b"", b"")) for group in event.groups))
    return event
