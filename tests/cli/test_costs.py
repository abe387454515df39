"""Seconds, money and bytes in `kvcache audit`, `curve`, `whatif` and `report`, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcache import KVCacheConfig, KVCacheManager, Recorder, Request
from kvcache.manager import Substitutes
from tests.support.answers import assert_documented
from tests.support.commands import Kvcache

HALF_AN_HOUR = 1800 * 10**9
FORMULA = ("--prefill", "10 + 2 n + 1 n m")
PRICE = ("--price", "3", "--currency", "EUR", "--gpus", "2")
MODEL = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
MODEL |= {"head_dim": 8, "hidden_size": 16, "torch_dtype": "bfloat16"}
IN_BLOCK = 4 * 2 * 2 * 8 * 2 * 4
"""Bytes: layers, K and V, heads, elements, bytes, tokens."""


def write(place: Path, prompts: tuple[int, ...] = (0, 0), blocks: int = 8) -> Path:
    """Prompts of 13 tokens, half an hour apart, that begin with these; in so many blocks of four."""
    config = KVCacheConfig(
        max_sequence_length=16, tokens_per_block=4, primary_blocks=blocks, enable_partial_reuse=False
    )
    now = [1_790_000_000 * 10**9]
    own = Substitutes(wall_ns=lambda: now[0])
    with KVCacheManager(config, log=place, substitutes=own) as manager:
        for number, first in enumerate(prompts):
            now[0] += HALF_AN_HOUR * bool(number)
            manager.add_sequence(number, list(range(first, first + 13)))
            manager.store_context_blocks(number, 13)
            manager.remove_sequence(number)
            manager.flush()
    return place


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """Two equal prompts: of the second one 12 tokens are reused."""
    return write(tmp_path / "twice")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path / "config.json"


def answer(kvcache: Kvcache, *args: Any) -> Any:
    done = kvcache(*args, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


class TestAudit:
    """The first takes 10 + 2·13 + 13²/2 = 120.5 seconds, the second 10 + 2 + 12.5 = 24.5; reuse saves 24 + 72 = 96."""

    def test_text(self, kvcache: Kvcache, twice: Path, model: Path) -> None:
        """Facts, and what the tokens of each reason take."""
        out = kvcache("audit", twice, *FORMULA, *PRICE, "--model-config", model).out
        assert TEXT in out
        assert REASONS in out

    def test_json(self, kvcache: Kvcache, twice: Path, model: Path) -> None:
        """The same numbers, of the reasons, too."""
        said = answer(kvcache, "audit", twice, *FORMULA, *PRICE, "--model-config", model)
        assert said["prefill_model"] == {
            "formula": "10 + 2 n + 1 n m",
            "gpus": 2,
            "hours": 0.5,
            "price_per_gpu_hour": 3,
            "currency": "EUR",
            "fit": None,
        }
        assert_documented("audit", said)
        found = said["prefill"]
        assert (found["mean_seconds"], found["p50_seconds"]) == (72.5, 72.5)
        assert found["p95_seconds"] == pytest.approx(24.5 + 0.95 * 96)
        assert found["gpu_hours"] == pytest.approx(145 * 2 / 3600)
        assert found["saved_gpu_hours"] == pytest.approx(96 * 2 / 3600)
        assert found["cost_per_hour"] == pytest.approx(145 * 2 / 3600 * 3 / 0.5)
        assert found["saved_per_hour"] == pytest.approx(96 * 2 / 3600 * 3 / 0.5)
        hours = {name: each * 1800 for name, each in found["gpu_hours_by_reason"].items() if each}
        assert hours == pytest.approx({"primary": 96, "last_token": 29, "never_seen": 96})
        assert said["memory"] == {
            "bytes_per_block": IN_BLOCK,
            "cache_bytes": {"primary": 8 * IN_BLOCK, "secondary": 0},
            "stored_bytes": 3 * IN_BLOCK,
            "evicted_bytes": {"primary": 0, "secondary": 0},
            "offloaded_bytes": 0,
            "onboarded_bytes": 0,
        }
        assert said["model"]["bytes_per_token"] == IN_BLOCK // 4

    def test_without_options_nothing_is_said(self, kvcache: Kvcache, twice: Path) -> None:
        """The log's settings name no model, and nobody says how long prefills take."""
        said = answer(kvcache, "audit", twice)
        assert [said[name] for name in ("prefill_model", "prefill", "model", "memory")] == [None] * 4
        out = kvcache("audit", twice).out
        assert "GPU-hours" not in out
        assert "KiB" not in out

    def test_only_part_of_the_log(self, kvcache: Kvcache, twice: Path) -> None:
        """What does not count costs nothing; a single batch has no hours."""
        said = answer(kvcache, "audit", twice, *FORMULA, *PRICE, "--since", "2", "--until", "2")
        assert (said["prefill"]["mean_seconds"], said["prefill"]["saved_gpu_hours"]) == (24.5, 96 * 2 / 3600)
        assert (said["prefill_model"]["hours"], said["prefill"]["cost_per_hour"]) == (None, None)

    def test_evictions_are_priced(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Of a cache of four blocks: the blocks of the first prompt go for the second, and are computed again."""
        log = write(tmp_path / "log", (100, 200, 100), blocks=4)
        # 96 seconds of 2 GPUs are 0.0533 hours, 3 EUR each, within the log's hour.
        out = kvcache("audit", log, *FORMULA, *PRICE).out
        assert "lost             0.0533 GPU-hours, 0.160 EUR per hour, on tokens that had been evicted" in out

    def test_by_group(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Tenant a computes what b reuses: 120.5 and 24.5 seconds; the others, one of c, take 120.5."""
        now = [1_790_000_000 * 10**9]
        config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=8)
        own = Substitutes(wall_ns=lambda: now[0])
        with KVCacheManager(config, log=tmp_path / "log", substitutes=own) as manager:
            for tenant, first in (("a", 0), ("b", 0), ("c", 100)):
                request = Request(tenant, list(range(first, first + 13)), labels={"tenant": tenant})
                manager.add_sequences([request])
                manager.store_context_blocks(tenant, 13)
                manager.remove_sequence(tenant)
                manager.flush()
            now[0] += HALF_AN_HOUR
        said = answer(kvcache, "audit", tmp_path / "log", "--by", "tenant", "--top", 2, *FORMULA, *PRICE)
        whole = {"turns": [], "prefill": 0, "prefill_model": 0}
        assert_documented("audit --by", said | whole)
        groups = [*said["groups"], said["others"]]
        seconds = [each["prefill"]["gpu_hours"] * 1800 for each in groups]
        assert seconds == pytest.approx([120.5, 24.5, 120.5])
        assert [each["prefill"]["saved_gpu_hours"] * 1800 for each in groups] == pytest.approx([0, 96, 0])
        for name in ("gpu_hours", "saved_gpu_hours", "cost_per_hour", "saved_per_hour"):
            assert sum(each["prefill"][name] for each in groups) == pytest.approx(said["prefill"][name])
        out = kvcache("audit", tmp_path / "log", "--by", "tenant", *FORMULA, *PRICE).out
        [row] = [line for line in out.splitlines() if line.split()[:2] == ["b", "1"]]
        assert row.split()[-3:] == ["0.0136", "0.0533", "0.0817"]

    def test_workers_together(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Of several logs each one's, and those of all: time is from the first of all batches to the last."""
        for name in ("east", "west"):
            write(tmp_path / "fleet" / name)
        said = answer(kvcache, "audit", tmp_path / "fleet", *FORMULA, *PRICE, "--jobs", 1)
        assert said["prefill"]["gpu_hours"] == pytest.approx(2 * 145 * 2 / 3600)
        assert said["prefill"]["cost_per_hour"] == pytest.approx(2 * 145 * 2 / 3600 * 3 / 0.5)
        assert [each["audit"]["prefill"]["mean_seconds"] for each in said["workers"]] == [72.5, 72.5]
        out = kvcache("audit", tmp_path / "fleet", *FORMULA, *PRICE, "--jobs", 1).out
        assert "GPU-hours        0.161 for prefills; reuse saved 0.107" in out
        assert "EUR saved/h" in out


TEXT = """\
  prefill          10 + 2 n + 1 n m seconds for n tokens that attend to m tokens each
  time to prefill  72.50 s on average, p50 72.50 s, p95 115.70 s
  GPU-hours        0.0806 for prefills; reuse saved 0.0533
  EUR per hour     0.483 for prefills; reuse saves 0.320
  K and V          256 B per token of llama: 4 layers, bfloat16
  memory           8.0 KiB in primary; 1.0 KiB per block
                   3.0 KiB stored, 0 B evicted from primary
"""
REASONS = """
  prompt tokens                      count   share  GPU-hours   EUR/h
  reused from primary                   12  46.2 %     0.0533   0.320
  the last token is always computed      2   7.7 %     0.0161  0.0967
  never seen before                     12  46.2 %     0.0533   0.320
"""


class TestCurve:
    """Of the same two prompts, of three full blocks each: with one block 4 tokens are reused, with three 12."""

    def test_sizes(self, kvcache: Kvcache, twice: Path, model: Path) -> None:
        """Seconds at each size, worked out by hand, and bytes."""
        options = (*FORMULA, *PRICE, "--model-config", model, "--sizes", "3,2KiB,2.9KiB")
        said = answer(kvcache, "curve", twice, *options)
        assert_documented("curve", said)
        sizes = {each["blocks"]: each for each in said["sizes"]}
        # 10 + 2·(13 - r) + (13² - r²)/2 seconds where r tokens are reused.
        seconds = {1: 10 + 18 + (169 - 16) / 2, 2: 10 + 10 + (169 - 64) / 2, 3: 24.5, 8: 24.5}
        for blocks, second in seconds.items():
            found = sizes[blocks]["prefill"]
            assert found["mean_seconds"] == (120.5 + second) / 2
            assert found["gpu_hours"] == pytest.approx((120.5 + second) * 2 / 3600)
            assert found["saved_gpu_hours"] == pytest.approx((120.5 - second) * 2 / 3600)
            assert found["saved_per_hour"] == pytest.approx((120.5 - second) * 2 / 3600 * 3 / 0.5)
            assert sizes[blocks]["bytes"] == blocks * IN_BLOCK
        assert said["prefill_model"]["hours"] == 0.5

    def test_text(self, kvcache: Kvcache, twice: Path) -> None:
        """The same in a row."""
        out = kvcache("curve", twice, *FORMULA, *PRICE).out
        [row] = [line for line in out.splitlines() if line.split()[:1] == ["8"]]
        assert row.split()[3:10] == ["72.50", "s", "115.70", "s", "0.0806", "0.0533", "0.320"]
        assert "saved: GPU-hours saved by reuse, and money saved per hour" in out

    def test_of_a_trace(self, kvcache: Kvcache, model: Path, tmp_path: Path) -> None:
        """Times are the trace's; a block of it has bytes only where a model is given."""
        lines = [
            {"timestamp": at, "input_length": 13, "output_length": 1, "hash_ids": [1, 2, 3, 4]}
            for at in (5000, 5000 + 1_800_000)
        ]
        (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
        options = (tmp_path / "trace.jsonl", "--trace-block-size", 4, *FORMULA, *PRICE)
        said = answer(kvcache, "curve", *options)
        assert said["sizes"][-1]["prefill"]["saved_per_hour"] == pytest.approx(96 * 2 / 3600 * 3 / 0.5)
        assert said["sizes"][-1]["bytes"] is None
        assert " KiB" in kvcache("curve", *options, "--model-config", model).out
        done = kvcache("curve", *options, "--sizes", "1GiB")
        assert done.code == 2
        assert "the bytes of a block are unknown: give sizes in blocks, or --model-config" in done.err

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--sample", "0.5"), "--prefill needs all blocks, not samples"),
            (("--sizes", "3GiBB"), "'3GiBB' needs a number and one of the units B, KiB"),
            (
                ("--sizes", "9999999TiB", "--model-config", "MODEL"),
                "sizes must be 1 to 2,147,483,647 blocks, and a block has 1.0 KiB",
            ),
            (
                ("--bound", "1B", "--model-config", "MODEL"),
                "sizes must be 1 to 2,147,483,647 blocks, and a block has 1.0 KiB",
            ),
        ],
    )
    def test_sizes_that_there_are_not(
        self, kvcache: Kvcache, twice: Path, model: Path, options: tuple[str, ...], said: str
    ) -> None:
        """Neither smaller than a block, nor larger than any cache."""
        own = [model if each == "MODEL" else each for each in options]
        done = kvcache("curve", twice, *FORMULA, *own)
        assert (done.code, done.out) == (2, "")
        assert said in done.err


