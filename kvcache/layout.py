"""Where K and V lie: which layers share blocks, what a block looks like, and how many there are.

The layout is computed once from the configuration and says everything about the pools but their content.
It needs no torch, so that logs can be read and replayed on a machine without it.

Layers with the same attention window form a group: their blocks are allocated, shared and evicted together.
Inside a group, layers with the same number of KV heads share a pool. Blocks are block-major: all layers of a
pool, K and V, lie in one contiguous run of bytes, because moving few large pieces between device and host
is what makes transfers fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import cycle, islice

from events.types import GroupCreated, PoolCreated
from kvcache.config import MAX_BLOCKS, MAX_BYTES, KVCacheConfig
from kvcache.errors import ConfigError

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}
"""Bytes of one element, by the name of its type."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The blocks' data of the layers of one group that share a number of KV heads."""

    num_kv_heads: int
    layers: tuple[int, ...]
    head_dim: int
    dtype: str
    kv_layout: str
    """NHD: tokens before heads; HND: heads before tokens."""
    tokens_per_block: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block: [layers, K and V, tokens, heads, dim], tokens and heads swapped for HND."""
        inner = (self.tokens_per_block, self.num_kv_heads)
        if self.kv_layout == "HND":
            inner = (self.num_kv_heads, self.tokens_per_block)
        return (len(self.layers), 2, *inner, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return math.prod(self.block_shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The layers of one attention window."""

    index: int
    window: int
    """In tokens."""
    kind: str
    """What the layers attend to; "self" for decoder layers."""
    layers: tuple[int, ...]
    pools: tuple[PoolLayout, ...]
    """Ascending number of KV heads."""
    num_blocks: tuple[int, int]
    """Blocks in primary and in secondary."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all pools of the group."""
        return sum(pool.bytes_per_block for pool in self.pools)

    def group_created(self) -> GroupCreated:
        """Describe the group for the log."""
        pools = tuple(PoolCreated(one.num_kv_heads, one.layers, one.bytes_per_block) for one in self.pools)
        return GroupCreated(self.window, self.kind, self.layers, pools, self.num_blocks)


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a cache, ascending window."""

    groups: tuple[GroupLayout, ...]
    tokens_per_block: int
    content_id: str
    """Hex SHA-256 over what the bytes of a block mean. Bytes may be exchanged between caches that agree in it."""

    @classmethod
    def of(cls, config: KVCacheConfig) -> Layout:
        """Compute the layout.

        Every group gets the same number of blocks, hence holds the same number of tokens: a prefix is
        reusable only as far as all groups have it. Raises ConfigError if `host_cache_size` is given and too
        small for one block of each group.
        """
        by_window = _layers_by(_window_of_each_layer(config), range(config.num_layers))
        heads = _heads_of_each_layer(config)
        pools = [_pools(config, heads, layers) for layers in by_window.values()]
        num_blocks = _num_blocks(config, _bytes_per_block(pools))
        groups = tuple(
            GroupLayout(index, window, "self", layers, own_pools, num_blocks)
            for index, ((window, layers), own_pools) in enumerate(zip(by_window.items(), pools, strict=True))
        )
        return cls(groups, config.tokens_per_block, _content_id(config, groups))

    def max_tokens(self, max_sequence_length: int) -> int:
        """Tokens of the longest sequence that the primary blocks hold, but at most `max_sequence_length`."""
        fewest = min(group.num_blocks[0] for group in self.groups)
        return min(max_sequence_length, fewest * self.tokens_per_block)


def _window_of_each_layer(config: KVCacheConfig) -> list[int]:
    given = config.max_attention_window or (config.max_sequence_length,)
    limit = config.max_sequence_length
    return [min(window, limit) for window in islice(cycle(given), config.num_layers)]


def _heads_of_each_layer(config: KVCacheConfig) -> tuple[int, ...]:
    heads = config.num_kv_heads
    return (heads,) * config.num_layers if isinstance(heads, int) else heads


def _layers_by(values: Sequence[int], layers: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """The layers that share a value, ascending values."""
    found: dict[int, list[int]] = {}
    for layer in layers:
        found.setdefault(values[layer], []).append(layer)
    return {value: tuple(found[value]) for value in sorted(found)}


def _pools(config: KVCacheConfig, heads: Sequence[int], layers: tuple[int, ...]) -> tuple[PoolLayout, ...]:
    return tuple(
        PoolLayout(
            num_kv_heads=count,
            layers=sharing,
            head_dim=config.head_dim,
            dtype=config.dtype,
            kv_layout=config.kv_layout,
            tokens_per_block=config.tokens_per_block,
        )
        for count, sharing in _layers_by(heads, layers).items()
    )


def _bytes_per_block(pools: Sequence[tuple[PoolLayout, ...]]) -> int:
    """Bytes of one block of each group."""
    needed = sum(pool.bytes_per_block for group in pools for pool in group)
    if needed > MAX_BYTES:
        fields = "tokens_per_block, num_layers, num_kv_heads, head_dim"
        raise ConfigError([f"{fields}: given a block of {needed} bytes; accepted: at most {MAX_BYTES}"])
    return needed


def _num_blocks(config: KVCacheConfig, bytes_of_all_groups: int) -> tuple[int, int]:
    """Blocks per group and level; where two settings limit a level, the smaller wins."""
    primary = []
    if config.primary_blocks is not None:
        primary.append(config.primary_blocks)
    if config.max_tokens is not None:
        primary.append(config.max_tokens // config.tokens_per_block)
    secondary = []
    if config.secondary_blocks is not None:
        secondary.append(config.secondary_blocks)
    if config.host_cache_size is not None:
        fitting = config.host_cache_size // bytes_of_all_groups
        if config.host_cache_size and not fitting:
            accepted = f"0, or at least the {bytes_of_all_groups} bytes of one block of each group"
            raise ConfigError([f"host_cache_size: given {config.host_cache_size}; accepted: {accepted}"])
        secondary.append(fitting)
    blocks = min(primary), min(secondary, default=0)
    for count, field in zip(blocks, ("max_tokens", "host_cache_size"), strict=True):
        if count > MAX_BLOCKS:
            raise ConfigError([f"{field}: given room for {count} blocks; accepted: at most {MAX_BLOCKS}"])
    return blocks


def _content_id(config: KVCacheConfig, groups: tuple[GroupLayout, ...]) -> str:
    meaning = {
        "model": config.model,
        "tokens_per_block": config.tokens_per_block,
        "head_dim": config.head_dim,
        "dtype": config.dtype,
        "kv_layout": config.kv_layout,
        "groups": [
            {
                "window": group.window,
                "kind": group.kind,
                "pools": [[pool.num_kv_heads, list(pool.layers)] for pool in group.pools],
            }
            for group in groups
        ],
    }
    return sha256(json.dumps(meaning, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
