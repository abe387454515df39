"""History of a slot: the requests that hold it, the block cached in it, and the events that led there.

It is read from the state that a log folds into, after each event that may concern the slot, so it reflects the cache's
own decisions, event by event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from events import types as ev
from events.packed import names_of_keys
from events.types import PRIMARY, EventBatch, RequestId
from kvcache.fold.full_group import FullGroup
from kvcache.fold.positional import PositionalGroup
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.state import CacheState
from kvcache.replay import Progress, Replayed

_ALWAYS = (
    ev.CacheCreated,
    ev.StateExported,
    ev.PoolShared,
    ev.CacheCleared,
    ev.SequenceForked,
    ev.SequenceRewound,
    ev.SequenceRemoved,
    ev.EncoderRemoved,
    ev.TransferLanded,
    ev.TransferFailed,
)
"""Events that may concern a slot without naming it."""
_NEVER = (ev.SequenceAdded, ev.TokensAppended, ev.ContextComputed, ev.Checkpoint)
"""Events with other numbers in their columns."""


class Occupant(NamedTuple):
    """Occupant of a slot. Without fields set, the slot is blank."""

    requests: tuple[RequestId, ...] = ()
    """Running requests that hold it, in the order of admission."""
    block: int | None = None
    """Index of the block in their prompts, and in that of the request that stored it, from 0."""
    cached: bool = False
    """True if other requests can reuse it."""
    name: str | None = None
    """Name of a cached block: 16 hex digits; None if it has none."""
    landed: bool = True
    """True if its bytes have arrived."""
    of_group: int | None = None
    """Further group that owns the slot, in the blocks of which `block` counts; None if there is none."""


@dataclass(frozen=True)
class SlotChange:
    """An event after which a slot had another occupant, or its occupant another state."""

    seq: int
    index: int
    ts: int
    type: str
    why: str | None
    """Reason given by the event, if any."""
    occupant: Occupant


@dataclass
class SlotHistory:
    """History of one slot of one window."""

    group: int
    window: int
    changes: list[SlotChange] = field(default_factory=list)
    """Changes in order; empty if it was blank all the time."""

    @property
    def now(self) -> Occupant:
        """Current occupant."""
        return self.changes[-1].occupant if self.changes else Occupant()


class SlotWatch:
    """Fold that records the histories of a slot in all windows that have it (or in one: `group`)."""

    def __init__(self, level: int, slot: int, group: int | None = None) -> None:
        self.level, self.slot, self.group = level, slot, group
        self._packed = slot.to_bytes(4, "little")
        self._histories: dict[int, SlotHistory] = {}

    def fold(self, batches: Iterable[EventBatch], progress: Progress | None = None) -> Replayed:
        """Fold all batches, and record the slot's changes. Raises `Unreplayable`."""
        replayed = Replayed(CacheState())
        for batch in batches:
            replayed.fold(batch, verify=False, after=partial(self._see, replayed, batch))
            if progress is not None:
                progress(batch.seq)
        return replayed

    def histories(self, state: CacheState) -> list[SlotHistory]:
        """Return the histories of the windows that have the slot in a state, in ascending order."""
        return [
            self._histories.get(index) or SlotHistory(index, group.window)
            for index, group in self._groups(state)
        ]

    def _groups(self, state: CacheState) -> Iterator[tuple[int, FullGroup | SlidingGroup]]:
        for index, group in enumerate(state.groups):
            if self.group in (None, index) and self.slot < group.levels[self.level].size:
                yield index, group

    def _see(self, replayed: Replayed, batch: EventBatch, event: ev.AnyEvent) -> None:
        if isinstance(event, _NEVER) or not (isinstance(event, _ALWAYS) or self._is_named(event)):
            return
        state = replayed.state
        for index, group in self._groups(state):
            history = self._histories.setdefault(index, SlotHistory(index, group.window))
            occupant = occupant_of(state, index, self.level, self.slot)
            if occupant != history.now:
                place = next(at for at, each in enumerate(batch.events) if each is event)
                why = None if (given := getattr(event, "why", None)) is None else str(given)
                change = SlotChange(batch.seq, place, batch.ts, type(event).__name__, why, occupant)
                history.changes.append(change)

    def _is_named(self, event: ev.AnyEvent) -> bool:
        """Return True if the slot's number is in any column of an event, perhaps by chance."""
        values = (getattr(event, name) for name in event.__struct_fields__)
        return any(isinstance(value, bytes) and self._packed in value for value in values)


def occupant_of(state: CacheState, index: int, level: int, slot: int) -> Occupant:
    """Return the occupant of a slot of a group's level."""
    group, requests, block = state.groups[index], list[RequestId](), None
    for sequence in state.sequences.values() if level == PRIMARY else ():
        table = sequence.tables[index]
        if slot in table:
            requests.append(sequence.request_id)
            block = table.index(slot)
        elif slot in sequence.retention_in(index):
            requests.append(sequence.request_id)
    if not requests and not group.is_cached(level, slot) and (index, level) == (0, PRIMARY):
        return next((_sharer(state, each, slot) for each in state.positional if each.uses(slot)), Occupant())
    if not group.is_cached(level, slot):
        return Occupant(tuple(requests), block)
    run, at, landed = _cached(group, level, slot)
    size = group.tree.key_bytes
    name = names_of_keys(bytes(run.keys[at * size : (at + 1) * size]), size).hex() if size else None
    return Occupant(tuple(requests), run.start + at, True, name, landed)


def _sharer(state: CacheState, group: PositionalGroup, slot: int) -> Occupant:
    """Return the occupant, in a further group, of a slot of the first group's pool."""
    held = [
        (handle, at) for handle, table in group.tables.items() for at, own in table.items() if own == slot
    ]
    requests = tuple([state.sequences[handle].request_id for handle, _ in held])
    names, size = group.names.get(slot, {}), group.created.tokens_per_block
    places = [at for _, at in held] + [-(-end // size) - 1 for end in names.values()]
    name = names_of_keys(next(iter(names)), group.key_bytes).hex() if names else None
    return Occupant(requests, places[0], bool(names), name, of_group=group.index)


def _cached(group: FullGroup | SlidingGroup, level: int, slot: int) -> tuple[Run, int, bool]:
    """Return the run of a cached block, its index in it, and True if it has landed."""
    if isinstance(group, SlidingGroup):
        place = slot + level * group.levels[PRIMARY].size
        return *group.find(place), not group.transfers[place]
    run = group.run_at(level, slot)
    return run, run.slots.index(slot), not run.transfer
