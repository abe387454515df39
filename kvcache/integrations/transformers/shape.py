"""Shape of a model's K and V, read off the model: layers, heads, windows, type and device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache.config import KVCacheConfig
from kvcache.errors import ConfigError, Unsupported, UsageError
from kvcache.layout import Layout

INSTEAD = "use the default cache of Transformers for this model"
SHAPE = ("num_layers", "num_kv_heads", "head_dim", "kv_factor", "dtype", "max_attention_window")
"""Settings that the model decides."""
DTYPES = ("float16", "bfloat16", "float32")


class ModelShape(NamedTuple):
    """Settings of a cache that a model decides."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    windows: tuple[int | None, ...]
    """Window of each layer in tokens; None: it attends to everything."""
    longest: int | None
    """Number of positions of the model, if it has that."""
    steady: int | None
    """Number of tokens up to which K of a token does not depend on later ones; None: it never does."""
    device: torch.device

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """Read the shape of a model. Raises `Unsupported` for layers that keep anything other than K and V of all heads
        alike.
        """
        if not isinstance(model, PreTrainedModel):
            raise UsageError(f"model must be a Transformers model, not {type(model).__name__}")
        if model.config.is_encoder_decoder:
            raise Unsupported("a model with an encoder", INSTEAD)
        config: Any = model.config.get_text_config(decoder=True)
        if getattr(config, "kv_lora_rank", None):
            raise Unsupported("multi-head latent attention", INSTEAD)
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise Unsupported(f"a model in {dtype}", f"load it in one of {', '.join(DTYPES)}")
        heads = _of_all_layers(config, "num_attention_heads")
        if not heads or not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
            raise Unsupported("a model that caches something other than K and V per token", INSTEAD)
        head_dim = _of_all_layers(config, "head_dim") or config.hidden_size // heads
        longest, steady = getattr(config, "max_position_embeddings", None), _steady_length(config)
        return cls(
            _kv_heads(config) or heads,
            head_dim,
            dtype,
            _windows(config),
            longest if steady is None else min(steady, longest or steady),
            steady,
            _device(model),
        )

    def settings(self, given: dict[str, Any]) -> KVCacheConfig:
        """Build the settings of a cache for it from those of a caller. Raises `ConfigError`."""
        if twice := [name for name in SHAPE if name in given]:
            raise ConfigError([f"{name}: determined by the model; omit it" for name in twice])
        longest = given.get("max_sequence_length", self.longest)
        shape = {
            "num_layers": len(self.windows),
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "max_attention_window": tuple(window or longest for window in self.windows),
        }
        if longest is None:
            shape.pop("max_attention_window")  # the missing length is the error
        else:
            shape["max_sequence_length"] = longest
        return KVCacheConfig(**{**shape, **given})

    def refuse_other(self, config: KVCacheConfig) -> None:
        """Raise `ConfigError` for a cache with another shape than the model's K and V."""
        own, heads = [self.num_kv_heads] * len(self.windows), config.num_kv_heads
        has = (config.num_layers, config.head_dim, config.kv_factor, config.dtype)
        if has != (len(own), self.head_dim, 2, self.dtype) or heads not in (self.num_kv_heads, tuple(own)):
            needed = f"num_layers {len(own)}, num_kv_heads {self.num_kv_heads}, head_dim {self.head_dim}"
            raise ConfigError(
                [(f"the model needs {needed}, kv_factor 2, dtype {self.dtype}; accepted: only these")]
            )
        given = config.max_sequence_length
        if self.steady is not None and given > self.steady:
            reason = "since its rotary embedding depends on the length of the longest row beyond that"
            raise ConfigError(
                [f"max_sequence_length: given {given}; accepted: at most {self.steady}, {reason}"]
            )

    def refuse_cut(self, layout: Layout) -> None:
        """Raise `ConfigError` if a layer would see less than its window: memory may be short."""
        for group in layout.groups:
            wide = [self.windows[layer] for layer in group.layers]
            widest = None if None in wide else max(window or 0 for window in wide)
            if group.kind == "sliding" and (widest is None or group.window < widest):
                seen = "all" if widest is None else widest
                problem = f"primary_bytes: space for {group.window} tokens in layers that attend to {seen}"
                raise ConfigError([f"{problem}; accepted: more, or a smaller max_sequence_length"])


def _of_all_layers(config: Any, name: str) -> int | None:
    """Return a size of all layers; None if the config does not have it. Raises `Unsupported` if they differ."""
    try:
        size = getattr(config, name, None)
    except RuntimeError:  # raised by Transformers for a size that its layers have separately
        size = []
    if isinstance(size, list | tuple):
        raise Unsupported(f"a model whose layers differ in {name}", INSTEAD)
    return size


def _kv_heads(config: Any) -> int | None:
    """Return the KV heads of every layer; None: as many as query heads."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1  # Falcon has no other sign of it
    return _of_all_layers(config, "num_key_value_heads")


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """Unwrap a model from `torch.compile`."""
    found: PreTrainedModel = getattr(model, "_orig_mod", model)
    return found


def _windows(config: Any) -> tuple[int | None, ...]:
    """Return the windows of Transformers' own cache for this model."""
    if {"chunked_attention"} & set(getattr(config, "layer_types", None) or ()):
        raise Unsupported("chunked attention", INSTEAD)
    layers = DynamicCache(config=config).layers
    if not layers or len(layers) != config.num_hidden_layers:
        raise Unsupported("a model whose layers share K and V", INSTEAD)
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise Unsupported(f"a model whose layers keep a {type(layer).__name__}", INSTEAD)
    windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
    if any(window is not None and window < 1 for window in windows):
        raise Unsupported("an empty sliding window", "set sliding_window in the model's config to 1 or more")
    return windows


def _steady_length(config: Any) -> int | None:
    """Return the length from which on rotary embeddings depend on the longest row of a batch, in tokens."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    lengths = []
    for rope in (
        given,
        *(each for each in given.values() if isinstance(each, dict)),
    ):  # one, or one per kind of layer
        kind = rope.get("rope_type", rope.get("type")) or ""
        if kind == "longrope":
            # Releases differ in where they read it; the least is right in all of them.
            places = (
                rope.get("original_max_position_embeddings"),
                getattr(config, "original_max_position_embeddings", None),
            )
            lengths.append(min(place for place in (*places, config.max_position_embeddings) if place))
        elif "dynamic" in kind:
            lengths.append(config.max_position_embeddings)
    return min(lengths, default=None)


def _device(model: PreTrainedModel) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise Unsupported("a model on several devices", "load it on one device")
    return devices.pop()
