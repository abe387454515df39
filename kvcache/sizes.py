"""Number of blocks of each attention window, and of a sequence: arithmetic only.

Block counts and tokens hold for each window. Bytes are divided over the windows, in exact fractions, so that the same
settings give the same counts everywhere; the rest of a part after its last whole block stays unused. Cross attention
counts as one window more, the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvcache.config import MAX_BLOCKS, PRIMARY_LIMITS, KVCacheConfig, windows_of
from kvcache.errors import ConfigError

INSTEAD = "primary_blocks, max_tokens or primary_bytes"
"""Settings for the size of primary where free memory cannot be measured."""


def primary_settings(config: KVCacheConfig) -> str:
    """Return the settings that limit primary, for errors to name."""
    given = [name for name in PRIMARY_LIMITS if getattr(config, name) is not None]
    names = " and ".join(given)
    if {"primary_bytes", "free_gpu_memory_fraction"}.isdisjoint(given):
        return names
    parts = ["window_shares"] if len(windows_of(config)) > 1 else []
    if config.cross_kv_cache_fraction is not None:
        parts.append("cross_kv_cache_fraction")
    return f"{names}, or its part by {' and '.join(parts)}" if parts else names


def shares_of(weights: Sequence[float | Fraction]) -> tuple[Fraction, ...]:
    """Normalise the weights to a sum of one. A decimal number counts as it is written: 0.1 is a tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    whole = sum(exact)
    return tuple(weight / whole for weight in exact)


def weights_by_window(windows: Sequence[int], bytes_per_token: Sequence[int]) -> tuple[int, ...]:
    """Weigh the windows so that each holds tokens in proportion to its length."""
    return tuple(window * size for window, size in zip(windows, bytes_per_token, strict=True))


def split(total: int, shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Divide blocks or bytes by shares, each part rounded down."""
    return tuple(math.floor(total * share) for share in shares)


def block_counts(
    config: KVCacheConfig,
    windows: Sequence[int],
    bytes_per_block: Sequence[int],
    free_bytes: int | None = None,
) -> tuple[tuple[int, int], ...]:
    """Blocks in primary and in secondary of each window; if several settings limit a level, the smallest wins.

    `bytes_per_block` is of all layers of each window; where there is cross attention, of that at the end. `free_bytes`
    is the basis of `free_gpu_memory_fraction`; None: not measured. Raises ConfigError if that is needed, if bytes are
    too few for one block of a window, or if blocks are too many to be numbered.
    """
    level = _Level(config, tuple(windows), tuple(bytes_per_block))
    primary: dict[str, tuple[int, ...]] = {}
    if config.primary_blocks is not None:
        primary["primary_blocks"] = level.each(config.primary_blocks)
    if config.max_tokens is not None:
        primary["max_tokens"] = level.each(config.max_tokens // config.tokens_per_block)
    if config.primary_bytes is not None:
        primary["primary_bytes"] = level.fitting("primary_bytes", config.primary_bytes)
    if config.free_gpu_memory_fraction is not None:
        primary["free_gpu_memory_fraction"] = level.fraction(config.free_gpu_memory_fraction, free_bytes)
    secondary: dict[str, tuple[int, ...]] = {}
    if config.secondary_blocks is not None:
        secondary["secondary_blocks"] = level.each(config.secondary_blocks)
    if config.host_cache_size is not None:
        given = config.host_cache_size
        secondary["host_cache_size"] = level.fitting("host_cache_size", given) if given else level.each(0)
    return tuple(zip(_smallest(primary), _smallest(secondary or {"": level.each(0)}), strict=True))


@dataclass(frozen=True, slots=True)
class _Level:
    """Inputs of the limits of a level."""

    config: KVCacheConfig
    windows: tuple[int, ...]
    bytes_per_block: tuple[int, ...]

    def each(self, count: int | tuple[int, ...]) -> tuple[int, ...]:
        """Expand a number of blocks to one per window."""
        return count if isinstance(count, tuple) else (count,) * len(self.bytes_per_block)

    def fraction(self, given: float, free: int | None) -> tuple[int, ...]:
        """Return the blocks that fit in a fraction of the free memory."""
        field = "free_gpu_memory_fraction"
        if free is None:
            where = "what kvcache.pools.sized(config) returns, which measures the GPU's free memory"
            raise ConfigError([f"{field}: given {given}; accepted: {where}, or {INSTEAD} instead"])
        budget = math.floor(free * Fraction(str(given)))
        return self.fitting(field, budget, f"{given}, which is {budget} of {free} free bytes")

    def fitting(self, field: str, budget: int, given: str = "") -> tuple[int, ...]:
        """Return the blocks that fit in the windows' shares of `budget` bytes, at least one of each."""
        shares = self._shares()
        parts = zip(split(budget, shares), self.bytes_per_block, strict=True)
        counts = tuple(part // size for part, size in parts)
        if 0 in counts:
            needed, at = max(
                (math.ceil(size / share), index)
                for index, (size, share) in enumerate(zip(self.bytes_per_block, shares, strict=True))
            )
            owner = f"window {self.windows[at]}" if at < len(self.windows) else "cross attention"
            one = f"one block of {owner} has {self.bytes_per_block[at]}"
            if field != "host_cache_size":
                one += " (windows are cut to the capacity of their blocks)"
            least = f"{'0, or ' * (field == 'host_cache_size')}at least {needed} bytes"
            raise ConfigError([f"{field}: given {given or budget}; accepted: {least}, since {one}"])
        return counts

    def _shares(self) -> tuple[Fraction, ...]:
        """Return the share of each window, and that of cross attention."""
        if self.config.cross_kv_cache_fraction is None:
            return self._window_shares()
        cross = Fraction(str(self.config.cross_kv_cache_fraction))
        return (*(share * (1 - cross) for share in self._window_shares()), cross)

    def _window_shares(self) -> tuple[Fraction, ...]:
        rule = self.config.window_shares
        if isinstance(rule, tuple):
            return shares_of(rule)
        if rule == "equal":
            return shares_of([1] * len(self.windows))
        # A block has equally many tokens in all windows, so its bytes weigh as those of a token do.
        return shares_of(weights_by_window(self.windows, self.bytes_per_block[: len(self.windows)]))


def _smallest(limits: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the smallest of several limits for each window. Raises ConfigError if even that cannot be numbered."""
    for counts in zip(*limits.values(), strict=True):
        count, field = min(zip(counts, limits, strict=True))
        if count > MAX_BLOCKS:
            raise ConfigError([f"{field}: given space for {count} blocks; accepted: at most {MAX_BLOCKS}"])
    return tuple(map(min, zip(*limits.values(), strict=True)))


def blocks_at_most(num_tokens: int, window: int, tokens_per_block: int, sink_tokens: int = 0) -> int:
    """Upper bound of blocks of one window that a sequence holds at a time while it grows to `num_tokens`, one by one.

    A sliding window begins and ends inside of blocks, so it takes one block more than its length does. Sink tokens, the
    first ones that stay visible, fill blocks of their own. (A prompt has all its blocks at once until it is stored.)
    """
    padding = -sink_tokens % tokens_per_block
    blocks = -(-(min(num_tokens, window) + padding) // tokens_per_block)
    return blocks + (num_tokens > window)
