"""Tables as Parquet files, written by pyarrow, which is loaded only here."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcache.errors import UsageError
from kvcache.export.schema import COLUMNS, Values
from kvcache.export.spelling import texts


@dataclass(eq=False, repr=False)
class PackageMissing(UsageError):
    """A format needs a package that is not installed; `extra` of kvcache brings it."""

    package: str
    extra: str
    text = "writing Parquet needs {package}: pip install 'kvcache[{extra}]'"


class ParquetWriter:
    """A directory with a file per table. Times are timestamps in ns, UTC. Raises `PackageMissing`."""

    def __init__(self, path: Path) -> None:
        try:
            arrow: Any = import_module("pyarrow")
            parquet: Any = import_module("pyarrow.parquet")
        except ImportError as error:
            raise PackageMissing("pyarrow", "export") from error
        self._arrow = arrow
        kinds = {
            "integer": arrow.int64(),
            "text": arrow.string(),
            "boolean": arrow.bool_(),
            "time": arrow.timestamp("ns", "UTC"),
        }
        path.mkdir()
        self._open = ExitStack()
        self._writers: dict[str, Any] = {}
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

    def close(self) -> None:
        """Complete all files."""
        self._open.close()
