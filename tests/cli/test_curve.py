"""`kvcache curve`: the table, its marks, and what is refused."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit.curve import CurveRecorder, LoggedPrompts, best_hits
from kvcache.report.charts import curve_by_size
from kvcache.report.imported import ImportedCurve
from tests.support.commands import Kvcache, run_log
from tests.support.places import ROOT

pytestmark = pytest.mark.timeout(600)
"""The first policy that is played waits for the compiler, which takes long on a machine that is busy."""


def recorded(log: Path) -> CurveRecorder:
    recorder = CurveRecorder()
    for blocks in LoggedPrompts(log):
        recorder.add(blocks)
    return recorder


def found(kvcache: Kvcache, *args: Any) -> dict[str, Any]:
    done = kvcache("curve", *args, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    """A log of four prompts of two full blocks, two after two, that all begin alike; 4 primary blocks, 2 secondary."""
    config = KVCacheConfig(
        max_sequence_length=12,
        tokens_per_block=4,
        primary_blocks=4,
        secondary_blocks=2,
        num_layers=4,
        head_dim=4,
    )
    with KVCacheManager(config, log=tmp_path / "turns") as manager:
        for number in (1, 2, 1, 2):
            manager.add_sequence(number, [7] * 4 + [number] * 5)
            manager.store_context_blocks(number, 8)
            manager.remove_sequence(number)
            manager.flush()
    return tmp_path / "turns"


def test_table(kvcache: Kvcache, turns: Path) -> None:
    """Sizes, hit rates by level, the bound where it was asked, bars and marks; a block has 512 bytes."""
    done = kvcache("curve", turns, "--bound", "2,3")
    assert done.err == ""
    assert done.out == TABLE.format(turns)


TABLE = """\
{}: reuse of its prompts by cache size
  prompts   4 with 8 full blocks of 4 tokens, 3 of them distinct
  now       4 + 2 blocks: 62.5 % from primary, 0.0 % from secondary
  recorded  62.5 % from primary, 0.0 % from secondary by the cache itself, with concurrent requests
  knee      3 blocks: no doubling from there gains a percentage point

  blocks    bytes  block hit rate  primary  secondary  at best
       1    512 B          37.5 %   37.5 %      0.0 %           ███████████
       2  1.0 KiB          37.5 %   37.5 %      0.0 %   37.5 %  ███████████
       3  1.5 KiB          62.5 %   62.5 %      0.0 %   62.5 %  ███████████████████  knee
       4  2.0 KiB          62.5 %   62.5 %      0.0 %           ███████████████████  primary now
       6  3.0 KiB          62.5 %   62.5 %      0.0 %           ███████████████████  both levels now

block hit rate: reused fraction of the prompts' full blocks
at best: hit rate of a clairvoyant cache of this size, in one level
"""


def test_bytes_of_no_model_are_not_reported(kvcache: Kvcache, log: Path) -> None:
    """A log whose settings are those of no model has no bytes worth telling."""
    out = kvcache("curve", log).out
    assert "KiB" not in out
    assert "bytes are unknown: the log's settings do not describe a model" in out


def test_json(kvcache: Kvcache, log: Path) -> None:
    """The numbers are those of the library, at powers of two, at the log's own sizes, the knee, and where asked."""
    said = found(kvcache, log, "--bound", "50,100")
    recorder = recorded(log)
    curve = recorder.curve()
    sizes = {each["blocks"]: each for each in said["sizes"]}
    assert {50, 100, 120, 220, said["knee"], 64, 128, 256} <= sizes.keys()
    assert list(sizes) == sorted(sizes)
    assert max(sizes) >= curve.distinct_blocks
    for size, each in sizes.items():
        assert each["hits"] == curve.hits(size) == sum(each["level_hits"].values())
        assert each["level_hits"]["primary"] == curve.hits(min(size, 120))
        assert each["hit_rate"] == curve.hits(size) / curve.block_requests
        assert each["best_hits"] == (best_hits(recorder.reuses, size) if size in (50, 100) else None)
        assert each["standard_error"] == 0
    assert (said["knee"], said["block_requests"]) == (curve.knee, curve.block_requests)
    assert said["num_blocks"] == {"primary": 120, "secondary": 100}
    assert said["recorded_hit_rate"]["secondary"] > 0
    assert said["bytes_per_block"] == 2048


