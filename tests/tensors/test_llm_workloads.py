"""Whatever a cache does meanwhile, a model that runs on it computes what it computes without one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuda_ops.copier import Copier, Copy, Ticket
from kvcache import KVCacheManager
from kvcache.calls.tables import BlockTables
from kvcache.fold import prefix_tree
from kvcache.results import Admission
from tests.support.engines.inside import sequence_of
from tests.support.engines.llm_workload import SIZE, Dense, Workload, WrongAnswer, small_llm

LLM = small_llm()
DENSE = Dense(LLM, LLM.Model(None, torch.float64))
STEPS = 12
MUTANT_SEEDS = 60
"""How many workloads a mutation may survive."""


def drive(rng: random.Random, steps: int = STEPS, **options: Any) -> Workload:
    workload = Workload(LLM, rng, **options)
    workload.run(steps, DENSE)
    return workload


@settings(suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_random_workloads(seed: int) -> None:
    """Every logit of every step, in float64: of reused, copied, moved, branched, taken back and returned K/V."""
    drive(random.Random(seed))


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_many_random_workloads(seed: int) -> None:
    """The same, more and longer ones."""
    drive(random.Random(seed), 30)


def test_workloads_do_all_that_they_should() -> None:
    """Among a few of them everything occurs that could go wrong."""
    done = Counter[str]()
    for seed in range(20):
        workload = drive(random.Random(seed))
        stats = workload.manager.stats()
        done.update(workload.done)
        for name in ("reused_tokens", "blocks_copied", "blocks_offloaded", "blocks_onboarded"):
            done[name] += getattr(stats, name)
    wanted = {"chunk", "draft", "fork", "guess", "late", "preempt", "resume", "rewind", "cut"}
    wanted |= {"reused_tokens", "blocks_copied", "blocks_offloaded", "blocks_onboarded"}
    assert {name for name, count in done.items() if count >= 3} >= wanted


class SkippingCopier:
    """Leaves out the first copy of each batch."""

    def __init__(self, inner: Copier) -> None:
        self._inner = inner

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        return self._inner.submit(copies[1:])


Mutate = Callable[[pytest.MonkeyPatch], dict[str, Any]]


def claim_one_block_too_many(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A block of other tokens is found for a prompt's next one."""
    found = prefix_tree.common_bytes

    def too_many(content: bytes, symbols: bytes, start: int, stop: int, begin: int = 0) -> int:
        size = SIZE * 4
        common = found(content, symbols, start, stop, begin) // size * size + size
        return min(common, len(content) - begin, (stop - start) // size * size)

    patch.setattr(prefix_tree, "common_bytes", too_many)
    return {}


def report_one_block_too_many(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A chunk is said to be computed together with the block behind it."""
    reported = KVCacheManager.store_context_blocks

    def too_much(manager: KVCacheManager, request_id: Any, number: int) -> Any:
        return reported(manager, request_id, min(number + SIZE, sequence_of(manager, request_id).num_tokens))

    patch.setattr(KVCacheManager, "store_context_blocks", too_much)
    return {}


def skip_a_copy(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of each batch of copies one is not made."""
    return {"wrap": SkippingCopier}


def swap_k_and_v(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The second layer reads K for V."""
    attend = LLM.attend

    def swapped(query: Any, kv: Any, *of: Any, **how: Any) -> Any:
        second = kv.key.shape[2] == LLM.KV_HEADS[1]
        return attend(query, kv._replace(key=kv.value, value=kv.key) if second else kv, *of, **how)

    patch.setattr(LLM, "attend", swapped)
    return {}


def shift_a_table(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The slots of the sliding window's tables stand one place further on."""
    padded = BlockTables.padded

    def shifted(manager: Any, names: Any, window: int, **how: Any) -> Any:
        tables: Any = padded(manager, names, window, **how)
        return tables.copy_(tables.roll(1, dims=-1)) if window == LLM.WINDOWS[0] else tables

    patch.setattr(BlockTables, "padded", shifted)
    return {}


def window_one_token_short(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The sliding window has a token fewer."""
    attend = LLM.attend
    short = {LLM.WINDOWS[0]: LLM.WINDOWS[0] - 1}
    patch.setattr(
        LLM, "attend", lambda *of, window, **how: attend(*of, window=short.get(window, window), **how)
    )
    return {}


def reuse_the_last_prompt_token(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The first token that is to be computed is taken for reused."""
    reused: Any = vars(Admission)["reused_tokens"]
    patch.setattr(
        Admission, "reused_tokens", property(lambda self: min(reused.fget(self) + 1, self.num_tokens - 1))
    )
    return {}


@pytest.mark.parametrize(
    "mutate",
    [
        claim_one_block_too_many,
        report_one_block_too_many,
        skip_a_copy,
        swap_k_and_v,
        shift_a_table,
        window_one_token_short,
        reuse_the_last_prompt_token,
    ],
)
def test_workloads_find_what_is_wrong(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these mistakes gives a wrong logit in one of the first workloads."""
    for seed in range(MUTANT_SEEDS):
        with monkeypatch.context() as patch:
            try:
                drive(random.Random(seed), **mutate(patch))
            except WrongAnswer:
                return
    pytest.fail("no workload has noticed")
