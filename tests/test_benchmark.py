"""The benchmark runs, and what it measures is the work that it says: as many tokens are reused as the trace allows."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import feed, feed_steps, feed_streams, index, log, manager, policies
from tests.support.feeds.publisher import batch, stored
from tests.support.places import ROOT

TRACE = ROOT / "tests" / "data" / "chats_small.jsonl"
REQUESTS = 40
BLOCK = 16
TRACE_BLOCK = 512


def reusable_tokens() -> int:
    """Prompt tokens in full blocks that an earlier prompt had, but for each prompt's last token; nothing is evicted."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for line in TRACE.read_text().splitlines()[:REQUESTS]:
        request = json.loads(line)
        length, ids = request["input_length"], request["hash_ids"]
        # A block is known by all that stands before its end; only its number says how far into the last id it goes.
        blocks = [(end, *ids[: -(-end // TRACE_BLOCK)]) for end in range(BLOCK, length + 1, BLOCK)]
        known = 0
        while known < (length - 1) // BLOCK and blocks[known] in seen:
            known += 1
        total += known * BLOCK
        seen.update(blocks)
    return total


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call a benchmark's `main` in this process and return what it prints."""
    monkeypatch.setattr(gc, "freeze", lambda: None)

    def call(main: Callable[[], None], *options: object) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, options)])
        capsys.readouterr()
        main()
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return call


def test_benchmark_runs_and_reuses_what_the_trace_allows(
    measured: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short trace in three modes gives the four numbers, and the reuse that the trace's ids make possible."""
    apart = manager.measure_apart

    def measure(mode: str, *trace: Any, **options: Any) -> dict[str, Any]:
        """Start an interpreter for one of the runs alone: with one for each they would be most of the time."""
        return (apart if (mode, options) == ("off", {}) else manager.measure)(mode, *trace, **options)

    monkeypatch.setattr(manager, "measure_apart", measure)
    options = ["--requests", REQUESTS, "--repeat", 1, "--modes", "off", "log", "wire", "--json"]
    reported = json.loads(measured(manager.main, TRACE, *options))
    times = ("cpu_seconds_per_1000", "cpu_seconds_per_1000_events_off", "cpu_seconds_per_1000_wire")
    assert reported.keys() == {"modes", "hit_tokens", *times}
    assert all(reported[name] > 0 for name in times)  # how fast is no test's business: machines differ
    assert reported["hit_tokens"] == reusable_tokens() > 0
    modes = reported["modes"]
    assert {(mode["requests"], mode["waits"], mode["hit_tokens"]) for mode in modes.values()} == {
        (REQUESTS, 0, reported["hit_tokens"])
    }
    assert [name for name, mode in modes.items() if mode["log_bytes"]] == ["log"]


PEER = """
import json, marshal, sys
stores, prompts, removals = marshal.load(open(sys.argv[1], "rb"))
assert len(prompts) and {len(hashes) for _, _, hashes, _ in stores} == {16}
print(json.dumps({"store": 1e-9, "match_list": 1e9, "noise": 0}))
"""


def test_benchmark_of_the_index_gives_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run, but for the memory that a process of its own has."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    figures = index.measure(index.make_work(4000))
    assert figures.keys() == index.UNITS.keys() - {"memory"}
    assert min(figures.values()) > 0


@pytest.mark.long
def test_benchmark_of_the_index_runs_alongside_another_one(
    tmp_path: Path, measured: Callable[..., str]
) -> None:
    """A short run gives all figures, and ratios that are above 1 where ours is better, whichever way that is."""
    (tmp_path / "peer.py").write_text(PEER)
    peer = f"{sys.executable} {tmp_path / 'peer.py'}"
    out = measured(index.main, "--blocks", 4000, "--repeat", 1, "--beside", peer)
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert list(lines) == [
        "store", "wire", "remove", "match_packed", "match_packed_p99", "match_list", "memory",
    ]  # fmt: skip
    alongside = {name: float(line.split()[-4]) for name, line in lines.items() if "beside" in line}
    assert alongside.keys() == {"store", "match_list"}
    assert min(alongside.values()) > 1000


PEER_SUBSCRIBER = """
import json, sys, time
import msgspec, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
blocks, numbers, last = 0, [], int(sys.argv[2])
while not numbers or numbers[-1] < last:
    _, number, payload = socket.recv_multipart()
    numbers.append(int.from_bytes(number, "big"))
    for event in msgspec.msgpack.decode(payload)[1]:
        blocks += len(event["block_hashes"]) if event["type"] == "BlockStored" else 0
assert numbers == list(range(last + 1))
print(json.dumps({"blocks": blocks, "until": time.time()}))
"""


def test_benchmark_of_the_feed_times_steps(capfd: pytest.CaptureFixture[str]) -> None:
    """A few steps of an engine with a sink, of which its listener hears."""
    run = feed_steps.measure("in-process", 120, 0.0)
    assert (len(run["times"]), run["missing"], sum(run["dropped"].values())) == (120, 0, 0)
    assert len(run["late"]) == len(run["flushed"]) > 0
    assert capfd.readouterr() == ("", "")


def test_benchmark_of_the_feed_counts_blocks() -> None:
    """A subscriber finds those of the messages that it is sent."""
    messages = [[b"", b"", batch(stored(3))], [b"", b"", batch(stored(5, 7))]]
    blocks, seconds = feed_streams.speak(messages, [sys.executable, feed_streams.__file__, "--consume"])
    assert blocks == 3
    assert seconds > 0


@pytest.mark.long
@pytest.mark.timeout(180)
def test_benchmark_of_the_feed_gives_everything_in_one_run(
    tmp_path: Path, measured: Callable[..., str]
) -> None:
    """Tiny runs of all parts: every figure, nothing that a subscriber missed, and a peer that got all blocks, too."""
    (tmp_path / "peer.py").write_text(PEER_SUBSCRIBER)
    modes = ["none", "in-process", "five", "sidecar-five"]
    sizes = ["--rounds", 1, "--repeat", 1, "--steps", 200, "--forward-ms", 1, "--blocks", 4096]
    peer = f"{sys.executable} {tmp_path / 'peer.py'}"
    reported = json.loads(measured(feed.main, "--json", *sizes, "--modes", *modes, "--peer", peer))
    assert list(reported) == ["steps", "streams", "index"]
    steps = reported["steps"]
    assert list(steps) == modes
    assert {name: values["missing"] for name, values in steps.items()} == dict.fromkeys(steps, 0)
    # Only the sink that hangs in the engine has lost anything; a sidecar's reads the log later.
    assert [name for name, values in steps.items() if values["dropped"]] == ["five"]
    assert [name for name, values in steps.items() if "late_ms_p99" not in values] == ["none"]
    assert steps["none"]["longer_mean_%"] == 0
    assert reported["streams"].keys() == {
        "published", "late_join", "late_join_again", "late_join_index",
        "consumed", "consumed_by_peer", "ours_to_peer",
    }  # fmt: skip
    assert all(value > 0 for value in reported["streams"].values())
    assert reported["index"]["beside"] == {}


@pytest.mark.long
def test_benchmark_refuses_a_peer_that_misses_blocks(tmp_path: Path, measured: Callable[..., str]) -> None:
    """How fast a subscriber is that did not take everything is no figure."""
    (tmp_path / "peer.py").write_text(PEER_SUBSCRIBER.replace("blocks += len", "blocks += 1 < len"))
    peer = f"{sys.executable} {tmp_path / 'peer.py'}"
    with pytest.raises(SystemExit, match=r"has heard of 4 blocks instead of 512$"):
        measured(feed.main, "--only", "streams", "--repeat", 1, "--blocks", 512, "--peer", peer)


def test_benchmark_of_the_log_gives_everything_in_one_run(
    tmp_path: Path, measured: Callable[..., str]
) -> None:
    """A short trace: sizes; what was appended, and as much written by itself; steps; replays, also from a snapshot."""
    options = ["--requests", REQUESTS, "--repeat", 1, "--step-requests", 3, "--dir", tmp_path, "--json"]
    reported = json.loads(measured(log.main, TRACE, *options))
    sizes = [name for name in reported if name.startswith("sizes")]
    assert [name for name in reported if name not in sizes] == [
        "append",
        "steps",
        "replay",
        "replay, compressed",
    ]
    assert all(
        figure > 0
        for part in reported.values()
        for name, figure in part.items()
        if name != "cpu_ms_per_megabyte_of_compression"
    )
    for name in sizes:
        assert reported[name]["part_of_zstd_at_once"] < 1.1
        assert reported[name]["bytes_per_token_compressed"] < 0.9 * reported[name]["bytes_per_token"]
    append = reported["append"]
    assert append["part_of_raw"] * append["raw_megabytes_per_second"] == pytest.approx(
        append["megabytes_per_second"]
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(600)
def test_policies(measured: Callable[..., str]) -> None:
    """A line for each policy and size; without the rule for prefixes LRU and FIFO have libCacheSim's hits."""
    out = measured(policies.main, TRACE, "--sizes", 4, "--policies", "lru,fifo").splitlines()
    assert [line.split()[:2] for line in out[1:3]] == [["lru", "4"], ["fifo", "4"]]
    for line in out[1:3]:
        rates = dict(re.findall(r"(ours|flat|libcachesim) +([\d.]+%)", line))
        assert rates.get("libcachesim", rates["flat"]) == rates["flat"] != "0.00%"
    assert find_spec("libcachesim") is not None or "pip install libcachesim" in out[-1]
