"""`kvcache subscribe --format native` at a cache's own feed: the lines of `kvcache events`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from events.log import LogReader
from tests.support.commands import Kvcache, Start
from tests.support.feeds.native import Cache
from tests.support.waiting import wait_until

URL = "zmq+pub://127.0.0.1:0?format=native&replay=0&heartbeat=200ms"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with closing(Cache(URL, log=tmp_path / "log")) as cache:
        yield cache


def endpoint(cache: Cache) -> str:
    return str(cache.manager.feeds[0].transport.endpoint)  # type: ignore[attr-defined]


def test_lines_are_those_of_the_log(kvcache: Kvcache, start: Start, cache: Cache, tmp_path: Path) -> None:
    """Behind the state with which it begins, the same as `kvcache events` prints of the log."""
    process = start("subscribe", "--format", "native", endpoint(cache), "--count", 12)
    wait_until(lambda: cache.manager.feeds[0].subscribers == 1)
    cache.steps(30)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    received = out.splitlines()
    assert [line.split()[1] for line in received[:3]] == ["EpochStarted", "CacheCreated", "StateExported"]
    cache.close()
    batches = list(LogReader(tmp_path / "log"))
    assert {int(line.split(".")[0]) for line in received} == {batch.seq for batch in batches[:12]}
    logged = kvcache("events", tmp_path / "log", "--until", batches[11].seq).out.splitlines()
    reported = {line.split()[0]: line.split()[2:] for line in logged}
    for line in received[3:]:
        assert reported[line.split()[0]] == line.split()[1:]


def test_json_has_address_message_and_fields(start: Start, cache: Cache) -> None:
    """An object for each event."""
    cache.steps(5)
    wait_until(lambda: cache.manager.sink_stats()[0].lag_batches == 0)
    process = start("subscribe", "--format", "native", endpoint(cache), "--count", 1, "--json")
    out, _ = process.communicate(timeout=60)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["type"] for line in lines[:3]] == ["EpochStarted", "CacheCreated", "StateExported"]
    assert [line["index"] for line in lines] == list(range(len(lines)))
    assert {line["seq"] for line in lines} == {cache.last_seq}
    assert set(lines[0]) > {"seq", "index", "ts", "time", "message", "topic", "replayed", "type"}


def test_tables_are_of_routers(kvcache: Kvcache) -> None:
    """What counts blocks needs the events that routers get."""
    said = kvcache("subscribe", "--format", "native", "tcp://127.0.0.1:5557", "--table")
    assert said.code == 2
    assert "--format native prints the events of one ENDPOINT" in said.err
    said = kvcache("subscribe", "--format", "native", "tcp://*:5557")
    assert "--format native cannot be combined with --bind" in said.err
