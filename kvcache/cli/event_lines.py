"""Events as lines in a terminal: those of the stdout sink, with some color."""

from __future__ import annotations

from collections.abc import Iterator

from events.types import AnyEvent, EventBatch
from kvcache.cli.output import paint
from sinks.render import Known, render_event

_COLORS = {
    "SequenceAdded": "bold",
    "SequenceRemoved": "bold",
    "EncoderAdded": "bold",
    "EncoderRemoved": "bold",
    "BlocksReused": "green",
    "BlocksStored": "green",
    "BlocksFilled": "green",
    "BlocksCopied": "green",
    "BlocksUpdated": "yellow",
    "BlocksMoved": "yellow",
    "BlocksRemoved": "red",
    "TransferFailed": "red",
    "AdmissionRefused": "red",
    "LoadFailed": "red",
    "Gap": "red",
    "CacheCleared": "red",
}


def event_lines(batch: EventBatch, known: Known, *without: type[AnyEvent]) -> Iterator[str]:
    """One line per event that is of none of the types `without`; `known` has seen all batches before."""
    for index, event in enumerate(batch.events):
        known.see(event)
        if not isinstance(event, without):
            yield event_line(batch, index, event, known)


def event_line(batch: EventBatch, index: int, event: AnyEvent, known: Known, time: str | None = None) -> str:
    """The event's address and time (None: without), dimmed, its type in the color of what it means, its details."""
    address = f"{f'{batch.seq}.{index}':>9}" + ("" if time is None else f"  {time:>9}")
    kind = type(event).__name__
    details = render_event(event, known).removeprefix(kind)
    return f"{paint(address, 'dim')}  {paint(kind, _COLORS.get(kind))}{details}"
