"""A recorder's mirror and log are what an engine with a cache manager of its own has decided, and nothing else."""

from __future__ import annotations

import json
import random
import typing
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from events.errors import LogTooNew
from events.feed.fold import Feed
from events.log import LogReader
from events.types import AnyEvent, BlocksReused, BlocksStored, CacheCreated
from kvcache import KVCacheConfig, KVCacheManager, Recorder
from kvcache.audit.reasons import Reason
from kvcache.audit.totals import audit_batches
from kvcache.errors import (
    Contradiction,
    DuplicateRequest,
    InvalidTokens,
    InvariantViolated,
    KVCacheError,
    PromptTooLong,
    UnknownRequest,
    Unsupported,
    UsageError,
)
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.group import Level
from kvcache.fold.slot_states import SlotState
from kvcache.replay import replay
from sinks.render import StreamNames, render_event
from tests.oracles.naive_audit import NaiveAudit
from tests.support.commands import Kvcache
from tests.support.engines.foreign_engine import ForeignEngine
from tests.support.feeds.strict import StrictIndex
from tests.support.seeds import seeds

BLOCKS, SIZES = (6, 12, 24), (1, 3, 4)
STEPS = 120


def engine_of(seed: int, log: Path | None = None, *, tokens: bool = True) -> ForeignEngine:
    """An engine with a cache so small that everything happens."""
    return ForeignEngine(seed, BLOCKS[seed % 3], SIZES[seed // 3 % 3], log, tokens=tokens)


@pytest.mark.parametrize("seed", seeds(range(400), quick=12))
def test_the_mirror_is_what_the_engine_holds(seed: int) -> None:
    """After each step, state and engine agree on what is cached, where, and on tokens and tables of requests."""
    engine = engine_of(seed)
    for _ in range(STEPS):
        engine.act()
        engine.compare()


def test_everything_happens() -> None:
    """The random engines do all that a recorder has calls for, so that the tests with them prove something."""
    seen = Counter[str]()
    for seed in range(12):
        engine = engine_of(seed)
        for _ in range(STEPS):
            engine.act()
        seen += engine.counters.seen
        seen["refused"] += engine.counters.refusals
        seen["onboarded"] += engine.counters.secondary_hits
    least = {name: seen[name] for name in sorted(seen)}
    assert min(least.values()) >= 5, least
    assert len(least) == 17, least


@pytest.mark.parametrize("seed", seeds(range(300), quick=8))
def test_the_log_says_what_the_engine_has_counted(seed: int, tmp_path: Path) -> None:
    """It replays to the live state, with and without tokens; an audit's sums are the engine's, reasons an oracle's."""
    tokens = seed % 4 > 0
    engine = engine_of(seed, tmp_path / "log", tokens=tokens)
    for _ in range(STEPS):
        engine.act()
    engine.recorder.close()
    replayed = replay(tmp_path / "log", verify=True)
    assert fingerprint(replayed.state) == fingerprint(engine.recorder.state)
    audit = audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))
    counted = engine.counters
    assert (audit.prompt_tokens, audit.reused, audit.refusals) == (
        counted.prompt_tokens,
        counted.hits,
        counted.refusals,
    )
    assert (audit.reasons[Reason.EXTERNAL], audit.not_loaded) == (counted.external, counted.not_loaded)
    assert audit.counts is not None
    assert audit.counts[0] == audit.counts[1] == (counted.prompt_tokens, counted.hits)
    if tokens:
        assert audit.reasons[Reason.SECONDARY] == counted.secondary_hits
        oracle, sums = NaiveAudit(), Counter[str]()
        for batch in LogReader(tmp_path / "log"):
            for each in oracle.batch(batch):
                sums.update(each.sums)
        assert {reason.label: audit.reasons[reason] for reason in Reason if audit.reasons[reason]} == sums
        assert "not_servable" not in sums


@pytest.mark.parametrize("seed", seeds(range(200), quick=6))
def test_routers_are_reported_what_the_engine_holds(seed: int, tmp_path: Path) -> None:
    """After each step a strict index that hears the feed has the names of what is cached, level by level."""
    engine = engine_of(seed, tmp_path / "log")
    feed, index = Feed(), StrictIndex()
    assert engine.recorder.wait_durable(60)
    for batch in LogReader(tmp_path / "log"):
        feed.fold(batch)
    for _ in range(STEPS):
        engine.act()
        for batch in engine.batches:
            for change in feed.fold(batch):
                index.apply(change)
        if engine.batches and not engine.recorder.bus.pending:
            tree, size = engine.recorder.state.groups[0].tree, engine.key_bytes
            for level in (0, 1):
                keys = [bytes(run.keys) for run in tree.runs.values() if run.level == level]
                names = {key[at : at + 8] for key in keys for at in range(0, len(key), size)}
                assert index.names(level) == names
        engine.batches.clear()


