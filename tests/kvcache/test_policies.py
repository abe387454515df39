"""Orders of eviction at many sizes: against caches played block by block, the curve, and the manager itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit.curve import best_hits, measure
from kvcache.audit.policies import POLICIES, Policy, RequestRecorder, Workload
from kvcache.errors import UsageError
from kvcache.whatif.trial import Trial
from kvcache.whatif.trial import play as play_manager
from tests.oracles.eviction_models import (
    Gap,
    Levels,
    Model,
    Prompt,
    Ranked,
    Segmented,
    Stop,
    Tail,
    TwoQueues,
)
from tests.support.prompts import reuses_of, some_prompts
from tests.support.seeds import seeds

pytestmark = pytest.mark.timeout(600)
"""The first policy that is played waits for the compiler, which takes long on a machine that is busy."""

MODELS: dict[str, Callable[[list[Prompt], int], Model]] = {
    "lru": Levels,
    "fifo": Model,
    "lfu": lambda prompts, size: Ranked(prompts, size, lambda depth: 1.0),
    "gdsf:8": lambda prompts, size: Ranked(prompts, size, lambda depth: 1 + depth * 4 / 8),
    "slru": lambda prompts, size: Segmented(prompts, size, max(1, round(0.8 * size))),
    "slru:0.3": lambda prompts, size: Segmented(prompts, size, max(1, round(0.3 * size))),
    "s3fifo": lambda prompts, size: TwoQueues(prompts, size, max(1, round(0.1 * size))),
    "s3fifo:0.5": lambda prompts, size: TwoQueues(prompts, size, max(1, round(0.5 * size))),
    "tlru:8": lambda prompts, size: Tail(prompts, size, 2),
    "stop": lambda prompts, size: Stop(prompts, size, 600),
    "stop:20": lambda prompts, size: Stop(prompts, size, 20),
    "gap": lambda prompts, size: Gap(prompts, size, 20),
}


def some_requests(random_: random.Random, held: float) -> list[Prompt]:
    """Prompts that often begin like earlier ones, at random times, with stop reasons."""
    blocks = some_prompts(random_, random_.randint(1, 60), random_.choice((2, 3, 20)), 12)
    now, requests = 0.0, []
    for each in blocks:
        now += random_.choice((0.0, 1.0, random_.expovariate(0.2), random_.expovariate(0.01)))
        stop = random_.choice((None, "tool_use", "end_turn", "max_tokens"))
        requests.append(
            Prompt(each, now, random_.choice((0.0, random_.expovariate(1 / held))) if held else 0.0, stop)
        )
    return requests


def workload_of(requests: list[Prompt]) -> Workload:
    recorder = RequestRecorder()
    for each in requests:
        recorder.add(each.blocks, arrival=each.arrival, held=each.held, stop=each.stop or "unknown")
    return recorder.workload(4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("held", [0.0, 3.0, 60.0], ids=["free", "held", "long"])
@pytest.mark.parametrize("seed", seeds(range(100), quick=2))
def test_equals_a_cache_that_is_played(name: str, held: float, seed: int) -> None:
    """Each prompt finds as many blocks as in a model with lists, also where requests hold their blocks for a time."""
    random_ = random.Random(f"{name} {held} {seed}")
    for _ in range(10):
        requests = some_requests(random_, held)
        size = random_.randint(1, 40)
        played = MODELS[name](requests, min(size, workload_of(requests).distinct_blocks)).play()
        assert Policy.named(name).hits(workload_of(requests), size).tolist() == played


@pytest.mark.parametrize("seed", seeds(range(30), quick=5))
def test_lru_is_the_curve(seed: int) -> None:
    """Nothing held, the least recently used leaf evicted: the curve of all sizes; no policy is above the bound."""
    random_ = random.Random(seed)
    prompts = some_prompts(random_, 60, 3, 12)
    workload, curve = workload_of([Prompt(blocks) for blocks in prompts]), measure(prompts)
    for size in (1, 2, 5, 9, 20, curve.distinct_blocks + 5):
        assert int(Policy.named("lru").hits(workload, size).sum()) == curve.hits(size)
        best = best_hits(reuses_of(prompts), size)
        assert all(int(Policy.named(name).hits(workload, size).sum()) <= best for name in POLICIES)


def test_equals_what_the_manager_does(tmp_path: Path) -> None:
    """One request at a time, with a block left over for its last token: what-if's `lru` finds the same blocks.

    Its `lfu` begins to count uses at other moments, and comes close.
    """
    random_ = random.Random(5)
    prompts = some_prompts(random_, 120, 3, 12)
    config = KVCacheConfig(
        max_sequence_length=52, tokens_per_block=4, primary_blocks=64, enable_partial_reuse=False
    )
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for number, blocks in enumerate(prompts):
            tokens = [token for block in blocks for token in (block, block, block, block)] + [1]
            manager.add_sequence(number, tokens)
            manager.store_context_blocks(number, len(tokens))
            manager.remove_sequence(number)
            manager.flush()
    workload = workload_of([Prompt(blocks) for blocks in prompts])
    trials = [Trial({"primary_blocks": size + 1}, name) for name in ("lru", "lfu") for size in (12, 16, 30)]
    _, *results = play_manager(tmp_path / "log", trials)
    for trial, result in zip(trials, results, strict=True):
        assert trial.policy is not None
        ours = Policy.named(trial.policy).hits(workload, trial.sets["primary_blocks"] - 1)
        exact = result.tally.reused_tokens
        assert int(ours.sum()) * 4 == pytest.approx(exact, rel=0.04 if trial.policy == "lfu" else 0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lirs", "policy 'lirs': there are lru, fifo"),
        ("lru:3", "policy 'lru:3': lru takes no number"),
        ("stop:", "stop takes a number above 0, from 1e-09 to 1,000,000,000, not ''"),
        ("tlru:1e300", "tlru takes a number above 0, from 1e-09 to 1,000,000,000, not '1e300'"),
        ("gdsf:5e-324", "gdsf takes a number above 0"),
        ("stop:-1", "takes a number above 0"),
        ("stop:nan", "takes a number above 0"),
        ("slru:1.5", "slru takes a part of the cache, below 1"),
    ],
)
def test_names(name: str, says: str) -> None:
    """What is no policy is refused with what there is."""
    with pytest.raises(UsageError, match=says):
        Policy.named(name)


def test_stops_are_needed() -> None:
    """Where no request says why it ended, `stop` is refused, not played as something else."""
    recorder = RequestRecorder()
    recorder.add([1, 2])
    with pytest.raises(UsageError, match="no request has a stop reason"):
        Policy.named("stop").hits(recorder.workload(4), 5)


def test_nothing() -> None:
    """Without requests, or without blocks, nothing hits."""
    assert RequestRecorder().workload(4).block_requests == 0
    recorder = RequestRecorder()
    assert Policy.named("lru").hits(recorder.workload(4), 5).tolist() == []
    recorder.add([])
    for name in ("lru", "gap", "gdsf", "slru", "s3fifo"):
        assert Policy.named(name).hits(recorder.workload(4), 5).tolist() == [0]
