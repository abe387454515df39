"""Events that concern several sequences or copies, narrowed to those that were asked for."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from itertools import accumulate

from msgspec.structs import replace

from events import types as ev
from events.packed import HANDLE_BYTES, NAME_BYTES, SLOT_BYTES, TOKEN_BYTES

_INDEX_BYTES = 4
_TRANSFER_BYTES = 8


def part_of_sequences(
    event: ev.AnyEvent, handles: Container[int], transfers: Container[int], key_bytes: int
) -> ev.AnyEvent:
    """What the event says of these sequences and of these copies of theirs.

    Of an exported state the cached blocks stay: they are no sequence's.
    """
    match event:
        case ev.BlocksFilled():
            return filled_rows(event, _chosen("q", event.handles, handles), key_bytes)
        case ev.BlocksAllocated() | ev.BlocksReturned():
            own, counts, slots = _counted(event.handles, event.counts, event.slots, handles)
            return replace(event, handles=own, counts=counts, slots=slots)
        case ev.BlocksDetached():
            own, counts, slots = _counted(event.handles, event.counts, event.slots, handles)
            freed = array("i", [slot for slot in array("i", event.freed) if slot in array("i", slots)])
            return replace(event, handles=own, counts=counts, slots=slots, freed=freed.tobytes())
        case ev.TokensAppended():
            own, counts, tokens = _counted(event.handles, event.counts, event.tokens, handles)
            return replace(event, handles=own, counts=counts, tokens=tokens)
        case ev.TransferLanded() | ev.TransferFailed():
            rows = _chosen("q", event.transfers, transfers)
            return replace(event, transfers=_cut(event.transfers, _TRANSFER_BYTES, rows))
        case ev.StateExported():
            return replace(
                event,
                sequences=tuple(each for each in event.sequences if each.handle in handles),
                transfers=tuple(each for each in event.transfers if each.handle in handles),
            )
    return event


def filled_rows(event: ev.BlocksFilled, rows: list[int], key_bytes: int) -> ev.BlocksFilled:
    """The event with only these of its rows."""
    return ev.BlocksFilled(
        handles=_cut(event.handles, HANDLE_BYTES, rows),
        group=event.group,
        blocks=_cut(event.blocks, _INDEX_BYTES, rows),
        parents=_cut(event.parents, NAME_BYTES, rows),
        keys=_cut(event.keys, key_bytes, rows),
        slots=_cut(event.slots, SLOT_BYTES, rows),
        priority=event.priority,
    )


def _chosen(kind: str, column: bytes, wanted: Container[int]) -> list[int]:
    """The rows whose entry in a column of numbers is wanted."""
    return [row for row, entry in enumerate(array(kind, column)) if entry in wanted]


def _cut(column: bytes, width: int, rows: Iterable[int]) -> bytes:
    return b"".join(column[row * width : (row + 1) * width] for row in rows)


def _counted(
    handles: bytes, counts: bytes, column: bytes, wanted: Container[int]
) -> tuple[bytes, bytes, bytes]:
    """Handles, counts and a column of slots or tokens, so many for each handle (without counts one each)."""
    rows = _chosen("q", handles, wanted)
    if not counts:
        return _cut(handles, HANDLE_BYTES, rows), b"", _cut(column, TOKEN_BYTES, rows)
    ends = list(accumulate(array("I", counts), initial=0))
    parts = [column[ends[row] * TOKEN_BYTES : ends[row + 1] * TOKEN_BYTES] for row in rows]
    return _cut(handles, HANDLE_BYTES, rows), _cut(counts, _INDEX_BYTES, rows), b"".join(parts)
