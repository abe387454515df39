"""`kvcache export --to mooncake|bailian`: what a trace out of a log says, and what it keeps to itself."""

from __future__ import annotations

import json
import stat
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvcache import KVCacheConfig, KVCacheManager
from kvcache.manager import Substitutes
from kvcache.record.outputs import open_log
from kvcache.workload.traces import read_trace
from tests.support.commands import Kvcache, run_log
from tests.support.logs.agents import agents_lines

SIZE = 4


def config(**settings: Any) -> KVCacheConfig:
    sizes: dict[str, Any] = {"max_sequence_length": 64, "tokens_per_block": SIZE, "primary_blocks": 40}
    return KVCacheConfig(**(sizes | settings))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two turns of a chat, one in another namespace that is preempted and comes back, and one that still runs."""
    ms = iter(range(0, 10**9, 10**6))
    clock = 1_800_000_000 * 10**9
    times = Substitutes(wall_ns=lambda: clock + next(ms))
    with KVCacheManager(config(), log=tmp_path / "log", substitutes=times) as manager:
        for name, prompt in (("a", [1] * 9), ("b", [1] * 9 + [2] * 7)):
            manager.add_sequence(name, prompt)
            manager.store_context_blocks(name, len(prompt))
            manager.add_tokens([name], [3])
            manager.remove_sequence(name)
            manager.flush()
        manager.add_sequence("c", [1] * 9, cache_salt="secret")
        manager.store_context_blocks("c", 9)
        manager.add_tokens(["c"], [5])
        manager.remove_sequence("c", why="preempted")
        manager.add_sequence("c", [1] * 9 + [5], cache_salt="secret", resumed=True)
        manager.flush()
    return tmp_path / "log"


def exported(
    kvcache: Kvcache, log: Path, path: Path, *options: Any, to: str = "mooncake"
) -> list[dict[str, Any]]:
    done = kvcache("export", log, "--to", to, "-o", path, *options)
    assert (done.code, done.err) == (0, "")
    assert f"({to})" in done.out
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_a_line_says(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """Lengths, outputs, times, and equal numbers for equal blocks in one namespace alone; no name and no token."""
    lines = exported(kvcache, log, path := tmp_path / "trace.jsonl")
    assert [(each["input_length"], each["output_length"]) for each in lines] == [
        (9, 1),
        (16, 1),
        (9, 1),
        (10, 0),
    ]
    a, b, c, again = (each["hash_ids"] for each in lines)
    assert list(map(len, (a, b, c, again))) == [3, 4, 3, 3]
    assert a[:2] == b[:2]
    assert c[:2] == again[:2]
    assert len({*a, *b, *c, *again}) == 3 + 2 + 3 + 1
    times = [each["timestamp"] for each in lines]
    assert times[0] == 0
    assert times == sorted(times)
    assert "secret" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """A new one each time; with one of one's own the numbers are the same in all traces. A short one is refused."""
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    one, other = (exported(kvcache, log, tmp_path / name) for name in ("1", "2"))
    assert not {each for line in one for each in line["hash_ids"]} & {
        each for line in other for each in line["hash_ids"]
    }
    assert exported(kvcache, log, tmp_path / "3", "--key", key) == exported(
        kvcache, log, tmp_path / "4", "--key", key
    )
    key.write_bytes(b"short")
    done = kvcache("export", log, "--to", "mooncake", "-o", tmp_path / "5", "--key", key)
    assert (done.code, (tmp_path / "5").exists()) == (2, False)
    assert "a key of 5 bytes is too short: use at least 32" in done.err
    done = kvcache("export", log, "--to", "csv", "-o", tmp_path / "6", "--key", key)
    assert "--key works with traces only" in done.err


@pytest.mark.parametrize("to", ["mooncake", "bailian"])
def test_the_curve_of_a_trace_is_that_of_its_log(kvcache: Kvcache, tmp_path: Path, to: str) -> None:
    """At every size, after preemptions and evictions, too."""
    log = run_log(tmp_path / "log", "--tokens-per-block", 32, "--primary-blocks", 40, "--concurrency", 4)
    lines = exported(kvcache, log, tmp_path / "trace", to=to)
    options = ["--trace-block-size", "32"] if to == "bailian" else []
    assert len(list(read_trace(tmp_path / "trace", block_tokens=32))) == len(lines)
    of_log = json.loads(kvcache("curve", log, "--json", "--bound", "10,40").out)
    of_trace = json.loads(kvcache("curve", tmp_path / "trace", "--json", "--bound", "10,40", *options).out)
    sizes = {each["blocks"]: (each["hits"], each["best_hits"]) for each in of_log["sizes"]}
    assert of_trace["prompts"] == of_log["prompts"] == len(lines)
    for each in of_trace["sizes"]:
        assert (each["hits"], each["best_hits"]) == sizes[each["blocks"]]
    assert of_trace["sizes"][-1]["hits"] > 0


