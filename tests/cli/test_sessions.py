"""Sessions and labels of requests, from a trace through the manager and its log to what commands say of them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from operator import itemgetter
from pathlib import Path

import pytest

from events.log import LogReader
from events.types import SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit.tables import open_log
from kvcache.cli import main
from tests.support.commands import Kvcache
from tests.support.logs.agents import agents_lines, write_agents_trace


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of sessions of several tenants, in a cache too small for all of them. Not to be changed."""
    directory = tmp_path_factory.mktemp("agents")
    trace = write_agents_trace(directory / "trace.jsonl")
    options = ["--no-pools", "--tokens-per-block", "16", "--primary-blocks", "200", "--concurrency", "3"]
    assert main(["run", str(trace), *options, "-q", "--log", str(directory / "log")]) == 0
    return directory / "log"


def test_a_run_passes_on_what_its_trace_says(agents: Path) -> None:
    """Each admission has the session and the labels of its line."""
    lines = agents_lines()
    events = [each for batch in LogReader(agents) for each in batch.events]
    added = {each.request_id: each for each in events if isinstance(each, SequenceAdded)}
    assert len(added) == len(lines)
    for number, line in enumerate(lines):
        labels = {name: line[name] for name in ("agent", "tenant") if line[name] is not None}
        assert (added[number].session, added[number].labels) == (line["session_id"], labels)


def added(log: Path) -> list[SequenceAdded]:
    return [each for batch in LogReader(log) for each in batch.events if isinstance(each, SequenceAdded)]


def test_lines_have_them(agents: Path, kvcache: Kvcache) -> None:
    """Behind the counts of the admission; a text that is not plain is quoted."""
    lines = kvcache("events", agents, "--type", "SequenceAdded").out.splitlines()
    for line, event in zip(lines, added(agents), strict=True):
        session = "" if event.session is None else f" session={event.session!r}"
        labels = ",".join(f"{name}:{value}" for name, value in (event.labels or {}).items())
        assert line.endswith(f"{session} labels={labels}")


def test_events_of_a_session(agents: Path, kvcache: Kvcache) -> None:
    """All that `--request` finds of its requests, and nothing else."""
    found = kvcache("events", agents, "--session", "chat 3", "--json").out.splitlines()
    expected = [
        line
        for event in added(agents)
        if event.session == "chat 3"
        for line in kvcache("events", agents, "--request", event.request_id, "--json").out.splitlines()
    ]
    place = itemgetter("seq", "index")

    def named(lines: list[str]) -> set[tuple[int, int]]:
        return {place(json.loads(line)) for line in lines}

    assert len(expected) > 50
    assert named(found) == named(expected)
    assert kvcache("events", agents, "--session", "chat").out == ""


def test_a_branch_is_of_its_parents_session(tmp_path: Path, kvcache: Kvcache) -> None:
    """Nothing else says whose it is."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=32)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        manager.add_sequence("a", range(9), session="s", labels={"tenant": "t"})
        manager.add_sequence("b", range(9))
        manager.fork("a", "c")
        for name in "abc":
            manager.remove_sequence(name)
    rows = {row.request_id: (row.session, row.labels) for row in open_log(tmp_path / "log").requests()}
    assert rows == {"a": ("s", {"tenant": "t"}), "b": (None, None), "c": ("s", {"tenant": "t"})}
    lines = kvcache("events", tmp_path / "log", "--session", "s", "--type", "SequenceRemoved").out
    assert [line.split()[3] for line in lines.splitlines()] == ["request=a", "request=c"]


def test_explain_and_tables_have_them(agents: Path, kvcache: Kvcache, tmp_path: Path) -> None:
    """As the event of the admission has them; labels as JSON in columns."""
    assert kvcache("export", agents, "--to", "sqlite", "-o", tmp_path / "tables").code == 0
    with closing(sqlite3.connect(tmp_path / "tables")) as database:
        query = "SELECT request_id, session, labels, labels->>'tenant' FROM requests"
        exported = {int(name): rest for name, *rest in database.execute(query)}
    rows = {row.request_id: row for row in open_log(agents).requests()}
    for event in added(agents):
        row = rows[event.request_id]
        assert (row.session, row.labels) == (event.session, event.labels)
        tenant = (event.labels or {}).get("tenant")
        assert exported[int(event.request_id)] == [event.session, json.dumps(event.labels), tenant]
    last = added(agents)[-1]
    (stay,) = json.loads(kvcache("explain", agents, "--request", last.request_id, "--json").out)["requests"][
        0
    ]["stays"]
    assert (stay["session"], stay["labels"]) == (last.session, last.labels)
    said = kvcache("explain", agents, "--request", last.request_id).out
    assert f"\n  session  {last.session}\n  labels   agent {(last.labels or {})['agent']}" in said
