"""All tables of a log as Parquet, CSV, JSON lines or SQLite; docs/how-to/export.md defines the columns."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import sqlite3
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from events.types import EventBatch
from kvcache import phrases
from kvcache.audit.reasons import Reason
from kvcache.audit.tables import (
    BlockLife,
    EvictionRow,
    OccupancyRow,
    RequestRow,
    StepRow,
    TableName,
    tables_of,
)
from kvcache.errors import UsageError

iso = lru_cache(1 << 12)(phrases.iso)
"""Format a time as ISO 8601, cached because many rows share a time."""


def times(values: Sequence[int | None]) -> list[str | None]:
    """Format a column of times."""
    return [None if value is None else iso(value) for value in values]


def texts(values: Sequence[Any]) -> list[str | None]:
    """Format a column of texts, in which request ids may be numbers."""
    return [value if value is None else str(value) for value in values]


Kind = Literal["integer", "text", "boolean", "time"]
Values = list[list[Any]]
"""Values by column; times are integers, nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. The `kind` of request ids is text; only JSON keeps their original type."""

    name: str
    kind: Kind
    unit: str = ""
    optional: bool = False
    """True if values may be null."""


_KINDS: dict[Any, Kind] = {int: "integer", bool: "boolean"}
_UNITS = {
    "tokens": ("tokens", "window"),
    "blocks": ("blocks", "never_reused", "held", "unreferenced", "blank"),
    "requests": ("admitted", "refused", "ended", "running"),
    "hex digits": ("salt_digest",),
    "ns": ("ts",),
}
"""Units of columns, by the ends of their names."""


def _columns_of(row: type[NamedTuple]) -> Iterator[Column]:
    """Yield the columns of rows: two per time, for computing and for reading, and one per reason."""
    for name, hint in typing.get_type_hints(row).items():
        kinds = typing.get_args(hint)
        if name == "tokens_by_reason":
            yield from (Column(f"tokens_{reason.label}", "integer", "tokens", True) for reason in Reason)
        elif name != "occupancy":
            optional = type(None) in kinds
            kind = _KINDS.get(hint if not optional or len(kinds) > 2 else kinds[0], "text")
            unit = next((unit for unit, ends in _UNITS.items() if name.endswith(ends)), "")
            yield Column(name, kind, unit, optional)
            if unit == "ns":
                yield Column(f"{name.removesuffix('ts')}time", "time", "UTC", optional)


_ROWS: dict[str, Any] = {
    "requests": RequestRow,
    "blocks": BlockLife,
    "evictions": EvictionRow,
    "steps": StepRow,
}
COLUMNS: dict[str, list[Column]] = {table: list(_columns_of(row)) for table, row in _ROWS.items()}
"""Columns by table, in order."""
COLUMNS["occupancy"] = [*COLUMNS["steps"][:3], *_columns_of(OccupancyRow)]


def tables_in(name: TableName, rows: Sequence[Any]) -> dict[str, Values]:
    """Return rows of a log as columns of tables: rows of steps make two tables."""
    found: dict[str, Values] = {name: _columns(name, rows, _ROWS[name]._fields)}
    if name == "steps":
        levels = [(row.seq, row.ts, *level) for row in rows for level in row.occupancy]
        found["occupancy"] = _columns("occupancy", levels, ("seq", "ts", *OccupancyRow._fields))
    return found


def _columns(table: str, rows: Sequence[Any], fields: Sequence[str]) -> Values:
    of_field = dict(zip(fields, zip(*rows, strict=True) if rows else repeat(()), strict=False))
    return [_column(column, of_field) for column in COLUMNS[table]]


def _column(column: Column, of_field: dict[str, Any]) -> list[Any]:
    name = column.name
    if column.kind == "time":
        return list(of_field[f"{name.removesuffix('time')}ts"])
    if name == "labels":
        return [None if each is None else json.dumps(each) for each in of_field[name]]
    if name in of_field:
        return list(of_field[name])
    reason = name.removeprefix("tokens_")
    return [tokens.get(reason) for tokens in of_field["tokens_by_reason"]]


@dataclass(eq=False, repr=False)
class TargetExists(UsageError):
    """The target path exists. `replaceable` is True if its names look like an earlier export."""

    path: Path
    replaceable: bool

    def __str__(self) -> str:
        if self.replaceable:
            return f"{self.path} already exists: choose another path, or replace it with --force"
        return f"{self.path} already exists and is not an earlier export, so it is not replaced: choose another path"


_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only writing causes."""


