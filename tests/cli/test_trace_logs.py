"""Traces for commands that take logs: what is played, in which cache, at which times."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import CacheCreated
from kvcache.workload.clock import START_NS
from tests.support.commands import TRACE, Kvcache, Start
from tests.support.waiting import wait_until

BLOCK = 16
STEP_NS = 20_000_000
PROMPTS: list[tuple[int, ...]] = [(1, 2, 3), (1, 2, 4), (1, 2, 3), (5, 6), (1, 7), (5, 6, 8)]
"""Numbers of blocks, of which the last one is cut in the middle."""


def write(path: Path, times: list[int], prompts: Sequence[tuple[int, ...]] = PROMPTS) -> Path:
    path.write_text(
        "".join(
            json.dumps(
                {"timestamp": at, "input_length": len(ids) * BLOCK - 8, "output_length": 3, "hash_ids": ids}
            )
            + "\n"
            for at, ids in zip(times, prompts, strict=True)
        )
    )
    return path


def in_turn(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that prompts reuse if they come one after the other and nothing is evicted, by comparing all pairs.

    The last block of a prompt is cut, so only the blocks before it are whole, of the one it ends in, all but the last
    token.
    """
    total = 0
    for at, ids in enumerate(prompts):
        length = len(ids) * BLOCK - 8
        tokens = [(number, place) for number in ids for place in range(BLOCK)][:length]
        best = 0
        for earlier in prompts[:at]:
            others = [(number, place) for number in earlier for place in range(BLOCK)][
                : len(earlier) * BLOCK - 8
            ]
            same = 0
            while same < min(length - 1, len(others)) and tokens[same] == others[same]:
                same += 1
            best = max(best, same)
        total += best
    return total


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs of traces are, in which nothing stays."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def audited(kvcache: Kvcache, trace: Path, *options: Any) -> dict[str, Any]:
    done = kvcache("audit", trace, "--tokens-per-block", BLOCK, *options, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_requests_come_when_the_trace_says(kvcache: Kvcache, tmp_path: Path, temporary: Path) -> None:
    """Far apart each request finds all that came before; in one moment none finds anything."""
    apart = audited(kvcache, write(tmp_path / "apart.jsonl", [at * 60_000 for at in range(6)]))
    assert (apart["requests"], apart["reused_tokens"]) == (6, in_turn(PROMPTS))
    assert apart["reused_tokens"] > 100
    assert apart["last_ts"] - apart["first_ts"] >= 5 * 60 * 10**9
    together = audited(kvcache, write(tmp_path / "together.jsonl", [7] * 6))
    assert (together["requests"], together["reused_tokens"]) == (6, 0)
    assert list(temporary.iterdir()) == []


def test_the_cache_is_as_large_as_asked(kvcache: Kvcache, tmp_path: Path) -> None:
    """In a cache for one prompt only what came just before is reused, and the note says how large it is."""
    prompts = [(1, 2, 3), (4, 5, 6), (1, 2, 3), (1, 2, 3)]
    trace = write(tmp_path / "t.jsonl", [at * 60_000 for at in range(4)], prompts)
    sizes = ("--primary-blocks", 3, "--secondary-blocks", 0)
    assert audited(kvcache, trace, *sizes)["reused_tokens"] == in_turn(prompts[2:])
    said = kvcache("audit", trace, "--tokens-per-block", BLOCK, *sizes)
    assert said.err == (
        f"kvcache: {trace} is a trace: played at its own times through a cache of 3 + 0 blocks of 16 tokens "
        "(--primary-blocks, --secondary-blocks, --tokens-per-block)\n"
    )
    assert said.out.startswith(f"{trace}: batches 0 to")


@pytest.mark.parametrize("form", ["mooncake", "of 528 tokens", "bailian", "tokens"])
def test_blocks_are_those_of_the_trace(kvcache: Kvcache, tmp_path: Path, form: str) -> None:
    """Without options `audit` reuses the full blocks that `curve` counts, of the same size, and says which that is."""
    size = {"mooncake": 512, "of 528 tokens": 528, "bailian": 16, "tokens": 64}[form]
    options = ("--trace-block-size", 528) if form == "of 528 tokens" else ()
    lines: list[dict[str, Any]] = []
    for at, ids in enumerate(PROMPTS * 2):
        lines.append({"timestamp": at * 100_000, "input_length": len(ids) * size - 8, "output_length": 3})
        lines[-1] |= {"hash_ids": ids}
        if form == "bailian":
            lines[-1] |= {"chat_id": at, "timestamp": at * 100}
        if form == "tokens":
            tokens = [number for number in ids for _ in range(size)][: len(ids) * size - 8]
            lines[-1] = {
                "timestamp": at * 100.0,
                "prompt_token_ids": tokens,
                "usage": {"completion_tokens": 3},
            }
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = json.loads(kvcache("curve", trace, *options, "--json").out)
    audit = json.loads(kvcache("audit", trace, *options, "--json").out)
    # By hand: the last block of each prompt is cut, so all others are whole.
    whole = sum(
        max((common(ids[:-1], other[:-1]) for other in (PROMPTS * 2)[:at]), default=0)
        for at, ids in enumerate(PROMPTS * 2)
    )
    assert curve["tokens_per_block"] == audit["played"]["tokens_per_block"] == size
    assert audit["reasons"]["primary"] == size * whole == size * curve["sizes"][-1]["hits"]
    for command in (("audit",), ("whatif", "--jobs", 1)):
        said = kvcache(*command, trace, *options).out
        assert f" blocks of {size} tokens, at the trace's own times\n" in said


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many numbers both begin with."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_blocks_of_a_cache_are_not_as_large_as_one_likes(kvcache: Kvcache, tmp_path: Path) -> None:
    """A trace whose numbers stand for more tokens than a cache's blocks have is played in blocks of 64."""
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 9000, "output_length": 1, "hash_ids": [1, 2, 3]}
    trace.write_text(json.dumps(line) + "\n")
    assert json.loads(kvcache("audit", trace, "--json").out)["played"]["tokens_per_block"] == 64


