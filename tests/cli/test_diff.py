"""`kvcache diff`: what is told of two logs, in both forms, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from events.log import LogReader, LogWriter
from events.types import AllocateReason, BlocksAllocated, EventBatch, SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.inputs import Request
from kvcache.manager import Substitutes
from tests.support.commands import Kvcache, run_log, segments

SIZES = ("--primary-blocks", 120, "--secondary-blocks", 100, "--concurrency", 3)


@pytest.fixture(scope="session")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The requests of `log` in a cache with less room. Not to be changed."""
    options = ("--primary-blocks", 70, "--secondary-blocks", 20, "--concurrency", 3)
    return run_log(tmp_path_factory.mktemp("logs") / "smaller", *options)


def answer(done: Any, code: int) -> Any:
    assert (done.code, done.err) == (code, "")
    return json.loads(done.out)


def reused(log: Path) -> dict[Any, SequenceAdded]:
    return {
        event.request_id: event
        for batch in LogReader(log)
        for event in batch.events
        if isinstance(event, SequenceAdded)
    }


def test_equal_logs(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """A log of the same with another id, at another time, in another epoch, says the same."""
    with LogWriter(tmp_path / "later") as writer:
        for batch in LogReader(log):
            writer.append(EventBatch(batch.seq, batch.ts + 10**15, batch.events))
    again = run_log(tmp_path / "again", *SIZES)
    for other in (log, tmp_path / "later", again):
        found = answer(kvcache("diff", log, other, "--json"), 0)
        assert (found["equal"], found["divergence"], found["settings"]) == (True, None, [])
        assert (found["changed_requests"], found["changes"]) == (0, [])
        assert found["requests"] == len(reused(log))
    done = kvcache("diff", log, again)
    assert (done.code, done.out.splitlines()[1]) == (0, "  no difference")


def test_settings_do_not_count(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """Another setting that changes nothing is shown, and the logs are equal; so is a larger cache until it is used."""
    other = run_log(tmp_path / "other", *SIZES, "--set", "log.fsync=never")
    found = answer(kvcache("diff", log, other, "--json"), 0)
    assert found["settings"] == [{"name": "log.fsync", "a": "group", "b": "never"}]
    done = kvcache("diff", log, other)
    assert done.code == 0
    assert ["log.fsync", '"group"', '"never"'] in [line.split() for line in done.out.splitlines()]
    small, large = (
        run_log(tmp_path / f"of_{blocks}", "--limit", 3, "--primary-blocks", blocks) for blocks in (300, 301)
    )
    found = answer(kvcache("diff", small, large, "--json"), 0)
    assert [each["name"] for each in found["settings"]] == ["primary_blocks", "secondary_blocks", "windows"]


def test_requests(kvcache: Kvcache, log: Path, smaller: Path) -> None:
    """Totals, and the requests whose reuse differs most, are those of the admissions in the logs."""
    a, b = reused(log), reused(smaller)
    changed = {name: b[name].reused - a[name].reused for name in a if b[name].reused != a[name].reused}
    found = answer(kvcache("diff", log, smaller, "--json", "--top", 4), 1)
    assert (found["equal"], found["requests"]) == (False, len(a))
    assert found["changed_requests"] == len(changed) > 4
    for side, admissions in (("a", a), ("b", b)):
        assert found[side]["reused_tokens"] == sum(each.reused for each in admissions.values())
        assert found[side]["prompt_tokens"] == sum(each.num_tokens for each in admissions.values())
    listed = {each["request_id"]: each for each in found["changes"]}
    largest = sorted(map(abs, changed.values()), reverse=True)[:4]
    assert [abs(changed[name]) for name in listed] == largest
    for name, each in listed.items():
        assert (each["a"]["reused_tokens"], each["b"]["reused_tokens"]) == (a[name].reused, b[name].reused)
    out = kvcache("diff", log, smaller, "--top", 4).out
    rows = [line.split() for line in out.splitlines()]
    for name in listed:
        assert any(row[:1] == [str(name)] and f"{changed[name]:+,}" in row for row in rows)
    assert f"{len(a)} in both logs, of which {len(changed)} reused more or less" in out


def test_divergence(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """What each log says at the first difference are the lines of `kvcache events`, and all before is the same."""
    other = run_log(tmp_path / "other", *SIZES, "--set", "enable_partial_reuse=false")
    found = answer(kvcache("diff", log, other, "--json"), 1)["divergence"]
    out = kvcache("diff", log, other).out
    events = {}
    for side, path in (("a", log), ("b", other)):
        lines = kvcache("events", path).out.splitlines()[3:]  # behind what begins the epoch
        seq, index = found[side]["seq"], found[side]["index"]
        [place] = [at for at, line in enumerate(lines) if line.split()[0] == f"{seq}.{index}"]
        assert f"  {side.upper()}  {lines[place]}\n" in out
        assert lines[place].endswith(found[side]["line"])
        events[side] = [line.split(maxsplit=2)[2] for line in lines[:place]]
    assert events["a"] == events["b"]
    assert len(events["a"]) > 10


def test_fields(kvcache: Kvcache, tmp_path: Path) -> None:
    """Where the lines are the same, the fields that differ are named; tokens are in neither."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=8)
    for name, token in (("a", 123456789), ("b", 987654321)):
        with KVCacheManager(
            config, log=tmp_path / name, substitutes=Substitutes(wall_ns=lambda: 5)
        ) as manager:
            manager.add_sequences([Request("r", [token] * 9)])
            manager.flush()
            manager.remove_sequence("r")
    done = kvcache("diff", tmp_path / "a", tmp_path / "b")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[2].removeprefix("  A") == lines[3].removeprefix("  B")
    assert lines[4] == "  they differ in tokens"
    for form in ((), ("--json",)):
        reported = kvcache("diff", tmp_path / "a", tmp_path / "b", *form).out
        assert "123456789" not in reported
        assert "987654321" not in reported


def test_requests_are_named(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """A request that was admitted just before the first difference, in the same batch, is named, not its handle."""
    first, place = next(
        (batch, at)
        for batch in LogReader(log)
        for at, event in enumerate(batch.events)
        if isinstance(event, BlocksAllocated)
    )
    changed = replace(first.events[place], why=AllocateReason.COPY)
    events = (*first.events[:place], changed, *first.events[place + 1 :])
    with LogWriter(tmp_path / "changed") as writer:
        for batch in LogReader(log):
            reported = events if batch.seq == first.seq else batch.events
            writer.append(EventBatch(batch.seq, batch.ts, reported))
    lines = kvcache("diff", log, tmp_path / "changed").out.splitlines()
    for line, why in zip(lines[2:4], ("prompt", "copy"), strict=True):
        assert line.split()[3:5] == ["BlocksAllocated", "request=0"]
        assert line.endswith(f" why={why}")
    assert lines[4] == "  they differ in why"


def test_shorter_log(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """A log that stops earlier, in the middle of a batch, differs; that it is torn is noted."""
    other = run_log(tmp_path / "other", *SIZES)
    [file] = segments(other)
    with file.open("r+b") as segment:
        segment.truncate(file.stat().st_size // 2)
    last = max(batch.seq for batch in LogReader(other))
    done = kvcache("diff", log, other)
    assert done.code == 1
    assert f"  B  ends after batch {last}\n" in done.out
    assert f"  A  {f'{last + 1}.0':>9}  " in done.out
    assert f"{other} is torn: the writer stopped inside a batch" in done.err
    found = json.loads(kvcache("diff", other, log, "--json", "--top", 2).out)
    assert found["divergence"]["a"] is None
    assert found["divergence"]["b"]["seq"] == last + 1
    missing = len(reused(log)) - len(reused(other))
    only = found["b"]["only"]
    assert (only["requests"], len(only["first"]), found["a"]["only"]["requests"]) == (missing, 2, 0)
    assert f"only in B    {missing} requests (" in kvcache("diff", other, log, "--top", 2).out


def test_times(kvcache: Kvcache, log: Path, smaller: Path) -> None:
    """--time is that of `kvcache events`."""
    assert "  2026-01-01T00:00:0" in kvcache("diff", log, smaller, "--time", "utc").out


def test_errors(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """What is no log is a wrong request, and damage is damage, whichever of the two has it."""
    for args in ((log, tmp_path), (tmp_path, log)):
        done = kvcache("diff", *args)
        assert (done.code, done.out) == (2, "")
        assert f"{tmp_path} is not a log directory" in done.err
    assert kvcache("diff", log, log, "--top", "-1").code == 2
    assert "'0' is not an integer that is at least 1" in kvcache("diff", log, log, "--top", "0").err
    damaged = run_log(tmp_path / "damaged", *SIZES)
    [file] = segments(damaged)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = kvcache("diff", damaged, log)
    assert (done.code, done.out) == (1, "")
    assert "is damaged at byte" in done.err
