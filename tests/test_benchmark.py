"""The benchmark runs, and what it measures is the work that it says: as many tokens are reused as the trace allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

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
