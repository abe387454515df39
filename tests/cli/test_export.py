"""`kvcache export`: tables in four formats with what their page says, and recipes that run as they stand."""

from __future__ import annotations

import csv
import json
import random
import re
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.packed import unpack_i32
from events.types import BlocksMoved, BlocksRemoved, EventBatch, MoveReason, SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager, phrases
from kvcache.audit import open_log
from kvcache.audit.export import COLUMNS, FORMATS, Column, TargetExists, export, iso
from kvcache.audit.tables import BlockLife, EvictionRow, OccupancyRow, RequestRow, StepRow
from kvcache.audit.totals import audit_batches
from kvcache.cli.output import Output
from tests.support.commands import Kvcache, RunPython, run_log, segments
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "how-to" / "export.md").read_text(encoding="utf-8")
Table = list[dict[str, Any]]


def missing(package: str) -> bool:
    return find_spec(package) is None


def needs(*packages: str) -> pytest.MarkDecorator:
    gone = [package for package in packages if missing(package)]
    return pytest.mark.skipif(bool(gone), reason=f"needs {', '.join(gone)}, which the extra dev has")


WRITTEN = [pytest.param(name, marks=needs("pyarrow") if name == "parquet" else ()) for name in FORMATS]


def exported(kvcache: Kvcache, log: Path, to: str, place: Path) -> Path:
    path = place / f"tables.{to}"
    done = kvcache("export", log, "--to", to, "-o", path)
    assert done.code == 0, done.err
    return path


def read(path: Path, to: str, table: str) -> Table:
    """A table as plain values: times are ns in parquet and text elsewhere, null is None, and so is nothing in CSV."""
    file = path / f"{table}.{to}"
    if to == "csv":
        with file.open(encoding="utf-8", newline="") as lines:
            return [{name: text or None for name, text in row.items()} for row in csv.DictReader(lines)]
    if to == "jsonl":
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if to == "sqlite":
        database = sqlite3.connect(path)
        cursor = database.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        database.close()
        return rows
    found = import_module("pyarrow.parquet").read_table(file)
    for index, field in enumerate(found.schema):
        if str(field.type).startswith("timestamp"):
            found = found.set_column(index, field.name, found.column(index).cast("int64"))
    return list(found.to_pylist())


def normal(column: Column, value: Any) -> Any:
    """A value as all formats mean it."""
    if value is None:
        return None
    if column.kind == "boolean":
        return str(value).lower() in ("true", "1")
    if column.kind == "time":
        return value if isinstance(value, str) else iso(value)
    return int(value) if column.kind == "integer" else str(value)


