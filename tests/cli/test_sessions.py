"""Sessions and labels of requests, from a trace through the manager and its log to what commands say of them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit.tables import open_log
from tests.support.answers import assert_documented
from tests.support.commands import Kvcache, run_log
from tests.support.logs.agents import agents_lines, write_agents_trace


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of sessions of several tenants, in a cache too small for all of them. Not to be changed."""
    directory = tmp_path_factory.mktemp("agents")
    trace = write_agents_trace(directory / "trace.jsonl")
    return run_log(directory / "log", "--primary-blocks", 200, "--concurrency", 3, trace=trace)


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


def audit_by(kvcache: Kvcache, log: Path, by: str, *options: Any) -> Any:
    done = kvcache("audit", log, "--by", by, "--json", *options)
    assert done.code == 0
    return json.loads(done.out)


@pytest.mark.parametrize("by", ["tenant", "session", "lora"])
@pytest.mark.parametrize("top", [1, 3, 100])
def test_groups_and_others_are_all_there_is(agents: Path, kvcache: Kvcache, by: str, top: int) -> None:
    """However many are named, their sums are those of the whole audit, and of the tables."""
    whole = json.loads(kvcache("audit", agents, "--json").out)
    said = audit_by(kvcache, agents, by, "--top", top)
    groups = said["groups"] + [said["others"]] * (said["others"] is not None)
    assert len(said["groups"]) <= top
    for key in ("requests", "prompt_tokens", "reused_tokens"):
        assert sum(group[key] for group in groups) == whole[key] == said[key]
    for reason, tokens in whole["reasons"].items():
        assert sum(group["reasons"][reason] for group in groups) == tokens
    removed = sum(row.full_blocks for row in open_log(agents).evictions())
    for key in ("evicted_blocks", "evicted_for_it_blocks"):
        assert sum(group[key] for group in groups) == removed > 0
    assert sum(pair["blocks"] for pair in said["evictions"]) == removed
    recomputed = sum(pair["recomputed_tokens"] for pair in said["evictions"])
    assert recomputed == whole["evictions"]["recomputed_tokens"] > 0
    assert sum(group["cache_share"] for group in groups) == pytest.approx(1)
    names = [group["name"] for group in said["groups"]]
    assert all(len(moment["blocks"]) == len(names) for moment in said["over_time"])
    kinds = sum(each["requests"] for each in said.get("turns", []))
    assert kinds == (sum(event.session is not None for event in added(agents)) if by == "session" else 0)


def test_a_table_of_groups(agents: Path, kvcache: Kvcache) -> None:
    """The largest have a row of their own, the rest has one; then who evicted whom, and whose the cache was."""
    said = audit_by(kvcache, agents, "tenant", "--top", 2)
    out = kvcache("audit", agents, "--by", "tenant", "--top", 2).out
    rows = [line.split() for line in out.splitlines()]
    names = [group["name"] or "(none)" for group in said["groups"]]
    begin = next(at for at, row in enumerate(rows) if row[:2] == ["tenant", "requests"])
    assert [row[0] for row in rows[begin + 1 : begin + 3]] == names
    assert rows[begin + 3][:3] == ["1", "other", f"{said['others']['requests']}"]
    assert "evicted from tenant" in out
    assert "extends the previous turn" not in out
    assert "extends the previous turn" in kvcache("audit", agents, "--by", "session").out
    done = kvcache("audit", agents, "--by", "tenants")
    assert (done.code, "by one of session, tenant" in done.err) == (2, True)
    done = kvcache("audit", agents.parent, "--by", "tenant")
    assert (done.code, "--by requires a single log: give that of one worker (log)" in done.err) == (2, True)


def test_the_turns_of_a_session(agents: Path, kvcache: Kvcache) -> None:
    """A row for each, with what it is to the one before; the same for programs."""
    said = json.loads(kvcache("explain", agents, "--session", "chat 1", "--json").out)
    requests = [event for event in added(agents) if event.session == "chat 1"]
    assert [turn["request_id"] for turn in said["turns"]] == [event.request_id for event in requests]
    assert [turn["prompt_tokens"] for turn in said["turns"]] == [event.num_tokens for event in requests]
    assert [turn["reused_tokens"] for turn in said["turns"]] == [event.reused for event in requests]
    lines = kvcache("explain", agents, "--session", "chat 1").out.splitlines()
    assert lines[0].startswith(f"session chat 1: {len(requests)} turns, ")
    assert [line.split()[:2] for line in lines[3:]] == [
        [str(number + 1), str(event.request_id)] for number, event in enumerate(requests)
    ]
    done = kvcache("explain", agents, "--session", "nobody")
    assert (done.code, "no request of session 'nobody' was admitted in the log" in done.err) == (2, True)
    assert kvcache("explain", agents, "--session", "chat 1", "--request", 1).code == 2


def test_what_is_said_of_groups_and_turns_is_documented(agents: Path, kvcache: Kvcache) -> None:
    """Each key, and no other."""
    assert_documented("audit --by", audit_by(kvcache, agents, "session", "--top", 2))
    said = json.loads(kvcache("explain", agents, "--session", "chat 1", "--json").out)
    assert {tuple(turn.pop("labels")) for turn in said["turns"]} == {("agent", "tenant")}
    assert_documented(
        "explain --session", said | {"turns": [turn | {"labels": None} for turn in said["turns"]]}
    )
