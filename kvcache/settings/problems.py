"""What is wrong with settings, in words: a line per problem, with the field, what was given and what is accepted."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvcache.errors import ConfigError

_SHOWN = 60
"""A given value is quoted up to this many characters."""
_QUOTES = reprlib.Repr()
"""Quotes no more of a nested value than will be shown: through references, a short file may hold an endless one."""
_QUOTES.maxlevel, _QUOTES.maxstring, _QUOTES.maxother, _QUOTES.maxlong = 3, 2 * _SHOWN, 2 * _SHOWN, 2 * _SHOWN
_QUOTES.maxtuple = _QUOTES.maxlist = _QUOTES.maxdict = 8


_ELSEWHERE = {
    "tokens_per_block": "block_size kv_block_size page_size",
    "max_sequence_length": "max_model_len max_seq_len max_seq_length max_length context_length max_position_embeddings",
    "max_tokens": "max_total_tokens max_num_tokens",
    "primary_blocks": "num_blocks num_gpu_blocks num_gpu_blocks_override",
    "primary_bytes": "kv_cache_memory_bytes max_gpu_total_bytes",
    "free_gpu_memory_fraction": "gpu_memory_utilization mem_fraction_static",
    "secondary_blocks": "num_cpu_blocks",
    "host_cache_size": "swap_space cpu_offload_gb kv_offloading_size hicache_size hicache_ratio secondary_bytes "
    "enable_hierarchical_cache",
    "enable_block_reuse": "enable_prefix_caching enable_caching disable_radix_cache",
    "max_attention_window": "sliding_window sliding_window_size attention_chunk_size",
    "num_layers": "num_hidden_layers",
    "num_kv_heads": "num_key_value_heads num_attention_heads",
    "head_dim": "head_size",
    "dtype": "kv_cache_dtype cache_dtype torch_dtype",
    "kv_layout": "kv_cache_layout",
    "block_hash": "prefix_caching_hash_algo kv_cache_event_hash_algo",
    "eviction_policy": "radix_eviction_policy",
    "model": "model_name served_model_name model_path",
}
_HERE = {theirs: ours for ours, names in _ELSEWHERE.items() for theirs in names.split()}
"""What vLLM, SGLang, TensorRT-LLM and configs of models call settings, and what they are here."""


@dataclass(frozen=True)
class Accepts:
    """Says for people what a field accepts; stands among the marks of its type."""

    text: str

    @classmethod
    def of(cls, field: FieldInfo) -> str | None:
        """What a field says; None: nothing."""
        return next((mark.text for mark in field.metadata if isinstance(mark, cls)), None)


def problems_of(model: type[BaseModel], error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """One line per field and problem. A union reports each of its branches; they end in the same line."""
    lines: dict[str, None] = {}
    for detail in error.errors(include_url=False):
        lines.update(dict.fromkeys(_lines_of(model, detail, values)))
    return list(lines)


def _lines_of(model: type[BaseModel], detail: ErrorDetails, values: Mapping[str, Any]) -> list[str]:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    nested = detail.get("ctx", {}).get("error")
    if isinstance(nested, ConfigError):
        return [f"{name}.{line}" if name else line for line in nested.problems]
    if detail["type"] == "extra_forbidden":
        close = _inside(model, name) or closest(name, model.model_fields)
        known = f"did you mean {close}?" if close else f"there are {', '.join(model.model_fields)}"
        return [f"{name}: no such field; {known}"]
    accepts = f"accepted: {accepted(model.model_fields[name])}"
    if detail["type"] == "missing":
        return [f"{name}: missing; {accepts}"]
    return [f"{name}: given {quoted(values[name])}; {accepts}"]


def quoted(value: object) -> str:
    """A given value as errors show it."""
    try:
        given = _QUOTES.repr(value)
    except Exception:  # noqa: BLE001  integers of thousands of digits have none
        return f"a value of type {type(value).__name__}"
    return given if len(given) <= _SHOWN else given[:_SHOWN] + "…"


def accepted(field: FieldInfo) -> str:
    """What a setting accepts, in words."""
    return Accepts.of(field) or f"a mapping of {', '.join(_fields_inside(field))}"


def _inside(model: type[BaseModel], name: str) -> str | None:
    """The full name of a setting that a model inside this one has; None: none has it."""
    outer = (key for key, field in model.model_fields.items() if name in _fields_inside(field))
    return next((f"{key}.{name}" for key in outer), None)


def _fields_inside(field: FieldInfo) -> Mapping[str, object]:
    inner: Mapping[str, object] = getattr(field.annotation, "model_fields", {})
    return inner


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is like an unknown one, or is another software's word for it; None: there is none."""
    names = {each.lower(): each for each in known}
    here = _HERE.get(name.lower().replace("-", "_"), "")
    return names.get(here) or next(iter(difflib.get_close_matches(name, names.values(), n=1)), None)