def test_sample(kvcache: Kvcache, log: Path) -> None:
    """Samples say how far off they may be, and begin at sizes for which they have some blocks."""
    said, exact = found(kvcache, log, "--sample", "0.25"), recorded(log).curve()
    assert said["sample_rate"] == 0.25
    assert min(each["blocks"] for each in said["sizes"]) >= 32
    assert any(each["standard_error"] > 0 for each in said["sizes"])
    for each in said["sizes"]:
        assert abs(each["hit_rate"] - exact.hit_rate(each["blocks"])) < 0.2
    last = said["sizes"][-1]
    assert 0 < abs(last["hit_rate"] - exact.hit_rate(last["blocks"])) < 0.05
    done = kvcache("curve", log, "--sample", "0.25")
    assert "from 4 samples of 0.25 of the blocks" in done.out
    assert " ± " in done.out
    assert " ± " not in kvcache("curve", log).out


def test_small_samples(kvcache: Kvcache, log: Path) -> None:
    """A few sampled blocks give no knee and no standard error; a warning says how few they are, and what would do."""
    done = kvcache("curve", log, "--sample", "0.05")
    assert done.code == 0
    assert "blocks each, too few for accurate hit rates" in done.err
    assert "give --sample 0." in done.err
    assert "knee" not in done.out
    assert "±" not in done.out
    said = json.loads(kvcache("curve", log, "--sample", "0.05", "--json").out)
    assert said["knee"] is None
    assert len(said["sampled_blocks"]) == 4
    assert min(said["sampled_blocks"]) < 32
    assert {each["standard_error"] for each in said["sizes"]} == {None}
    assert found(kvcache, log)["sampled_blocks"] is None


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_empty_samples(kvcache: Kvcache, log: Path, options: tuple[str, ...]) -> None:
    """A rate that takes no block is refused, and a larger one is named."""
    done = kvcache("curve", log, "--sample", "0.0000001", *options)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "no block of the prompts is in a sample of 1e-07 of them: give a sample rate of 0." in done.err


def test_one_level(kvcache: Kvcache, tmp_path: Path) -> None:
    """Where there is no secondary level the table does not speak of it."""
    out = kvcache("curve", run_log(tmp_path / "log", "--primary-blocks", 120, "--secondary-blocks", 0)).out
    assert "120 blocks: " in out
    assert "secondary" not in out


def test_no_prompts(kvcache: Kvcache, tmp_path: Path) -> None:
    """A log in which nothing was admitted has no table, and no numbers but 0."""
    config = KVCacheConfig(max_sequence_length=8, primary_blocks=2)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        manager.flush()
    done = kvcache("curve", tmp_path / "log")
    assert (done.code, done.err) == (0, "")
    assert "none: no block is requested twice" in done.out
    assert found(kvcache, tmp_path / "log")["block_requests"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sample", "0"), "'0' is not a number above 0 and at most 1"),
        (("--sample", "1.5"), "is not a number above 0"),
        (("--sample", "x"), "is not a number above 0"),
        (("--bound", "0"), "'0' is not an integer that is at least 1"),
        (("--bound", "1,,2"), "'' is not an integer"),
        (("--bound", "9223372036854775807"), "give up to 2,147,483,647 blocks"),
        (("--bound", "5,99999999999999999999999"), "give up to 2,147,483,647 blocks"),
        (("--bound", "2", "--sample", "0.5"), "the bound requires all blocks, not samples"),
    ],
)
def test_usage(kvcache: Kvcache, log: Path, options: tuple[str, ...], says: str) -> None:
    """What cannot be asked is one line, and exit code 2."""
    done = kvcache("curve", log, *options)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert says in done.err