class TestWhatIf:
    """The same two prompts in other caches."""

    def test_a_cache_that_is_too_small(self, kvcache: Kvcache, twice: Path, model: Path) -> None:
        """Of 4 blocks all 3 of the first prompt are reused, as recorded; without reuse each takes 120.5 seconds."""
        tried = ("--set", "enable_block_reuse=true,false", "--no-bound", "--jobs", 1)
        said = answer(kvcache, "whatif", twice, *tried, *FORMULA, *PRICE, "--model-config", model)
        assert_documented("whatif", {**said["recorded"], "config": 0, **said, "recorded": 0, "trials": 0})
        whole, none = said["trials"]
        assert said["recorded"]["prefill"] == whole["prefill"]
        assert whole["prefill"]["mean_seconds"] == 72.5
        assert whole["prefill"]["saved_per_hour"] == pytest.approx(96 * 2 / 3600 * 3 / 0.5)
        assert (none["prefill"]["mean_seconds"], none["prefill"]["saved_gpu_hours"]) == (120.5, 0)
        assert none["cache_bytes"] == {"primary": 8 * IN_BLOCK, "secondary": 0}
        assert said["prefill_model"]["hours"] == 0.5

    def test_it_is_what_the_audit_says(self, kvcache: Kvcache, log: Path) -> None:
        """Of a log whose requests were admitted once each: what was recorded takes as long."""
        formula = ("--prefill", "4ms + 60us n + 0.2ns n m", "--price", 1)
        of_audit = answer(kvcache, "audit", log, *formula)["prefill"]
        said = answer(kvcache, "whatif", log, *formula, "--no-bound", "--jobs", 1)
        for row in (said["recorded"], *said["trials"]):
            for name, number in row["prefill"].items():
                assert number == pytest.approx(of_audit[name]), name

    def test_a_preempted_request_takes_gpu_hours_again(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """It is no request, so that its time is in no mean."""
        config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=8)
        with Recorder(config, engine="an engine", log=tmp_path / "log") as recorder:
            recorder.admitted("a", list(range(5)))
            recorder.allocated("a", [0, 1])
            recorder.computed("a", 5)
            recorder.ended("a", why="preempted")
            recorder.flush()
            recorder.admitted("a", list(range(6)), resumed=True)
            recorder.allocated("a", [2, 3])
            recorder.computed("a", 6)
            recorder.flush()
        said = answer(kvcache, "whatif", tmp_path / "log", *FORMULA, "--no-bound", "--jobs", 1)
        found = said["recorded"]["prefill"]
        # 10 + 2·5 + 25/2, and 10 + 2·6 + 36/2.
        assert (found["mean_seconds"], found["gpu_hours"]) == (32.5, pytest.approx(72.5 / 3600))

    def test_sizes_in_bytes_are_those_of_the_model(self, kvcache: Kvcache, twice: Path, model: Path) -> None:
        """With blocks of any size: a block of 4 tokens has 1 KiB."""
        sizes = ("--set", "primary_bytes=5KiB,8192", "--set", "host_cache_size=0,2KiB")
        blocks = ("--set", "tokens_per_block=4,8")
        out = kvcache(
            "whatif", twice, *sizes, *blocks, "--model-config", model, "--no-bound", "--jobs", 1
        ).out
        rows = [line.split()[1:-5] for line in out.splitlines() if line.startswith("  lru")]
        assert [row[:4] for row in rows] == [
            ["5", "0", "4", "5.0"],
            ["2", "0", "8", "4.0"],
            ["5", "2", "4", "5.0"],
            ["2", "1", "8", "4.0"],
            ["8", "0", "4", "8.0"],
            ["4", "0", "8", "8.0"],
            ["8", "2", "4", "8.0"],
            ["4", "1", "8", "8.0"],
        ]
        assert "5.0 KiB + 2.0 KiB" in out
        done = kvcache("whatif", twice, "--set", "primary_bytes=5XB", "--model-config", model)
        assert (done.code, done.out) == (2, "")
        assert "--set primary_bytes: '5XB' needs a number and one of the units" in done.err


