"""The tables of an export: names, types and units of their columns. docs/export.md says what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcache.audit.opened import TableName
from kvcache.audit.reasons import Reason
from kvcache.audit.rows import BlockLife, EvictionRow, OccupancyRow, RequestRow, StepRow

Kind = Literal["integer", "text", "boolean", "time"]
Values = list[list[Any]]
"""Column by column; times are integers, nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `kind` of a request's id is text: JSON alone has it as the engine gave it."""

    name: str
    kind: Kind
    unit: str = ""
    optional: bool = False
    """Whether it may be null."""


def _of(kind: Kind, names: str, unit: str = "") -> list[Column]:
    """Columns by their names; a question mark behind one: may be null."""
    return [Column(name.rstrip("?"), kind, unit, name.endswith("?")) for name in names.split()]


def _numbers(names: str, unit: str = "") -> list[Column]:
    return _of("integer", names, unit)


def _texts(names: str, unit: str = "") -> list[Column]:
    return _of("text", names, unit)


def _moment(prefix: str = "", mark: str = "") -> list[Column]:
    """A time, for computing and for reading."""
    return [*_numbers(f"{prefix}ts{mark}", "ns"), *_of("time", f"{prefix}time{mark}", "UTC")]


_OCCUPANCY = [
    *_numbers("window", "tokens"),
    *_texts("level"),
    *_numbers("blocks held unreferenced blank", "blocks"),
]

COLUMNS: dict[str, list[Column]] = {
    "requests": [
        *_numbers("admission?"),
        *_texts("request_id outcome"),
        *_numbers("lora_id?"),
        *_texts("lora_name?"),
        *_texts("salt_digest?", "hex digits"),
        *_of("boolean", "uses_extra_ids"),
        *_numbers("refusals"),
        *_moment("first_refused_", "?"),
        *_numbers("admitted_seq?"),
        *_moment("admitted_", "?"),
        *_numbers("ended_seq?"),
        *_moment("ended_", "?"),
        *_numbers("prompt_tokens? output_tokens? reused_tokens?", "tokens"),
        *_numbers(" ".join(f"tokens_{reason.label}?" for reason in Reason), "tokens"),
    ],
    "blocks": [
        *_numbers("window", "tokens"),
        *_numbers("content"),
        *_numbers("num_tokens", "tokens"),
        *_texts("stored_by?"),
        *_numbers("stored_by_admission? stored_seq"),
        *_moment("stored_"),
        *_numbers("priority reused"),
        *_moment("last_used_"),
        *_numbers("offloads"),
        *_moment("last_offloaded_", "?"),
        *_numbers("onboards"),
        *_moment("last_onboarded_", "?"),
        *_texts("level?"),
        *_numbers("gone_seq?"),
        *_moment("gone_", "?"),
        *_texts("gone_why? gone_for?"),
        *_numbers("gone_for_admission? eviction?"),
    ],
    "evictions": [
        *_numbers("eviction seq"),
        *_moment(),
        *_numbers("window", "tokens"),
        *_texts("level why"),
        *_numbers("blocks full_blocks never_reused", "blocks"),
        *_texts("for_request?"),
        *_numbers("for_admission?"),
    ],
    "steps": [
        *_numbers("seq"),
        *_moment(),
        *_numbers("admitted refused ended running", "requests"),
        *_numbers("prompt_tokens reused_tokens computed_tokens output_tokens", "tokens"),
        *_numbers("stored_blocks removed_blocks cleared_blocks offloaded_blocks onboarded_blocks", "blocks"),
    ],
    "occupancy": [*_numbers("seq"), *_moment(), *_OCCUPANCY],
}
"""By table, in order."""


def tables_in(name: TableName, rows: Sequence[Any]) -> dict[str, Values]:
    """Rows of a log as columns of tables: those of steps make two."""
    if name == "steps":
        return {"steps": _columns("steps", rows, StepRow), "occupancy": _occupancy(rows)}
    return {name: _columns(name, rows, _ROWS[name])}


_ROWS: dict[str, Any] = {"requests": RequestRow, "blocks": BlockLife, "evictions": EvictionRow}


def _columns(table: str, rows: Sequence[Any], kind: Any) -> Values:
    of_field = dict(zip(kind._fields, zip(*rows, strict=True), strict=True))
    return [_column(column, of_field) for column in COLUMNS[table]]


def _column(column: Column, of_field: dict[str, Any]) -> list[Any]:
    name = column.name
    if column.kind == "time":
        return list(of_field[f"{name.removesuffix('time')}ts"])
    if name in of_field:
        return list(of_field[name])
    reason = name.removeprefix("tokens_")
    return [tokens.get(reason) for tokens in of_field["tokens_by_reason"]]


def _occupancy(rows: Sequence[StepRow]) -> Values:
    times = [(row.seq, row.ts, row.ts) for row in rows for _ in row.occupancy]
    levels: list[OccupancyRow] = [level for row in rows for level in row.occupancy]
    if not levels:
        return [[] for _ in COLUMNS["occupancy"]]
    columns = (*zip(*times, strict=True), *zip(*levels, strict=True))
    return list(map(list, columns))
