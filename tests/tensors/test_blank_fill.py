"""With `debug_fill_blank`, whoever reads K/V that nobody wrote finds NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcache.errors import TransfersPending
from kvcache.inputs import Request
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools
from tests.support.engines import strategies
from tests.support.engines.fake_engine import FakeEngine, expected
from tests.support.engines.inside import sequence_of
from tests.support.engines.simulated import LateCopier


def primary_of(engine: FakeEngine) -> torch.Tensor:
    """The only pool: [blocks, layers, K and V, tokens, heads, dim]."""
    return engine.pools.groups[0][0].primary


def found_by(engine: FakeEngine, request_id: str, prompt: list[int]) -> tuple[int, list[float]]:
    """How many tokens of a prompt are reused, and their K as the engine reads it."""
    (admitted,) = engine.admit(Request(request_id, prompt))
    engine.start_transfers()
    slots = engine.manager.block_table(request_id).tolist()
    return admitted.reused_tokens, primary_of(engine)[slots, 0, 0].flatten()[
        : admitted.reused_tokens
    ].tolist()


@pytest.mark.parametrize("fill", [False, True])
def test_draft_tokens_that_were_never_computed_are_found_as_nan(fill: bool) -> None:
    """An engine that appends draft tokens says that they are computed; who reuses them reads what was never written."""
    engine = FakeEngine(debug_fill_blank=fill)
    old = [9] * 16
    engine.admit(Request("before", old))
    engine.forward("before")
    engine.end("before", store=False)  # leaves bytes that look like K/V
    engine.admit(Request("a", [0, 1, 2]))
    engine.forward("a")
    engine.manager.add_tokens(["a"], [3, 4, 5, 6], [4])  # drafts
    reused, values = found_by(engine, "b", [0, 1, 2, 3, 4, 5, 7])
    assert reused == 6
    assert values[:3] == expected([0, 1, 2], sequence_of(engine.manager, "b").namespace)
    assert np.isnan(values[3:]).all() == fill
    assert np.isnan(values[3:]).any() == fill


def test_tables_are_refused_until_the_blocks_are_overwritten() -> None:
    """Nothing may be computed into a block that is yet to be overwritten."""
    engine = FakeEngine(debug_fill_blank=True)
    engine.admit(Request("a", [0, 1, 2, 3]))
    with pytest.raises(TransfersPending):
        engine.manager.block_table("a")
    with pytest.raises(TransfersPending):
        engine.manager.store_context_blocks("a", 2)
    engine.forward("a")
    assert engine.manager.count_reusable([0, 1, 2]) == 1
    engine.verify_running()


def test_offloaded_bytes_are_saved_before_they_are_overwritten() -> None:
    """A block's new owner gets it overwritten only when the copy of its old bytes has been made."""
    engine = FakeEngine(
        wrap=lambda copier: LateCopier(copier, 3), primary_blocks=2, secondary_blocks=2, debug_fill_blank=True
    )
    engine.admit(Request("a", [0, 1, 2]))
    engine.forward("a")
    engine.end("a")
    engine.admit(Request("b", [1, 1, 1]))
    engine.start_transfers()
    assert primary_of(engine).isnan().all()
    engine.forward("b")
    engine.settle()
    assert [block.level for block in engine.manager.match([0, 1, 2]).blocks] == [1]
    engine.verify()


def test_block_that_becomes_its_own_copy_keeps_its_bytes() -> None:
    """Where the source of a partial copy is evicted and becomes the target itself, nothing is overwritten."""
    engine = FakeEngine(tokens_per_block=4, primary_blocks=1, debug_fill_blank=True)
    engine.admit(Request("a", [0, 1, 2]))
    engine.forward("a")
    engine.end("a")
    reused, values = found_by(engine, "b", [0, 1, 3])
    assert (reused, values) == (2, expected([0, 1], sequence_of(engine.manager, "b").namespace))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("num_kv_heads", "kv_factor"), [(2, 2), ((1, 2), 2), (1, 1)])
def test_every_type_has_something_to_show(dtype: str, num_kv_heads: Any, kv_factor: int) -> None:
    """Allocated blocks hold NaN, of integers the largest, in all pools; the others hold what they held."""
    heads = {"num_kv_heads": num_kv_heads, "kv_factor": kv_factor}
    config = strategies.config(dtype=dtype, num_layers=2, debug_fill_blank=True, **heads)
    pools = Pools(Layout.of(config), "cpu")
    with KVCacheManager(config, pools=pools) as manager:
        manager.add_sequence("a", [1, 2, 3])
        manager.start_transfers()
        (group,) = pools.groups
        for pool in group:
            values = pool.primary.to(torch.float32)
            shown = values == 127 if dtype == "int8" else values.isnan()
            assert shown[:2].all()
            assert not shown[2:].any()
            assert not values[2:].any()