@pytest.fixture(scope="session")
def windows_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two windows, two levels, and no tokens. Not to be changed."""
    sets = (
        "--set",
        "max_attention_window=64,1048576",
        "--set",
        "num_layers=2",
        "--set",
        "log.record_tokens=false",
    )
    sizes = ("--primary-blocks", 120, "--secondary-blocks", 100, "--concurrency", 3)
    return run_log(tmp_path_factory.mktemp("logs") / "log", *sizes, *sets)


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.parametrize("which", ["log", "windows_log"])
def test_tables_hold_what_the_log_reports(
    kvcache: Kvcache, tmp_path: Path, request: pytest.FixtureRequest, which: str, to: str
) -> None:
    """Every table has each row of `open_log`, in order, value by value; sums agree with the raw events."""
    log = request.getfixturevalue(which)
    path = exported(kvcache, log, to, tmp_path)
    opened = open_log(log)
    steps = list(opened.steps())
    rows: dict[str, list[dict[str, Any]]] = {
        "requests": [
            row._asdict() | {f"tokens_{reason}": count for reason, count in row.tokens_by_reason.items()}
            for row in opened.requests()
        ],
        "blocks": [row._asdict() for row in opened.block_lives()],
        "evictions": [row._asdict() for row in opened.evictions()],
        "steps": [row._asdict() for row in steps],
        "occupancy": [
            {"seq": step.seq, "ts": step.ts} | row._asdict() for step in steps for row in step.occupancy
        ],
    }
    tables = {table: read(path, to, table) for table in COLUMNS}
    for table, found in tables.items():
        columns = COLUMNS[table]
        assert list(found[0]) == [column.name for column in columns]
        expected = [
            {
                column.name: normal(
                    column, row[column.name.replace("time", "ts") if column.kind == "time" else column.name]
                )
                for column in columns
            }
            for row in rows[table]
        ]
        assert [
            {column.name: normal(column, row[column.name]) for column in columns} for row in found
        ] == expected
        assert not any(
            value is None for row in expected for name, value in row.items() if not optional(table, name)
        )
    events = [event for batch in LogReader(log) for event in batch.events]
    added = [event for event in events if isinstance(event, SequenceAdded)]
    assert (
        sum(int(row["reused_tokens"]) for row in tables["requests"]) == sum(each.reused for each in added) > 0
    )
    assert sum(int(row["tokens_partial"]) for row in tables["requests"]) == sum(
        each.reused_partial for each in added
    )
    gone = sum(len(unpack_i32(event.slots)) for event in events if isinstance(event, BlocksRemoved))
    assert sum(int(row["blocks"]) for row in tables["evictions"]) == gone > 0
    offloads = [
        event for event in events if isinstance(event, BlocksMoved) and event.why == MoveReason.OFFLOAD
    ]
    offloaded = sum(len(unpack_i32(event.from_slots)) for event in offloads)
    assert sum(int(row["offloaded_blocks"]) for row in tables["steps"]) == offloaded > 0


def optional(table: str, name: str) -> bool:
    return next(column.optional for column in COLUMNS[table] if column.name == name)


def documented(table: str) -> list[tuple[str, str, str]]:
    lines = PAGE.partition(f"\n### {table}\n")[2].partition("\n#")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert rows[0] == ["column", "type", "unit", "is"]
    return [(name, kind, unit) for name, kind, unit, *_ in rows[1:]]


def test_every_column_is_documented() -> None:
    """The page has each table, and each column in order with type and unit; the schema has all fields of rows."""
    assert re.findall(r"(?m)^### (\w+)$", PAGE) == list(COLUMNS)
    for table, columns in COLUMNS.items():
        assert documented(table) == [
            (column.name, column.kind + "?" * column.optional, column.unit) for column in columns
        ]
    kinds: dict[str, Any] = {
        "requests": RequestRow,
        "blocks": BlockLife,
        "evictions": EvictionRow,
        "steps": StepRow,
    }
    for table, kind in kinds.items():
        names = {column.name for column in COLUMNS[table] if column.kind != "time"}
        dropped = {"tokens_by_reason", "occupancy"}
        assert {name for name in names if table != "requests" or not name.startswith("tokens_")} == {
            *kind._fields
        } - dropped
    assert [column.name for column in COLUMNS["occupancy"][3:]] == list(OccupancyRow._fields)


@pytest.mark.parametrize("to", [pytest.param("parquet", marks=needs("pyarrow")), "sqlite"])
def test_types_are_as_documented(kvcache: Kvcache, tmp_path: Path, log: Path, to: str) -> None:
    """Where files have types, they are those of the page, and null is allowed just where it says so."""
    path = exported(kvcache, log, to, tmp_path)
    for table in COLUMNS:
        if to == "sqlite":
            info = sqlite3.connect(path).execute(f"PRAGMA table_info({table})").fetchall()
            found = [(name, kind, not required) for _, name, kind, required, *_ in info]
            spelled = {"integer": "INTEGER", "text": "TEXT", "boolean": "INTEGER", "time": "TEXT"}
        else:
            schema = import_module("pyarrow.parquet").read_schema(path / f"{table}.parquet")
            found = [(field.name, str(field.type), field.nullable) for field in schema]
            spelled = {
                "integer": "int64",
                "text": "string",
                "boolean": "bool",
                "time": "timestamp[ns, tz=UTC]",
            }
        expected = [
            (name, spelled[kind.removesuffix("?")], kind.endswith("?")) for name, kind, _ in documented(table)
        ]
        assert found == expected


def test_ids_and_times_in_json(kvcache: Kvcache, tmp_path: Path, log: Path) -> None:
    """JSON lines have ids as the engine gave them, levels by name, and times twice: as ns, and as text that sorts."""
    path = exported(kvcache, log, "jsonl", tmp_path)
    ids = {
        event.request_id
        for batch in LogReader(log)
        for event in batch.events
        if isinstance(event, SequenceAdded)
    }
    assert {row["request_id"] for row in read(path, "jsonl", "requests")} == ids
    assert {type(one) for one in ids} == {int}
    for row in read(path, "jsonl", "steps"):
        text, digits = row["time"][:-1].split(".")
        at = datetime.fromisoformat(text).replace(tzinfo=UTC)
        assert row["ts"] == int(at.timestamp()) * 10**9 + int(digits)
        assert len(digits) == 9
    assert {row["level"] for row in read(path, "jsonl", "occupancy")} == {"primary", "secondary"}


def test_what_csv_has_no_type_for(kvcache: Kvcache, tmp_path: Path, log: Path) -> None:
    """In CSV booleans are words, and null is nothing."""
    rows = read(exported(kvcache, log, "csv", tmp_path), "csv", "requests")
    assert {(row["uses_extra_ids"], row["lora_name"]) for row in rows} == {("false", None)}


def test_no_cell_of_csv_is_a_formula(kvcache: Kvcache, tmp_path: Path) -> None:
    """A spreadsheet runs what clients have named; taking one ' away gives it back. Numbers stay numbers."""
    names: list[str | int] = [
        "=1+1",
        "+1",
        "-1",
        "@SUM(A1)",
        "\t=1",
        "\r=1",
        "\n=1",
        "'=1",
        "\uff1d1+1",
        "\uff201",
        "a=1",
        " =1",
        "",
        -7,
    ]
    config = KVCacheConfig(max_sequence_length=8, tokens_per_block=4, primary_blocks=4)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for name in names:
            manager.add_sequence(name, [1, 2], lora_name=str(name) or None)
            manager.remove_sequence(name)
    rows = read(exported(kvcache, tmp_path / "log", "csv", tmp_path), "csv", "requests")
    ids = [row["request_id"] or "" for row in rows]
    assert ids == [f"'{name}" for name in names[:10]] + [str(name) for name in names[10:]]
    assert [row["lora_name"] for row in rows[:3]] == ["'=1+1", "'+1", "'-1"]
    assert rows[-1]["lora_name"] == "'-7"