def test_what_the_engine_could_have_reused(tmp_path: Path, kvcache: Kvcache) -> None:
    """A cached block that it does not take has a reason of its own, and `explain` says whose decision that was."""
    recorder = begin(tmp_path / "log")
    recorder.admitted("d", PROMPT_C, [8])
    recorder.ended("d")
    recorder.close()
    audit = audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))
    assert audit.reasons[Reason.NOT_REUSED] == 8  # of b, which was admitted before the step's end, and of d
    assert (
        "cached, but not reused by the engine" in kvcache("explain", tmp_path / "log", "--request", "d").out
    )


def test_the_last_block_of_a_hit(tmp_path: Path, kvcache: Kvcache) -> None:
    """An engine that computes it again by design says so, and no audit wonders about it."""
    config = KVCacheConfig(tokens_per_block=4, primary_blocks=8, max_sequence_length=32)
    with Recorder(config, engine="toy", log=tmp_path / "log", drops_last_hit=True) as recorder:
        for name, reused, own in (("a", [], [0, 1, 2]), ("b", [0], [3, 4]), ("c", [], [5, 6, 7])):
            recorder.admitted(name, PROMPT_C, reused)
            recorder.allocated(name, own)
            recorder.stored(name, 2)
    audit = audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))
    assert (audit.reasons[Reason.LAST_HIT], audit.reasons[Reason.NOT_REUSED]) == (4, 8)
    said = kvcache("explain", tmp_path / "log", "--request", "b").out
    assert "speculative decoding computes the last block of a hit again" in said


def test_what_comes_from_outside(tmp_path: Path, kvcache: Kvcache) -> None:
    """An audit, an explanation and a report tell it apart from hits, and what does not come."""
    config = KVCacheConfig(tokens_per_block=4, primary_blocks=8, max_sequence_length=32)
    with Recorder(config, engine="toy", log=tmp_path / "log") as recorder:
        recorder.admitted("a", PROMPT_C, external=6)
        recorder.allocated("a", [0, 1, 2])
        recorder.computed("a", 4)
        recorder.not_loaded("a", 2)
        recorder.counted(9, 1)
    said = kvcache("audit", tmp_path / "log").out
    assert "from outside   4 tokens loaded, 2 failed to load" in said
    assert "engine count   differs: 9 looked up, 1 reused; the log has 9 and 0" in said
    answer = json.loads(kvcache("audit", tmp_path / "log", "--json").out)
    assert [answer[key] for key in ("reused_tokens", "loaded_tokens", "not_loaded_tokens")] == [0, 4, 2]
    assert answer["engine_counts"]["in_log"] == {"prompt_tokens": 9, "reused_tokens": 0}
    said = kvcache("explain", tmp_path / "log", "--request", "a").out
    assert "not loaded  2 tokens failed to load from outside" in said
    assert [line.split()[:4] for line in said.splitlines()[6:9]] == [
        ["0–1", "0–5", "6", "loaded"],
        ["1", "6–7", "2", "never"],
        ["2", "8", "1", "the"],
    ]
    kvcache("report", tmp_path / "log", "--output", tmp_path / "report.html")
    assert "loaded from outside" in (tmp_path / "report.html").read_text()


# -- what cannot be true

PROMPT_C = list(range(100, 109))


def begin(log: Path | None = None) -> Recorder:
    """Blocks of four tokens: `a` holds 3, 4, 5, `b` 3, 6, 7 (6 is a copy of 4); 8 and 9 are cached, and 10 is free."""
    config = KVCacheConfig(tokens_per_block=4, primary_blocks=8, secondary_blocks=2, max_sequence_length=32)
    recorder = Recorder(config, engine="toy 1", log=log, first_block_id=3, wall_ns=lambda: 0)
    recorder.admitted("a", range(12))
    recorder.allocated("a", [3, 4, 5])
    recorder.stored("a", 2)
    recorder.admitted("b", [*range(8), 70, 71], [3])
    recorder.allocated("b", [6, 7])
    recorder.stored("b", 2)
    recorder.admitted("c", PROMPT_C)
    recorder.allocated("c", [8, 9, 10])
    recorder.stored("c", 2)
    recorder.ended("c")
    return recorder


