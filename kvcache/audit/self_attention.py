"""A log of an encoder-decoder model without its cross attention: what is told of prompts, as if that were all.

An audit explains why prompts were computed. The blocks of encoders' inputs say nothing of that: a prompt's namespace
tells inputs apart already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from events import types as ev
from events.types import CROSS

_PER_GROUP: dict[type, tuple[str, ...]] = {
    ev.CacheCreated: ("groups",),
    ev.SequenceRemoved: ("stored", "freed"),
    ev.SequenceRewound: ("freed",),
    ev.CacheCleared: ("removed", "unnamed"),
    ev.Checkpoint: ("num_cached",),
    ev.AdmissionRefused: ("needed", "available"),
    ev.BlocksPinned: ("slots",),
    ev.BlocksUnpinned: ("freed",),
    ev.StateExported: ("groups",),
}
"""Columns with an entry for each group, the last of which is cut off."""


class SelfAttention:
    """A fold that leaves out of each batch what is about cross attention."""

    def __init__(self) -> None:
        self._cross: int | None = None
        """The group; None: there is none, and batches stay as they are."""
        self._inputs: set[int] = set()
        """Handles of encoders' inputs."""

    def of(self, events: Sequence[ev.AnyEvent]) -> Sequence[ev.AnyEvent]:
        """What the events tell of the sequences themselves."""
        if self._cross is None and not any(type(event) is ev.CacheCreated for event in events):
            return events
        told = [self._part(event) for event in events]
        return [event for event in told if event is not None]

    def _part(self, event: Any) -> Any:
        if isinstance(event, ev.CacheCreated):
            last = event.groups[-1:]
            self._cross = len(event.groups) - 1 if last and last[0].kind == CROSS else None
            self._inputs.clear()
        if self._cross is None:
            return event
        if isinstance(event, ev.EncoderAdded):
            self._inputs.add(event.handle)
        if isinstance(event, ev.StateExported):
            event = self._without_inputs(event)
        elif getattr(event, "handle", None) in self._inputs or getattr(event, "group", None) == self._cross:
            return None
        return replace(event, **{name: getattr(event, name)[:-1] for name in _PER_GROUP.get(type(event), ())})

    def _without_inputs(self, event: ev.StateExported) -> ev.StateExported:
        self._inputs = {each.encoder for each in event.sequences if each.encoder}
        return replace(
            event,
            sequences=tuple(
                [
                    replace(each, stored=each.stored[:-1], slots=each.slots[:-1], encoder=0)
                    for each in event.sequences
                    if each.handle not in self._inputs
                ]
            ),
            transfers=tuple([each for each in event.transfers if each.group != self._cross]),
            pins=tuple([replace(each, slots=each.slots[:-1]) for each in event.pins]),
        )
