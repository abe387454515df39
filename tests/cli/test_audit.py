"""`kvcache explain` and `kvcache audit`: what people are told of a log, in a case worked out by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from events.log import LogReader
from events.log.frames import SEGMENT_HEADER_BYTES
from events.types import SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit.histogram import Ages
from kvcache.audit.timeline import PARTS, Timeline
from kvcache.errors import OutOfBlocks
from tests.cli.conftest import Kvcache

SECOND = 10**9
A, B = list(range(100, 113)), list(range(200, 213))
"""Two prompts of three blocks of four tokens, and one token more."""


@pytest.fixture
def evicted(tmp_path: Path) -> Path:
    """A is cached, evicted for B two seconds later, refused while C holds the room, and comes again; 4 blocks."""
    config = KVCacheConfig(
        max_sequence_length=16, tokens_per_block=4, primary_blocks=4, enable_partial_reuse=False
    )
    clock = itertools.count(1_790_000_000 * SECOND, SECOND)
    with KVCacheManager(config, log=tmp_path / "log", wall_ns=lambda: next(clock)) as manager:
        for name, prompt in (("first", A), ("other", B)):
            manager.add_sequence(name, prompt)
            manager.store_context_blocks(name, 13)
            manager.flush()
            manager.remove_sequence(name)
            manager.flush()
        manager.add_sequence("holder", [9] * 16)
        with pytest.raises(OutOfBlocks):
            manager.add_sequence("again", A)
        manager.flush()
        manager.remove_sequence("holder")
        manager.add_sequence("again", A)
        manager.flush()
    return tmp_path / "log"


def test_explain_tells_who_evicted_it_and_when(kvcache: Kvcache, evicted: Path) -> None:
    """Of the request that came too late: its refusal, and why it computed everything."""
    done = kvcache("explain", evicted, "--request", "again")
    assert done.code == 0
    assert "request again: refused in batch 5 (+5.000s)" in done.out
    assert "4 blocks, 0 could be had" in done.out
    assert "1 request; most blocks: holder (4)" in done.out
    assert "13 prompt tokens, admitted in batch 6 (+6.000s)" in done.out
    [row] = [line for line in done.out.splitlines() if line.split()[:2] == ["0–2", "0–11"]]
    assert "evicted from primary" in row
    assert "3.00 s before, in batch 3 (+3.000s), to make room for request other" in row
    assert "stored by request first in batch 1 (+1.000s)" in row


def test_audit_charges_the_eviction(kvcache: Kvcache, evicted: Path) -> None:
    """Twelve tokens computed again, by the eviction for the other prompt."""
    found = json.loads(kvcache("audit", evicted, "--json").out)
    reasons = {reason: tokens for reason, tokens in found["reasons"].items() if tokens}
    assert reasons == {"last_token": 4, "unaligned": 3, "evicted": 12, "never_seen": 36}
    assert (found["requests"], found["refusals"], found["prompt_tokens"]) == (4, 1, 55)
    [worst] = found["evictions"]["worst"]
    assert (worst["seq"], worst["for_request"], worst["recomputed_tokens"]) == (3, "other", 12)
    assert found["evictions"]["recomputed_tokens"] == 12
    assert found["blocks"]["never_reused"] == found["blocks"]["stored"]
    text = kvcache("audit", evicted).out
    assert "12 tokens, because they were evicted" in text
    assert "hits come" not in text


def test_audit_from_one_moment_to_another(kvcache: Kvcache, evicted: Path) -> None:
    """What was before is known, but not counted."""
    found = json.loads(kvcache("audit", evicted, "--since", "+6", "--json").out)
    assert (found["requests"], found["reasons"]["evicted"], found["first_seq"]) == (1, 12, 6)
    found = json.loads(kvcache("audit", evicted, "--until", 3, "--json").out)
    assert (found["requests"], found["reasons"]["evicted"], found["last_seq"]) == (2, 0, 3)


def test_audit_of_a_run_agrees_with_its_summary(kvcache: Kvcache, log: Path) -> None:
    """Counted in two ways: by the events of admissions, and token by token."""
    found = json.loads(kvcache("audit", log, "--json").out)
    added = [event for batch in LogReader(log) for event in batch.events if isinstance(event, SequenceAdded)]
    assert (
        found["prompt_tokens"] == sum(event.num_tokens for event in added) == sum(found["reasons"].values())
    )
    assert found["reused_tokens"] == sum(event.reused for event in added) > 0
    assert found["prefixes"]
    assert "prefixes that served most" in kvcache("audit", log).out


def test_of_a_log_without_tokens_it_is_said(kvcache: Kvcache, tmp_path: Path) -> None:
    """Reuse is known; why the rest was computed is not."""
    config = KVCacheConfig.model_validate(
        {
            "max_sequence_length": 16,
            "tokens_per_block": 4,
            "primary_blocks": 8,
            "log": {"record_tokens": False},
        }
    )
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for name in ("a", "b"):
            manager.add_sequence(name, A)
            manager.store_context_blocks(name, 13)
            manager.flush()
            manager.remove_sequence(name)
    done = kvcache("audit", tmp_path / "log")
    assert "not recorded" in done.out
    found = json.loads(kvcache("audit", tmp_path / "log", "--json").out)
    assert {reason: tokens for reason, tokens in found["reasons"].items() if tokens} == {
        "primary": 12,
        "last_token": 2,
        "unknown": 12,
    }
    assert "reused from primary" in kvcache("explain", tmp_path / "log", "--request", "b").out


def test_an_empty_log_has_nothing_to_audit(kvcache: Kvcache, evicted: Path, tmp_path: Path) -> None:
    """It says so, as the other commands do."""
    (tmp_path / "empty").mkdir()
    [segment] = evicted.glob("*.kvlog")
    (tmp_path / "empty" / segment.name).write_bytes(segment.read_bytes()[:SEGMENT_HEADER_BYTES])
    done = kvcache("audit", tmp_path / "empty")
    assert (done.code, done.out) == (2, "")
    assert "holds no batch yet" in done.err


def test_ages_are_right_to_a_quarter() -> None:
    """A quantile lies in the step that the true one lies in."""
    ages = Ages()
    ages.add(np.arange(1, 1001) * SECOND // 10)
    for part in (0.1, 0.5, 0.9):
        found = ages.quantile(part)
        assert found is not None
        assert part * 100 <= found < part * 100 * 1.26
    assert ages.total == 1000


def test_a_timeline_keeps_its_sums() -> None:
    """However long it becomes, and wherever its clock goes."""
    timeline = Timeline(1)
    times = [0, 5, 1000, 3, 10**6, -7]
    for at in times:
        timeline.add(at * SECOND, np.array([1]))
    assert int(timeline.rows.sum()) == len(times)
    assert len(timeline.rows) <= PARTS
    assert timeline.width * PARTS > 10**6 * SECOND