def test_log_without_tokens(kvcache: Kvcache, tmp_path: Path) -> None:
    """Its curve is that of the same run with tokens; a line says how blocks are told apart. Advice needs tokens."""
    size = ("--primary-blocks", 120)
    bare = run_log(tmp_path / "bare", *size, "--set", "log.record_tokens=false")
    curves = [
        json.loads(kvcache("curve", each, "--json").out) for each in (bare, run_log(tmp_path / "log", *size))
    ]
    assert curves[0]["sizes"] == curves[1]["sizes"]
    assert (curves[0]["unnamed_blocks"], curves[1]["unnamed_blocks"]) == (0, None)
    assert "the log records no tokens: blocks are told apart by name" in kvcache("curve", bare).out
    done = kvcache("advise", bare)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "records no tokens" in done.err
    assert "log.record_tokens=true" in done.err


def test_windows(kvcache: Kvcache, tmp_path: Path) -> None:
    """Of several windows the one with full attention is named."""
    options = ("--set", "max_attention_window=64,900", "--set", "max_sequence_length=900")
    out = kvcache("curve", run_log(tmp_path / "log", "--primary-blocks", 120, *options)).out
    assert "900, with full attention; sliding windows are ignored" in out


TRACE = ROOT / "tests" / "data" / "chats_small.jsonl"


def test_a_trace_is_what_its_log_is(kvcache: Kvcache, tmp_path: Path) -> None:
    """The curve of a trace is that of the log of a run of it, whose blocks are the trace's."""
    args = ("--tokens-per-block", 512, "--primary-blocks", 4000, "--no-pools", "--concurrency", 1, "-q")
    assert kvcache("run", TRACE, *args, "--log", tmp_path / "log").code == 0
    of_log = found(kvcache, tmp_path / "log", "--bound", "20,100")
    of_trace = found(kvcache, TRACE, "--bound", "20,100")
    same = ("prompts", "tokens_per_block", "block_requests", "distinct_blocks", "knee", "sample_rate")
    assert {name: of_trace[name] for name in same} == {name: of_log[name] for name in same}
    sizes = {each["blocks"]: each for each in of_log["sizes"]}
    for each in of_trace["sizes"]:
        assert (each["hits"], each["best_hits"]) == (
            sizes[each["blocks"]]["hits"],
            sizes[each["blocks"]]["best_hits"],
        )
    assert of_trace["sizes"][-1]["hits"] > 0
    (tmp_path / "trace.json").write_text(json.dumps(of_trace))
    done = kvcache(
        "report", tmp_path / "log", "--curve", tmp_path / "trace.json", "-o", tmp_path / "page.html"
    )
    assert "is about the trace" in done.err


def test_traces(kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stdin; with tokens, cut into the blocks that one asks for; and one that says nothing of reuse."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TRACE.read_bytes())))
    piped = kvcache("curve", "-")
    assert piped.out.splitlines()[1:] == kvcache("curve", TRACE).out.splitlines()[1:]
    assert "now" not in piped.out
    calls = tmp_path / "calls.jsonl"
    calls.write_text(
        "".join(f'{{"timestamp": {at}, "prompt_token_ids": {[*range(17)]}}}\n' for at in range(3))
    )
    seen = found(kvcache, calls, "--tokens-per-block", 4)
    assert (seen["block_requests"], seen["distinct_blocks"], seen["sizes"][-1]["hits"]) == (12, 4, 8)
    arrivals = tmp_path / "azure.csv"
    arrivals.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    done = kvcache("curve", arrivals)
    assert (done.code, done.out) == (2, "")
    assert "arrivals and lengths only" in done.err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"{bad")))
    assert "-:1: JSON is malformed" in kvcache("curve", "-").err
    assert "give a log directory, or a trace" in kvcache("curve", tmp_path / "nothing").err


@pytest.mark.parametrize("option", ["--tokens-per-block", "--trace-block-size", "--tokenizer"])
def test_options_of_traces(kvcache: Kvcache, log: Path, option: str) -> None:
    """Are refused where there is a log."""
    assert f"{option} is only valid for traces" in kvcache("curve", log, option, 16).err


