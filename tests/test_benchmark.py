"""The benchmark runs, and what it measures is the work that it says: as many tokens are reused as the trace allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


# Starting interpreters would be most of the time, so only one of the runs has a process of its own.
MAIN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import manager
apart = manager.measure_apart
def measure(mode, *trace, **options):
    return (apart if (mode, options) == ("off", {}) else manager.measure)(mode, *trace, **options)
manager.measure_apart = measure
manager.main()
"""


def test_benchmark_runs_and_reuses_what_the_trace_allows(tmp_path: Path) -> None:
    """A short trace in three modes gives the four numbers, and the reuse that the trace's ids make possible."""
    options = ["--requests", str(REQUESTS), "--repeat", "1", "--modes", "off", "log", "wire", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, str(ROOT / "benchmarks"), str(TRACE), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    times = ("cpu_seconds_per_1000", "cpu_seconds_per_1000_events_off", "cpu_seconds_per_1000_wire")
    assert told.keys() == {"modes", "hit_tokens", *times}
    assert all(told[name] > 0 for name in times)  # how fast is no test's business: machines differ
    assert told["hit_tokens"] == reusable_tokens() > 0
    modes = told["modes"]
    assert {(mode["requests"], mode["waits"], mode["hit_tokens"]) for mode in modes.values()} == {
        (REQUESTS, 0, told["hit_tokens"])
    }
    assert [name for name, mode in modes.items() if mode["log_bytes"]] == ["log"]


PEER = """
import json, marshal, sys
stores, prompts, removals = marshal.load(open(sys.argv[1], "rb"))
assert len(prompts) and {len(hashes) for _, _, hashes, _ in stores} == {16}
print(json.dumps({"store": 1e-9, "match_list": 1e9, "noise": 0}))
"""


def test_benchmark_of_the_index_runs_beside_another_one(tmp_path: Path) -> None:
    """A short run gives all figures, and ratios that are above 1 where ours is better, whichever way that is."""
    (tmp_path / "peer.py").write_text(PEER)
    command = [sys.executable, str(ROOT / "benchmarks" / "index.py"), "--blocks", "4000", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--beside", f"{sys.executable} {tmp_path / 'peer.py'}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert list(lines) == [
        "store", "wire", "remove", "match_packed", "match_packed_p99", "match_list", "memory",
    ]  # fmt: skip
    beside = {name: float(line.split()[-4]) for name, line in lines.items() if "beside" in line}
    assert beside.keys() == {"store", "match_list"}
    assert min(beside.values()) > 1000


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


@pytest.mark.timeout(180)
def test_benchmark_of_the_feed_gives_everything_in_one_run(tmp_path: Path) -> None:
    """Tiny runs of all parts: every figure, nothing that a subscriber missed, and a peer that got all blocks, too."""
    (tmp_path / "peer.py").write_text(PEER_SUBSCRIBER)
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "feed.py"),
        "--json",
        "--rounds",
        "1",
        "--repeat",
        "1",
    ]
    modes = ["none", "in-process", "five", "sidecar-five"]
    options = ["--modes", *modes, "--steps", "200", "--forward-ms", "1", "--blocks", "4096"]
    done = subprocess.run(
        [*command, *options, "--peer", f"{sys.executable} {tmp_path / 'peer.py'}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert list(told) == ["steps", "streams", "index"]
    steps = told["steps"]
    assert list(steps) == modes
    assert {name: values["missing"] for name, values in steps.items()} == dict.fromkeys(steps, 0)
    # Only the sink that hangs in the engine has lost anything; a sidecar's reads the log later.
    assert [name for name, values in steps.items() if values["dropped"]] == ["five"]
    assert [name for name, values in steps.items() if "late_ms_p99" not in values] == ["none"]
    assert steps["none"]["longer_mean_%"] == 0
    assert told["streams"].keys() == {
        "published", "late_join", "late_join_again", "late_join_index",
        "consumed", "consumed_by_peer", "ours_to_peer",
    }  # fmt: skip
    assert all(value > 0 for value in told["streams"].values())
    assert told["index"]["beside"] == {}


def test_benchmark_refuses_a_peer_that_misses_blocks(tmp_path: Path) -> None:
    """How fast a subscriber is that did not take everything is no figure."""
    (tmp_path / "peer.py").write_text(PEER_SUBSCRIBER.replace("blocks += len", "blocks += 1 < len"))
    command = [sys.executable, str(ROOT / "benchmarks" / "feed.py"), "--only", "streams", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--blocks", "512", "--peer", f"{sys.executable} {tmp_path / 'peer.py'}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("has heard of 4 blocks instead of 512\n")


def test_benchmark_of_the_log_gives_everything_in_one_run(tmp_path: Path) -> None:
    """A short trace: what was appended, and as much written by itself; steps; replays, also from a snapshot."""
    command = [sys.executable, str(ROOT / "benchmarks" / "log.py"), str(TRACE), "--requests", str(REQUESTS)]
    done = subprocess.run(
        [*command, "--repeat", "1", "--step-requests", "3", "--dir", str(tmp_path), "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert list(told) == ["append", "steps", "replay"]
    assert all(figure > 0 for part in told.values() for figure in part.values())
    append = told["append"]
    assert append["part_of_raw"] * append["raw_megabytes_per_second"] == pytest.approx(
        append["megabytes_per_second"]
    )
    assert list(tmp_path.iterdir()) == []
