"""The layout computed from a configuration: groups, pools, shapes, bytes, blocks and the content id."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
import torch

from events.types import GroupCreated, PoolCreated
from kvcache.config import KVCacheConfig
from kvcache.errors import ConfigError
from kvcache.layout import ITEM_BYTES, Layout


def layout(**settings: Any) -> Layout:
    """The layout of a small cache, but for the settings given."""
    return Layout.of(
        KVCacheConfig(**{"max_sequence_length": 64, "tokens_per_block": 4, "primary_blocks": 16, **settings})
    )


def test_one_window_is_one_group() -> None:
    """Without windows all layers form one group whose window is the longest sequence."""
    (group,) = layout(num_layers=3).groups
    assert (group.index, group.window, group.kind, group.layers) == (0, 64, "full", (0, 1, 2))
    assert [pool.layers for pool in group.pools] == [(0, 1, 2)]


def test_windows_repeat_over_the_layers_and_groups_ascend() -> None:
    """Layer i has window i modulo the list's length; groups are ordered by window."""
    groups = layout(num_layers=5, max_attention_window=(32, 16)).groups
    assert [(group.index, group.window, group.layers) for group in groups] == [
        (0, 16, (1, 3)),
        (1, 32, (0, 2, 4)),
    ]


def test_windows_beyond_the_longest_sequence_are_one() -> None:
    """Windows are clamped to the longest sequence, so two that exceed it fall into one group."""
    groups = layout(num_layers=4, max_attention_window=(64, 100, 16, 10**9)).groups
    assert [(group.window, group.layers) for group in groups] == [(16, (2,)), (64, (0, 1, 3))]


def test_pools_split_by_heads_inside_a_group() -> None:
    """Layers of one group with different numbers of KV heads lie in different pools, fewer heads first."""
    groups = layout(num_layers=4, num_kv_heads=(16, 1, 2, 1), max_attention_window=(64, 64, 16, 64)).groups
    found = [[(pool.num_kv_heads, pool.layers) for pool in group.pools] for group in groups]
    assert found == [[(2, (2,))], [(1, (1, 3)), (16, (0,))]]


@pytest.mark.parametrize("kv_factor", [2, 1])
@pytest.mark.parametrize(("kv_layout", "inner"), [("NHD", (4, 5, 7)), ("HND", (5, 4, 7))])
def test_block_shape(kv_layout: str, inner: tuple[int, ...], kv_factor: int) -> None:
    """A block is layers, K and V or K only, tokens before heads or heads before tokens, and the head's dimension."""
    shape = (3, kv_factor, *inner)
    (group,) = layout(
        num_layers=3, num_kv_heads=5, head_dim=7, kv_layout=kv_layout, kv_factor=kv_factor
    ).groups
    assert group.bytes_per_block == 3 * kv_factor * 4 * 5 * 7 * 2
    assert group.pools[0].block_shape == shape


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_bytes_per_block_are_those_of_a_tensor(dtype: str) -> None:
    """A tensor of a block's shape and type occupies the bytes that the layout says."""
    (group,) = layout(num_layers=3, num_kv_heads=5, head_dim=7, dtype=dtype).groups
    (pool,) = group.pools
    tensor = torch.empty(pool.block_shape, dtype=getattr(torch, dtype))
    assert pool.bytes_per_block == group.bytes_per_block == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"primary_blocks": 8}, (8, 0)),
        ({"primary_blocks": None, "max_tokens": 35}, (8, 0)),
        ({"primary_blocks": 3, "max_tokens": 35}, (3, 0)),
        ({"primary_blocks": 9, "max_tokens": 35}, (8, 0)),
        ({"secondary_blocks": 5}, (8, 5)),
        ({"host_cache_size": 5119}, (8, 4)),
        ({"host_cache_size": 5120}, (8, 5)),
        ({"host_cache_size": 5120, "secondary_blocks": 3}, (8, 3)),
        ({"host_cache_size": 5120, "secondary_blocks": 6}, (8, 5)),
        ({"host_cache_size": 0}, (8, 0)),
    ],
)
def test_smaller_limit_wins(settings: dict[str, Any], blocks: tuple[int, int]) -> None:
    """Where two settings limit a level, the smaller one counts; tokens and bytes are rounded down to blocks."""
    # A block has 2 layers × 2 × 4 tokens × 2 heads × 16 dims × 2 bytes = 1024 bytes.
    (group,) = layout(**{"head_dim": 16, "primary_blocks": 8, **settings}).groups
    assert group.num_blocks == blocks


