"""Months of a log, as fast as they go: what is kept stays small, and readers get all or are told."""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from kvcache import KVCacheConfig, KVCacheManager
from kvcache.config import LogConfig
from kvcache.replay import replay
from tests.support.forked import Forked
from tests.support.memory import STATM, resident_bytes
from tests.support.waiting import wait_until


def config(retain: int) -> KVCacheConfig:
    # A window has memory of its own, which fills up with each segment anew.
    log = LogConfig(retain_bytes=retain, overflow="block", fsync="never", window=1 << 20)
    return KVCacheConfig(
        max_sequence_length=512,
        tokens_per_block=4,
        primary_blocks=512,
        secondary_blocks=512,
        num_layers=1,
        log=log,
    )


def step(manager: KVCacheManager, rng: random.Random, number: int, running: deque[int]) -> None:
    """A request begins, all running ones get a token, and the oldest ends."""
    prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(8, 40))]
    manager.add_sequence(number, prompt)
    manager.store_context_blocks(number, len(prompt))
    running.append(number)
    manager.add_tokens(list(running), [rng.randrange(1, 4) for _ in running])
    if len(running) > 3:
        manager.remove_sequence(running.popleft())
    manager.flush()


def reader(kind: str, log: Path) -> Forked:
    return Forked("tests.support.logs.soak_reader", kind, log, stderr=2)


def audited(log: Path) -> int:
    """How many prompt tokens the audit of what is kept explains."""
    audit = Forked("kvcache", "-q", "audit", log, "--json")
    out, err = audit.communicate()
    assert (audit.returncode, err) == (0, "")
    tokens: int = json.loads(out)["prompt_tokens"]
    return tokens


def is_written(manager: KVCacheManager) -> bool:
    stats = manager.log_stats()
    return stats is not None and stats.lag_batches == 0


def bytes_in(log: Path) -> int:
    total = 0
    for path in log.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


def soak(tmp_path: Path, events: int, retain: int, samples: int) -> dict[str, Any]:
    """An engine that makes so many events, a follower, a late reader, an audit now and then; what was seen."""
    log, rng, running = tmp_path / "log", random.Random(7), deque[int]()
    memory, tokens, largest = [0], 0, 0
    with KVCacheManager(config(retain), log=log) as manager:
        readers = [reader(kind, log) for kind in ("follow", "late")]
        number = 0
        while (made := manager.stats().events) < events:
            for _ in range(200):
                step(manager, rng, number, running)
                number += 1
            largest = max(largest, bytes_in(log))
            # Followers may hold as much again; a segment, an eighth, and a snapshot come on top.
            assert largest <= 2.3 * retain, "more is kept than is to be"
            if made * samples // events >= len(memory):
                memory.append(resident_bytes())
                wait_until(lambda: is_written(manager), "the log is not written")
                tokens += audited(log)
        fingerprint, batches = manager.fingerprint(), manager.stats().batches
    (tmp_path / "done").touch()
    reported = [json.loads(each.communicate(timeout=120)[0]) for each in readers]
    assert [each.returncode for each in readers] == [0, 0]
    assert replay(log).fingerprint == fingerprint
    return {
        "largest": largest,
        "memory": memory,
        "tokens": tokens,
        "batches": batches,
        "follow": reported[0],
        "late": reported[1],
    }


def judge(seen: dict[str, Any]) -> None:
    """Every batch was read, or told to be missing."""
    assert seen["follow"]["unannounced"] == seen["late"]["unannounced"] == []
    assert seen["follow"]["batches"] + seen["follow"]["missing"] >= seen["batches"], seen
    assert seen["late"]["batches"] > 0
    assert seen["tokens"] > 0


def test_a_log_is_kept_small_alongside_its_readers(tmp_path: Path) -> None:
    """30,000 events, of which 1 MiB is kept."""
    judge(soak(tmp_path, 30_000, 1 << 20, 2))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not STATM.exists(), reason="how much memory a process has is read from /proc")
def test_ten_million_events(tmp_path: Path) -> None:
    """Of which 100 MB are kept; the engine's memory stops to grow."""
    seen = soak(tmp_path, 10_000_000, 100_000_000, 10)
    print(json.dumps(seen))
    judge(seen)
    assert seen["largest"] < 300_000_000
    memory = seen["memory"]
    assert max(memory[4:]) - memory[3] < 32 << 20, memory