def test_run_and_curve_keep_models_apart(kvcache: Kvcache, tmp_path: Path) -> None:
    """Requests of two models share nothing in either."""
    line = (
        '{{"timestamp": {}, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2], "model": "{}"}}\n'
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(line.format(at, at % 2) for at in range(4)))
    assert found(kvcache, trace)["distinct_blocks"] == 2
    options = ("--no-pools", "--concurrency", 1, "--tokens-per-block", 512, "--json")
    assert json.loads(kvcache("run", trace, *options).out)["reused_tokens"] == 2 * 1023


IDLE = """\
{}: reuse of its prompts by idle timeout
  prompts  6 with 12 full blocks of 4 tokens, 3 of them distinct
  knee     3 blocks: no doubling from there gains a percentage point
  covered  9 min; reuse after longer pauses is not visible

  timeout  block hit rate  tokens lost
     10 s          16.7 %           28  █████
     30 s          25.0 %           24  ████████
     60 s          33.3 %           20  ██████████
    2 min          41.7 %           16  ████████████
    5 min          66.7 %            4  ████████████████████
     none          75.0 %            0  ██████████████████████

block hit rate: reused fraction of the prompts' full blocks, in an unbounded cache that drops blocks
idle for longer than the timeout; tokens lost: reused only without a timeout
"""


def test_timeouts(kvcache: Kvcache, tmp_path: Path) -> None:
    """Hits by how long blocks are kept that nobody asks for; each of these is one that was asked for that long ago."""
    trace = tmp_path / "calls.jsonl"
    calls = [(0, 1), (9, 2), (19, 1), (79, 2), (379, 2), (560, 1)]
    trace.write_text(
        "".join(f'{{"timestamp": {at}, "prompt_token_ids": {[7] * 4 + [own] * 5}}}\n' for at, own in calls)
    )
    done = kvcache("curve", trace, "--tokens-per-block", 4, "--ttl")
    assert (done.err, done.out) == ("", IDLE.format(trace))
    said = found(kvcache, trace, "--tokens-per-block", 4)
    assert [each["seconds"] for each in said["timeouts"]] == [10, 30, 60, 120, 300, None]
    assert [each["hits"] for each in said["timeouts"]] == [2, 3, 4, 5, 8, 9]
    assert [each["lost_tokens"] for each in said["timeouts"]] == [28, 24, 20, 16, 4, 0]
    assert [each["hit_rate"] for each in said["timeouts"]] == [each["hits"] / 12 for each in said["timeouts"]]
    assert said["covered_seconds"] == 560
    assert said["sizes"][-1]["hits"] == 9


def test_costs_of_timeouts(kvcache: Kvcache, tmp_path: Path) -> None:
    """Each prompt computes what lies behind its blocks that were asked for lately enough."""
    trace = tmp_path / "calls.jsonl"
    calls = [(0, 1), (9, 2), (19, 1), (79, 2), (379, 2), (560, 1)]
    trace.write_text(
        "".join(f'{{"timestamp": {at}, "prompt_token_ids": {[7] * 4 + [own] * 5}}}\n' for at, own in calls)
    )
    options = ("--tokens-per-block", 4, "--prefill", "10 + 2 n + 1 n m", "--price", 3, "--gpus", 2)
    said = found(kvcache, trace, *options)["timeouts"]

    def seconds(timeout: float) -> float:
        used, total = dict[tuple[int, ...], int](), 0.0
        for at, own in calls:
            reused = 0
            for block in ((7,), (7, own)):
                reused += 4 * (at - used.get(block, -1_000_000) <= timeout)
                used[block] = at
            total += 10 + sum(2 + token + 0.5 for token in range(reused, 9))
        return total

    for each in said:
        total = seconds(each["seconds"] or 10_000)
        assert each["prefill"]["gpu_hours"] == pytest.approx(total * 2 / 3600)
        assert each["prefill"]["cost_per_hour"] == pytest.approx(total * 2 / 3600 * 3 / (560 / 3600))
    out = kvcache("curve", trace, *options, "--ttl").out
    assert re.search(
        r"timeout  block hit rate  tokens lost  +prefill  +p95  GPU-hours +saved  USD saved/h\n", out
    )
    assert {each["prefill"] for each in found(kvcache, trace)["timeouts"]} == {None}