def test_host_memory_is_shared_by_all_groups() -> None:
    """Groups with equally large blocks get the same number of them for the host's bytes, and no byte more."""
    two = layout(head_dim=16, max_attention_window=(16, 64), host_cache_size=5 * 1024)
    assert [group.num_blocks for group in two.groups] == [(16, 5), (16, 5)]
    assert sum(group.bytes_per_block for group in two.groups) * 5 == 5 * 1024


def test_host_memory_below_one_block_is_refused() -> None:
    """Host memory that holds nothing is a mistake, and the error says how much is needed."""
    with pytest.raises(
        ConfigError,
        match="host_cache_size: given 1023; accepted: 0, or at least 1024 bytes, since one block of window 64 has 1024",
    ):
        layout(head_dim=16, host_cache_size=1023)


BLOCK_SIZES = "tokens_per_block, num_layers, num_kv_heads, head_dim"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"primary_blocks": None, "max_tokens": 2**62},
            f"max_tokens: given space for {2**60} blocks; accepted: at most 2147483647",
        ),
        (
            {"host_cache_size": 2**62, "head_dim": 1},
            f"host_cache_size: given space for {2**56} blocks; accepted: at most 2147483647",
        ),
        (
            {"head_dim": 2**30, "num_kv_heads": 2**30},
            f"{BLOCK_SIZES}: given a block of {2**65} bytes; accepted: at most {2**62}",
        ),
    ],
)
def test_what_no_log_can_hold_is_refused(settings: dict[str, Any], line: str) -> None:
    """Settings that multiply to more blocks or bytes than numbers are made for are refused by name."""
    with pytest.raises(ConfigError) as caught:
        layout(**settings)
    assert caught.value.problems == (line,)


def with_a_group_per_layer(num_layers: int) -> Layout:
    each = tuple(range(1, num_layers + 1))
    return layout(
        num_layers=num_layers,
        num_kv_heads=each,
        max_attention_window=each,
        max_sequence_length=num_layers,
        primary_blocks=-(-num_layers // 4),
    )


def lines_run(call: Callable[[], object]) -> int:
    """Count the lines that a call executes."""
    count, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_many_groups_are_as_much_work_as_many_layers() -> None:
    """A window and a number of heads per layer: work grows with the layers, not with their square."""
    few, many = (lines_run(partial(with_a_group_per_layer, number)) for number in (250, 500))
    assert few < many < 2.5 * few


@pytest.mark.long
def test_65536_groups() -> None:
    """As many layers as there may be: with their square, this would run into the timeout."""
    groups = with_a_group_per_layer(65_536).groups
    assert [(group.layers, group.pools[0].layers) for group in groups[-1:]] == [((65_535,), (65_535,))]


def test_group_created_describes_the_group() -> None:
    """The event in the log says window, layers, pools with their bytes, and blocks per level."""
    groups = layout(num_kv_heads=(2, 1), secondary_blocks=3).groups
    pools = (PoolCreated(1, (1,), 2 * 4 * 8 * 2), PoolCreated(2, (0,), 2 * 4 * 2 * 8 * 2))
    assert groups[0].group_created() == GroupCreated(64, "full", (0, 1), pools, (16, 3))


def test_content_id_is_the_documented_digest() -> None:
    """The id is SHA-256 over the meaning of a block as canonical JSON, so that other programs can compute it."""
    meaning = (
        '{"dtype":"bfloat16","groups":[{"kind":"full","pools":[[2,[0,1]]],"window":64}],'
        '"head_dim":8,"kv_factor":2,"kv_layout":"NHD","model":"m","tokens_per_block":4}'
    )
    assert layout(model="m").content_id == sha256(meaning.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"tokens_per_block": 8},
        {"head_dim": 16},
        {"dtype": "float16"},
        {"kv_layout": "HND"},
        {"kv_factor": 1},
        {"num_layers": 3},
        {"num_kv_heads": (2, 4)},
        {"max_attention_window": (16, 64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_content_id_changes_with_the_meaning(change: dict[str, Any]) -> None:
    """Whatever changes what a block's bytes mean changes the content id."""
    assert layout(**change).content_id != layout().content_id


def test_content_id_ignores_sizes_and_policies() -> None:
    """Caches of different sizes and policies that store the same bytes have the same content id."""
    other = layout(primary_blocks=99, secondary_blocks=7, block_hash="none", enable_partial_reuse=False)
    assert other.content_id == layout().content_id