def finish(recorder: Recorder) -> list[AnyEvent]:
    """Go on with all of it; returns the events since the last flush."""
    recorder.check()
    recorder.appended(["a", "b"], [9, 9])
    recorder.stored("a", 3)
    recorder.evicted([9, 8], "a")
    recorder.allocated("a", [9])
    recorder.ended("a", "aborted")
    recorder.evicted([5, 4])
    recorder.admitted("d", [*range(8), 1], [3, 6])
    recorder.allocated("d", [4])
    recorder.ended("b")
    recorder.ended("d")
    recorder.moved([6], [1])
    recorder.admitted("e", [*range(8), 1], [3], onboarded=[1], onto=[10])
    recorder.cleared()
    recorder.check()
    batch = recorder.flush()
    recorder.close()
    assert batch is not None
    return list(batch.events)


Call = Callable[[Recorder], Any]
OTHER = [*PROMPT_C[:8], 1]
WRONG: dict[str, tuple[Call, type[KVCacheError], str]] = {
    "admitted twice": (lambda r: r.admitted("a", [1]), DuplicateRequest, "already running"),
    "no prompt": (lambda r: r.admitted("d", []), InvalidTokens, "empty"),
    "a prompt that never fits": (lambda r: r.admitted("d", [1] * 33), PromptTooLong, "33 tokens"),
    "a hit on a free block": (
        lambda r: r.admitted("d", OTHER, [10]),
        Contradiction,
        "block 10, which request 'd' reuses as its block 0, is not cached",
    ),
    "a hit on a block without a name": (
        lambda r: r.admitted("d", OTHER, [5]),
        Contradiction,
        "block 5, .* not cached",
    ),
    "a hit on other tokens": (
        lambda r: r.admitted("d", [100, 101, 102, 0, 5], [8]),
        Contradiction,
        "block 8, which request 'd' reuses as its block 0, holds other tokens",
    ),
    "a hit on other tokens, later": (
        lambda r: r.admitted("d", [*PROMPT_C[:4], 0, 0, 0, 0, 0], [8, 9]),
        Contradiction,
        "block 9, which request 'd' reuses as its block 1, holds other tokens",
    ),
    "a hit on the middle of a prompt": (
        lambda r: r.admitted("d", [*PROMPT_C[4:8], 1], [9]),
        Contradiction,
        "block 9, .* as its block 0, does not begin a prompt",
    ),
    "hits on two prompts": (
        lambda r: r.admitted("d", [*PROMPT_C[:4], 4, 5, 6, 7, 8], [8, 4]),
        Contradiction,
        "block 4, .* as its block 1, does not continue the block before it",
    ),
    "a hit in another namespace": (
        lambda r: r.admitted("d", OTHER, [8], cache_salt="x"),
        Contradiction,
        "block 8, .* is cached for another LoRA adapter or salt",
    ),
    "a hit on all tokens": (
        lambda r: r.admitted("d", PROMPT_C[:8], [8, 9]),
        Contradiction,
        "reuses 2 blocks of 4 tokens, but its prompt has 8",
    ),
    "a hit in secondary": (
        lambda r: r.admitted("d", OTHER, onboarded=[0], onto=[10]),
        Contradiction,
        "secondary block 0, .* is not cached",
    ),
    "onboarded to nowhere": (
        lambda r: r.admitted("d", OTHER, [8], onto=[10]),
        UsageError,
        "0 onboarded blocks need as many free blocks, not 1",
    ),
    "onboarded to a block in use": (
        lambda r: r.admitted("d", OTHER, [8], onto=[3]),
        Contradiction,
        "block 3 is given",
    ),
    "a block that is none": (
        lambda r: r.admitted("d", OTHER, [11]),
        Contradiction,
        "unknown block 11: .* 3 to 10",
    ),
    "many blocks of which one is none": (
        lambda r: r.allocated("a", list(range(2, 40))),
        Contradiction,
        "unknown block 2",
    ),
    "blocks that are no numbers": (lambda r: r.allocated("a", [10.0]), UsageError, "must be an integer"),
    "blocks that are one number": (
        lambda r: r.allocated("a", np.array(10)),
        UsageError,
        "one-dimensional list of integers",
    ),
    "blocks that are floats": (
        lambda r: r.allocated("a", np.array([10.0])),
        UsageError,
        "one-dimensional list of integers",
    ),
    "blocks that are nothing": (lambda r: r.allocated("a", None), UsageError, "block ids must be a list"),
    "loaded to the last token": (
        lambda r: r.admitted("d", OTHER, [8], external=5),
        Contradiction,
        "reuses 1 blocks of 4 tokens and loads 5 tokens, but its prompt has 9",
    ),
    "less than nothing is loaded": (
        lambda r: r.admitted("d", OTHER, external=-1),
        UsageError,
        "external",
    ),
    "more is missing than there is": (
        lambda r: r.not_loaded("a", 12),
        Contradiction,
        "has 12 tokens, so 12 cannot be missing",
    ),
    "a free block is invalidated": (
        lambda r: r.invalidated([8, 10]),
        Contradiction,
        "block 10 is invalidated, and not cached",
    ),
    "invalidated twice": (lambda r: r.invalidated([8, 8]), UsageError, "names a block twice"),
    "counted less than nothing": (lambda r: r.counted(-1, 0), UsageError, "prompt_tokens"),
    "refused while it runs": (lambda r: r.refused("a", 1), DuplicateRequest, "already running"),
    "refused for less than nothing": (lambda r: r.refused("d", -1), UsageError, "negative"),
    "allocated to nobody": (lambda r: r.allocated("d", [10]), UnknownRequest, "unknown request"),
    "allocated though cached": (
        lambda r: r.allocated("a", [10, 8]),
        Contradiction,
        "block 8 is given to request 'a', but it is cached and must be evicted first",
    ),
    "allocated though held": (
        lambda r: r.allocated("b", [5]),
        Contradiction,
        "block 5 is given to request 'b', but request 'a' holds it",
    ),
    "allocated though a copy is held": (
        lambda r: r.allocated("a", [6]),
        Contradiction,
        "block 6 is given to request 'a', but other blocks have the same content",
    ),
    "allocated twice": (
        lambda r: r.allocated("a", [10, 10]),
        Contradiction,
        "block 10 is given to request 'a' twice",
    ),
    "grown by too few": (
        lambda r: r.grown(["a", "b"], [10]),
        UsageError,
        "1 blocks were given for 2 requests",
    ),
    "grown by what is cached": (
        lambda r: r.grown(["a", "b"], [10, 8]),
        Contradiction,
        "block 8 is given to request 'b', but it is cached",
    ),
    "grown by one for both": (lambda r: r.grown(["a", "b"], [10, 10]), Contradiction, "to two requests"),
    "computed beyond its tokens": (lambda r: r.computed("a", 13), Contradiction, "13 cannot be computed"),
    "computed beyond its slots": (
        lambda r: [r.admitted("d", [1] * 9), r.allocated("d", [10]), r.computed("d", 5)],
        Contradiction,
        "has 9 tokens and slots for 4, so 5 cannot be computed",
    ),
    "computed less than stored": (
        lambda r: r.computed("a", 7),
        Contradiction,
        "2 cached blocks, so more than 7",
    ),
    "stored beyond its blocks": (
        lambda r: r.stored("a", 4),
        Contradiction,
        "which fill 3 blocks, so its first 4",
    ),
    "stored before it is full": (
        lambda r: r.stored("b", 3),
        Contradiction,
        "3 blocks and 10 tokens, which fill 2",
    ),
    "named here and there": (
        lambda r: r.stored("a", 3, [b"12345678"]),
        UsageError,
        "names were given, but the recorder makes them",
    ),
    "filled before it is full": (
        lambda r: r.filled(["a", "b"]),
        Contradiction,
        "its first 3 cannot be cached",
    ),
    "filled twice": (lambda r: r.filled(["a", "a"]), UsageError, "duplicate request id"),
    "replaced by a free block": (
        lambda r: r.replaced("a", 2, [10]),
        Contradiction,
        "block 10 does not have the content of block 2",
    ),
    "replaced by other tokens": (
        lambda r: r.replaced("a", 2, [8]),
        Contradiction,
        "block 8 does not have the content of block 2",
    ),
    "replaced though cached": (
        lambda r: r.replaced("a", 1, [6]),
        Contradiction,
        "is the one after them, not block 1",
    ),
    "appended to nobody": (lambda r: r.appended(["a", "c"], [1, 1]), UnknownRequest, "unknown request 'c'"),
    "appended twice": (lambda r: r.appended(["a", "a"], [1, 1]), UsageError, "duplicate request id"),
    "appended more than there are": (
        lambda r: r.appended(["a", "b"], [1]),
        InvalidTokens,
        "1 tokens were given for 2",
    ),
    "appended beyond its slots": (
        lambda r: r.appended(["b", "a"], [1, 2, 3], [1, 2]),
        Contradiction,
        "request 'a' has slots for 12 tokens, but 13 count as computed",
    ),
    "appended beyond its slots, one by one": (
        lambda r: [r.appended(["a"], [1]), r.appended(["a"], [1])],
        Contradiction,
        "request 'a' has slots for 12 tokens, but 13 count as computed",
    ),
    "appended beyond all bounds": (lambda r: r.appended(["a"], [1] * 21, [21]), PromptTooLong, "33 tokens"),
    "ended twice": (lambda r: r.ended("c"), UnknownRequest, "unknown request"),
    "ended for no reason": (
        lambda r: r.ended("a", "lost"),  # type: ignore[arg-type]
        UsageError,
        "why must be one of",
    ),
    "evicted though held": (
        lambda r: r.evicted([9, 5]),
        Contradiction,
        "block 5 cannot go: it is not cached",
    ),
    "evicted though cached and held": (
        lambda r: r.evicted([9, 3]),
        Contradiction,
        "block 3 cannot go: .* held",
    ),
    "evicted though a copy is held": (
        lambda r: r.evicted([6]),
        Contradiction,
        "block 6 is evicted, but a running",
    ),
    "evicted though its copy is held": (
        lambda r: r.evicted([9, 4]),
        Contradiction,
        "block 4 is evicted, but a running",
    ),
    "evicted though free": (
        lambda r: r.evicted([9, 10]),
        Contradiction,
        "block 10 cannot go: it is not cached",
    ),
    "evicted before what continues it": (
        lambda r: r.evicted([8]),
        Contradiction,
        "block 8 cannot go: .* still cached",
    ),
    "evicted twice": (lambda r: r.evicted([9, 8, 9]), Contradiction, "block 9 cannot go: it is named twice"),
    "evicted from secondary": (
        lambda r: r.evicted([0], level="secondary"),
        Contradiction,
        "secondary block 0 cannot go: it is not cached",
    ),
    "evicted from nowhere": (
        lambda r: r.evicted([9], level="disk"),  # type: ignore[arg-type]
        UsageError,
        "level must be",
    ),
    "evicted for nobody": (lambda r: r.evicted([9], "c"), UnknownRequest, "unknown request"),
    "moved though held": (lambda r: r.moved([3], [0]), Contradiction, "block 3 cannot go: it is held"),
    "moved before what continues it": (lambda r: r.moved([8, 9], [0, 1]), Contradiction, "block 8 cannot go"),
    "moved to nowhere": (
        lambda r: r.moved([9], [2]),
        Contradiction,
        "unknown block 2: ids are from 0 to 1",
    ),
    "moved to one for two": (
        lambda r: r.moved([9, 8], [0]),
        UsageError,
        "2 moved blocks need as many secondary blocks, but 1",
    ),
    "moved to one twice": (lambda r: r.moved([9, 8], [1, 1]), Contradiction, "secondary block 1 is not free"),
    "moved though a copy is left": (lambda r: r.moved([6], [0]), Unsupported, "moving block 6"),
    "moved for nobody": (lambda r: r.moved([9], [0], "c"), UnknownRequest, "unknown request"),
}
"""By what is wrong: a call, its error, and what the error says."""
REPORTED_BEFORE = {"computed beyond its slots": 2, "appended beyond its slots, one by one": 1}
"""Entries whose first calls are right."""


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_true_is_refused_and_leaves_no_trace(what: str) -> None:
    """The error names the contradiction, nothing is recorded, and all goes on as if the call had not been made."""
    call, kind, said = WRONG[what]
    recorder = begin()
    before, pending = fingerprint(recorder.state), len(recorder.bus.pending)
    with pytest.raises(kind, match=said) as refused:
        call(recorder)
    assert type(refused.value) is kind
    if what in REPORTED_BEFORE:
        return
    assert (fingerprint(recorder.state), len(recorder.bus.pending)) == (before, pending)
    assert finish(recorder) == finish(begin())


