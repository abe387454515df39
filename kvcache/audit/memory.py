"""Memory of blocks in bytes, for a given model or for the one in a log's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from events.types import CROSS, FULL, PRIMARY, SECONDARY
from kvcache.audit.kv_shape import KVShape
from kvcache.audit.totals import Audit
from kvcache.config import KVCacheConfig
from kvcache.layout import Layout

_SHAPE = ("num_layers", "num_kv_heads", "head_dim", "kv_factor", "dtype")
"""Settings that determine the bytes of a block."""


def names_model(settings: Mapping[str, Any]) -> bool:
    """Return True if the settings have a model's shape: the defaults are those of no model."""
    fields = KVCacheConfig.model_fields
    return any(settings.get(name, fields[name].default) != fields[name].default for name in _SHAPE)


def cache_bytes(config: KVCacheConfig, model: KVShape | None) -> tuple[int, int] | None:
    """Return the bytes of each level of a cache for its window with full attention; None if unknown."""
    if model is None and not names_model(config.model_dump(mode="json")):
        return None
    windows = Layout.of(config).windows
    full = next((group for group in windows if group.kind == FULL), windows[-1])
    block = full.bytes_per_block if model is None else model.bytes_per_token * config.tokens_per_block
    primary, secondary = (blocks * block for blocks in full.num_blocks)
    return primary, secondary


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a log's blocks, for the window with full attention."""

    bytes_per_block: int
    cache_bytes: tuple[int, int]
    """Bytes of each level of the last cache."""
    stored_bytes: int | None
    """Bytes of all full blocks that were stored. This and the next field are None if there are several windows, because
    their blocks are counted together.
    """
    evicted_bytes: tuple[int, int] | None
    """Bytes evicted from each level."""
    offloaded_bytes: int | None
    onboarded_bytes: int | None

    @classmethod
    def of(cls, audit: Audit, model: KVShape | None) -> Memory | None:
        """Return the memory by `model`, or by the log's own settings; None if unknown."""
        created = audit.created
        if created is None or (model is None and not names_model(json.loads(created.config))):
            return None
        own = [group for group in created.groups if group.kind != CROSS]
        full = next((group for group in own if group.kind == FULL), own[-1])
        if model is None:
            block = sum(pool.bytes_per_block for pool in full.pools)
        else:
            block = model.bytes_per_token * created.tokens_per_block
        primary, secondary = (blocks * block for blocks in full.num_blocks)
        if len(own) > 1:
            return cls(block, (primary, secondary), None, None, None, None)
        evicted = audit.levels[PRIMARY].evicted * block, audit.levels[SECONDARY].evicted * block
        moved = audit.offloaded * block, audit.onboarded * block
        return cls(block, (primary, secondary), audit.stored * block, evicted, *moved)
