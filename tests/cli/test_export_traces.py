"""`kvcache export --to mooncake|bailian`: what a trace out of a log says, and what it keeps to itself."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from kvcache import KVCacheConfig, KVCacheManager
from kvcache.manager import Substitutes
from kvcache.workload.traces import read_trace
from tests.support.commands import Kvcache, run_log

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
    assert "a key of 5 bytes can be guessed: take 32" in done.err
    done = kvcache("export", log, "--to", "csv", "-o", tmp_path / "6", "--key", key)
    assert "--key is for traces" in done.err


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


def test_what_has_no_trace(kvcache: Kvcache, tmp_path: Path) -> None:
    """A log without tokens, and one without a request."""
    with KVCacheManager(config(log={"record_tokens": False}), log=tmp_path / "names") as manager:
        manager.add_sequence("a", [1] * 9)
    with KVCacheManager(config(), log=tmp_path / "empty"):
        """Nobody comes."""
    for name, says in (("names", "records no tokens"), ("empty", "holds no request yet")):
        done = kvcache("export", tmp_path / name, "--to", "mooncake", "-o", tmp_path / "trace")
        assert (done.code, (tmp_path / "trace").exists()) == (2, False)
        assert says in done.err