def test_times_are_spelled_as_by_other_commands() -> None:
    """One time is the same text everywhere."""
    for ts in (0, 1, -1, 1767225600480000000, (1 << 63) - 1, -(1 << 63)):
        assert iso(ts) == phrases.iso(ts)


@pytest.mark.parametrize("to", WRITTEN)
def test_numbers_beyond_64_bits(kvcache: Kvcache, tmp_path: Path, to: str) -> None:
    """Where a format has no room for a number, that is said with what to do; ids of requests are text."""
    config = KVCacheConfig(max_sequence_length=8, tokens_per_block=4, primary_blocks=4)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        manager.add_sequence((1 << 64) - 1, [1] * 5, lora_id=(1 << 64) - 1)
    done = kvcache("export", tmp_path / "log", "--to", to, "-o", tmp_path / "t")
    if to in ("csv", "jsonl"):
        [row] = read(tmp_path / "t", to, "requests")
        assert (int(row["request_id"]), int(row["lora_id"])) == ((1 << 64) - 1,) * 2
    else:
        says = "a number in the table requests exceeds 64 bits: export to csv or jsonl instead"
        assert (done.code, done.err) == (2, f"kvcache: error: {says}\n")


class TestTarget:
    """Where tables go."""

    def test_what_people_see(self, kvcache: Kvcache, tmp_path: Path, log: Path) -> None:
        """The rows of each table, and nothing on stderr."""
        done = kvcache("export", log, "--to", "csv", "-o", tmp_path / "t")
        requests = len(read(tmp_path / "t", "csv", "requests"))
        assert done.out.splitlines()[:2] == [
            f"{log} -> {tmp_path / 't'} (csv)",
            f"  requests   {requests} rows",
        ]
        assert done.err == ""

    @pytest.mark.parametrize("to", ["csv", "sqlite"])
    def test_an_earlier_export_is_replaced_when_asked(
        self, kvcache: Kvcache, tmp_path: Path, log: Path, windows_log: Path, to: str
    ) -> None:
        """What is there is refused and stays as it is; --force puts the new one in its place."""
        path = exported(kvcache, log, to, tmp_path)
        before = read(path, to, "blocks")
        again = ("export", windows_log, "--to", to, "-o", path)
        done = kvcache(*again)
        assert (done.code, done.out) == (2, "")
        assert (
            done.err
            == f"kvcache: error: {path} already exists: choose another path, or replace it with --force\n"
        )
        assert read(path, to, "blocks") == before
        assert kvcache(*again, "--force").code == 0
        assert read(path, to, "blocks") != before
        assert [each.name for each in tmp_path.iterdir()] == [path.name]

    def test_a_database_replaces_databases_only(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """The log that is read is a directory of files, too."""
        log = run_log(tmp_path / "log", "--primary-blocks", 120, "--limit", 2)
        [segment] = log.glob("*.kvlog")
        before = segment.read_bytes()
        done = kvcache("export", log, "--to", "sqlite", "-o", segment, "--force")
        assert (done.code, segment.read_bytes()) == (2, before)

    @pytest.mark.parametrize("to", ["csv", "sqlite"])
    def test_nothing_else_is_replaced(self, kvcache: Kvcache, tmp_path: Path, to: str) -> None:
        """A directory that holds anything but tables is left alone, though --force is given: a log, for instance."""
        log = run_log(tmp_path / "log", "--primary-blocks", 120, "--limit", 2)
        done = kvcache("export", log, "--to", to, "-o", log, "--force")
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "is not an earlier export, so it is not replaced: choose another path" in done.err
        assert kvcache("replay", log, "--verify", "-q").code == 0

    @pytest.mark.parametrize("to", ["csv", "sqlite"])
    def test_an_export_that_fails_leaves_nothing(self, kvcache: Kvcache, tmp_path: Path, to: str) -> None:
        """A damaged log is told, the tables are not there, and those of before stay."""
        log = run_log(tmp_path / "log", "--primary-blocks", 120, "--limit", 5)
        path = exported(kvcache, log, to, tmp_path)
        before = read(path, to, "steps")
        [segment] = segments(log)
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        done = kvcache("export", log, "--to", to, "-o", path, "--force")
        assert (done.code, done.out) == (1, "")
        assert read(path, to, "steps") == before
        assert kvcache("export", log, "--to", to, "-o", tmp_path / "new").code == 1
        assert sorted(each.name for each in tmp_path.iterdir()) == ["log", path.name]

    def test_who_is_faster_keeps_the_place(self, tmp_path: Path, log: Path) -> None:
        """What appears at the path while tables are written is not overwritten."""

        def watched() -> Iterator[EventBatch]:
            for batch in LogReader(log):
                (tmp_path / "t").write_text("mine")
                yield batch

        for to in ("csv", "sqlite"):
            (tmp_path / "t").unlink(missing_ok=True)
            with pytest.raises(TargetExists) as raised:
                export(watched(), to, tmp_path / "t")
            assert not raised.value.replaceable
            assert (tmp_path / "t").read_text() == "mine"
            assert [each.name for each in tmp_path.iterdir()] == ["t"]

    def test_a_place_that_is_not_there(self, kvcache: Kvcache, tmp_path: Path, log: Path) -> None:
        """A missing directory is named."""
        done = kvcache("export", log, "--to", "csv", "-o", tmp_path / "a" / "b")
        assert (done.code, done.err) == (2, f"kvcache: error: {tmp_path / 'a'}: No such file or directory\n")

    def test_a_log_without_a_batch(self, kvcache: Kvcache, tmp_path: Path, log: Path) -> None:
        """Where nothing is there to be exported, that is not found, as elsewhere."""
        (tmp_path / "log").mkdir()
        name = segments(log)[0].name
        (tmp_path / "log" / name).write_bytes(segments(log)[0].read_bytes()[:10])
        done = kvcache("export", tmp_path / "log", "--to", "csv", "-o", tmp_path / "t")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert "has no batches yet" in done.err
        assert not (tmp_path / "t").exists()

    def test_a_torn_log(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """What can be read is exported, with a note on how the log ends."""
        log = run_log(tmp_path / "log", "--primary-blocks", 120, "--limit", 3)
        segment = segments(log)[-1]
        segment.write_bytes(segment.read_bytes()[:-3])
        done = kvcache("export", log, "--to", "csv", "-o", tmp_path / "t")
        assert done.code == 0
        assert "the log is torn" in done.err

    def test_without_pyarrow(self, fork_python: RunPython, log: Path) -> None:
        """Parquet says what to install; the other formats need nothing."""
        done = fork_python(
            "import sys\nsys.modules['pyarrow'] = None\nfrom kvcache.cli import main\n"
            f"print([main(['export', {str(log)!r}, '--to', to, '-o', to, '-q']) for to in ('parquet', 'csv')])"
        )
        assert (
            done.stderr
            == "kvcache: error: exporting to Parquet requires pyarrow: pip install 'kvcache[export]'\n"
        )
        assert done.stdout.endswith("[2, 0]\n")


PIECES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the log and the exports that the page speaks of."""
    from kvcache.cli import main

    place = tmp_path_factory.mktemp("page")
    run_log(place / "chats.log", "--primary-blocks", 120, "--secondary-blocks", 20, "--concurrency", 3)
    for to, name in (("parquet", "tables"), ("sqlite", "tables.db")):
        if to == "sqlite" or not missing("pyarrow"):
            assert main(["export", str(place / "chats.log"), "--to", to, "-o", str(place / name)]) == 0
    return place


def ran(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the one piece that defines this name leaves behind."""
    [code] = [piece for piece in PIECES if re.search(rf"(?m)^{name} = ", piece)]
    monkeypatch.chdir(place)
    found: dict[str, Any] = {}
    exec(compile(code, name, "exec"), found)
    return found


class TestPage:
    """The code of docs/how-to/export.md."""

    def test_every_piece_is_run(self) -> None:
        """The tests below are as many as the page has pieces of code."""
        assert len(PIECES) == sum(name.startswith("test_recipe") for name in vars(TestPage))

    def test_recipe_in_python(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rows of a log answer questions of a line each."""
        found = ran("reused", place, monkeypatch)
        events = [event for batch in LogReader(place / "chats.log") for event in batch.events]
        assert (
            found["reused"] == sum(event.reused for event in events if isinstance(event, SequenceAdded)) > 0
        )
        assert found["first"] == next(iter(LogReader(place / "chats.log"))).ts
        assert 0 < found["forced"] <= len(list(open_log(place / "chats.log").block_lives()))
        assert 0 < found["fullest"] <= 120

    @needs("duckdb", "pyarrow")
    def test_recipe_for_ratios(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ratios of all minutes are those of the requests that were admitted in them."""
        expected: dict[int, list[int]] = {}
        for row in open_log(place / "chats.log").requests():
            assert row.admitted_ts is not None
            minute = expected.setdefault(row.admitted_ts // 60_000_000_000 * 60, [0, 0])
            minute[0] += row.reused_tokens or 0
            minute[1] += row.prompt_tokens or 0
        ratios = ran("ratios", place, monkeypatch)["ratios"]
        assert ratios == [(second, pytest.approx(a / b)) for second, (a, b) in sorted(expected.items())]

    @needs("duckdb", "pyarrow")
    def test_recipe_for_evictions(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What an eviction cost is what was stored again of its blocks, counted here life by life."""
        lives = sorted(open_log(place / "chats.log").block_lives(), key=lambda life: life.stored_seq)
        cost: Counter[tuple[int, int | None]] = Counter()
        last: dict[int, BlockLife] = {}
        for life in lives:
            before = last.get(life.content)
            if before is not None and before.gone_seq is not None:
                cost[before.gone_seq, before.gone_for_admission] += life.num_tokens
            last[life.content] = life
        costly = ran("costly", place, monkeypatch)["costly"]
        highest = sorted(((tokens, -seq) for (seq, _), tokens in cost.items()), reverse=True)[:10]
        assert [(tokens, -seq) for _, seq, _, tokens in costly] == highest
        assert len(costly) > 3

    @needs("duckdb", "pyarrow")
    def test_the_audit_finds_the_same_evictions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of prompts that come again one after the other, in a cache that is too small for them."""
        from kvcache.cli import main

        config = KVCacheConfig(
            max_sequence_length=32, tokens_per_block=4, primary_blocks=12, enable_partial_reuse=False
        )
        draw = random.Random(5)
        with KVCacheManager(config, log=tmp_path / "chats.log") as manager:
            for number in range(60):
                prompt = [draw.randrange(6)] * draw.randrange(9, 30, 4)
                manager.add_sequence(number, prompt)
                manager.store_context_blocks(number, len(prompt))
                manager.remove_sequence(number)
                manager.flush()
        assert (
            main(["export", str(tmp_path / "chats.log"), "--to", "parquet", "-o", str(tmp_path / "tables")])
            == 0
        )
        audit = audit_batches(((batch, True) for batch in LogReader(tmp_path / "chats.log")), top=1000)
        listed = [(each.window, each.batch, str(each.for_request), each.tokens) for each in audit.worst]
        costly = ran("costly", tmp_path, monkeypatch)["costly"]
        assert costly == sorted(listed, key=lambda each: (-each[3], each[1]))[:10]
        assert len(costly) == 10

    @needs("pandas", "pyarrow")
    def test_recipe_for_long_lives(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The longest lives are those by the rows, the log's end for what is cached still."""
        rows = list(open_log(place / "chats.log").block_lives())
        end = list(LogReader(place / "chats.log"))[-1].ts
        expected = sorted(((row.gone_ts or end) - row.stored_ts for row in rows), reverse=True)[:10]
        longest = ran("end", place, monkeypatch)["longest"]
        assert [int(each.value) for each in longest["lived"]] == expected

    @needs("pandas")
    def test_recipe_for_reasons(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """All reasons together are everything."""
        percent = ran("percent", place, monkeypatch)["percent"]
        assert percent.sum() == pytest.approx(100)
        assert percent["primary"] > 0

    def test_recipe_for_room(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The least room is that of the steps."""
        rooms = [
            (level.blank + level.unreferenced, step.seq, iso(step.ts))
            for step in open_log(place / "chats.log").steps()
            for level in step.occupancy
            if level.level == "primary"
        ]
        free, seq, time = min(rooms)
        assert ran("tightest", place, monkeypatch)["tightest"] == (time, seq, free)


FORMATS_HERE = [each.values[0] for each in WRITTEN if not (each.marks and missing("pyarrow"))]


@pytest.mark.parametrize("to", FORMATS_HERE)
def test_a_file_that_may_not_grow(log: Path, tmp_path: Path, fork_python: RunPython, to: str) -> None:
    """A disk that takes no more is one line that names the path that was meant, and leaves nothing behind."""
    path = tmp_path / "out" / "tables"
    path.parent.mkdir()
    done = fork_python(
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from kvcache.cli import main\n"
        f"sys.exit(main(['export', {str(log)!r}, '--to', {to!r}, '-o', {str(path)!r}]))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"kvcache: error: {path}: (File too large|Input/output error)\n", done.stderr)
    assert list(path.parent.iterdir()) == []


def test_a_full_disk_under_a_database(
    kvcache: Kvcache, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sqlite calls full is what the system calls so, with the path."""
    connect = sqlite3.connect

    def limited(*args: Any, **options: Any) -> sqlite3.Connection:
        database = connect(*args, **options)
        database.execute("PRAGMA max_page_count = 8")
        return database

    monkeypatch.setattr(sqlite3, "connect", limited)
    done = kvcache("export", log, "--to", "sqlite", "-o", tmp_path / "t.sqlite")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"kvcache: error: {tmp_path / 't.sqlite'}: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", FORMATS_HERE)
def test_sigterm_leaves_no_files(
    kvcache: Kvcache, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """As after Ctrl-C, what was half written is gone, and the exit code says what ended the command."""
    begun: list[Path] = []

    def watched(out: Output, reader: LogReader, title: str) -> Iterator[EventBatch]:
        for number, batch in enumerate(reader):
            yield batch
            if number == 5:
                begun.extend(tmp_path.iterdir())
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Output, "watched", watched)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        done = kvcache("export", log, "--to", to, "-o", tmp_path / "tables")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (done.code, done.out, done.err) == (143, "", "")
    assert [path.suffix for path in begun] == [".partial"]
    assert list(tmp_path.iterdir()) == []