def test_what_did_not_fit_is_said(kvcache: Kvcache, tmp_path: Path) -> None:
    """Where people look, and in JSON, of each command about the cache; nothing where all fit."""
    trace = write(tmp_path / "t.jsonl", [at * 60_000 for at in range(6)])
    sizes = ("--primary-blocks", 2, "--secondary-blocks", 0)
    refused = [at for at, ids in enumerate(PROMPTS) if len(ids) > 2]
    for command in (("audit",), ("whatif", "--jobs", 1)):
        said = kvcache(*command, trace, *sizes).out
        assert f"did not fit     {len(refused)} requests, such as number 0: " in said
        played = json.loads(kvcache(*command, trace, *sizes, "--json").out)["played"]
        assert (played["refused"], [each["request_id"] for each in played["refusals"]]) == (
            len(refused),
            refused,
        )
        assert played["num_blocks"] == {"primary": 2, "secondary": 0}
        assert "did not fit" not in kvcache(*command, trace).out
    assert "did not fit" in kvcache("audit", trace, *sizes, "--by", "session").out


def test_whatif_reports_the_same_cache(kvcache: Kvcache, tmp_path: Path) -> None:
    """The row of what was recorded is the audit's, and equal calls say the same, so a report takes it."""
    sizes = ("--primary-blocks", 90, "--secondary-blocks", 0)
    audit = audited(kvcache, TRACE, *sizes)
    call = ("whatif", TRACE, "--tokens-per-block", BLOCK, *sizes, "--set", "primary_blocks=90,4000", "--json")
    done = kvcache(*call, "--jobs", 1)
    found = json.loads(done.out)
    assert found["log"] == str(TRACE)
    reused = [each["reused_tokens"] for each in (found["recorded"], *found["trials"])]
    assert reused[0] == reused[1] == audit["reused_tokens"] < reused[2]
    (tmp_path / "whatif.json").write_text(done.out)
    page = tmp_path / "page.html"
    given = ("--whatif", tmp_path / "whatif.json", "-o", page)
    done = kvcache("report", TRACE, "--tokens-per-block", BLOCK, *sizes, *given)
    assert done.code == 0, done.err
    assert f"<title>{TRACE.name}" in page.read_text()
    done = kvcache("report", TRACE, *given, "--force")
    assert "is about another log" in done.err  # of another cache