def test_policies(kvcache: Kvcache) -> None:
    """A column each, at the sizes that were given; `lru` is the curve, and a report draws a line each."""
    options = ("--policy", "lru, s3fifo,slru:0.5,lru", "--sizes", "10,40", "--bound", "40")
    said = found(kvcache, TRACE, *options)
    assert [each["blocks"] for each in said["sizes"]] == [10, 40]
    for each in said["sizes"]:
        hits = {policy["name"]: policy["hits"] for policy in each["policies"]}
        assert list(hits) == ["lru", "s3fifo", "slru:0.5"]
        assert hits["lru"] == each["hits"] > 0
        assert max(hits.values()) <= (each["best_hits"] or said["block_requests"])
    table = kvcache("curve", TRACE, *options).out
    assert "blocks  block hit rate" in table
    assert "s3fifo  slru:0.5  at best" in table
    assert "hit rates of other eviction policies" in table
    names = [line["name"] for line in curve_by_size(msgspec.convert(said, ImportedCurve))["data"]]
    assert names == ["block hit rate", "at best (clairvoyant)", "lru", "s3fifo", "slru:0.5"]
    assert found(kvcache, TRACE)["sizes"][0]["policies"] == []


def test_policies_of_a_log(kvcache: Kvcache, log: Path) -> None:
    """At all sizes of the table, where none is given."""
    said = found(kvcache, log, "--policy", "lru")
    assert len(said["sizes"]) > 5
    assert all(each["policies"] == [{"name": "lru", "hits": each["hits"]}] for each in said["sizes"])


def test_policies_by_stop_and_time(kvcache: Kvcache, tmp_path: Path) -> None:
    """Of a trace come times, stop reasons and how long outputs are.

    Three conversations of two blocks come, a second apart, to a cache for two, then the first again. With `stop` it has
    its blocks, since it waits for a tool, unless half a second is all that they are kept. With `--hold` nothing
    makes room for the third.
    """
    trace = tmp_path / "trace.jsonl"
    line = '{{"timestamp":{},"input_length":1025,"output_length":50,"hash_ids":[{}],"stop":"{}"}}\n'
    turns = [("1,2,9", "tool_use"), ("3,4,8", "end_turn"), ("5,6,7", "end_turn"), ("1,2,9", "end_turn")]
    trace.write_text("".join(line.format(1000 * at, *turn) for at, turn in enumerate(turns)))
    hits = {
        name: found(kvcache, trace, "--sizes", "4", "--policy", *options)["sizes"][0]["policies"][0]["hits"]
        for name, options in {
            "lru": ("lru",),
            "stop": ("stop",),
            "over": ("stop:0.5",),
            "held": ("lru", "--hold", "10"),
        }.items()
    }
    assert hits == {"lru": 0, "stop": 2, "over": 0, "held": 2}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policy", "lru,mru"), "policy 'mru': there are lru, fifo"),
        (("--policy", ""), "policy '': there are lru, fifo"),
        (("--policy", "lru", "--sample", "0.5"), "--policy needs all blocks"),
        (("--policy", "stop"), "no request has a stop reason, which the policy stop needs"),
        (("--policy", "lru", "--ttl"), "--ttl cannot be combined with --policy"),
        (("--hold", "50"), "--hold requires --policy"),
        (("--policy", "lru", "--hold", "0"), "'0' is not a number of tokens per second"),
        (("--policy", "lru", "--hold", "5", "--bound", "9"), "--bound cannot be combined with --hold"),
        (("--policy", "lru", "--hold", "5"), "--hold works with traces only"),
    ],
)
def test_policies_that_cannot_be_played(
    kvcache: Kvcache, log: Path, options: tuple[str, ...], says: str
) -> None:
    """Each is one line that says what to give."""
    done = kvcache("curve", log, *options)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert says in done.err


def test_policies_without_numba(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are played all the same, and a warning says what is missing."""
    monkeypatch.setattr("kvcache.cli.curve.COMPILED", False)
    done = kvcache("curve", TRACE, "--policy", "fifo", "--sizes", "5")
    assert done.code == 0
    assert "pip install 'kvcache[simulate]'" in done.err