@contextmanager
def replacing(path: Path, *, force: bool, header: bytes | None) -> Iterator[Path]:
    """Yield a temporary path next to the target, which replaces the target if the block ends without an error.

    A file beginning with `header` is written, or a directory of tables (None). Raises `TargetExists`, also with `force`
    if the target is anything else, and FileNotFoundError if the target's own directory is missing. Until the end the
    old target stays. A full disk is an OSError that names `path`. Like the log, the target is readable by its owner
    alone, because it names requests.
    """
    _refuse(path, header, force)
    parent = path.absolute().parent
    if not parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(parent))
    work = Path(tempfile.mkdtemp(dir=parent, prefix=f".{path.name}.", suffix=".partial"))
    try:
        with _naming(path, work):
            yield work / "new"
            _make_private(work / "new")
        # Another process may have been faster.
        _refuse(path, header, force)
        if header is None and os.path.lexists(path):
            path.rename(work / "old")
        (work / "new").replace(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_private(new: Path) -> None:
    if new.is_dir():
        new.chmod(0o700)
    for file in new.iterdir() if new.is_dir() else [new]:
        file.chmod(0o600)


@contextmanager
def _naming(path: Path, work: Path) -> Iterator[None]:
    """Name the target in errors of writing; leave errors of reading unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_WRITING or str(error.filename).startswith(str(work)):
            number = error.errno or errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _refuse(path: Path, header: bytes | None, force: bool) -> None:
    if os.path.lexists(path):
        replaceable = _is_export(path) if header is None else _begins(path, header)
        if not (force and replaceable):
            raise TargetExists(path, replaceable)


def _begins(path: Path, header: bytes) -> bool:
    """Return True if it is a file that begins with `header`, or an empty one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(header)) in (header, b"")


def _is_export(path: Path) -> bool:
    """Return True if replacing the directory would delete nothing but tables."""
    if not path.is_dir():
        return False
    return all(
        each.stem in COLUMNS and each.suffix in (".csv", ".jsonl", ".parquet") for each in path.iterdir()
    )


Spelling = Callable[[list[Any]], Sequence[Any]]


def _spelled(table: str, values: Values, **how: Spelling) -> Iterator[tuple[Any, ...]]:
    """Return rows of a table, with columns spelled by kind: times as text, others as given by `how`."""
    ways: dict[str, Spelling] = {"time": times, **how}
    columns = zip(COLUMNS[table], values, strict=True)
    return zip(*(ways.get(column.kind, list)(own) for column, own in columns), strict=True)


class _Directory:
    """Directory with a file per table. Like all writers it takes the columns of tables, some rows at a time."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._open = ExitStack()
        self._writers: dict[str, Any] = {}
        """Writers by table."""

    def _file(self, path: Path) -> TextIO:
        return self._open.enter_context(path.open("w", encoding="utf-8", newline=""))

    def close(self) -> None:
        """Finish all files."""
        self._open.close()


class CsvWriter(_Directory):
    """Directory with a CSV file per table. Null is an empty field, booleans are ``true`` and ``false``.

    SECURITY: a spreadsheet would run text that looks like a formula, so it is prefixed with '.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for table, columns in COLUMNS.items():
            self._writers[table] = csv.writer(_Lines(self._file(path / f"{table}.csv")))
            self._writers[table].writerow([column.name for column in columns])

    def write(self, table: str, values: Values) -> None:
        """Append rows."""
        self._writers[table].writerows(_spelled(table, values, text=_unlike_formulas, boolean=_lower))


class _Lines:
    """File that ends each row in a newline. The csv module quotes a carriage return only if its own rows end in one."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        """Write a row that ends as the csv module ends it."""
        self._file.write(row.removesuffix("\r\n") + "\n")


_FULL_WIDTH = ("\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Full-width =, +, - and @ of East Asian keyboards."""
_FORMULA = ("=", "+", "-", "@", *_FULL_WIDTH, "\t", "\r", "\n", "'")
"""Beginnings of formulas; also ', so that removing one prefix restores any text."""


def _unlike_formulas(values: list[Any]) -> list[Any]:
    return [f"'{each}" if isinstance(each, str) and each.startswith(_FORMULA) else each for each in values]


def _lower(values: list[Any]) -> list[str]:
    return [str(value).lower() for value in values]


