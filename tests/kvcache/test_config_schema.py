"""The JSON schema of the settings: it says what they mean, and refuses what they refuse."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache.config import KVCacheConfig, LogConfig
from kvcache.errors import ConfigError

SCHEMA = KVCacheConfig.model_json_schema()
SAYS_ONLY = {"$defs", "default", "description", "title"}
"""Keywords that refuse nothing."""
TYPES: dict[str, type | tuple[type, ...]] = {
    "array": list,
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "object": dict,
    "string": str,
}


def refusals(schema: dict[str, Any], value: Any) -> Iterator[str]:
    """The keywords of a schema that a value breaks, as JSON Schema has them; KeyError for one unknown here."""
    for keyword in schema.keys() - SAYS_ONLY:
        concerned, holds = KEYWORDS[keyword]
        if isinstance(value, concerned) and not holds(schema, schema[keyword], value):
            yield keyword


def accepts(schema: dict[str, Any], value: Any) -> bool:
    return not list(refusals(schema, value))


def is_of_type(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, float):
        return name == "number" or (name == "integer" and value.is_integer())
    return isinstance(value, TYPES[name])


Holds = Callable[[dict[str, Any], Any, Any], bool]
KEYWORDS: dict[str, tuple[type | tuple[type, ...], Holds]] = {
    "$ref": (object, lambda _, path, value: accepts(SCHEMA["$defs"][path.rpartition("/")[2]], value)),
    "additionalProperties": (
        dict,
        lambda schema, more, value: all(
            more if isinstance(more, bool) else accepts(more, value[name])
            for name in value.keys() - schema.get("properties", {}).keys()
        ),
    ),
    "allOf": (object, lambda _, branches, value: all(accepts(branch, value) for branch in branches)),
    "anyOf": (object, lambda _, branches, value: any(accepts(branch, value) for branch in branches)),
    "enum": (
        object,
        lambda _, values, value: any((value, type(value)) == (each, type(each)) for each in values),
    ),
    "exclusiveMaximum": ((int, float), lambda _, bound, value: value < bound),
    "exclusiveMinimum": ((int, float), lambda _, bound, value: value > bound),
    "items": (list, lambda _, inner, value: all(accepts(inner, item) for item in value)),
    "maximum": ((int, float), lambda _, bound, value: value <= bound),
    "maxItems": (list, lambda _, bound, value: len(value) <= bound),
    "maxLength": (str, lambda _, bound, value: len(value) <= bound),
    "minimum": ((int, float), lambda _, bound, value: value >= bound),
    "minLength": (str, lambda _, bound, value: len(value) >= bound),
    "minItems": (list, lambda _, bound, value: len(value) >= bound),
    "not": (object, lambda _, inner, value: not accepts(inner, value)),
    "properties": (
        dict,
        lambda _, of, value: all(accepts(of[name], value[name]) for name in of.keys() & value),
    ),
    "pattern": (str, lambda _, pattern, value: re.search(pattern, value) is not None),
    "propertyNames": (dict, lambda _, inner, value: all(accepts(inner, name) for name in value)),
    "required": (dict, lambda _, names, value: value.keys() >= set(names)),
    "type": (object, lambda _, name, value: is_of_type(name, value)),
}
"""Keyword to the values that it concerns, and whether it holds for one, given the schema and what stands there."""


def is_configuration(settings: dict[str, Any]) -> bool:
    try:
        KVCacheConfig(**settings)
    except ConfigError:
        return False
    return True


def settings(**changed: Any) -> dict[str, Any]:
    """A configuration as a file holds it, with windows and blocks such that no two of its settings are at odds."""
    has_file = changed.keys() & {"secondary_path", "verify_secondary"}
    of_file = {"model": "m", "secondary_blocks": 8, "secondary_path": "s"} if has_file else {}
    return {
        "max_sequence_length": 64,
        "primary_blocks": 8,
        "tokens_per_block": 1,
        **of_file,
        "max_attention_window": 64 if "num_layers" in changed else [1, 64],
        **changed,
    }


VALUES: list[Any] = [
    None, True, False, *range(-1, 5), 48, 64, 99, 100, 101, 4095, 4096, 65536, 65537, 2**30, 2**30 + 1, 2**31 - 1,
    2**31, 2**62, 2**62 + 1, 2**70, -(2**70), 1.5, 0.5, -0.5, "", "x", "1KB", "4KiB", "1.5MiB", "999999.9TiB", "0MiB",
    "-1MiB", "9999999TiB", "1 MiB ", "MiB", "1mib", "1EiB", "1e3MiB", "none", "block", "NHD", "nhd", "int8", "xxh3_64",
    "equal", "group", [], [0, 1], [1, 2], [1, -1], ["x", 1], [None, 1], [True, 1], [[1], [2]], {}, {"x": 1},
]  # fmt: skip
FIELDS = [
    *((name, None) for name in KVCacheConfig.model_fields),
    *(("log", name) for name in LogConfig.model_fields),
]


@pytest.mark.parametrize(("outer", "inner"), FIELDS)
def test_refuses_what_the_settings_refuse(outer: str, inner: str | None) -> None:
    """Of many values for each field the schema accepts none that the configuration would refuse."""
    tried = [settings(**{outer: value if inner is None else {inner: value}}) for value in VALUES]
    wrong = [each[outer] for each in tried if accepts(SCHEMA, each) and not is_configuration(each)]
    assert wrong == []
    assert len([each for each in tried if not accepts(SCHEMA, each)]) >= 10


BAD_RULES: list[Any] = [
    101, -1, True, 1.5, [], {}, "", "x", "60:", "60s", "60:5min:", {"priority": 101}, {"priority": 3, "duration_ms": 0},
    {"priority": 3, "duration": 5}, {"duration_ms": 3},
]  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens_per_block": 0},
        {"primary_blocks": None},
        {"primary_blocks": None, "max_tokens": None},
        {"primary_blocks": []},
        {"primary_blocks": [0, 1]},
        {"primary_blocks": None, "primary_bytes": 0},
        {"primary_blocks": None, "free_gpu_memory_fraction": 1},
        {"free_gpu_memory_fraction": 0},
        {"window_shares": "none"},
        {"window_shares": []},
        {"window_shares": [1, 0]},
        {"kv_factor": 3},
        {"max_sequence_length": None},
        {"num_kv_heads": []},
        {"max_attention_window": []},
        {"max_attention_window": [1] * 65537},
        {"num_kv_heads": [1] * 65537},
        {"head_dimm": 8},
        {"log": {"fsyncc": "never"}},
        {"log": None},
        {"block_hash": "none", "log": {"record_tokens": False}},
        *({"stop_retention": {"stop": rule}} for rule in BAD_RULES),
        {"stop_retention": {"x" * 65: 20}},
    ],
    ids=str,
)
def test_refusals_by_hand(changed: dict[str, Any]) -> None:
    """What is wrong by more than its type is refused by both."""
    tried = settings(**changed)
    assert (is_configuration(tried), accepts(SCHEMA, tried)) == (False, False)


@pytest.mark.parametrize("missing", ["max_sequence_length", "primary_blocks"])
def test_what_is_needed(missing: str) -> None:
    """Without the longest sequence, or without a limit of the primary pool, both refuse."""
    tried = {name: value for name, value in settings().items() if name != missing}
    assert (is_configuration(tried), accepts(SCHEMA, tried)) == (False, False)


@pytest.mark.parametrize(
    "changed",
    [
        *({"tokens_per_block": 1 << exponent} for exponent in range(31)),
        {"tokens_per_block": 48},
        {"primary_blocks": None, "max_tokens": 64},
        {"max_tokens": 64},
        {"primary_blocks": None, "primary_bytes": 2**62},
        {"primary_blocks": None, "free_gpu_memory_fraction": 0.9},
        {"primary_blocks": [4, 8], "secondary_blocks": [0, 1]},
        {"window_shares": "window"},
        {"window_shares": [0.25, 3]},
        {"kv_factor": 1},
        {"num_kv_heads": [4, 8]},
        {"max_attention_window": 32},
        {"max_attention_window": [32]},
        {"max_attention_window": None},
        {"secondary_blocks": 0, "host_cache_size": 2**62},
        {"primary_bytes": "80GB", "host_cache_size": "1.5TiB"},
        {"log": {"segment_bytes": "64MiB", "max_queued_bytes": "512KiB"}},
        {"model": "m", "block_hash": "xxh3_64", "log": {"record_tokens": False, "segment_bytes": 4096}},
        {"block_hash": "none", "log": {"record_tokens": True}},
        {"block_hash": "none", "log": {}},
        {
            "stop_retention": {
                "tool_calls": {"priority": 60, "duration_ms": 300000},
                "stop": 20,
                "*": "60:2min",
            }
        },
        {"stop_retention": {"": {"priority": 0}, "a.b": "100", "c": "60:1.5s", "d": None, "e": "none"}},
    ],
    ids=str,
)
def test_accepts_what_files_hold(changed: dict[str, Any]) -> None:
    """The schema does not refuse what a file of settings may say."""
    tried = settings(**changed)
    assert (is_configuration(tried), list(refusals(SCHEMA, tried))) == (True, [])


def test_accepts_a_whole_configuration() -> None:
    """A configuration written as JSON, with every field in it, is right by the schema."""
    full = KVCacheConfig(**settings(max_attention_window=32, num_kv_heads=[1, 2], log={"fsync": "never"}))
    assert list(refusals(SCHEMA, json.loads(full.model_dump_json()))) == []


def test_every_field_is_described() -> None:
    """Each field says what it means and, in the words of the errors, what it accepts."""
    reported = {"log": SCHEMA["properties"]["log"]["description"]}
    for prefix, schema in (("", SCHEMA), ("log.", SCHEMA["$defs"]["LogConfig"])):
        for name, field in schema["properties"].items():
            if prefix + name not in reported:
                meaning, _, reported[prefix + name] = field["description"].partition(" Accepted: ")
                assert re.fullmatch(r"[A-Z].*\.", meaning), name
    wrong: dict[str, Any] = {name: object() for name in KVCacheConfig.model_fields if name != "log"}
    wrong["log"] = dict.fromkeys(LogConfig.model_fields, object())
    with pytest.raises(ConfigError) as caught:
        KVCacheConfig(**wrong)
    errors = dict(line.split(": ", 1) for line in caught.value.problems)
    assert {name: text.partition("accepted: ")[2] + "." for name, text in errors.items()} | {
        "log": "Settings of the event log."
    } == reported


def test_schema_without_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python has no source the schema still says what each field accepts."""

    def no_source(model: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", no_source)
    described = KVCacheConfig.model_json_schema()["properties"]["model"]["description"]
    assert described == "Accepted: text."
