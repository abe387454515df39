"""All tables of a log, written in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from events.types import EventBatch
from kvcache.audit.opened import TableName, tables_of
from kvcache.errors import UsageError
from kvcache.export.parquet import ParquetWriter
from kvcache.export.schema import COLUMNS, tables_in
from kvcache.export.target import replacing
from kvcache.export.writers import CsvWriter, JsonlWriter, SqliteWriter, Writer


@dataclass(eq=False, repr=False)
class NumberTooLarge(UsageError):
    """The log holds a number that the format has no room for: beyond 64 bits, with a sign."""

    table: str
    text = "a number in the table {table} is beyond 64 bits: write csv or jsonl, which hold any"


SQLITE_HEADER = b"SQLite format 3\0"
"""How a database begins: no other file is replaced by one."""
FORMATS: dict[str, type[Writer]] = {
    "parquet": ParquetWriter,
    "csv": CsvWriter,
    "jsonl": JsonlWriter,
    "sqlite": SqliteWriter,
}
_AT_ONCE = 1 << 15
"""Rows of a table that wait to be written together."""


def export(batches: Iterable[EventBatch], to: str, path: Path, *, force: bool = False) -> dict[str, int]:
    """Write all tables in one of `FORMATS`; returns how many rows each has.

    `path` becomes a file (``sqlite``) or a directory with a file per table, when all is written. `force` replaces an
    earlier export. Raises `TargetExists`, `PackageMissing`, `UsageError` if there is no batch, and what reading raises.
    """
    with (
        replacing(path, force=force, header=SQLITE_HEADER if to == "sqlite" else None) as new,
        closing(FORMATS[to](new)) as writer,
    ):
        return _write(batches, writer)


def _write(batches: Iterable[EventBatch], writer: Writer) -> dict[str, int]:
    written = dict.fromkeys(COLUMNS, 0)
    for name, rows in _gathered(batches):
        for table, values in tables_in(name, rows).items():
            try:
                writer.write(table, values)
            except OverflowError as error:
                raise NumberTooLarge(table) from error
            written[table] += len(values[0])
    if not written["steps"]:
        raise UsageError("the log holds no batch yet: there is nothing to export")
    return written


def _gathered(batches: Iterable[EventBatch]) -> Iterator[tuple[TableName, list[Any]]]:
    """Rows by table, many at a time."""
    waiting: dict[TableName, list[Any]] = {"requests": [], "blocks": [], "evictions": [], "steps": []}
    for name, rows in tables_of(batches, *waiting):
        waiting[name] += rows
        if len(waiting[name]) >= _AT_ONCE:
            yield name, waiting[name]
            waiting[name] = []
    yield from ((name, rows) for name, rows in waiting.items() if rows)