def test_a_contradiction_names_request_and_block() -> None:
    """Programs get them as attributes, in the engine's numbers."""
    recorder = begin()
    with pytest.raises(Contradiction) as refused:
        recorder.allocated("b", [10, 8])
    assert (refused.value.request_id, refused.value.block) == ("b", 8)


def test_one_name_for_one_content() -> None:
    """Blocks with the same tokens and two names are refused: something tells them apart that the log does not know."""
    config = KVCacheConfig(tokens_per_block=2, primary_blocks=8, max_sequence_length=16)
    recorder = Recorder(config, engine="toy", name_bytes=8)
    for request, block in (("a", 0), ("b", 1), ("c", 2)):
        recorder.admitted(request, [5, 6, 7])
        recorder.allocated(request, [block])
    with pytest.raises(UsageError, match="expected 1 names of 8 bytes each, got 0"):
        recorder.stored("a", 1)
    with pytest.raises(Contradiction, match="block 0 of request 'b' has the tokens of block 1"):
        recorder.filled(["a", "b"], [b"12345678", b"abcdefgh"])
    recorder.filled(["a", "b"], [b"12345678"] * 2)
    for store in (recorder.stored, lambda request, _, names: recorder.filled([request], names)):
        with pytest.raises(
            Contradiction, match="block 0 of request 'c' has the tokens of block 0, but another name"
        ):
            store("c", 1, [b"abcdefgh"])
    recorder.stored("c", 1, b"12345678")
    recorder.check()


