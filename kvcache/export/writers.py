"""Tables as files: one for each table, or a database with all of them."""

from __future__ import annotations

import csv
import errno
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from kvcache.export.schema import COLUMNS, Column, Values
from kvcache.export.spelling import texts, times


class Writer(Protocol):
    """Writes the columns of tables, some rows at a time; every table of the schema is there in the end."""

    def __init__(self, path: Path) -> None:
        """Begin at a path where nothing is yet."""

    def write(self, table: str, values: Values) -> None:
        """Append rows."""

    def close(self) -> None:
        """Complete it."""


class CsvWriter:
    """A directory with a file per table. Null is an empty field, booleans are ``true`` and ``false``.

    SECURITY: a spreadsheet would run text that looks like a formula: it has a ' before it.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._open = ExitStack()
        self._writers: dict[str, Any] = {}
        for table, columns in COLUMNS.items():
            file = self._open.enter_context((path / f"{table}.csv").open("w", encoding="utf-8", newline=""))
            self._writers[table] = csv.writer(_Lines(file))
            self._writers[table].writerow([column.name for column in columns])

    def write(self, table: str, values: Values) -> None:
        """Append rows."""
        spelled = [_for_csv(column, own) for column, own in zip(COLUMNS[table], values, strict=True)]
        self._writers[table].writerows(zip(*spelled, strict=True))

    def close(self) -> None:
        """Close all files."""
        self._open.close()


class _Lines:
    """Ends each row in a newline. The csv module quotes a carriage return only if its own rows end in one."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        """Write a row with the end that the csv module gives it."""
        self._file.write(row.removesuffix("\r\n") + "\n")


_FULL_WIDTH = ("\uff1d", "\uff0b", "\uff0d", "\uff20")
"""=, +, - and @ of East Asian keyboards."""
_FORMULA = ("=", "+", "-", "@", *_FULL_WIDTH, "\t", "\r", "\n", "'")
"""What a formula begins with; and ', so that whoever takes one away has the text as it was."""


def _for_csv(column: Column, values: list[Any]) -> Sequence[Any]:
    if column.kind == "time":
        return times(values)
    if column.kind == "text":
        return [
            f"'{each}" if isinstance(each, str) and each.startswith(_FORMULA) else each for each in values
        ]
    return [str(value).lower() for value in values] if column.kind == "boolean" else values


class JsonlWriter:
    """A directory with a file per table, one JSON object per row and line."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._open = ExitStack()
        self._files = {
            table: self._open.enter_context((path / f"{table}.jsonl").open("w", encoding="utf-8"))
            for table in COLUMNS
        }

    def write(self, table: str, values: Values) -> None:
        """Append rows."""
        columns = COLUMNS[table]
        names = [column.name for column in columns]
        spelled = [
            times(own) if column.kind == "time" else own for column, own in zip(columns, values, strict=True)
        ]
        self._files[table].writelines(
            json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in zip(*spelled, strict=True)
        )

    def close(self) -> None:
        """Close all files."""
        self._open.close()


_SQL = {"integer": "INTEGER", "text": "TEXT", "boolean": "INTEGER", "time": "TEXT"}


class SqliteWriter:
    """One database with all tables. Booleans are 0 and 1, times text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _as_of_system(path):
            self._database = sqlite3.connect(path, isolation_level=None)
            self._create()

    def _create(self) -> None:
        # Whole or not at all is seen to by who names the file; no need for a journal on the way.
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
        spelled = [_for_sqlite(column, own) for column, own in zip(COLUMNS[table], values, strict=True)]
        with _as_of_system(self._path):
            self._database.execute("BEGIN")
            # SECURITY: the names are the schema's own; values are bound.
            self._database.executemany(
                f"INSERT INTO {table} VALUES ({places})",  # noqa: S608
                zip(*spelled, strict=True),
            )
            self._database.execute("COMMIT")

    def close(self) -> None:
        """Close the database."""
        self._database.close()


@contextmanager
def _as_of_system(path: Path) -> Iterator[None]:
    """Raise what the system refuses as the other formats do: as an OSError."""
    try:
        yield
    except sqlite3.OperationalError as error:
        # The lower byte is the kind of error.
        number = errno.ENOSPC if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def _for_sqlite(column: Column, values: list[Any]) -> Sequence[Any]:
    if column.kind == "time":
        return times(values)
    return texts(values) if column.kind == "text" else values
