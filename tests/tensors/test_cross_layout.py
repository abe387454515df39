"""How much memory cross attention gets, and where its K/V lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.config import KVCacheConfig
from kvcache.errors import ConfigError
from kvcache.layout import Layout, with_primary_blocks
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools
from kvcache.replay import replay

BLOCK = 4 * 2 * 2 * 8 * 2
"""Bytes of a block of 4 tokens in one layer: K and V, two heads of 8 elements of 2 bytes."""


def config(**settings: Any) -> KVCacheConfig:
    defaults: dict[str, Any] = {"max_sequence_length": 64, "tokens_per_block": 4, "num_layers": 2}
    return KVCacheConfig(**(defaults | {"cross_kv_cache_fraction": 0.25} | settings))


def blocks(settings: KVCacheConfig) -> list[tuple[str, int, tuple[int, int]]]:
    return [(group.kind, group.window, group.num_blocks) for group in Layout.of(settings).groups]


def test_a_part_of_the_bytes_is_for_cross_attention() -> None:
    """A quarter here; every layer has both, so a block of each takes two layers' bytes."""
    given = config(primary_bytes=80 * BLOCK, host_cache_size=40 * BLOCK)
    assert blocks(given) == [("full", 64, (30, 15)), ("cross", 0, (10, 5))]
    assert [group.layers for group in Layout.of(given).groups] == [(0, 1), (0, 1)]


def test_windows_divide_the_rest() -> None:
    """Their shares are of three quarters: a third and two thirds of 60 blocks of one layer; the rest is for two."""
    given = config(primary_bytes=80 * BLOCK, max_attention_window=[8, 64], window_shares=[1, 2])
    assert blocks(given) == [("sliding", 8, (20, 0)), ("full", 64, (40, 0)), ("cross", 0, (10, 0))]


@pytest.mark.parametrize(("number", "counts"), [(9, (9, 9)), ((9, 7), (9, 7))])
def test_blocks_may_be_given(number: Any, counts: tuple[int, int]) -> None:
    """One number for all groups, or a list with that of cross attention at its end; the smaller limit wins."""
    given = config(primary_blocks=number, secondary_blocks=number)
    assert [group.num_blocks for group in Layout.of(given).groups] == [(each, each) for each in counts]
    less = config(primary_blocks=number, primary_bytes=24 * BLOCK)
    assert [group.num_blocks[0] for group in Layout.of(less).groups] == [9, 3]
    assert [group.num_blocks[0] for group in Layout.of(config(max_tokens=32)).groups] == [8, 8]


def test_free_memory_is_divided_likewise() -> None:
    """The counts that a fraction of it comes to are settings that say the same."""
    given = config(free_gpu_memory_fraction=0.5)
    counted = with_primary_blocks(given, 160 * BLOCK)
    assert counted.primary_blocks == (30, 10)
    assert blocks(counted) == [("full", 64, (30, 0)), ("cross", 0, (10, 0))]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"primary_blocks": (9, 8, 7)},
            "given 3 numbers; accepted: 2 (one per window, and one for cross attention)",
        ),
        (
            {"primary_blocks": (9,)},
            "given 1 numbers; accepted: 2 (one per window, and one for cross attention)",
        ),
        (
            {"cross_kv_cache_fraction": 1},
            "cross_kv_cache_fraction: given 1; accepted: a number above 0 and below 1",
        ),
        ({"cross_kv_cache_fraction": 0.0}, "cross_kv_cache_fraction: given 0.0; accepted: a number above 0"),
        ({"primary_bytes": 7 * BLOCK}, f"at least {8 * BLOCK} bytes, since one block of cross attention has"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    """Each problem names the setting, and what is accepted."""
    more = {} if settings.keys() & {"primary_blocks", "primary_bytes"} else {"primary_blocks": 8}
    with pytest.raises(ConfigError) as reported:
        Layout.of(config(**settings, **more))
    assert says in str(reported.value)


def test_shares_are_of_windows_only() -> None:
    """`window_shares` has no number for cross attention, whose part is the fraction."""
    with pytest.raises(ConfigError, match=r"window_shares: given 2 numbers; accepted: 1 \(one per window\)"):
        config(primary_bytes=1 << 20, window_shares=[1, 2])


def test_bytes_of_models_with_and_without_an_encoder_are_not_exchanged() -> None:
    """Their blocks mean other things, how large the groups are does not matter."""
    plain = config(primary_blocks=8, cross_kv_cache_fraction=None)
    ids = {
        Layout.of(each).content_id
        for each in (plain, config(primary_blocks=8), config(primary_blocks=(8, 5)))
    }
    assert len(ids) == 2


def test_pools_keep_both_apart() -> None:
    """A layer has a tensor for its own tokens, and one for the encoder's."""
    layout = Layout.of(config(primary_blocks=(9, 7), num_kv_heads=(1, 2)))
    pools = Pools(layout, "cpu")
    for layer, heads in ((0, 1), (1, 2)):
        assert pools.layer(layer).shape == (9, 2, 4, heads, 8)
        assert pools.layer(layer, cross=True).shape == (7, 2, 4, heads, 8)
    pools.layer(0, cross=True).fill_(1)
    assert torch.count_nonzero(pools.layer(0)) == 0
    with pytest.raises(KeyError):
        pools.layer(2, cross=True)
    with pytest.raises(KeyError):
        Pools(Layout.of(config(primary_blocks=8, cross_kv_cache_fraction=None)), "cpu").layer(0, cross=True)


def test_logs_say_which_group_it_is(tmp_path: Any) -> None:
    """The last one of `CacheCreated`, whose window is 0."""
    with KVCacheManager(config(primary_blocks=(9, 7)), log=tmp_path):
        pass
    created = replay(tmp_path).state.created
    assert created is not None
    assert [(group.kind, group.window, group.num_blocks) for group in created.groups] == [
        ("full", 36, (9, 0)),
        ("cross", 0, (7, 0)),
    ]
