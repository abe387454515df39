"""Events that concern several sequences, narrowed to those that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from events.packed import NAME_BYTES, SLOT_BYTES
from events.types import BlocksFilled


@dataclass(frozen=True, slots=True)
class FilledRow:
    """One sequence's part of a `BlocksFilled`."""

    handle: int
    key: bytes
    parent: bytes


WantedRow = Callable[[FilledRow], bool]


def narrowed(event: BlocksFilled, key_bytes: int, wanted: list[WantedRow]) -> BlocksFilled | None:
    """The event with only those of its rows that all of `wanted` want; None if there is none."""
    chosen = [
        number for number, row in enumerate(_rows(event, key_bytes)) if all(each(row) for each in wanted)
    ]
    if not chosen:
        return None

    def cut(column: bytes, width: int) -> bytes:
        return b"".join(column[number * width : (number + 1) * width] for number in chosen)

    return BlocksFilled(
        handles=cut(event.handles, SLOT_BYTES),
        group=event.group,
        blocks=cut(event.blocks, SLOT_BYTES),
        parents=cut(event.parents, NAME_BYTES),
        keys=cut(event.keys, key_bytes),
        slots=cut(event.slots, SLOT_BYTES),
        priority=event.priority,
    )


def _rows(event: BlocksFilled, key_bytes: int) -> Iterator[FilledRow]:
    """Without block hashes, keys and parents are empty."""
    for number, handle in enumerate(memoryview(event.handles).cast("I")):
        keys, parents = number * key_bytes, number * NAME_BYTES
        yield FilledRow(
            handle, event.keys[keys : keys + key_bytes], event.parents[parents : parents + NAME_BYTES]
        )
