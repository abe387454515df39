"""What blocks take, in bytes: of a model that is given, or of the one that a log's settings name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from events.types import CROSS, FULL, PRIMARY, SECONDARY, CacheCreated
from kvcache.audit.kv_shape import KVShape
from kvcache.audit.totals import Audit
from kvcache.config import KVCacheConfig
from kvcache.layout import Layout

_SHAPE = ("num_layers", "num_kv_heads", "head_dim", "kv_factor", "dtype")
"""Settings that tell how many bytes a block has."""


def names_model(settings: Mapping[str, Any]) -> bool:
    """Whether the settings of a cache have a model's shape: the defaults are those of no model."""
    fields = KVCacheConfig.model_fields
    return any(settings.get(name, fields[name].default) != fields[name].default for name in _SHAPE)


def bytes_per_block(created: CacheCreated, model: KVShape | None) -> int | None:
    """K and V of a block of the window with full attention: of `model`, or else as the cache's settings say.

    None: they name none.
    """
    if model is not None:
        return model.bytes_per_token * created.tokens_per_block
    if not names_model(json.loads(created.config)):
        return None
    own = [group for group in created.groups if group.kind != CROSS]
    full = next((group for group in own if group.kind == FULL), own[-1])
    return sum(pool.bytes_per_block for pool in full.pools)


def cache_bytes(config: KVCacheConfig, model: KVShape | None) -> tuple[int, int] | None:
    """What the levels of a cache take for its window with full attention; None: nobody knows."""
    if model is None and not names_model(config.model_dump(mode="json")):
        return None
    windows = Layout.of(config).windows
    full = next((group for group in windows if group.kind == FULL), windows[-1])
    block = full.bytes_per_block if model is None else model.bytes_per_token * config.tokens_per_block
    primary, secondary = (blocks * block for blocks in full.num_blocks)
    return primary, secondary


@dataclass(frozen=True, slots=True)
class Memory:
    """What a log's blocks take, of the window with full attention."""

    bytes_per_block: int
    cache_bytes: tuple[int, int]
    """Of each level of the last cache."""
    stored_bytes: int | None
    """Of all full blocks that were stored; None, as what follows: there are several windows, whose blocks are counted
    together.
    """
    evicted_bytes: tuple[int, int] | None
    """From each level."""
    offloaded_bytes: int | None
    onboarded_bytes: int | None

    @classmethod
    def of(cls, audit: Audit, model: KVShape | None) -> Memory | None:
        """What they take of `model`, or of the log's own; None: nobody knows."""
        created = audit.created
        block = None if created is None else bytes_per_block(created, model)
        if created is None or block is None:
            return None
        own = [group for group in created.groups if group.kind != CROSS]
        full = next((group for group in own if group.kind == FULL), own[-1])
        primary, secondary = (blocks * block for blocks in full.num_blocks)
        if len(own) > 1:
            return cls(block, (primary, secondary), None, None, None, None)
        evicted = audit.levels[PRIMARY].evicted * block, audit.levels[SECONDARY].evicted * block
        moved = audit.offloaded * block, audit.onboarded * block
        return cls(block, (primary, secondary), audit.stored * block, evicted, *moved)
