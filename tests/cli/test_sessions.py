"""Sessions and labels of requests, from a trace through the manager and its log to what commands say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from events.log import LogReader
from events.types import SequenceAdded
from kvcache.cli import main
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