class JsonlWriter(_Directory):
    """Directory with a file per table, one JSON object per row and line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._writers |= {table: self._file(path / f"{table}.jsonl") for table in COLUMNS}

    def write(self, table: str, values: Values) -> None:
        """Append rows."""
        names = [column.name for column in COLUMNS[table]]
        self._writers[table].writelines(
            json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in _spelled(table, values)
        )


_SQL = {"integer": "INTEGER", "text": "TEXT", "boolean": "INTEGER", "time": "TEXT"}


class SqliteWriter:
    """SQLite database with all tables. Booleans are 0 and 1, times text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _as_of_system(path):
            self._database = sqlite3.connect(path, isolation_level=None)
            self._create()

    def _create(self) -> None:
        # `replacing` makes the export atomic, so no journal is needed.
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        for table, columns in COLUMNS.items():
            spelled = ", ".join(
                f"{column.name} {_SQL[column.kind]}{'' if column.optional else ' NOT NULL'}"
                for column in columns
            )
            self._database.execute(f"CREATE TABLE {table} ({spelled})")

    def write(self, table: str, values: Values) -> None:
        """Append rows."""
        places = ", ".join("?" * len(COLUMNS[table]))
        with _as_of_system(self._path):
            self._database.execute("BEGIN")
            # SECURITY: the names are the schema's own; values are bound.
            self._database.executemany(
                f"INSERT INTO {table} VALUES ({places})",  # noqa: S608
                _spelled(table, values, text=texts),
            )
            self._database.execute("COMMIT")

    def close(self) -> None:
        """Close the database."""
        self._database.close()


@contextmanager
def _as_of_system(path: Path) -> Iterator[None]:
    """Raise errors of the system as OSError, as the other formats do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        # The lower byte is the kind of error.
        number = errno.ENOSPC if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


class ParquetWriter(_Directory):
    """Directory with a Parquet file per table. Times are timestamps in ns, UTC. Raises `UsageError` without pyarrow."""

    def __init__(self, path: Path) -> None:
        try:
            arrow: Any = import_module("pyarrow")
            parquet: Any = import_module("pyarrow.parquet")
        except ImportError as error:
            raise UsageError(
                "exporting to Parquet requires pyarrow: pip install 'kvcache[export]'"
            ) from error
        self._arrow = arrow
        kinds = {
            "integer": arrow.int64(),
            "text": arrow.string(),
            "boolean": arrow.bool_(),
            "time": arrow.timestamp("ns", "UTC"),
        }
        super().__init__(path)
        self._schemas: dict[str, Any] = {}
        for table, columns in COLUMNS.items():
            fields = [
                arrow.field(column.name, kinds[column.kind], nullable=column.optional) for column in columns
            ]
            self._schemas[table] = schema = arrow.schema(fields)
            writer = parquet.ParquetWriter(path / f"{table}.parquet", schema, compression="zstd")
            self._writers[table] = self._open.enter_context(writer)

    def write(self, table: str, values: Values) -> None:
        """Append rows, as a row group."""
        columns = [
            self._arrow.array(texts(own) if column.kind == "text" else own, field.type)
            for column, field, own in zip(COLUMNS[table], self._schemas[table], values, strict=True)
        ]
        self._writers[table].write_table(self._arrow.Table.from_arrays(columns, schema=self._schemas[table]))


SQLITE_HEADER = b"SQLite format 3\0"
"""Beginning of a database: no other file is replaced by one."""
Writer = ParquetWriter | CsvWriter | JsonlWriter | SqliteWriter
FORMATS: dict[str, type[Writer]] = {
    "parquet": ParquetWriter,
    "csv": CsvWriter,
    "jsonl": JsonlWriter,
    "sqlite": SqliteWriter,
}
_AT_ONCE = 1 << 15
"""Rows of a table that are buffered and written together."""


def export(batches: Iterable[EventBatch], to: str, path: Path, *, force: bool = False) -> dict[str, int]:
    """Write all tables in one of `FORMATS`; return the number of rows of each.

    `path` becomes a file (``sqlite``) or a directory with a file per table, once everything is written. `force`
    replaces an earlier export. Raises `TargetExists`, `UsageError` if there is no batch or no pyarrow, and what reading
    raises.
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
                raise UsageError(
                    f"a number in the table {table} exceeds 64 bits: export to csv or jsonl instead"
                ) from error
            written[table] += len(values[0])
    if not written["steps"]:
        raise UsageError("the log has no batches yet: nothing to export")
    return written


def _gathered(batches: Iterable[EventBatch]) -> Iterator[tuple[TableName, list[Any]]]:
    """Yield rows by table, many at a time."""
    waiting: dict[TableName, list[Any]] = {"requests": [], "blocks": [], "evictions": [], "steps": []}
    for name, rows in tables_of(batches, *waiting):
        waiting[name] += rows
        if len(waiting[name]) >= _AT_ONCE:
            yield name, waiting[name]
            waiting[name] = []
    yield from ((name, rows) for name, rows in waiting.items() if rows)
