"""What a model keeps of each token, read off the model: layers, heads, windows, type and device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache.config import KVCacheConfig
from kvcache.errors import ConfigError, Unsupported, UsageError
from kvcache.layout import Layout

INSTEAD = "use the cache that Transformers makes for this model"
SHAPE = ("num_layers", "num_kv_heads", "head_dim", "kv_factor", "dtype", "max_attention_window")
"""The settings that the model decides."""
DTYPES = ("float16", "bfloat16", "float32")


class ModelShape(NamedTuple):
    """What the settings of a cache take from a model."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    windows: tuple[int | None, ...]
    """Of each layer in tokens; None: it attends to everything."""
    longest: int | None
    """Tokens that the model has positions for, if it says so."""
    device: torch.device

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """Raises `Unsupported` for models whose layers keep something else than K and V of all heads alike."""
        if not isinstance(model, PreTrainedModel):
            raise UsageError(f"model must be a model of Transformers, not {type(model).__name__}")
        if model.config.is_encoder_decoder:
            raise Unsupported("a model with an encoder", INSTEAD)
        config: Any = model.config.get_text_config(decoder=True)
        if getattr(config, "kv_lora_rank", None):
            raise Unsupported("multi-head latent attention", INSTEAD)
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise Unsupported(f"a model in {dtype}", f"load it in one of {', '.join(DTYPES)}")
        heads = config.num_attention_heads
        return cls(
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype,
            _windows(config),
            getattr(config, "max_position_embeddings", None),
            _device(model),
        )

    def settings(self, given: dict[str, Any]) -> KVCacheConfig:
        """The settings of a cache for it, with what a caller gives. Raises `ConfigError`."""
        if twice := [name for name in SHAPE if name in given]:
            raise ConfigError([f"{name}: the model decides it; leave it out" for name in twice])
        longest = given.get("max_sequence_length", self.longest)
        shape = {
            "num_layers": len(self.windows),
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "max_attention_window": tuple(window or longest for window in self.windows),
        }
        if longest is None:
            shape.pop("max_attention_window")  # the missing length is what is wrong
        else:
            shape["max_sequence_length"] = longest
        return KVCacheConfig(**{**shape, **given})

    def refuse_cut(self, layout: Layout) -> None:
        """Raise `ConfigError` where memory is so short that a layer would see less than its window."""
        for group in layout.groups:
            short = [self.windows[layer] or 0 for layer in group.layers]
            if group.kind == "sliding" and group.window < max(short):
                problem = (
                    f"primary_bytes: room for {group.window} tokens of layers that attend to {max(short)}"
                )
                raise ConfigError([f"{problem}; accepted: more, or a smaller max_sequence_length"])


def _windows(config: Any) -> tuple[int | None, ...]:
    """As Transformers' own cache has them for this model."""
    if {"chunked_attention"} & set(getattr(config, "layer_types", None) or ()):
        raise Unsupported("chunked attention", INSTEAD)
    layers = DynamicCache(config=config).layers
    if not layers or len(layers) != config.num_hidden_layers:
        raise Unsupported("a model whose layers share K and V", INSTEAD)
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise Unsupported(f"a model whose layers keep a {type(layer).__name__}", INSTEAD)
    return tuple(getattr(layer, "sliding_window", None) for layer in layers)


def _device(model: PreTrainedModel) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise Unsupported("a model on several devices", "load it on one")
    return devices.pop()
