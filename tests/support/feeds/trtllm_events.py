"""TensorRT-LLM's events of a busy cache, and what a reader of them holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvcache import KVCacheConfig, KVCacheManager, Request
from tests.support.engines import strategies
from tests.support.feeds.strict import Engine

WINDOWS = [None, (6, strategies.LIMIT), (5,)]
Held = dict[tuple[int, int], set[int]]
"""(group, level) to names."""


class BusyEngine(Engine):
    """Images, extra ids, salts and adapters; other priorities now and then; and sometimes all is cleared."""

    def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.02:
            self.manager._blocks.housekeeping.clear()  # without the flush that would take the batch away
        elif chance < 0.1 and self.running:
            self.manager.set_priority(self.rng.choice(self.running), self.rng.randrange(30, 80))
        else:
            super().step()

    def request(self, request_id: int) -> Request:
        request = super().request(request_id)
        return Request(
            request_id,
            request.tokens,
            cache_salt=request.cache_salt,
            multimodal=request.multimodal,
            extra_ids=request.extra_ids,
            lora_name=self.rng.choice([None, None, "style"]),
        )


def config(windows: Sequence[int] | None, **settings: Any) -> KVCacheConfig:
    layers = len(windows or (1,))
    sizes = {"primary_blocks": 14, "secondary_blocks": 8, "event_buffer_max_size": 1 << 20}
    return strategies.config(max_attention_window=windows, num_layers=layers, **(sizes | settings))


def held_by(manager: KVCacheManager) -> Held:
    """What is cached, parts of blocks too, by the state itself."""
    held: Held = {}
    for group in range(len(manager.state.groups)):
        for name, (level, *_) in strategies.cached_blocks(manager.state, group).items():
            held.setdefault((group, level), set()).add(int.from_bytes(name, "big"))
    return held


def work(manager: KVCacheManager, seed: int, steps: int = 300) -> BusyEngine:
    engine = BusyEngine(manager, random.Random(seed))
    for _ in range(steps):
        engine.step()
        if engine.rng.random() < 0.6:
            manager.flush()
    manager.flush()
    return engine


def _block(name: int, tokens: Sequence[int]) -> dict[str, Any]:
    unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {
        "type": "stored_block",
        "block_hash": name,
        "tokens": unique,
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
        "cache_salt": None,
    }


FIRST, SECOND = 924206229973855, 2728178455351807326
STREAM: list[dict[str, Any]] = [
    {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [8, 2]}, "window_size": 16},
    {
        "event_id": 1,
        "data": {
            "type": "stored",
            "parent_hash": None,
            "blocks": [_block(FIRST, [1, 2, 3, 4]), _block(SECOND, [5, 6, 7, 8])],
        },
        "window_size": 16,
    },
    {
        "event_id": 2,
        "data": {
            "type": "updated",
            "block_hash": FIRST,
            "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
            "priority": None,
        },
        "window_size": 16,
    },
    {"event_id": 3, "data": {"type": "removed", "block_hashes": [SECOND, FIRST]}, "window_size": 16},
]