def test_a_fit_is_reported(kvcache: Kvcache, twice: Path, tmp_path: Path) -> None:
    """With its error, and in JSON."""
    rows = [(n, k, 10 + 2 * n + n * (k + n / 2)) for n in (1, 4, 30) for k in (0, 12)]
    text = "tokens,cached,seconds\n" + "\n".join(",".join(map(str, row)) for row in rows)
    (tmp_path / "measured.csv").write_text(text)
    fit = ("--prefill-fit", tmp_path / "measured.csv")
    out = kvcache("audit", twice, *fit).out
    assert "prefill          10 + 2 n + 1 n m seconds for n tokens" in out
    assert "fitted to 6 prefills: RMS error 0 µs, median 0.0 %" in out
    said = answer(kvcache, "audit", twice, *fit)
    assert said["prefill"]["mean_seconds"] == pytest.approx(72.5)
    assert said["prefill_model"]["fit"]["prefills"] == 6


def test_the_largest_numbers_are_numbers(kvcache: Kvcache, twice: Path) -> None:
    """Of all options at once, for people and in JSON."""
    largest = ("--prefill", "1e6 + 1e6 n + 1e6 n m", "--price", "1e9", "--gpus", "1000000")
    for command in ("audit", "curve", "whatif"):
        done = kvcache(command, twice, *largest)
        assert (done.code, done.err) == (0, "")
        text = kvcache(command, twice, *largest, "--json").out
        assert "Infinity" not in text
        assert "NaN" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--price", "2"), "--price and --gpus require --prefill or --prefill-fit"),
        (("--gpus", "2"), "--price and --gpus require --prefill or --prefill-fit"),
        ((*FORMULA, "--prefill-fit", "x"), "--prefill and --prefill-fit exclude each other"),
        (("--prefill", "fast"), "prefill 'fast': 'fast' is not understood"),
        ((*FORMULA, "--price", "0"), "'0' is not an amount above 0"),
        ((*FORMULA, "--price", "1e300"), "'1e300' is not an amount above 0 and at most 1,000,000,000"),
        ((*FORMULA, "--gpus", "1000001"), "'1000001' is more than 1,000,000"),
        ((*FORMULA, "--tensor-parallel", "9" * 19), "is more than 1,000,000"),
        (("--prefill", "1e308 n"), "prefill '1e308 n': '1e308 n' is more than 1,000,000 seconds"),
        (("--prefill-fit", "nowhere.csv"), "nowhere.csv"),
        (("--kv-dtype", "fp8"), "--kv-dtype requires --model-config"),
        (("--model-config", "nowhere.json"), "nowhere.json"),
    ],
)
@pytest.mark.parametrize("command", ["audit", "curve", "whatif", "report"])
def test_what_makes_no_sense_is_refused(
    kvcache: Kvcache, twice: Path, command: str, options: tuple[str, ...], said: str
) -> None:
    """In one line, before anything is read."""
    done = kvcache(command, twice, *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not Path("report.html").exists()


def test_a_model_that_is_not_understood(kvcache: Kvcache, twice: Path, tmp_path: Path) -> None:
    """The error names the field."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"index_head_dim": 128}))
    done = kvcache("audit", twice, "--model-config", tmp_path / "config.json")
    assert done.code == 2
    assert "index_head_dim: the index of sparse attention cannot be counted" in done.err


def test_layers_that_are_not_counted_are_reported(kvcache: Kvcache, twice: Path, tmp_path: Path) -> None:
    """Those that see a window, and those that have no K and V."""
    kinds = ["full_attention", "sliding_attention", "mamba", "mamba"]
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"layer_types": kinds, "sliding_window": 32}))
    out = kvcache("audit", twice, "--model-config", tmp_path / "config.json", "--kv-dtype", "fp8").out
    assert "K and V        32 B per token of llama: 1 layer, fp8" in out
    assert "not counted: up to 1.0 KiB per sequence in 1 layer with a 32-token window" in out
    assert "not counted: 2 layers without K and V (mamba)" in out