def test_a_block_that_lost_its_name_is_not_named_while_others_hold_it() -> None:
    """After the cache was cleared, what two requests hold has one slot: it can be named once one of them is left."""
    recorder = begin()
    recorder.cleared()
    with pytest.raises(Contradiction, match="lost its name"):
        recorder.stored("a", 1)
    recorder.ended("b")
    recorder.stored("a", 3)
    recorder.check()
    recorder.allocated("a", [6, 7, 8])


def test_blocks_in_use_are_invalidated() -> None:
    """With all that continues them, and nobody else's: they stay with their requests, and are free when these end."""
    recorder = begin()
    assert sorted(recorder.invalidated([3])) == [3, 4, 6]
    recorder.check()
    states = recorder.state.slot_states(0)[0].tolist()
    held, shared, cached = (SlotState.HELD, SlotState.SHARED, SlotState.UNREFERENCED)
    assert [states[block - 3] for block in (3, 4, 6, 8, 9)] == [
        shared,
        shared,
        SlotState.BLANK,
        cached,
        cached,
    ]
    recorder.ended("b")
    assert recorder.state.slot_states(0)[0].tolist()[:2] == [held, held]
    recorder.ended("a")
    recorder.check()
    recorder.admitted("d", OTHER, [8])
    recorder.allocated("d", [3, 4, 5, 6, 7, 10])