def reported_agents(directory: Path) -> tuple[list[dict[str, Any]], Path]:
    """Sessions with tenants, models and stop reasons, which are given, and a log of them, in the same order."""
    lines = agents_lines()
    for number, line in enumerate(lines):
        model = "zebra" if line["tenant"] == "zeta" else "okapi"
        line |= {"model": model, "stop": ("tool_use", "end_turn", None)[number % 3]}
    (directory / "agents").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ("--tokens-per-block", 64, "--primary-blocks", 100, "--concurrency", 1)
    return lines, run_log(directory / "log", *sizes, trace=directory / "agents")


def partition(names: list[Any]) -> set[frozenset[int]]:
    """Which places have equal names; what has none is in no part."""
    parts = defaultdict(list)
    for place, name in enumerate(names):
        if name is not None:
            parts[name].append(place)
    return set(map(frozenset, parts.values()))


@pytest.mark.parametrize("to", ["mooncake", "bailian"])
def test_sessions_are_kept_but_not_their_names(kvcache: Kvcache, tmp_path: Path, to: str) -> None:
    """What shares a session, an agent, a tenant or a model does so in the trace that is read back; why outputs ended is
    as it was. Names are pseudonyms by the key.
    """
    given, log = reported_agents(tmp_path)
    exported(kvcache, log, path := tmp_path / "trace", to=to)
    requests = list(read_trace(path, block_tokens=64))
    assert len(requests) == len(given) > 50
    alone = [f"alone {at}" if to == "bailian" else None for at in range(len(given))]
    sessions = [line["session_id"] or other for line, other in zip(given, alone, strict=True)]
    assert partition([each.session for each in requests]) == partition(sessions)
    text = path.read_text()
    for hidden in ("chat 1", "acme", "zeta", "main", "helper", "zebra", "okapi"):
        assert hidden not in text
    hits = curve(kvcache, log)
    assert curve(kvcache, path, "--trace-block-size", 64) == hits
    assert hits[0][1] > 0
    if to == "mooncake":
        assert [each.stop for each in requests] == [line["stop"] for line in given]
        for name in ("agent", "tenant", "model"):
            found = [(each.labels or {}).get(name) for each in requests]
            assert partition(found) == partition([line[name] for line in given])
        assert kvcache("audit", path, "--by", "tenant").code == 0


def test_turns_of_a_bailian_trace(kvcache: Kvcache, tmp_path: Path) -> None:
    """A line names the turn before of its session, and says which turn it is."""
    given, log = reported_agents(tmp_path)
    lines = exported(kvcache, log, tmp_path / "trace", to="bailian")
    latest, turns = dict[str, int](), defaultdict[str, int](int)
    for line, was in zip(lines, given, strict=True):
        session = was["session_id"] or f"alone {line['chat_id']}"
        turns[session] += 1
        assert (line["parent_chat_id"], line["turn"]) == (latest.get(session, -1), turns[session])
        latest[session] = line["chat_id"]
    assert max(turns.values()) == 6


def test_a_key_keeps_pseudonyms(kvcache: Kvcache, tmp_path: Path) -> None:
    """Traces with one key name a session alike, and those with another do not."""
    _, log = reported_agents(tmp_path)
    (tmp_path / "key").write_bytes(bytes(32))
    options = [("--key", tmp_path / "key")] * 2 + [()]
    one, same, other = (
        {line.get("session_id") for line in exported(kvcache, log, tmp_path / f"{number}", *each)} - {None}
        for number, each in enumerate(options)
    )
    assert one == same
    assert not one & other


def curve(kvcache: Kvcache, path: Path, *options: Any) -> list[tuple[int, int]]:
    """Hits by size."""
    done = kvcache("curve", path, "--json", "--sizes", "50,100,200,400", *options)
    assert done.code == 0, done.err
    return [(each["blocks"], each["hits"]) for each in json.loads(done.out)["sizes"]]


SILENT = ("--set", "log.record_tokens=false")


