"""`kvcache export --to perfetto`: read as Chrome's format has it, and compared with the log's rows and events."""

from __future__ import annotations

import gzip
import json
from array import array
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import ContextComputed, SequenceAdded, TokensAppended
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit import open_log
from kvcache.errors import OutOfBlocks
from kvcache.manager import Substitutes
from tests.support.commands import TRACE, Kvcache

Events = list[dict[str, Any]]
PHASES = {"X", "C", "M", "i"}


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


class Timeline:
    """What a viewer makes of a file: slices by line, which must lie in each other, counters, and names of lines."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        whole = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        self.begin = whole["otherData"]["begin"]
        self.events: Events = whole["traceEvents"]
        self.titles: dict[tuple[int, int], str] = {}
        self.counters: dict[str, list[tuple[int, dict[str, int]]]] = defaultdict(list)
        self.slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        for event in self.events:
            assert event["ph"] in PHASES
            assert isinstance(event["name"], str)
            assert isinstance(event["pid"], int)
            if event["ph"] == "M":
                assert event["name"] in ("process_name", "thread_name")
                self.titles[event["pid"], event.get("tid", 0)] = event["args"]["name"]
                continue
            assert event["ts"] >= 0
            if event["ph"] == "C":
                assert all(isinstance(value, int) for value in event["args"].values())
                self.counters[event["name"]].append((ns(event["ts"]), event["args"]))
            elif event["ph"] == "X":
                assert event["dur"] >= 0
                self.slices[event["pid"], event["tid"]].append(event)
        for line in self.slices.values():
            self._nest(line)

    def _nest(self, line: Events) -> None:
        """Open and close slices by the order of times, of length and of the file; none sticks out of another."""
        order = sorted(enumerate(line), key=lambda each: (each[1]["ts"], -each[1]["dur"], each[0]))
        open_: list[int] = []
        for _, each in order:
            begin, end = ns(each["ts"]), ns(each["ts"]) + ns(each["dur"])
            while open_ and (open_[-1] <= begin and not (open_[-1] == begin == end)):
                open_.pop()
            assert not open_ or end <= open_[-1]
            open_.append(end)

    def of(self, process: str) -> Events:
        pid = next(pid for (pid, tid), name in self.titles.items() if tid == 0 and name == process)
        return [each for (owner, _), line in self.slices.items() if owner == pid for each in line]


def exported(kvcache: Kvcache, log: Path, path: Path) -> Timeline:
    done = kvcache("export", log, "--to", "perfetto", "-o", path)
    assert done.code == 0, done.err
    assert done.out.startswith(f"{log} -> {path} (perfetto)\n")
    return Timeline(path)


@pytest.fixture
def long(kvcache: Kvcache, tmp_path: Path) -> Path:
    """A log of requests, of which some have prompts that take several steps, and of offloads and evictions."""
    trace = tmp_path / "trace.jsonl"
    line = '{{"timestamp": {}, "input_length": 20480, "output_length": 9, "hash_ids": {}}}\n'
    longer = [line.format(at, [*range(7000 + 40 * at, 7040 + 40 * at)]) for at in range(3)]
    trace.write_text("".join([*longer, TRACE.read_text(), *longer]))
    sizes = (
        "--primary-blocks",
        1400,
        "--secondary-blocks",
        300,
        "--concurrency",
        3,
        "--tokens-per-block",
        16,
    )
    args = ("--no-pools", *sizes, "--speed", 10_000, "-q", "--log", tmp_path / "long")
    assert kvcache("run", trace, *args).code == 0
    return tmp_path / "long"


def prompts_computed(log: Path) -> dict[int, int]:
    """When the prompt of each admission was computed, by the events alone, in ns."""
    found: dict[int, int] = {}
    length: dict[int, tuple[int, int]] = {}
    for batch in LogReader(log):
        for event in batch.events:
            if isinstance(event, SequenceAdded):
                length[event.handle] = (len(length), event.num_tokens)
            elif isinstance(event, TokensAppended):
                for handle in array("q", event.handles):
                    found.setdefault(length[handle][0], batch.ts)
            elif isinstance(event, ContextComputed) and event.num_tokens >= length[event.handle][1]:
                found.setdefault(length[event.handle][0], batch.ts)
    return found


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_requests_are_slices(kvcache: Kvcache, long: Path, tmp_path: Path, name: str) -> None:
    """From admission to removal, with prefill and decoding in them, on as few lines as run at once."""
    found = exported(kvcache, long, tmp_path / name)
    first = next(iter(open_log(long))).ts
    rows = {row.request_id: row for row in open_log(long).requests()}
    computed = prompts_computed(long)
    slices = found.of("requests")
    whole = {each["args"]["request_id"]: each for each in slices if each["args"]}
    assert whole.keys() == rows.keys()
    assert len(whole) > 50
    for request_id, row in rows.items():
        each = whole[request_id]
        assert row.admitted_ts is not None
        assert row.ended_ts is not None
        assert row.admission is not None
        assert each["name"] == f"request {request_id}"
        begin, end = row.admitted_ts - first, row.ended_ts - first
        assert (ns(each["ts"]), ns(each["ts"]) + ns(each["dur"])) == (begin, end)
        assert each["args"]["outcome"] == "ended"
        for name_ in ("prompt_tokens", "reused_tokens", "output_tokens"):
            assert each["args"][name_] == getattr(row, name_)
        parts = [
            (part["name"], ns(part["ts"]), ns(part["ts"]) + ns(part["dur"]))
            for part in slices
            if part["tid"] == each["tid"]
            and not part["args"]
            and begin <= ns(part["ts"]) < max(end, begin + 1)
        ]
        middle = computed[row.admission] - first
        assert ("prefill", begin, middle) in parts
        assert middle == end or ("decode", middle, end) in parts
    assert {each["tid"] for each in slices} == {1, 2, 3}
    assert any(middle != rows[at].admitted_ts for at, middle in computed.items())


def test_steps_and_counters(kvcache: Kvcache, long: Path, tmp_path: Path) -> None:
    """Each batch is a slice that ends when it was made; counters are those of the rows of steps, after each."""
    found = exported(kvcache, long, tmp_path / "t.json")
    rows = list(open_log(long).steps())
    first = rows[0].ts
    steps = found.of("steps")
    assert [ns(each["ts"]) + ns(each["dur"]) for each in steps] == [row.ts - first for row in rows]
    for before, row, each in zip(rows[:-1], rows[1:], steps[1:], strict=True):
        assert ns(each["dur"]) == (row.ts - before.ts if before.running else 0)
    after: dict[str, dict[str, int]] = {}
    values = {name: dict(each) for name, each in found.counters.items()}
    for number, row in enumerate(rows):
        if number + 1 < len(rows) and rows[number + 1].ts == row.ts:
            continue
        for name, by_time in values.items():
            after[name] = by_time.get(row.ts - first, after.get(name, {}))
        for level in row.occupancy:
            assert after[f"blocks of {level.level}"] == {
                "held": level.held,
                "cached": level.unreferenced,
                "blank": level.blank,
            }
        assert after["running requests"] == {"requests": row.running}
        for name in ("stored", "removed", "cleared", "offloaded", "onboarded"):
            assert after["blocks per step"][name] == getattr(row, f"{name}_blocks")
    assert any(row.offloaded_blocks for row in rows)


def test_clocks_and_ends(kvcache: Kvcache, tmp_path: Path) -> None:
    """An epoch whose clock begins again stands behind the one before; what runs at the end goes on to there, and what
    was only refused is a mark. No token is in the file.
    """
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=4)
    for _ in range(2):
        times = Substitutes(wall_ns=partial(next, iter(range(10**18, 10**18 + 10**9, 10**6))))
        manager = KVCacheManager.open(config, tmp_path / "log", substitutes=times)
        with manager:
            manager.add_sequence("a", [77777] * 9)
            manager.flush()
            with pytest.raises(OutOfBlocks):
                manager.add_sequence("b", [88888] * 16)
            manager.flush()
    found = exported(kvcache, tmp_path / "log", tmp_path / "t.json")
    assert found.begin == "2001-09-09T01:46:40.000000000Z"
    whole = [each for each in found.of("requests") if each["args"]]
    assert [each["args"]["outcome"] for each in sorted(whole, key=lambda each: each["ts"])] == [
        "lost",
        "running",
    ]
    assert sum(ns(each["dur"]) > 0 for each in whole) == 2
    marks = [each["name"] for each in found.events if each["ph"] == "i"]
    assert marks == ["request b refused"]
    text = (tmp_path / "t.json").read_text()
    assert "77777" not in text
    assert "88888" not in text
    times_of_steps = [each["ts"] + each["dur"] for each in found.of("steps")]
    assert times_of_steps == sorted(times_of_steps)


def test_a_request_says_where_it_comes_from(kvcache: Kvcache, tmp_path: Path) -> None:
    """Its session, its labels and why its output ended, as far as the engine has said them."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=40)
    labels = {"tenant": "acme", "model": "okapi"}
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        manager.add_sequence("a", [77777] * 9, session="chat 1", labels=labels)
        manager.remove_sequence("a", stop="tool_use")
        manager.add_sequence("b", [77777] * 9, session="chat 2")
        manager.add_sequence("c", [77777] * 9)
    slices = exported(kvcache, tmp_path / "log", tmp_path / "t.json").of("requests")
    found = {each["args"]["request_id"]: each["args"] for each in slices if each["args"]}
    said = {
        name: {key: args[key] for key in ("session", "labels", "stop") if key in args}
        for name, args in found.items()
    }
    assert said == {
        "a": {"session": "chat 1", "labels": labels, "stop": "tool_use"},
        "b": {"session": "chat 2"},
        "c": {},
    }
    assert "77777" not in (tmp_path / "t.json").read_text()


def test_what_is_refused(kvcache: Kvcache, long: Path, tmp_path: Path) -> None:
    """Another file in its place, a key, and a log without a batch; an earlier one gives way to --force."""
    path = tmp_path / "t.json"
    path.write_text("mine")
    done = kvcache("export", long, "--to", "perfetto", "-o", path, "--force")
    assert (done.code, path.read_text()) == (2, "mine")
    path.unlink()
    exported(kvcache, long, path)
    assert "already exists" in kvcache("export", long, "--to", "perfetto", "-o", path).err
    assert kvcache("export", long, "--to", "perfetto", "-o", path, "--force").code == 0
    Timeline(path)
    assert (
        "--key works with traces only"
        in kvcache("export", long, "--to", "perfetto", "-o", path, "--key", path).err
    )
