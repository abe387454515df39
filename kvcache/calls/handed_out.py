"""For debugging: the tables that were given out, and whether they are right when an engine is about to use them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, NamedTuple
from weakref import ref

from kvcache.errors import StaleTables, UsageError
from kvcache.fold.sequence import Sequence


class _Note(NamedTuple):
    """Of which sequences, or inputs of encoders, a table is, and what it was made from."""

    sequences: tuple[Sequence, ...]
    group: int
    of_step: bool
    made_from: list[tuple[Any, ...]]


class HandedOut:
    """Remembers of each table what it was made from, as long as the table lives.

    A count of changes would not do: it tells that something has changed, which each call of an engine makes true, and
    not whether these tables have.
    """

    def __init__(self, running: Mapping[int, Sequence]) -> None:
        self._running = running
        """By handles."""
        self._notes: dict[int, tuple[ref[Any], _Note]] = {}

    def __len__(self) -> int:
        """Return how many tables are remembered."""
        return len(self._notes)

    def note(self, tables: Items[Any], sequences: Items[Sequence], group: int, *, of_step: bool) -> None:
        """These objects were made now, of these sequences; `of_step`: they also say which tokens a step computes."""
        made_from = [_source(each, group, of_step=of_step) for each in sequences]
        for table in tables:
            self._keep(table, _Note(tuple(sequences), group, of_step, made_from))

    def _keep(self, table: Any, note: _Note) -> None:
        key = id(table)
        self._notes[key] = ref(table, lambda _: self._notes.pop(key, None)), note

    def check(self, table: Any) -> tuple[Sequence, ...]:
        """Raise `StaleTables` if this table would be made otherwise now; returns of whom it is.

        Raises `UsageError` for what was not given out here.
        """
        reference, note = self._notes.get(id(table), (None, None))
        if note is None or reference is None or reference() is not table:
            raise UsageError(
                f"check_tables: this {type(table).__name__} was not given out by this manager: pass tables as they "
                "were given, or the buffers that were passed as out, rather than copies of them on a device"
            )
        for sequence, before in zip(note.sequences, note.made_from, strict=True):
            runs = self._running.get(sequence.handle) is sequence
            if not runs or _source(sequence, note.group, of_step=note.of_step) != before:
                raise StaleTables(sequence.request_id)
        return note.sequences


def _source(sequence: Sequence, group: int, *, of_step: bool) -> tuple[Any, ...]:
    """What a table of a sequence is made from."""
    table = tuple(sequence.tables[group])
    return (table, sequence.computed, sequence.num_tokens) if of_step else (table,)
