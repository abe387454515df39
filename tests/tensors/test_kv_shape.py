"""Bytes of K and V as `kvcache.audit.kv_shape` works them out are those that Transformers keeps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvcache.audit.kv_shape import KVShape

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "mistral": HEADS | WINDOW,
    "qwen2": HEADS | WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": HEADS,
    "gemma": HEADS | {"head_dim": 32},
    "gemma2": HEADS | WINDOW,
    "gemma3_text": WINDOW,
    "cohere2": HEADS | WINDOW,
    "gpt_oss": HEADS | WINDOW | {"num_local_experts": 4},
    "phi3": HEADS | {"pad_token_id": 0},
    "falcon": {"num_attention_heads": 4, "multi_query": True},
    "gpt_bigcode": {"n_layer": 3, "n_head": 4, "n_embd": 64, "multi_query": True},
    "gpt2": {"n_layer": 3, "n_head": 4, "n_embd": 64},
}
LENGTH = 5
"""Tokens, fewer than windows have."""


@pytest.mark.parametrize("kind", MODELS)
def test_they_are_what_transformers_keeps(kind: str, tmp_path: Path) -> None:
    """Of small models with what their config.json would say, which leaves out what is Transformers' default."""
    config = AutoConfig.for_model(kind, **({} if "n_layer" in MODELS[kind] else SMALL), **MODELS[kind])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_diff_dict(), "dtype": "float32"}, default=str))
    models: Any = AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.float32)
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model(torch.zeros(1, LENGTH, dtype=torch.long), past_key_values=cache, use_cache=True)
    kept = Counter[bool]()
    layers: Any = cache.layers
    for layer in layers:
        kept[layer.is_sliding] += layer.keys.nbytes + layer.values.nbytes
    shape = KVShape.read(path)
    found = Counter({bool(shape.window): shape.bytes_per_token * LENGTH})
    for _, _, num_bytes in shape.sliding:
        found[True] += num_bytes * LENGTH
    assert found == kept