def test_a_copy_is_invalidated() -> None:
    """The other one can be found still, and is not evicted before the one that is held is free."""
    recorder = begin()
    assert recorder.invalidated([4]) == [4]
    recorder.admitted("d", [*range(8), 1], [3, 6])
    recorder.ended("b")
    recorder.ended("d")
    recorder.check()
    with pytest.raises(Contradiction, match="block 6 is evicted, but a running request holds a copy of it"):
        recorder.evicted([6])
    recorder.ended("a")
    recorder.evicted([6])
    recorder.check()
    recorder.admitted("e", [*range(8), 1], [3])
    recorder.allocated("e", [4, 5, 6, 7])


# -- what the log says


def events_of(log: Path) -> list[AnyEvent]:
    """All events of a log."""
    return [event for batch in LogReader(log) for event in batch.events]


def test_the_log_says_who_decided(tmp_path: Path) -> None:
    """It names the engine, and no manager goes on with its state."""
    finish(begin(tmp_path / "log"))
    [created] = [event for event in events_of(tmp_path / "log") if type(event) is CacheCreated]
    assert created.engine == "toy 1"
    with pytest.raises(Unsupported, match="resuming a cache that toy 1 managed"):
        KVCacheManager.resume(replay(tmp_path / "log").state)


def test_older_readers_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they would not understand has a newer version; what they would has none."""
    finish(begin(tmp_path / "log"))
    odd = KVCacheConfig(tokens_per_block=3, primary_blocks=8, max_sequence_length=24)
    for name, config in {"odd": odd, "plain": odd.model_copy(update={"tokens_per_block": 4})}.items():
        KVCacheManager(config, log=tmp_path / name).close()
    monkeypatch.setattr("events.log.reader.FORMAT_VERSION", 1)
    for name in ("log", "odd"):
        with pytest.raises(LogTooNew, match="has format version 2, which is newer than this software"):
            list(LogReader(tmp_path / name))
    assert list(LogReader(tmp_path / "plain"))


STORY: list[tuple[Call, list[str]]] = [
    (lambda r: r.refused("a", 3), ["AdmissionRefused", "request=a needed=3 available=8"]),
    (lambda r: r.refused("a", 3), []),
    (lambda r: r.admitted("a", range(12)), ["SequenceAdded", "#1 request=a tokens=12 reused=0+0+0"]),
    (lambda r: r.allocated("a", [3]), ["BlocksAllocated", "why=prompt"]),
    (lambda r: r.computed("a", 3), ["ContextComputed", "tokens=3"]),
    (lambda r: r.computed("a", 3), []),
    (lambda r: r.stored("a", 1), ["ContextComputed", "tokens=4", "BlocksStored", "blocks=1 first=0"]),
    (lambda r: r.allocated("a", [4, 5]), ["BlocksAllocated", "blocks=2 why=reserve"]),
    (lambda r: r.computed("a", 12), ["ContextComputed", "tokens=12"]),
    (lambda r: r.stored("a", 1), []),
    (lambda r: r.stored("a", 2), ["BlocksStored", "blocks=1 first=1"]),
    (lambda r: r.appended(["a"], [1]), ["TokensAppended", "tokens=1"]),
    (lambda r: r.filled(["a"]), ["BlocksFilled", "blocks=1"]),
    (lambda r: r.allocated("a", [6]), ["BlocksAllocated", "blocks=1 why=decode"]),
    (lambda r: r.appended(["a"], [1, 2], [2]), ["TokensAppended", "tokens=2"]),
    (
        lambda r: r.admitted("b", range(9), [3], resumed=True),
        ["SequenceAdded", "reused=4+0+0", "BlocksReused", "blocks=1"],
    ),
    (lambda r: r.allocated("b", [7, 8]), ["BlocksAllocated", "blocks=2 why=prompt"]),
    (lambda r: r.stored("b", 2), ["ContextComputed", "tokens=8", "BlocksReused", "first=1", "replaced=1"]),
    (lambda r: r.ended("a"), ["SequenceRemoved", "tokens=15 computed=14 stored=3 freed=1"]),
    (lambda r: r.evicted([5], "b"), ["BlocksRemoved", "primary blocks=1", "why=capacity for request=b"]),
    (lambda r: r.evicted([4]), []),  # of which 7 is a copy
    (
        lambda r: r.ended("b", "preempted", stop="length"),
        ["SequenceRemoved", "tokens=9 computed=8 stored=2 freed=1 why=preempted stop=length"],
    ),
    (lambda r: r.moved([7], [1]), ["BlocksMoved", "primary->secondary blocks=1", "why=offload transfer=1"]),
    (
        lambda r: r.admitted("c", range(9), [3], onboarded=[1], onto=[10]),
        [
            "SequenceAdded",
            "reused=4+4+0",
            "BlocksReused",
            "BlocksReused",
            "BlocksMoved",
            "why=onboard transfer=2",
        ],
    ),
    (
        lambda r: r.admitted("d", range(50, 59), external=5),
        ["SequenceAdded", "reused=0+0+0 external=5"],
    ),
    (lambda r: r.not_loaded("d", 0), []),
    (lambda r: r.not_loaded("d", 2), ["LoadFailed", "request=d tokens=2"]),
    (lambda r: r.allocated("c", [7]), ["BlocksAllocated", "why=prompt"]),
    (
        lambda r: r.grown(["c", "d"], [8, 9]),
        ["BlocksAllocated", "request=c", "why=decode", "BlocksAllocated", "request=d", "why=prompt"],
    ),
    (
        lambda r: r.grown(["d", "c"], [5, 6]),
        ["BlocksAllocated", "request=d", "why=reserve", "BlocksAllocated"],
    ),
    (lambda r: r.grown([], []), []),
    (lambda r: r.invalidated([3]), ["BlocksRemoved", "primary blocks=2", "why=invalidated"]),
    (lambda r: r.cleared(), ["CacheCleared"]),
    (lambda r: r.flush(), ["TransferLanded", "transfers=1..2"]),
]
"""Calls, and what stands in the lines of the events that each of them makes."""


def test_each_call_becomes_its_events() -> None:
    """What docs/how-to/recording.md says of each call, with the reasons that follow from where a request stands."""
    config = KVCacheConfig(tokens_per_block=4, primary_blocks=8, secondary_blocks=2, max_sequence_length=32)
    recorder = Recorder(config, engine="toy 1", first_block_id=3)
    reported: list[AnyEvent] = []
    recorder.bus.subscribe(reported.append, *typing.get_args(AnyEvent))
    known = StreamNames(recorder.state.hashing.key_bytes)
    for number, (call, parts) in enumerate(STORY):
        call(recorder)
        lines = []
        for event in reported:
            known.see(event)
            lines.append(render_event(event, known))
        reported.clear()
        recorder.check()
        text, at = "\n".join(lines), 0
        for part in parts:
            assert part in text[at:], (number, part, lines)
            at = text.index(part, at) + len(part)
        assert len(lines) == sum(part.isalpha() for part in parts), (number, lines)


def test_names_are_the_engines(tmp_path: Path) -> None:
    """Keys in the log are those that the engine gave, whether a block is stored or filled, and hits have them."""
    config = KVCacheConfig(tokens_per_block=2, primary_blocks=8, max_sequence_length=16)
    names = [bytes([number]) * 16 for number in range(3)]
    with Recorder(config, engine="toy", log=tmp_path / "log", name_bytes=16) as recorder:
        recorder.admitted("a", [1, 2, 3, 4, 5])
        recorder.allocated("a", [0, 1, 2])
        recorder.stored("a", 2, names[:2])
        recorder.appended(["a"], [6])
        recorder.filled(["a"], b"".join(names[2:]))
        recorder.admitted("b", [1, 2, 3, 4, 9], [0, 1])
    events = events_of(tmp_path / "log")
    created = next(event for event in events if type(event) is CacheCreated)
    assert (created.hash_algorithm, created.key_bytes) == ("engine_128", 16)
    assert [event.keys for event in events if type(event) is BlocksStored] == [b"".join(names[:2])]
    assert [event.names for event in events if type(event) is BlocksReused] == [bytes(8) + bytes([1]) * 8]


@pytest.mark.parametrize("tokens", [True, False])
def test_commands_read_it(tmp_path: Path, kvcache: Kvcache, tokens: bool) -> None:
    """All that reads logs of managers reads this one."""
    log, page, tables = tmp_path / "log", tmp_path / "page.html", tmp_path / "tables"
    engine = engine_of(9, log, tokens=tokens)
    assert engine.traits.names
    for _ in range(STEPS):
        engine.act()
    engine.recorder.close()
    commands = [
        ("replay", log, "--verify"),
        ("audit", log),
        ("events", log),
        ("report", log, "--output", page),
        ("export", log, "--to", "csv", "--output", tables),
        ("log", "verify", log),
        ("diff", log, log),
        ("explain", log, "--request", engine.numbers - 1),
    ]
    for command in commands + [("curve", log)] * tokens:
        done = kvcache(*command)
        assert done.code == 0, (command, done.err)
    prompt = tmp_path / "prompt.json"
    prompt.write_text("[1, 1, 1]")
    matched = kvcache("match", log, "--tokens", prompt)
    assert (matched.code, "the engine's own block names" in matched.err) == (
        (0, False) if tokens else (2, True)
    )


def test_wrong_arguments_of_the_constructor() -> None:
    """What cannot be recorded is said before anything is opened."""
    config = KVCacheConfig(max_sequence_length=64, primary_blocks=8)
    sliding = KVCacheConfig(max_sequence_length=64, primary_blocks=8, max_attention_window=(16, 64))
    with pytest.raises(Unsupported, match="sliding windows"):
        Recorder(sliding, engine="toy")
    with pytest.raises(UsageError, match="makes the decisions"):
        Recorder(config, engine="")
    with pytest.raises(UsageError, match="name_bytes must be one of 8, 16, 32"):
        Recorder(config, engine="toy", name_bytes=7)
    with pytest.raises(UsageError, match="config must be a KVCacheConfig"):
        Recorder({}, engine="toy")  # type: ignore[arg-type]


# -- slots that others choose


@pytest.mark.parametrize("seed", seeds(range(100), quick=10))
def test_chosen_slots_are_taken_as_one_by_one(seed: int) -> None:
    """Whichever blank slots are taken, the others keep their order; what is not blank is refused."""
    rng = random.Random(seed)
    size = rng.choice((4, 40, 9000))
    level, blank = Level(0, size), list(range(size))[::-1]
    for _ in range(60):
        taken = [slot for slot in range(size) if slot not in set(blank)] if size < 100 else []
        start = rng.randrange(len(blank)) if blank else 0
        chosen = (
            blank[start : start + rng.randint(1, 30)][::-1]
            if rng.random() < 0.5
            else rng.sample(blank, min(rng.choice((4, 40)), len(blank)))
        )
        assert level.are_blank(array("i", chosen)) or not chosen
        level.take_slots(array("i", chosen))
        for slot in chosen:
            blank.remove(slot)
        assert level.blank.tolist() == blank
        back = rng.sample(chosen, len(chosen) // 2)
        level.return_slots(array("i", back))
        blank += back
        if taken:
            assert not level.are_blank(array("i", [taken[0]]))
            with pytest.raises(InvariantViolated, match="not blank"):
                Level(0, 0).take_slots(array("i", [0]))
        if chosen:
            assert not level.are_blank(array("i", [chosen[0], chosen[0]]))
