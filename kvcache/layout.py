"""Layout of K and V: which layers share blocks, the shape of a block, and the number of blocks.

The layout is computed once from the configuration and describes everything about the pools except their content. It
needs no torch, so that logs can be read and replayed on a machine without it.

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
from typing import Any, Literal, NamedTuple

from events.diagnostics import get_logger
from events.types import CROSS_WINDOW, GroupCreated, PoolCreated
from kvcache.config import MAX_BYTES, PRIMARY_LIMITS, KVCacheConfig
from kvcache.errors import ConfigError, PromptTooLong
from kvcache.fold.shape import room_of
from kvcache.sizes import block_counts, primary_settings

_log = get_logger(__name__)

Kind = Literal["full", "sliding", "cross"]

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}
"""Bytes of one element, by the name of its type."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Block data of the layers of one group that share a number of KV heads."""

    num_kv_heads: int
    layers: tuple[int, ...]
    head_dim: int
    dtype: str
    kv_layout: str
    """NHD: tokens before heads; HND: heads before tokens."""
    tokens_per_block: int
    kv_factor: int = 2
    """2: K and V; 1: K only."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block: [layers, kv_factor, tokens, heads, dim], tokens and heads swapped for HND."""
        inner = (self.tokens_per_block, self.num_kv_heads)
        if self.kv_layout == "HND":
            inner = (self.num_kv_heads, self.tokens_per_block)
        return (len(self.layers), self.kv_factor, *inner, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return math.prod(self.block_shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The layers of one attention window."""

    index: int
    window: int
    """Length of the window in tokens, at most the capacity of its primary blocks. 0 (`CROSS_WINDOW`): cross
    attention."""
    kind: Kind
    """Kind of attention: to all of the longest sequence, to a sliding window, or to the encoder's output."""
    layers: tuple[int, ...]
    pools: tuple[PoolLayout, ...]
    """Pools, in ascending number of KV heads."""
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


class CutWindow(NamedTuple):
    """A window that is longer than its primary blocks can hold, and its new length, in tokens."""

    given: int
    window: int


class Bound(NamedTuple):
    """Upper bound of a length, in tokens, and its reason: the fields of the error for a longer one."""

    tokens: int
    window: int | None
    """Window with too few primary blocks for more; None: no window, or the only one."""
    settings: str
    """Settings to raise."""
    in_chunks: int = 0
    """Longest prompt that gets its slots chunk by chunk; 0: no more than at once."""

    def exceeded_by(self, length: int) -> PromptTooLong:
        """Build the error for this number of tokens."""
        return PromptTooLong(length, *self[:3], at_once=length <= self.in_chunks)


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a cache: ascending window, then cross attention."""

    groups: tuple[GroupLayout, ...]
    tokens_per_block: int
    content_id: str
    """Hex SHA-256 over the meaning of a block's bytes. Caches with equal ids may exchange bytes."""
    cut_windows: tuple[CutWindow, ...] = ()
    """Windows that were cut for lack of blocks."""

    @classmethod
    def of(cls, config: KVCacheConfig) -> Layout:
        """Compute the layout.

        A window is cut to the tokens that its primary blocks hold, and to those that the full group's hold: no
        sequence gets longer, so it slides no more than a full one. Windows that are equal then are one group, with
        the blocks of the one that had the fewest: a sequence takes as many in each, so the rest could not be used.

        Raises ConfigError if bytes are too few for one block of each window, and for a `free_gpu_memory_fraction`:
        `kvcache.pools.sized` measures it first.
        """
        windows, size = _windows(config), config.tokens_per_block
        cross = [windows.pop()] if config.cross_kv_cache_fraction is not None else []
        widest = windows[-1]
        longest = widest.num_blocks[0] * size if widest.is_full else config.max_sequence_length
        by_length: dict[int, list[_Window]] = {}
        for window in windows:
            length = min(window.tokens, window.num_blocks[0] * size, longest)
            by_length.setdefault(length, []).append(window)
        heads = _heads_of_each_layer(config)
        groups = tuple(
            _group(config, heads, index, length, by_length[length])
            for index, length in enumerate(sorted(by_length))
        )
        for window in cross:
            pools = _pools(config, heads, window.layers)
            groups += (
                GroupLayout(len(groups), CROSS_WINDOW, "cross", window.layers, pools, window.num_blocks),
            )
        cut = tuple(
            CutWindow(window.given, length)
            for length, alike in by_length.items()
            for window in alike
            if window.tokens > length
        )
        return cls(groups, size, _content_id(config, groups), cut)

    @property
    def windows(self) -> tuple[GroupLayout, ...]:
        """Groups without cross attention."""
        return tuple(group for group in self.groups if group.kind != "cross")

    @property
    def cross(self) -> GroupLayout | None:
        """Group of cross attention; None: the model has no encoder."""
        last = self.groups[-1]
        return last if last.kind == "cross" else None

    def longest_sequence(self, config: KVCacheConfig) -> Bound:
        """Longest sequence that the primary blocks hold, at most `max_sequence_length`."""
        size = self.tokens_per_block
        return self._bound(
            config, [room_of(each.num_blocks[0], each.window, each.kind, size) for each in self.windows]
        )

    def longest_prompt(self, config: KVCacheConfig) -> Bound:
        """Longest prompt: it has all of its blocks at admission, in sliding windows, too."""
        bound = self._bound(config, [each.num_blocks[0] * self.tokens_per_block for each in self.windows])
        return bound._replace(in_chunks=self.longest_sequence(config).tokens)

    def longest_input(self, config: KVCacheConfig) -> Bound | None:
        """Longest input of the encoder; None: the model has none."""
        if self.cross is None:
            return None
        tokens = self.cross.num_blocks[0] * self.tokens_per_block
        return Bound(tokens, CROSS_WINDOW, primary_settings(config))

    def _bound(self, config: KVCacheConfig, rooms: Sequence[int]) -> Bound:
        """Return the least of each group's capacity and `max_sequence_length`."""
        room, longest = min(rooms), config.max_sequence_length
        settings = ["max_sequence_length"] * (longest <= room) + [primary_settings(config)] * (
            room <= longest
        )
        several = room <= longest and len(rooms) > 1
        window = self.windows[rooms.index(room)].window if several else None
        return Bound(min(room, longest), window, " and ".join(settings))


def warn_of_windows(layout: Layout, config: KVCacheConfig) -> None:
    """Warn of windows that are cut, and of those that cannot slide, so that they limit every sequence."""
    for cut in layout.cut_windows:
        _log.warning(
            "window_cut", given=cut.given, window=cut.window, reason="the primary blocks hold no more tokens"
        )
    lengths, longest = {cut.window for cut in layout.cut_windows}, layout.longest_sequence(config).tokens
    for group in layout.windows:
        room = room_of(group.num_blocks[0], group.window, group.kind, layout.tokens_per_block)
        if group.kind == "sliding" and group.window not in lengths and room == longest:
            reason = "no sequence can be longer: a window slides only with one block more than its length"
            _log.warning("window_full", window=group.window, max_tokens=longest, reason=reason)


def with_primary_blocks(config: KVCacheConfig, free_bytes: int) -> KVCacheConfig:
    """Return the settings with block counts computed for this number of free bytes on the device.

    The counts replace all settings that limit primary. Raises ConfigError if there are too few bytes.
    """
    counts = tuple(window.num_blocks[0] for window in _windows(config, free_bytes))
    blocks = counts if len(set(counts)) > 1 else counts[0]
    return config.model_copy(update=dict.fromkeys(PRIMARY_LIMITS) | {"primary_blocks": blocks})


@dataclass(frozen=True, slots=True)
class _Window:
    """A window before it is cut to the capacity of its blocks."""

    given: int
    """Length in tokens, as given."""
    tokens: int
    """Length in tokens, at most `max_sequence_length`."""
    layers: tuple[int, ...]
    num_blocks: tuple[int, int]
    is_full: bool


def _windows(config: KVCacheConfig, free_bytes: int | None = None) -> list[_Window]:
    """Return the windows of all layers, ascending, with their blocks; then cross attention, which all layers have."""
    some = config.max_attention_window or (config.max_sequence_length,)
    given = list(islice(cycle(some), config.num_layers))
    tokens_of = [min(window, config.max_sequence_length) for window in given]
    by_window = _layers_by(tokens_of, range(config.num_layers))
    heads = _heads_of_each_layer(config)
    sizes = [
        sum(pool.bytes_per_block for pool in _pools(config, heads, layers)) for layers in by_window.values()
    ]
    every = tuple(range(config.num_layers))
    has_cross = config.cross_kv_cache_fraction is not None
    sizes += [sum(pool.bytes_per_block for pool in _pools(config, heads, every))] * has_cross
    if (needed := sum(sizes)) > MAX_BYTES:
        fields = "tokens_per_block, num_layers, num_kv_heads, head_dim"
        raise ConfigError([f"{fields}: given a block of {needed} bytes; accepted: at most {MAX_BYTES}"])
    counts = block_counts(config, list(by_window), sizes, free_bytes)
    windows = [
        _Window(
            max(given[layer] for layer in layers),
            tokens,
            layers,
            num_blocks,
            tokens == config.max_sequence_length,
        )
        for (tokens, layers), num_blocks in zip(by_window.items(), counts, strict=False)
    ]
    cross = _Window(CROSS_WINDOW, CROSS_WINDOW, every, counts[-1], is_full=False)
    return [*windows, cross] if has_cross else windows


def _group(
    config: KVCacheConfig, heads: Sequence[int], index: int, length: int, windows: Sequence[_Window]
) -> GroupLayout:
    """Build the group of the windows that are cut to one length."""
    layers = tuple(sorted(layer for window in windows for layer in window.layers))
    primary, secondary = (
        min(counts) for counts in zip(*(window.num_blocks for window in windows), strict=True)
    )
    kind: Kind = "full" if any(window.is_full for window in windows) else "sliding"
    return GroupLayout(index, length, kind, layers, _pools(config, heads, layers), (primary, secondary))


def _heads_of_each_layer(config: KVCacheConfig) -> tuple[int, ...]:
    heads = config.num_kv_heads
    return (heads,) * config.num_layers if isinstance(heads, int) else heads


def _layers_by(values: Sequence[int], layers: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Group layers by a value, in ascending order of values."""
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
            kv_factor=config.kv_factor,
        )
        for count, sharing in _layers_by(heads, layers).items()
    )


def _content_id(config: KVCacheConfig, groups: tuple[GroupLayout, ...]) -> str:
    meaning: dict[str, Any] = {
        "model": config.model,
        "tokens_per_block": config.tokens_per_block,
        "head_dim": config.head_dim,
        "dtype": config.dtype,
        "kv_layout": config.kv_layout,
        "kv_factor": config.kv_factor,
        "groups": [
            {
                # A full group attends to everything, regardless of its capacity.
                "window": config.max_sequence_length if group.kind == "full" else group.window,
                "kind": group.kind,
                "pools": [[pool.num_kv_heads, list(pool.layers)] for pool in group.pools],
            }
            for group in groups
        ],
    }
    if config.model_variant:
        meaning["model_variant"] = config.model_variant
    return sha256(json.dumps(meaning, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
