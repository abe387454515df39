"""The files of a tiny model for vLLM and of LoRA adapters for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 262144,
    "torch_dtype": "float32",
}
RANK = 8
ADAPTED = ("q_proj", "v_proj")
"""What adapters change."""


def write_model(directory: Path, **changes: Any) -> Path:
    """Write the configuration of a tiny model; its weights are never loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    return directory


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter of random weights, so large that it changes what is sampled."""
    directory.mkdir(parents=True, exist_ok=True)
    size, layers = MODEL["hidden_size"], MODEL["num_hidden_layers"]
    rng, header, data = np.random.default_rng(seed), dict[str, Any](), b""
    for module in (f"layers.{layer}.self_attn.{name}" for layer in range(layers) for name in ADAPTED):
        for half, shape in (("lora_A", (RANK, size)), ("lora_B", (size, RANK))):
            weights = (30 * rng.standard_normal(shape)).astype("<f4").tobytes()
            header[f"base_model.model.model.{module}.{half}.weight"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": (len(data), len(data) + len(weights)),
            }
            data += weights
    head = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ADAPTED, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory
