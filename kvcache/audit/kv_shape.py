"""Bytes of K and V per token of a model, from its Hugging Face configuration."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcache.errors import UsageError

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
    **dict.fromkeys(("fp32", "float32", "float"), 4),
}
"""Bytes of an element, by the names of its type."""
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_KINDS = {
    **dict.fromkeys((_FULL, "attention", "full", "global"), _FULL),
    **dict.fromkeys((_SLIDING, _CHUNKED, "sliding", "local"), _SLIDING),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp", "moe"), ""),
}
"""Tokens kept by a kind of layers: K and V of all tokens, of a window's, or no K and V."""
_OF_SOME_LAYERS = (
    "mamba_",
    "ssm_",
    "linear_conv",
    "conv_L",
    "layer_group_size",
    "global_attn_every_n_layers",
)
"""Prefixes of fields about layers with states instead of K and V, or of several kinds."""
_MOST_LAYERS = 10_000
_NESTED = ("text_config", "llm_config", "language_config")
_OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "longcat_flash": {"zero_expert_num": 256},
    "recurrent_gemma": {"attention_window_size": 2048},
}
"""Defaults that Transformers adds for configurations of these types."""
_OTHER_LAYERS = {
    "index_head_dim": "the index of sparse attention",
    "linear_attn_config": "layers of linear attention",
    "attn_type_list": "layers of linear attention",
    "block_configs": "layers that differ",
    "global_head_dim": "heads that differ by layer",
    "swa_head_dim": "heads that differ by layer",
    "swa_num_key_value_heads": "heads that differ by layer",
    "cross_attention_layers": "cross attention",
    "attention_types": "layers of local attention",
    "attention_other_setting": "heads that differ by layer",
    "attention_method": "layers that attend twice",
    "zero_expert_num": "layers that attend twice",
    "block_types": "layers that differ",
    "use_cla": "layers that share K and V",
}
"""Fields that change the cached data in a way not supported here, unless they are null or empty."""
_ABOUT_KV = re.compile(
    r"(^|_)(kv|key_values?|mqa|gqa|cla|swa)(_|$)|multi_query|(query|att(entio)?n|head)_groups?|heads_per_(layer|block)"
    r"|window|local_att|hybrid|recurrent|compress|shared?_(kv|att|layer)"
)
"""Pattern in the names of fields that may change the cached data."""
_UNDERSTOOD = {
    *(
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "num_attention_groups",
        "kv_channels",
        "kv_lora_rank",
    ),
    *(
        "multi_query",
        "multi_query_attention",
        "multi_query_group_num",
        "num_kv_shared_layers",
        "cla_share_factor",
    ),
    *("sliding_window", "use_sliding_window", "max_window_layers", "hybrid_override_pattern"),
    *("sliding_window_pattern", "_sliding_window_pattern"),
}
"""Such fields that are read here, or have no effect without one that is refused."""


@dataclass(eq=False, repr=False)
class ModelNotUnderstood(UsageError):
    """A model's configuration does not determine the size of a token's K and V. `file` is its path."""

    file: str
    reason: str
    text = "{file} does not determine the size of K and V: {reason}"


@dataclass(frozen=True, slots=True)
class KVShape:
    """Bytes of K and V on one GPU."""

    name: str
    """Type of the model."""
    dtype: str
    """Type of the elements of K and V."""
    layers: int
    """Number of layers with K and V of all tokens; if all slide, those of the shortest window."""
    bytes_per_token: int
    """Bytes per token of these layers."""
    window: int = 0
    """Window of these layers, if all slide."""
    sliding: tuple[tuple[int, int, int], ...] = ()
    """Further layers with a sliding window: its tokens, number of layers, their bytes per token."""
    without: Mapping[str, int] = field(default_factory=dict)
    """Layers without K and V, by kind: their states are not counted."""
    tensor_parallel: int = 1
    """GPUs over which the heads are divided."""

    @classmethod
    def read(cls, path: Path, *, dtype: str | None = None, tensor_parallel: int = 1) -> KVShape:
        """Read a ``config.json``; `dtype` is that of K and V (None: the model's).

        Raises `ModelNotUnderstood`, and `OSError`.
        """
        try:
            given = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ModelNotUnderstood(str(path), "it is not a JSON object, as a model's config.json is")
        config = _Config(given, str(path))
        return config.shape(dtype, tensor_parallel)


class _Config:
    """A configuration, with the interpretation of its fields."""

    def __init__(self, given: dict[str, Any], file: str) -> None:
        nested = next((given[name] for name in _NESTED if isinstance(given.get(name), dict)), None)
        types = {name: given[name] for name in ("torch_dtype", "dtype") if given.get(name) is not None}
        own = given if nested is None else {**types, **nested}
        self.type = str(own.get("model_type", "model"))
        known = {name: value for name, value in own.items() if value is not None}
        self._values = {**_OWN_DEFAULTS.get(self.type, {}), **known}
        self._file = file
        if given.get("is_encoder_decoder"):
            raise self.error("is_encoder_decoder: given true; accepted: decoder-only models")
        for name, what in _OTHER_LAYERS.items():
            if self._values.get(name):
                raise self.error(f"{name}: {what} cannot be counted")
        for name, value in self._values.items():
            if value and name not in _UNDERSTOOD and _ABOUT_KV.search(name):
                raise self.error(f"{name}: the effect of this field is unknown")

    def error(self, reason: str) -> ModelNotUnderstood:
        """Return an error about the configuration."""
        return ModelNotUnderstood(self._file, reason)

    def shape(self, dtype: str | None, tensor_parallel: int) -> KVShape:
        """Return the size of K and V."""
        name = dtype or str(self._values.get("torch_dtype", self._values.get("dtype", "")))
        item = DTYPES.get(name.removeprefix("torch."))
        if item is None:
            given = repr(name) if name else "nothing"
            raise self.error(f"dtype: given {given}; accepted: {', '.join(DTYPES)}")
        kinds, elements = self._kinds(), self._elements(tensor_parallel)
        windows, without = Counter[int](), Counter[str]()
        sizes = Counter[int]()
        for layer, kind in enumerate(kinds):
            keeps = _KINDS.get(kind)
            if keeps is None:
                raise self.error(f"layer_types: given {kind!r}; accepted: {', '.join(_KINDS)}")
            if not keeps:
                without[kind] += 1
                continue
            window = 0 if keeps == _FULL else self._window(kind)
            windows[window] += 1
            sizes[window] += elements[layer] * item
        if not windows:
            raise self.error("no layer has K and V")
        every = min(windows)  # 0, unless all of them slide
        sliding = tuple((window, windows[window], sizes[window]) for window in sorted(windows)[1:])
        name = name.removeprefix("torch.")
        return KVShape(
            self.type, name, windows[every], sizes[every], every, sliding, dict(without), tensor_parallel
        )

    def _number(self, *names: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        """Return the first of these fields that is present."""
        for name in names:
            if name in self._values:
                value = self._values[name]
                if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                    raise self.error(
                        f"{name}: given {value!r}; accepted: an integer from {least} to {most:,}"
                    )
                return value
        if default is None:
            raise self.error(f"{names[0]} is missing")
        return default

    @property
    def _num_layers(self) -> int:
        listed = self._values.get("layers_block_type")
        default = len(listed) if isinstance(listed, list) else None
        return self._number("num_hidden_layers", "n_layer", "num_layers", default=default, most=_MOST_LAYERS)

    # -- elements of K and V

    def _elements(self, tensor_parallel: int) -> list[int]:
        """Return the elements of each layer, per token and GPU."""
        if "kv_lora_rank" in self._values and self._values.get("use_mla") is not False:
            # Latent attention: one vector for all heads, on every GPU.
            return [self._number("kv_lora_rank") + self._number("qk_rope_head_dim")] * self._num_layers
        heads = self._number("num_attention_heads", "n_head")
        dim = self._number("head_dim", "attention_head_dim", "kv_channels", default=0)
        if not dim:
            hidden = self._number("hidden_size", "n_embd")
            if hidden % heads:
                raise self.error(f"head_dim is missing, and hidden_size {hidden} has no {heads} equal parts")
            dim = hidden // heads
        value_dim = self._number("v_head_dim", default=dim)
        return [self._on_one_gpu(each, tensor_parallel) * (dim + value_dim) for each in self._kv_heads(heads)]

    def _kv_heads(self, heads: int) -> list[int]:
        """Return the number of KV heads of each layer."""
        if self._values.get("multi_query") and not self._values.get("new_decoder_architecture"):
            return [1] * self._num_layers
        names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups")
        if self._values.get("multi_query_attention"):  # of ChatGLM
            return [self._number("multi_query_group_num")] * self._num_layers
        return [self._number(*names, default=heads)] * self._num_layers

    def _on_one_gpu(self, heads: int, tensor_parallel: int) -> int:
        """Divide heads over the GPUs; with more GPUs than heads, each head is replicated."""
        if heads % tensor_parallel and tensor_parallel % heads:
            raise self.error(
                f"num_key_value_heads: {heads} heads cannot be divided over {tensor_parallel} GPUs (--tensor-parallel)"
            )
        return max(heads // tensor_parallel, 1)

    # -- kinds of layers

    def _window(self, kind: str) -> int:
        """Return the number of tokens that such a layer attends to."""
        if kind == _CHUNKED:
            return self._number("attention_chunk_size")
        return self._number("sliding_window")

    def _kinds(self) -> Sequence[str]:
        """Return the kind of each layer that has K and V of its own, or none."""
        number = self._num_layers
        kinds = self._given_kinds() or [self._kind(layer) for layer in range(number)]
        if len(kinds) != number:
            raise self.error(f"layer_types: given {len(kinds)}; accepted: one of each of {number} layers")
        return kinds[: number - self._number("num_kv_shared_layers", default=0, least=0, most=number)]

    def _given_kinds(self) -> list[str]:
        """Return the kinds listed in the configuration; empty if there is no list."""
        given = self._listed("layer_types") or self._listed("layers_block_type")
        if given:
            return [_FULL if each == _SLIDING and self._sees_all else str(each) for each in given]
        pattern = self._values.get("hybrid_override_pattern")
        if isinstance(pattern, str):  # of Nemotron-H
            return [{"*": _FULL, "M": "mamba", "-": "mlp", "E": "moe"}.get(each, each) for each in pattern]
        return []

    def _listed(self, name: str) -> list[Any]:
        """Return this field; empty if it is absent."""
        given = self._values.get(name, [])
        if not isinstance(given, list):
            raise self.error(f"{name}: given {given!r}; accepted: a list with an item for each layer")
        return given

    def _kind(self, layer: int) -> str:
        """Return the kind of a layer by rule."""
        values = self._values
        if "full_attention_interval" in values:
            return _FULL if self._is_last_of("full_attention_interval", layer) else "linear_attention"
        if "attn_layer_period" in values:
            at = layer - self._number("attn_layer_offset", default=0, least=0)
            return "mamba" if at % self._number("attn_layer_period") else _FULL
        if attending := self._listed("attn_layer_indices"):
            return _FULL if layer in attending else "mamba"
        # In Falcon-H1 each layer has attention, and also a state.
        some = [name for name in values if name.startswith(_OF_SOME_LAYERS) and self.type != "falcon_h1"]
        if some:
            raise self.error(
                f"{some[0]} is given without layer_types, so it is unknown which layers it applies to"
            )
        if "attention_chunk_size" in values:  # Llama 4, where layers without positions see everything
            listed = values.get("no_rope_layers")
            if isinstance(listed, list) and len(listed) == self._num_layers:
                return _CHUNKED if listed[layer] else _FULL
            return _FULL if self._is_last_of("no_rope_layer_interval", layer, default=4) else _CHUNKED
        return _SLIDING if self._slides(layer) else _FULL

    def _is_last_of(self, name: str, layer: int, default: int | None = None) -> bool:
        """Return True if a layer is the last of every `name` layers."""
        return (layer + 1) % self._number(name, default=default) == 0

    def _slides(self, layer: int) -> bool:
        if "sliding_window" not in self._values or self._sees_all:
            return False
        pattern = self._values.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern:  # of L, local, and G, global
            return pattern[layer % len(pattern)] == "L"
        if pattern is not None:
            return not self._is_last_of("sliding_window_pattern", layer)
        return layer >= self._number("max_window_layers", default=0, least=0)

    @property
    def _sees_all(self) -> bool:
        """True if the nominal window spans all tokens."""
        if self._values.get("use_sliding_window") is False:
            return True
        longest = self._values.get("max_position_embeddings")
        return isinstance(longest, int) and self._window(_SLIDING) >= longest