def test_a_report_takes_the_curve_of_its_trace(
    kvcache: Kvcache, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the trace is spelled; that of another one is refused before anything is played, in one line."""
    trace, given, page = (
        write(tmp_path / "t.jsonl", [at * 60_000 for at in range(6)]),
        tmp_path / "curve.json",
        tmp_path / "page.html",
    )
    given.write_text(kvcache("curve", trace, "--json").out)
    monkeypatch.chdir(tmp_path)
    done = kvcache("report", "t.jsonl", "--tokens-per-block", 8, "--curve", given, "-o", page)
    assert done.code == 0, done.err
    assert (
        f"{given} is about the trace itself: its blocks are those of the trace, not of the cache\n"
        in done.err
    )
    assert "does not name" not in done.err
    assert f"A block has {BLOCK} tokens." in page.read_text()
    # What plays: nothing is there to play it with.
    monkeypatch.setattr("kvcache.cli.trace_play.play_into", None)
    other = write(tmp_path / "other.jsonl", [0] * 6)
    done = kvcache("report", other, "--curve", given, "-o", page, "--force")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"kvcache: error: {given} is about the trace {trace}: give the output of `kvcache curve {other} --json`\n"
    )


def test_rules_for_stop_reasons_last_in_the_time_of_the_trace(
    kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a tool is kept for as long as the rule says, and not any longer."""
    monkeypatch.setenv("KVCACHE_STOP_RETENTION", '{"tool_use": "60:1min"}')
    sizes = ("--primary-blocks", 6, "--secondary-blocks", 0)
    reused = []
    for pause in (50, 70):
        times = [0, 1000, 2000, (pause - 1) * 1000, pause * 1000 - 500, pause * 1000]
        trace = write(
            tmp_path / "t.jsonl", times, [(1, 2, 3), (4, 5, 6), (7, 8, 9), (4, 5, 7), (7, 8, 4), (1, 2, 4)]
        )
        lines = [json.loads(line) | {"stop": "end_turn"} for line in trace.read_text().splitlines()]
        lines[0]["stop"] = "tool_use"
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        reused.append(audited(kvcache, trace, *sizes)["over_time"]["parts"][-1]["primary"])
    assert reused == [2 * BLOCK, 0]


@pytest.mark.parametrize(
    "command",
    [("audit",), ("whatif",), ("curve",), ("curve", "--ttl"), ("curve", "--policy", "lru"), ("advise",)],
)
def test_late_times(kvcache: Kvcache, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Every command takes the latest that are read, and refuses what is later, as nanoseconds are, at its line."""
    prompts = PROMPTS * 20
    times = [*range(1, len(prompts))]
    done = kvcache(*command, write(tmp_path / "late.jsonl", [*times, 2**42], prompts))
    assert done.code == 0, done.err
    later = write(tmp_path / "later.jsonl", [*times, 1_777_312_800_000_000_000], prompts)
    done = kvcache(*command, later)
    assert (done.code, done.out) == (2, "")
    assert f"{later}:{len(prompts)}: timestamp is 56,319,644 years after the start" in done.err


@pytest.mark.parametrize("hashed", ["v2_sha256_64", "v1_block_key"])
def test_models_and_salts_are_distinguished(
    kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: str
) -> None:
    """Salts are those of the trace, by their digests; models share nothing, and are adapters of their names, or of
    numbers in the order in which they come where the hash of blocks knows no names.
    """
    monkeypatch.setenv("KVCACHE_BLOCK_HASH", hashed)
    own: list[dict[str, str]] = [
        {"model": "a"},
        {"model": "b"},
        {"model": "a", "cache_salt": "x"},
        {"cache_salt": "x"},
    ]
    trace = write(tmp_path / "trace.jsonl", [at * 60_000 for at in range(8)], [(1, 2)] * 8)
    lines = [json.loads(line) | own[at % 4] for at, line in enumerate(trace.read_text().splitlines())]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def grouped(by: str) -> dict[str | None, int]:
        groups = audited(kvcache, trace, "--by", by)["groups"]
        return {each["name"]: each["requests"] for each in groups}

    assert grouped("salt") == {None: 4, sha256(b"x").hexdigest(): 4}
    a, b = ("1", "2") if hashed == "v1_block_key" else ("a", "b")
    assert grouped("lora") == {a: 4, b: 2, None: 2}
    assert grouped("model") == {"a": 4, "b": 2, None: 2}
    # Of each of the four the second one comes after its own kind alone.
    assert audited(kvcache, trace)["reasons"]["primary"] == 4 * BLOCK
    assert kvcache("run", trace, "--no-pools", "--tokens-per-block", BLOCK).code == 0


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("audit", ()),
        ("whatif", ()),
        ("report", ()),
        ("explain", ("--request", "0")),
        ("export", ("--to", "jsonl", "-o", "tables")),
    ],
)
def test_what_cannot_be_reported(
    kvcache: Kvcache, tmp_path: Path, log: Path, command: str, more: tuple[str, ...]
) -> None:
    """Arrivals alone, lines that are no requests, requests that do not fit, and options of traces beside a log."""
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n")
    done = kvcache(command, azure, *more)
    assert (done.code, done.out) == (2, "")
    assert f"{azure} has arrivals and lengths only" in done.err
    broken = write(tmp_path / "broken.jsonl", [0] * 6)
    with broken.open("a") as file:
        file.write('{"timestamp": 0, "input_length": "8", "output_length": 3, "hash_ids": [1]}\n')
    done = kvcache(command, broken, *more)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"kvcache: error: {broken}:7: ")
    assert "input_length" in done.err
    done = kvcache(
        command, write(tmp_path / "t.jsonl", [0] * 6), *more, "--primary-blocks", 1, "--tokens-per-block", 16
    )
    assert (done.code, done.out) == (2, "")
    assert "none of the requests fits: " in done.err
    done = kvcache(command, log, *more, "--primary-blocks", 1)
    assert (done.code, done.out) == (2, "")
    assert f"--primary-blocks is only valid for traces, and {log} is not one" in done.err


def test_nothing_stays_after_sigterm(start: Start, tmp_path: Path) -> None:
    """Ended while it plays, the command takes its log away."""
    trace = write(tmp_path / "long.jsonl", [at * 5 for at in range(30_000)], PROMPTS * 5_000)
    process = start("audit", trace)
    wait_until(lambda: list((tmp_path / "tmp").glob("kvcache-trace-*/long.jsonl/*")))
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert list((tmp_path / "tmp").iterdir()) == []


def test_sizes_in_bytes(kvcache: Kvcache, tmp_path: Path) -> None:
    """As many blocks as fit: of 16 tokens, each with K and V of two layers with two heads of eight numbers."""
    trace, model = write(tmp_path / "trace", list(range(6))), tmp_path / "config.json"
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "torch_dtype": "bfloat16"}
    model.write_text(json.dumps(shape | {"num_key_value_heads": 2, "model_type": "llama"}))
    sizes = ("--primary-blocks", "25KiB", "--secondary-blocks", "6KiB", "--tokens-per-block", BLOCK)
    done = kvcache("audit", trace, *sizes, "--model-config", model)
    assert "through a cache of 12 + 3 blocks of 16 tokens" in done.err
    assert "--primary-blocks: the bytes of a block are unknown" in kvcache("audit", trace, *sizes).err
    small = kvcache("audit", trace, "--primary-blocks", "1KiB", "--model-config", model)
    assert "--primary-blocks: 1.0 KiB is less than one block (2.0 KiB)" in small.err


def test_sizes_of_a_run_in_bytes(kvcache: Kvcache, tmp_path: Path) -> None:
    """As many blocks as fit, of the model that the settings name; without one that is an error."""
    trace = write(tmp_path / "trace", list(range(6)))
    shape = [f"--set={each}" for each in ("num_layers=2", "num_kv_heads=2", "head_dim=8", "dtype=bfloat16")]
    sizes = (
        "--primary-blocks",
        "25KiB",
        "--secondary-blocks",
        "6KiB",
        "--tokens-per-block",
        BLOCK,
        "--no-pools",
    )
    done = kvcache("run", trace, *sizes, *shape, "--log", tmp_path / "log")
    assert done.code == 0, done.err
    [created] = [
        event
        for batch in LogReader(tmp_path / "log")
        for event in batch.events
        if isinstance(event, CacheCreated)
    ]
    assert created.groups[0].num_blocks == (12, 3)
    done = kvcache("run", trace, *sizes)
    assert (done.code, done.out) == (2, "")
    assert (
        "--primary-blocks: the bytes of a block are unknown: give a number of blocks, or a model's shape"
        in done.err
    )


def test_a_request_of_a_trace_is_explained(kvcache: Kvcache, tmp_path: Path, temporary: Path) -> None:
    """It finds what those before it have left, which a run as fast as it can would admit in one step."""
    trace = write(tmp_path / "t.jsonl", [at * 60_000 for at in range(6)])
    for request in range(1, 6):
        done = kvcache("explain", trace, "--tokens-per-block", BLOCK, "--request", request, "--json")
        [stay] = json.loads(done.out)["requests"][0]["stays"]
        assert stay["reused_tokens"] == in_turn(PROMPTS[: request + 1]) - in_turn(PROMPTS[:request])
    assert list(temporary.iterdir()) == []
    done = kvcache("explain", trace, "--request", 6)
    assert (done.code, done.out) == (2, "")


def test_a_trace_is_exported(kvcache: Kvcache, tmp_path: Path, temporary: Path) -> None:
    """As tables, and as another trace, with equal numbers where beginnings are equal, and only there."""
    trace = write(tmp_path / "t.jsonl", [at * 60_000 for at in range(6)])
    sizes = ("--tokens-per-block", BLOCK)
    done = kvcache("export", trace, *sizes, "--to", "jsonl", "-o", tmp_path / "tables")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "tables" / "requests.jsonl").read_text().splitlines()]
    assert sum(row["reused_tokens"] for row in rows) == in_turn(PROMPTS)
    done = kvcache("export", trace, *sizes, "--to", "mooncake", "-o", tmp_path / "new.jsonl")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{trace} -> ")
    new = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert [line["timestamp"] // 60_000 for line in new] == list(range(6))
    whole = [
        (ids[:at], line["hash_ids"][at - 1])
        for ids, line in zip(PROMPTS, new, strict=True)
        for at in range(1, len(ids))
    ]
    for beginning, number in whole:
        for other, its_number in whole:
            assert (beginning == other) == (number == its_number)
    assert list(temporary.iterdir()) == []


def test_the_log_of_a_trace_is_kept(kvcache: Kvcache, tmp_path: Path, temporary: Path) -> None:
    """Where one says; then it tells what the trace did."""
    trace, kept = write(tmp_path / "t.jsonl", [at * 60_000 for at in range(6)]), tmp_path / "kept"
    first = audited(kvcache, trace, "--keep-log", kept)
    assert list(temporary.iterdir()) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "t.jsonl", "temporary"]
    again = json.loads(kvcache("audit", kept, "--json").out)
    assert (again["reused_tokens"], again["requests"]) == (in_turn(PROMPTS), 6)
    del first["reported"], first["played"]  # which no log has
    assert again == first
    assert kvcache("log", "verify", kept).code == 0
    for place in (kept, trace, tmp_path / "no" / "kept"):
        done = kvcache("audit", trace, "--keep-log", place)
        assert (done.code, done.out) == (2, "")
        assert f"--keep-log {place}: give a new directory" in done.err


@pytest.mark.parametrize(
    "command",
    [("replay",), ("events",), ("who", "--slot", "0"), ("match", "--tokens", "1,2"), ("log", "info")],
)
def test_commands_that_take_no_traces_say_what_to_do(
    kvcache: Kvcache, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """They need a log, and the error says how a trace becomes one."""
    trace = write(tmp_path / "t.jsonl", [0] * 6)
    name, *more = command
    done = kvcache(name, *more, trace) if name == "log" else kvcache(name, trace, *more)
    assert (done.code, done.out) == (2, "")
    assert f"{trace} is not a log directory" in done.err
    assert "`kvcache audit TRACE --keep-log DIR` makes a log of it" in done.err


CALL = {"prompt_token_ids": list(range(40)), "usage": {"completion_tokens": 3}}
RECEIVED = 1_777_629_600_250
"""2026-05-01T10:00:00.250Z."""


def dynamo(received: int) -> dict[str, Any]:
    replay = {"trace_block_size": BLOCK, "input_length": 40, "input_sequence_hashes": [1, 2, 3]}
    request = {"request_received_ms": received, "output_tokens": 3, "replay": replay}
    return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}


def calls(*times: Any) -> list[dict[str, Any]]:
    return [CALL | {"timestamp": each} for each in times]


@pytest.mark.parametrize(
    ("lines", "begin"),
    [
        (calls("2026-05-01T12:00:00.250+02:00", "2026-05-01T10:00:05.250Z"), RECEIVED),
        (calls(RECEIVED / 1000, RECEIVED / 1000 + 5), RECEIVED),
        (calls(RECEIVED, RECEIVED + 5000), RECEIVED),
        ([CALL | {"response": {"created": 1_777_629_600}}], 1_777_629_600_000),
        ([dynamo(RECEIVED + 5000), dynamo(RECEIVED)], RECEIVED),
        ([dynamo(500), dynamo(5500)], START_NS // 10**6),
        (calls(27.5, 32.5), START_NS // 10**6),
        (calls(1e12, 1e12 + 5000), 10**12),
        (calls(9e14, 9e14 + 5000), START_NS // 10**6),
    ],
)
def test_a_trace_keeps_its_date(
    kvcache: Kvcache, tmp_path: Path, lines: list[dict[str, Any]], begin: int
) -> None:
    """Where it has one: the first request is admitted when it came, and the last one when that came."""
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = audited(kvcache, trace)
    last = begin + 5000 * (len(lines) - 1)
    assert 0 <= found["first_ts"] - begin * 10**6 <= STEP_NS
    assert 0 <= found["last_ts"] - last * 10**6 <= 10 * STEP_NS
    done = kvcache("run", trace, "--no-pools", "--tokens-per-block", BLOCK, "--log", tmp_path / "log")
    date = f"{datetime.fromtimestamp(begin // 1000, UTC):%Y-%m-%d}"
    assert f"that of the trace, from {date} on" in done.out
    assert date in kvcache("audit", tmp_path / "log", "--time", "utc").out


def test_a_trace_of_arrivals_keeps_its_date(kvcache: Kvcache, tmp_path: Path) -> None:
    """Azure's, which `run` alone plays."""
    trace = tmp_path / "azure.csv"
    header, rows = "TIMESTAMP,ContextTokens,GeneratedTokens", ("2023-11-16 18:17:03.9799600,48,10",) * 3
    trace.write_text("\n".join([header, *rows, ""]))
    sizes = ("--no-pools", "--tokens-per-block", BLOCK, "--log", tmp_path / "log")
    assert kvcache("run", trace, *sizes).code == 0
    first = json.loads(kvcache("audit", tmp_path / "log", "--json").out)["first_ts"]
    came = datetime(2023, 11, 16, 18, 17, 3, 979_960, UTC).timestamp() * 10**9
    assert abs(first - came) <= STEP_NS
