"""Small traces and the settings of caches for them."""

from __future__ import annotations

from typing import Any

from kvcache.workload.traces import read_trace
from tests.support.places import ROOT

CHATS = list(read_trace(ROOT / "tests" / "data" / "chats_small.jsonl"))
SMALL: dict[str, Any] = {"max_sequence_length": 4096, "tokens_per_block": 32, "primary_blocks": 100}
TIERED: dict[str, Any] = {**SMALL, "primary_blocks": 60, "secondary_blocks": 60}
WINDOWS: dict[str, Any] = {
    **TIERED,
    "num_layers": 4,
    "num_kv_heads": (1, 2, 2, 4),
    "max_attention_window": (100, 4096),
}
"""Two windows, each with two pools."""