@pytest.mark.parametrize("hashed", ["v1_block_key", "v2_sha256_64"])
@pytest.mark.parametrize("to", ["mooncake", "bailian"])
def test_a_log_without_tokens(kvcache: Kvcache, tmp_path: Path, to: str, hashed: str) -> None:
    """Its trace says what that of the same run says with tokens, by other numbers; and has the curve of both logs."""
    sizes = (
        "--tokens-per-block",
        32,
        "--primary-blocks",
        40,
        "--concurrency",
        4,
        "--set",
        f"block_hash={hashed}",
    )
    logs = [run_log(tmp_path / "tokens", *sizes), run_log(tmp_path / "names", *sizes, *SILENT)]
    lines = [exported(kvcache, each, tmp_path / f"{each.name}.jsonl", to=to) for each in logs]
    for one, other in zip(*lines, strict=True):
        assert {**one, "hash_ids": len(one["hash_ids"])} == {**other, "hash_ids": len(other["hash_ids"])}
    ids = [[number for line in each for number in line["hash_ids"]] for each in lines]
    assert partition(ids[0]) == partition(ids[1])
    assert any(len(part) > 1 for part in partition(ids[1]))
    paths = [*logs, *(tmp_path / f"{each.name}.jsonl" for each in logs)]
    curves = [
        dict(curve(kvcache, path, *(["--trace-block-size", 32] if path.is_file() else []))) for path in paths
    ]
    hits = [[each[size] for size in (50, 100, 200, 400)] for each in curves]
    assert hits == [hits[0]] * 4
    assert hits[0][-1] > hits[0][0] > 0


def test_blocks_that_nobody_has_stored(kvcache: Kvcache, tmp_path: Path) -> None:
    """What was stored of a prompt has its names, also after it was taken back; the rest is like no other block, in
    another trace by the same key, too.
    """
    prompt = list(range(18))
    (tmp_path / "key").write_bytes(bytes(32))
    traces = []
    for log in ("one", "two"):
        with KVCacheManager(config(log={"record_tokens": False}), log=tmp_path / log) as manager:
            for name, stored in (("whole", 18), ("cut", 9), ("taken back", 18), ("again", 18), ("runs", 0)):
                manager.add_sequence(name, prompt, cache_salt="other" if name in ("cut", "again") else None)
                if stored:
                    manager.store_context_blocks(name, stored)
                if name == "taken back":
                    manager.rewind(name, 6)
                    manager.add_tokens([name], [99])
                if name != "runs":
                    manager.remove_sequence(name, why="aborted" if name == "cut" else "finished")
                manager.flush()
        lines = exported(kvcache, tmp_path / log, tmp_path / f"{log}.jsonl", "--key", tmp_path / "key")
        traces.append([line["hash_ids"] for line in lines])
        assert [len(ids) for ids in traces[-1]] == [5] * 5
    whole, cut, back, again, runs = traces[0]
    assert whole[:4] == back[:4] == runs[:4]
    assert cut[:2] == again[:2]
    assert len({*whole, *cut, *back, *again, *runs}) == 4 + 5 + 2 + 1 + 1 + 1 + 1
    # `cut` has never stored its blocks 2 and 3, and nobody shares the last block, which is not full.
    same = {number for ids in traces[0] for number in ids} & {number for ids in traces[1] for number in ids}
    assert same == {*whole[:4], *again[:4]}
    done = kvcache("export", tmp_path / "one", "--to", "mooncake", "-o", tmp_path / "told")
    assert "2 blocks that no request has stored count as different from all" in done.out


def test_what_has_no_trace(kvcache: Kvcache, tmp_path: Path) -> None:
    """A log whose blocks are named in two ways, one that ceases to record tokens, and one without a request."""
    silent: dict[str, Any] = {"log": {"record_tokens": False}}
    for name, settings in (
        ("named", ({"block_hash": "v2_sha256_64", **silent}, {"block_hash": "v1_block_key", **silent})),
        ("ceases", ({}, silent)),
    ):
        for number, each in enumerate([config(**given) for given in settings]):
            log = open_log(tmp_path / name, each.log, resume=number > 0)
            with KVCacheManager(each, log=log) as manager:
                manager.add_sequence("a", [1] * 9)
    with KVCacheManager(config(), log=tmp_path / "empty"):
        """Nobody comes."""
    for name, says in (
        ("named", "its blocks are 4 tokens named by v1_block_key after 4 named by v2_sha256_64"),
        ("ceases", "the log ceases to record tokens in batch"),
        ("empty", "has no requests yet"),
    ):
        done = kvcache("export", tmp_path / name, "--to", "mooncake", "-o", tmp_path / "trace")
        assert (done.code, (tmp_path / "trace").exists()) == (2, False)
        assert says in done.err
