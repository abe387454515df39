"""The settings of a cache: one frozen model, and the ways to fill it.

A configuration comes from code, or from a YAML or TOML file, the environment and code together
(`KVCacheConfig.load`). All of them end in the same validation, which raises one `ConfigError` with a line per
problem: the field, what was given and what is accepted. Unknown fields are refused, since a mistyped setting that is
silently ignored costs more than an error at the start; an unknown environment variable may belong to another program
and only causes a warning.

The accepted values of a field are declared by its type, for pydantic by `Field` and for people by `Accepts`; its
docstring gives the meaning. The JSON schema (`KVCacheConfig.model_json_schema`) contains both.

Environment variables are ``KVCACHE_`` followed by the name of a setting. Not every variable with this prefix is meant
for this library: for a Service named "kvcache", Kubernetes gives every container ``KVCACHE_SERVICE_HOST``,
``KVCACHE_PORT`` and more, and for "kvcache-router" ``KVCACHE_ROUTER_SERVICE_HOST`` and so on. Names that are no
settings are therefore ignored.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import re
import reprlib
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from events.units import parse_bytes, parse_seconds
from kvcache.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


_SHOWN = 60
"""Maximum length of a quoted value, in characters."""
_QUOTES = reprlib.Repr()
"""Abbreviates nested values before they are quoted: with references, a short file can describe an endless one."""
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
"""Settings here by the names that vLLM, SGLang, TensorRT-LLM and model configurations give them."""


@dataclass(frozen=True)
class Accepts:
    """Description for people of what a field accepts, where its type does not say it; part of the field's `Annotated`
    type.
    """

    text: str


def problems_of(model: type[BaseModel], error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """Format validation errors as one line per field and problem. The branches of a union share one line."""
    lines: dict[str, None] = {}
    for detail in error.errors(include_url=False):
        lines.update(dict.fromkeys(_lines_of(model, detail, values)))
    return list(lines)


def _lines_of(model: type[BaseModel], detail: ErrorDetails, values: Mapping[str, Any]) -> list[str]:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    nested = detail.get("ctx", {}).get("error")
    if isinstance(nested, ConfigError):
        where = ".".join(map(str, detail["loc"]))
        return [f"{where}.{line}" if name else line for line in nested.problems]
    if detail["type"] == "extra_forbidden":
        close = _inside(model, name) or closest(name, model.model_fields)
        known = f"did you mean {close}?" if close else f"known fields: {', '.join(model.model_fields)}"
        return [f"{name}: no such field; {known}"]
    accepts = f"accepted: {accepted(model.model_fields[name])}"
    if detail["type"] == "missing":
        return [f"{name}: missing; {accepts}"]
    return [f"{name}: given {quoted(values[name])}; {accepts}"]


def quoted(value: object) -> str:
    """Format a given value for an error message."""
    try:
        given = _QUOTES.repr(value)
    except Exception:  # noqa: BLE001  integers of thousands of digits have none
        return f"a value of type {type(value).__name__}"
    return given if len(given) <= _SHOWN else given[:_SHOWN] + "…"


def accepted(field: FieldInfo) -> str:
    """Describe the accepted values of a setting."""
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        *most, last = get_args(kind)
        return f"{', '.join(most)} or {last}"
    if kind is bool:
        return "true or false"
    said = next((mark.text for mark in field.metadata if isinstance(mark, Accepts)), None)
    return said or f"a mapping of {', '.join(_fields_inside(field))}"


def _inside(model: type[BaseModel], name: str) -> str | None:
    """Return the full name of a setting inside a nested model; None if there is none."""
    outer = (key for key, field in model.model_fields.items() if name in _fields_inside(field))
    return next((f"{key}.{name}" for key in outer), None)


def _fields_inside(field: FieldInfo) -> Mapping[str, object]:
    kind = field.annotation
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that resembles an unknown one or is its equivalent for another engine; None if there is
    none.
    """
    names = {each.lower(): each for each in known}
    here = _HERE.get(name.lower().replace("-", "_"), "")
    return names.get(here) or next(iter(difflib.get_close_matches(name, names.values(), n=1)), None)


def in_bytes(value: object) -> object:
    """Convert a size with a unit, such as "64MiB", to bytes; return anything else unchanged."""
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_bytes(value)
    return value


def or_size(letters: str = "KMGT") -> Callable[[dict[str, Any]], None]:
    """Allow sizes as text in a setting's schema; `letters` are the prefixes of the units large enough to be valid
    alone.
    """

    def extend(schema: dict[str, Any]) -> None:
        if "anyOf" not in schema:
            schema["anyOf"] = [{name: schema.pop(name) for name in ("type", "minimum", "maximum")}]
        pattern = rf"^[1-9][0-9]{{0,5}}(\.[0-9]{{1,9}})?[{letters}]i?B$"
        schema["anyOf"].insert(1, {"type": "string", "pattern": pattern})

    return extend


MAX_BLOCKS = 2**31 - 1
"""Slots are int32."""
MAX_BYTES = 2**62
"""Sizes in bytes are int64 in the log."""
MAX_LAYERS = 65536


def storable(value: str) -> str:
    """Refuse text that is not valid Unicode."""
    value.encode()  # text that is not UTF-8 cannot be written to a log
    return value


def as_numbers(value: object) -> object:
    """Convert "1024,4096", "[1024, 4096]" (as in environment variables) or a list to a tuple."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):  # a bracket alone stays, and is refused as no integer
            text = text[1:-1]
        value = text.split(",")
        if len(value) == 1:
            value = value[0]
    return tuple(value) if isinstance(value, list) else value


def one_or_more(value: object) -> object:
    """Convert a single window to a tuple that applies to all layers."""
    value = as_numbers(value)
    return (value,) if isinstance(value, int | float | str) else value


def rule_or_numbers(value: object) -> object:
    """Keep the name of a rule; convert anything else to one number per window."""
    return value if value in ("equal", "window") else one_or_more(value)


def rules_in(value: object) -> object:
    """Parse rules given as JSON text (as in environment variables) and drop those that are none."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        return {stop: rule for stop, rule in value.items() if rule not in (None, "none")}
    return value


def rule_in(value: object) -> object:
    """Parse "60:300s", or a priority alone, into the fields of a rule."""
    if isinstance(value, str):
        priority, colon, lasts = value.partition(":")
        with suppress(ValueError):
            lasts = str(round(1000 * parse_seconds(lasts)))
        return {"priority": priority} | ({"duration_ms": lasts} if colon else {})
    return {"priority": value} if type(value) is int else value


def or_rule_as_text(schema: dict[str, Any]) -> None:
    """Allow shortened and empty rules in a schema."""
    texts = {"type": "string", "pattern": r"^([0-9]{1,3}(:[0-9]+(\.[0-9]+)?(us|ms|s|min)?)?|none)$"}
    priority = {"type": "integer", "minimum": 0, "maximum": 100}
    rules = {"anyOf": [schema["additionalProperties"], priority, texts, {"type": "null"}]}
    schema["additionalProperties"] = rules


def or_one_in_schema(schema: dict[str, Any]) -> None:
    """Allow a single number in the schema of the list of windows."""
    schema["anyOf"].insert(0, schema["anyOf"][0]["items"])


Positive = Annotated[int, Field(ge=1, le=MAX_BLOCKS), Accepts(f"an integer from 1 to {MAX_BLOCKS}")]
Natural = Annotated[int, Field(ge=0, le=MAX_BLOCKS), Accepts(f"an integer from 0 to {MAX_BLOCKS}")]
OneUp = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
OfLayers = Annotated[tuple[OneUp, ...], Field(min_length=1, max_length=MAX_LAYERS)]
IN_BYTES = BeforeValidator(in_bytes)
Bytes = Annotated[
    int,
    Field(ge=1, le=MAX_BYTES, json_schema_extra=or_size()),
    IN_BYTES,
    Accepts("bytes, from 1 to 2**62, also as 64MiB"),
]
MaybeBytes = Annotated[
    int | None,
    Field(ge=1, le=MAX_BYTES, json_schema_extra=or_size()),
    IN_BYTES,
    Accepts("bytes, from 1 to 2**62, also as 64GiB, or none"),
]
MaybeCount = Annotated[OneUp | None, Accepts(f"an integer from 1 to {MAX_BLOCKS}, or none")]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False), Accepts("seconds above 0, up to 1e9")]
MaybeSeconds = Annotated[
    float | None, Field(gt=0, le=1e9, allow_inf_nan=False), Accepts("seconds above 0, up to 1e9, or none")
]
ZeroUp = Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
OfWindows = Field(min_length=1, max_length=MAX_LAYERS)
MaybeBlocks = Annotated[
    OneUp | Annotated[tuple[OneUp, ...], OfWindows] | None,
    BeforeValidator(as_numbers),
    Accepts(f"an integer from 1 to {MAX_BLOCKS}, one such integer per window, or none"),
]
MaybeNoBlocks = Annotated[
    ZeroUp | Annotated[tuple[ZeroUp, ...], OfWindows] | None,
    BeforeValidator(as_numbers),
    Accepts(f"an integer from 0 to {MAX_BLOCKS}, one such integer per window, or none"),
]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MaybePart = Annotated[float | None, Field(gt=0, lt=1), Accepts("a number above 0 and below 1, or none")]
MaybeTokens = Annotated[
    int | None, Field(ge=1, le=MAX_BYTES), Accepts("tokens, from tokens_per_block to 2**62, or none")
]


def describe(model: type[BaseModel], properties: Mapping[str, dict[str, Any]]) -> None:
    """Give each property of a model's schema its description."""
    docstrings = _docstrings(model)
    for name, schema in properties.items():
        field = model.model_fields[name]
        said = [docstrings.get(name), None if _fields_inside(field) else f"Accepted: {accepted(field)}."]
        schema["description"] = " ".join(filter(None, said))


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field of a class; empty if Python has no source for it."""
    try:
        [definition] = ast.parse(inspect.getsource(model)).body
    except (OSError, TypeError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


ENV_PREFIX = "KVCACHE_"
_OF_SERVICE = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)
"""Suffixes of the variables that Kubernetes defines for a Service."""
_OF_EACH_SERVICE = ("SERVICE_HOST", "SERVICE_PORT", "PORT")
"""Suffixes of the variables that Kubernetes defines for every Service."""


_OF_ENGINES = ("KVCACHE_LOG", "KVCACHE_SINKS", "KVCACHE_MODE")
"""Variables that are read elsewhere: they enable and configure the integrations with vLLM and SGLang."""


class Environment(NamedTuple):
    """Settings of a model that were found in the environment."""

    values: dict[str, Any]
    """Values by the full name of the setting, as in ``log.fsync``."""
    unknown: tuple[str, ...]
    """Other variables with the prefix, which may be misspelled settings."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that hold settings."""
        return tuple(map(variable_of, self.values))

    def warning(self, model: type[BaseModel]) -> str | None:
        """Format a warning about the unknown variables, without their values; None if there are none."""
        if not self.unknown:
            return None
        known = [variable_of(name).removeprefix(ENV_PREFIX) for name in fields_of(model)]
        names = ", ".join(_with_closest(name, known) for name in self.unknown)
        verb = "is not a setting and is" if len(self.unknown) == 1 else "are not settings and are"
        return f"{names} {verb} ignored"


def read_environment(model: type[BaseModel], env: Mapping[str, str]) -> Environment:
    """Read the settings of a model from environment variables, ignoring empty ones. Values are validated later."""
    given = {
        name: env[name].strip() for name in sorted(env) if name.startswith(ENV_PREFIX) and env[name].strip()
    }
    known = {variable_of(name): (name, field) for name, field in fields_of(model).items()}
    values = {
        known[variable][0]: value_in(text, known[variable][1])
        for variable, text in given.items()
        if variable in known
    }
    services = _services(given)
    others = (name for name in given if name not in known and name not in _OF_ENGINES)
    unknown = tuple(name for name in others if not _is_of(services, name))
    return Environment(values, unknown)


def fields_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the settings of a model and of its nested models, by full name."""
    found = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.update(fields_of(kind, f"{prefix}{name}."))
        else:
            found[prefix + name] = field
    return found


def variable_of(name: str) -> str:
    """Return the name of the environment variable for a setting."""
    return ENV_PREFIX + name.upper().replace(".", "__")


def value_in(text: str, field: FieldInfo | None) -> str | None:
    """Interpret the text of a variable: "none" is None if the setting accepts that."""
    may_be_none = field is not None and type(None) in get_args(field.annotation)
    return None if may_be_none and text.lower() == "none" else text


def problems_in(model: type[BaseModel], env: Mapping[str, str]) -> list[str]:
    """Validate each variable by itself and return the problems. Whether settings fit together depends on the other
    sources.
    """
    values = read_environment(model, env).values
    return [
        f"{variable_of(name)}: {name}: given {quoted(values[name])}; accepted: {accepted(field)}"
        for name, field in fields_of(model).items()
        if name in values and not _fits(field, values[name])
    ]


def _fits(field: FieldInfo, value: Any) -> bool:
    kind: Any = Annotated[(field.annotation, field)]
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def _services(given: Mapping[str, str]) -> list[str]:
    """Return the prefix of each Kubernetes Service: that of one named "kvcache", and those with all the usual
    variables.
    """
    ends = _OF_EACH_SERVICE[0]
    begins = [name.removesuffix(ends) for name in given if name.endswith(f"_{ends}")]
    return [ENV_PREFIX, *(each for each in begins if all(each + end in given for end in _OF_EACH_SERVICE))]


def _is_of(services: list[str], name: str) -> bool:
    return any(name.startswith(each) and _OF_SERVICE.fullmatch(name, len(each)) for each in services)


def _with_closest(name: str, known: list[str]) -> str:
    shown = name if name.isidentifier() else quoted(name)
    # The common prefix would make any two names similar.
    meant = closest(name.removeprefix(ENV_PREFIX), known)
    return f"{shown} (did you mean {ENV_PREFIX}{meant}?)" if meant else shown


Values = dict[str, Any]
"""Settings by name; those of `log` are nested."""


class Sources:
    """The sources of the settings of a model. Raises ConfigError if the file cannot be used."""

    def __init__(
        self, model: type[BaseModel], path: Path | None, env: Mapping[str, str], by_name: Values
    ) -> None:
        self._file = {} if path is None else _read_file(path)
        self.environment = read_environment(model, env)
        self._by_name = by_name

    @property
    def values(self) -> Values:
        """Values of all sources, merged, in the form of a file."""
        values = self._file
        for name, value in self.environment.values.items():
            values = merged(values, nested(name, value))
        return merged(values, self._by_name)

    def origin(self, name: str) -> Literal["by name", "environment", "file"] | None:
        """Return the source that a setting's value comes from; None if it was not given."""
        if look_up(self._by_name, name) is not ...:
            return "by name"
        if name in self.environment.values:
            return "environment"
        return None if look_up(self._file, name) is ... else "file"


def look_up(values: Values, name: str) -> Any:
    """Return the value under a full name, as in ``log.fsync``; an ellipsis if there is none."""
    found: Any = values
    for step in name.split("."):
        found = found.get(step, ...) if isinstance(found, dict) else ...
    return found


def nested(name: str, value: Any) -> Values:
    """Build nested values that contain one setting only, given by its full name."""
    *outer, field = name.split(".")
    values = {field: value}
    for step in reversed(outer):
        values = {step: values}
    return values


def merged(below: Values, above: Mapping[str, Any]) -> Values:
    """Merge two mappings recursively; `above` takes precedence."""
    both = dict(below)
    for name, value in above.items():
        mappings = isinstance(value, Mapping) and isinstance(both.get(name), Mapping)
        both[name] = merged(both[name], value) if mappings else value
    return both


def _read_file(path: Path) -> Values:
    if path.suffix not in _PARSERS:
        raise ConfigError([f"the file's name must end in {', '.join(_PARSERS)}"], str(path))
    try:
        values = _PARSERS[path.suffix](path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from error
    except Exception as error:
        # On invalid input, parsers raise any exception, RecursionError on deep nesting.
        detail = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise ConfigError([f"cannot be read: {detail or type(error).__name__}"], str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError(
            [f"given {type(values).__name__}; accepted: a mapping of fields to values"], str(path)
        )
    wrong = [name for name in values if not isinstance(name, str)]
    if wrong:
        raise ConfigError([f"{quoted(name)}: names of fields must be text" for name in wrong], str(path))
    return values


def _parse_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(["YAML needs an extra: pip install 'kvcache[cli]', or use TOML"]) from error
    try:
        return yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark is not None else ""
        raise ValueError(f"{error.problem}{line}") from error


_PARSERS: dict[str, Callable[[str], object]] = {
    ".toml": tomllib.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


class _Settings(BaseModel, frozen=True, extra="forbid"):
    """Base of the settings models: frozen, without unknown fields, with one readable error."""

    # Type checkers take the constructor's parameters from the fields as long as they see no constructor here.
    if not TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(problems_of(type(self), error, values)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_flag_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse True and False for numbers: to Python True is 1, but it is hardly ever meant."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("a flag, not a number")
        if isinstance(value, Mapping) and not all(isinstance(name, str) for name in value):
            raise ValueError("names of fields must be text")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        describe(cls, handler.resolve_ref_schema(schema)["properties"])
        return schema


PRIMARY_LIMITS = ("primary_blocks", "max_tokens", "primary_bytes", "free_gpu_memory_fraction")
"""Settings that limit the size of the primary level."""
_LIMITS: list[JsonValue] = [
    {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in PRIMARY_LIMITS
]
"""One of these is required, and not as none."""
_NAMELESS: dict[str, JsonValue] = {
    "properties": {
        "block_hash": {"enum": ["none"]},
        "log": {"properties": {"record_tokens": {"enum": [False]}}, "required": ["record_tokens"]},
    },
    "required": ["block_hash", "log"],
}
"""Refused combination: in a log without tokens and without names, blocks could not be identified."""


class LogConfig(_Settings, frozen=True):
    """Settings of the event log."""

    record_tokens: bool = True
    """Whether to write token ids, which are the prompts. A log without them replays to the same fingerprint and can
    be continued, but `KVCacheManager.resume` refuses its state, and `kvcache match` needs the tokens of the prompt
    and finds only full blocks, by name. Sinks that do not declare that they need token ids do not receive any either.
    """
    overflow: Literal["block", "drop"] = "drop"
    """Behaviour when the disk is too slow: block the engine, or drop batches and record the loss. While the disk is
    full or fails, both drop batches that do not fit the queue, and with `block` each flush raises."""
    segment_bytes: Annotated[
        int,
        Field(ge=4096, le=MAX_BYTES, json_schema_extra=or_size("MGT")),
        IN_BYTES,
        Accepts("bytes, from 4096 to 2**62, also as 64MiB"),
    ] = 64 * 1024 * 1024
    """Size at which a segment file is closed and the next one begins."""
    fsync: Literal["always", "group", "interval", "never"] = "group"
    """When to sync batches to disk: immediately, all waiting ones together, with each flush blocking until they are
    synced (`always`) or not (`group`); at most every `log.fsync_seconds` (`interval`); or only at the end of a
    segment (`never`)."""
    fsync_seconds: Seconds = 1.0
    """With `interval`, the maximum time in seconds from writing a batch to syncing it. Shorter if the queue is half
    full."""
    retain_bytes: MaybeBytes = None
    """Size limit of the log in bytes, snapshots included. Each new segment starts a separate process that removes the
    oldest ones; reading then begins with a snapshot. Followers may retain as much again. While an engine writes, the
    log may exceed the limit by a segment and a snapshot; the writer waits for the process if it would be more. None:
    no limit."""
    retain_seconds: MaybeSeconds = None
    """Age limit of the log in seconds: segments that ended longer ago than this before the start of the newest one
    are removed."""
    retain_segments: MaybeCount = None
    """Maximum number of segments of the log, including the one being written."""
    snapshots: bool = False
    """Whether to write snapshots although the whole log is kept, so that replays start from them. They take no more
    space than the log."""
    compression: Literal["zstd", "none"] = "zstd"
    """Compression of the log while it is written: to 1/2 for chats, and to 1/14 for agents, which send their whole
    history each turn. Writing and reading it needs the extra `zstd`; if that is missing, the log is written
    uncompressed."""
    window: Annotated[
        int,
        Field(ge=1024, le=MAX_BYTES, json_schema_extra=or_size("MGT")),
        IN_BYTES,
        Accepts("bytes, from 1024 to 2**62, also as 64MiB"),
    ] = 128 * 1024 * 1024
    """Window of the compression in bytes: how far back it finds repetitions, and the memory that the writer and each
    reader use for it. Values above 128MiB are treated as 128MiB."""
    max_queued_batches: Positive = 4096
    """Maximum number of batches that wait for the disk."""
    max_queued_bytes: Bytes = 32 * 1024 * 1024
    """Maximum number of bytes that wait for the disk."""


ANY_STOP = "*"
"""Key in `stop_retention` for all other stop reasons, and for none."""


class StopRetention(_Settings, frozen=True):
    """Retention of a sequence's blocks from its end on."""

    priority: Annotated[int, Field(ge=0, le=100), Accepts("a priority from 0 to 100")]
    """Eviction priority: lower ones are evicted first; blocks without a retention have 35."""
    duration_ms: Annotated[
        int | None, Field(ge=1, le=MAX_BYTES // 10**6), Accepts("milliseconds, from 1 on, or none")
    ] = None
    """Duration of the priority in milliseconds; none: for good."""


class KVCacheConfig(_Settings, frozen=True, json_schema_extra={"anyOf": _LIMITS, "not": _NAMELESS}):
    """Settings of a cache. At least one of `PRIMARY_LIMITS` is required; if several are given, the smallest applies."""

    max_sequence_length: Positive
    """Maximum length of a sequence in tokens, prompt and output."""
    tokens_per_block: Annotated[int, Field(ge=1, le=2**30), Accepts("an integer from 1 to 2**30")] = 32
    """Number of tokens in a block, the unit of allocation and reuse."""
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS), Accepts(f"an integer from 1 to {MAX_LAYERS}")] = 2
    """Number of layers of the model that have a KV cache."""
    num_kv_heads: Annotated[
        OneUp | OfLayers,
        BeforeValidator(as_numbers),
        Accepts(f"an integer from 1 to {MAX_BLOCKS}, or one such integer per layer"),
    ] = 2
    """Number of KV heads, for all layers or per layer."""
    head_dim: Positive = 8
    """Number of elements of one head's K (or V) for one token."""
    kv_factor: Annotated[int, Field(ge=1, le=2), Accepts("2 or 1")] = 2
    """What layers store per token: K and V (2), or K only (1), as with MLA, where one latent vector serves as both."""
    dtype: Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"] = "bfloat16"
    """Data type of the elements."""
    kv_layout: Literal["NHD", "HND"] = "NHD"
    """Order of dimensions inside a block: tokens before heads (NHD), or heads before tokens (HND)."""
    max_attention_window: Annotated[
        OfLayers | None,
        BeforeValidator(one_or_more),
        Field(json_schema_extra=or_one_in_schema),
        Accepts(
            "windows in tokens, from 1 on (full: max_sequence_length or more), one per layer or fewer, or none"
        ),
    ] = None
    """Attention windows of the layers in tokens, repeated cyclically. A number of `max_sequence_length` or more is
    full attention; none: all layers have full attention. Layers with the same window share blocks; a sequence
    releases blocks that have left its window."""
    primary_blocks: MaybeBlocks = None
    """Number of blocks on the device, for each group of layers with the same window, or one number per window,
    ascending."""
    max_tokens: MaybeTokens = None
    """Capacity of the blocks on the device in tokens of all sequences together, for each group of layers with the
    same window. The length of one sequence is limited by `max_sequence_length`."""
    primary_bytes: MaybeBytes = None
    """Device memory for all groups together, in bytes, divided according to `window_shares`."""
    free_gpu_memory_fraction: MaybePart = None
    """Device memory as a fraction of what is free when `kvcache.pools.sized` measures it, divided according to
    `window_shares`. The result is block counts, and only these are recorded."""
    secondary_blocks: MaybeNoBlocks = None
    """Number of blocks in host memory, for each group of layers with the same window, or one number per window,
    ascending."""
    host_cache_size: Annotated[
        int | None,
        Field(ge=0, le=MAX_BYTES, json_schema_extra=or_size()),
        IN_BYTES,
        Accepts("bytes, from 0 to 2**62, also as 64GiB, or none"),
    ] = None
    """Host memory for all groups together, in bytes, divided according to `window_shares`. If `secondary_blocks` is
    given too, the smaller one applies; without either there is no secondary level."""
    secondary_path: Annotated[
        Annotated[str, Field(min_length=1), AfterValidator(storable)] | None,
        Accepts("the path of a file, or none"),
    ] = None
    """Path of the file that holds the secondary level, on a tmpfs or, without a GPU, on a disk; it is created if
    missing. After a restart `KVCacheManager.open` finds its blocks again. Requires `model` and the package xxhash."""
    verify_secondary: bool = False
    """Whether to verify the checksums of blocks when they are onboarded from the file of `secondary_path`. A mismatch
    counts as a failed copy, which drops everything cached. Costs as much as computing the checksum when the block was
    written."""
    copier: Literal["auto", "dma", "torch"] = "auto"
    """How blocks are copied between GPU and host memory: dma passes lists of copies to the driver for the GPU's copy
    engines, torch makes one call per contiguous range. auto: dma if the driver supports it, and inside the GPU a
    Triton kernel if Triton is installed; `kvcache doctor` shows the choice."""
    copy_pieces: Positive = 256
    """With dma, the maximum number of copies per driver call."""
    copy_bytes: Bytes = 64 * 1024 * 1024
    """With dma, the maximum number of bytes per driver call. The model's own copies can run between two calls."""
    hugepages: Literal["system", "always", "never"] = "system"
    """Whether the secondary level uses transparent huge pages, which make page-locking and copying faster, but may
    require the system to compact memory first: by the system's default, wherever possible, or never. Does not apply
    to the file of `secondary_path`."""
    numa_node: Annotated[int | None, Field(ge=0, le=1023), Accepts("an integer from 0 to 1023, or none")] = (
        None
    )
    """NUMA node of the memory for the secondary level, ideally that of the GPU. none: the system chooses."""
    window_shares: Annotated[
        Literal["equal", "window"] | Annotated[tuple[Weight, ...], OfWindows],
        BeforeValidator(rule_or_numbers),
        Accepts("equal, window, or one number above 0 per window"),
    ] = "equal"
    """How windows divide sizes in bytes: equally; in proportion to the window times its bytes per token, so that each
    holds tokens in proportion to its window; or in proportion to these numbers, in order of ascending windows."""
    cross_kv_cache_fraction: MaybePart = None
    """For encoder-decoder models, whose layers also have K/V of the encoder's tokens: the fraction of all sizes in
    bytes for the group of blocks that holds these; the windows divide the rest. Lists of block counts have one more
    entry for it at the end. none: the model has no encoder."""
    enable_block_reuse: bool = True
    """Whether computed blocks stay cached for reuse by later prompts."""
    enable_partial_reuse: bool = True
    """Whether a block that matches only at its start is reused by copying that part."""
    append_only_tables: bool = False
    """For engines with workers that only append to their block tables, such as vLLM's: whether a sequence keeps its own
    slots of blocks that another sequence stored first, until it ends, instead of returning them at once. Workers may
    read and write them as before, and the engine may ignore StoreResult.replaced. Such blocks take two slots."""
    keep_reservations: bool = False
    """Whether reserved slots that the next tokens do not need stay reserved, until another reserve, a rewind or the end
    of the sequence: for engines that launch a step before the number of tokens sampled by the last one is known."""
    secondary_offload_min_priority: Annotated[
        int, Field(ge=0, le=100), Accepts("a priority from 0 to 100")
    ] = 30
    """Minimum priority of evicted blocks to be kept in host memory; others are dropped."""
    eviction_policy: Literal["lru", "levels"] = "lru"
    """Eviction order among blocks of equal priority. lru: least recently released first. levels: as lru, but each use
    after the first, up to three of them, counts as a release later by half the current lifetime of a block; evicted
    blocks are remembered by name. Sliding windows always use lru."""
    stop_retention: Annotated[
        dict[
            Annotated[str, Field(max_length=64), AfterValidator(storable)],
            Annotated[StopRetention, BeforeValidator(rule_in)],
        ],
        BeforeValidator(rules_in),
        Field(json_schema_extra=or_rule_as_text),
        Accepts("a mapping of stop reasons to a priority, PRIORITY:DURATION as in 60:300s, or both by name"),
    ] = {}
    """Retention of blocks by the reason for which their sequence's output ended (`remove_sequence(stop=)`; `*`: any
    other reason, or none): their priority and its duration; after that it is 35."""
    evict_ahead: Natural = 64
    """Number of slots that decoding evicts ahead when it has to evict, at most 1/16 of primary, so that the next
    steps find a blank one. 0: each step evicts only what it needs, which keeps blocks longest. With 32 sequences in a
    full cache a step takes 84 µs with 0, 68 with 8, 64 with 32, 59 with 64 and 57 with 256 (with secondary 130, 86,
    80, 60 and 59)."""
    block_hash: Literal["auto", "v2_sha256_64", "v1_block_key", "xxh3_64", "none"] = "auto"
    """Algorithm of the block names in published events and logs; reuse never depends on it."""
    model: Annotated[str, AfterValidator(storable), Accepts("text")] = ""
    """Name of the model that computes K and V. Caches of different models never exchange bytes."""
    model_variant: Annotated[str, AfterValidator(storable), Accepts("text")] = ""
    """Everything else that K and V depend on: revision and quantization of the weights, adapters merged into them,
    rope scaling, the rank of tensor or pipeline parallelism. Compared like `model`, but published nowhere except in
    the log."""
    checkpoint_spacing: Positive = 50
    """Spacing of the fingerprints in the log: one is taken whenever this number times as many blocks have changed as
    the cache has slots, and one at the end. A fingerprint takes 0.1 µs per slot if prompts are long, and 0.4 to 0.6
    µs if each has a few blocks of its own; a changed block takes 0.4 µs and more, so 50 costs 0.5 to 3 % of the
    manager's time. It is computed in one piece: 0.1 to 0.6 s for a million slots. Without a log only the one at the
    end is taken."""
    event_buffer_max_size: Natural = 0
    """Number of events buffered for polling consumers; 0: none."""
    attention_dp_rank: Annotated[
        int | None, Field(ge=0, le=2**31 - 1), Accepts("an integer from 0 to 2147483647")
    ] = None
    """Rank of the engine in data-parallel attention, included in TensorRT-LLM's dicts."""
    max_pinned_share: Annotated[float, Field(ge=0, le=1), Accepts("a number from 0 to 1")] = 0.5
    """Maximum fraction of each window's primary blocks that may be pinned. Pinned blocks are never evicted."""
    debug_fill_blank: bool = False
    """For debugging, with pools: whether to overwrite blocks with NaN (int8: 127) when a sequence gets them, which
    exposes reads of K/V that was never written. Costs a write of each new block; copies then start in more batches,
    and `start_transfers` is required after each call that allocates."""
    debug_check_tables: bool = False
    """For debugging: whether `tables.check` detects tables that a later call has made stale, and copies that nothing
    waits for. Costs a copy of each requested table."""
    log: LogConfig = LogConfig()
    """Settings of the event log."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Validate settings that depend on each other."""
        if problems := [*_problems_between(self)]:
            raise ConfigError(problems)
        return self

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Self:
        """Read the settings from a file, the environment and `overrides`; later sources take precedence.

        `path` ends in .toml, .yaml or .yml (YAML needs the extra ``kvcache[cli]``). The variable ``KVCACHE_<FIELD>``
        sets a field, ``KVCACHE_LOG__<FIELD>`` a field of `log`; ``none`` means no value, and empty variables are
        ignored. `env` defaults to the environment of the process. Any other variable with the prefix ``KVCACHE_``
        causes a UserWarning, unless it looks like one that Kubernetes defines for a Service. Raises ConfigError.
        """
        sources = Sources(
            cls, None if path is None else Path(path), os.environ if env is None else env, overrides
        )
        if (warning := sources.environment.warning(cls)) is not None:
            warnings.warn(warning, UserWarning, stacklevel=2)
        try:
            return cls(**sources.values)
        except ConfigError as error:
            files = () if path is None else (str(path),)
            raise ConfigError(error.problems, ", ".join(files + sources.environment.variables)) from None


def windows_of(config: KVCacheConfig) -> list[int]:
    """Return the distinct attention windows of all layers in tokens, ascending, cut to `max_sequence_length`."""
    given = config.max_attention_window or (config.max_sequence_length,)
    return sorted({min(window, config.max_sequence_length) for window in given})


def _problems_between(config: KVCacheConfig) -> Iterator[str]:
    if all(getattr(config, name) is None for name in PRIMARY_LIMITS):
        yield f"{', '.join(PRIMARY_LIMITS)}: missing; accepted: one or more of them"
    if config.max_tokens is not None and config.max_tokens < config.tokens_per_block:
        least = f"at least one block of {config.tokens_per_block} tokens"
        yield f"max_tokens: given {config.max_tokens}; accepted: {least}"
    yield from _problems_of_lists(config)
    if config.secondary_path is None and config.verify_secondary:
        yield "verify_secondary: given true; accepted: only with secondary_path, whose blocks have checksums"
    if config.secondary_path is not None and not config.model:
        why = "whose blocks are never served to another model"
        yield f"model: given ''; accepted: a name with secondary_path, {why}"
    if config.secondary_path is not None and not (config.secondary_blocks or config.host_cache_size):
        yield "secondary_path: given; accepted: only with secondary_blocks or host_cache_size"
    if config.block_hash == "none" and config.eviction_policy == "levels":
        why = "eviction_policy=levels, which counts uses by name"
        yield f"block_hash: given 'none'; accepted: another one with {why}"
    if config.block_hash == "none" and not config.log.record_tokens:
        why = "log.record_tokens=false, since blocks in a log without tokens are identified by their names"
        yield f"block_hash: given 'none'; accepted: another one with {why}"


def _problems_of_lists(config: KVCacheConfig) -> Iterator[str]:
    """Report lists whose length does not match the number of layers or windows."""
    heads, windows, layers = config.num_kv_heads, config.max_attention_window, config.num_layers
    if isinstance(heads, tuple) and len(heads) != layers:
        yield f"num_kv_heads: given {len(heads)} numbers; accepted: one, or {layers} (num_layers)"
    if windows is not None and len(windows) > layers:
        yield f"max_attention_window: given {len(windows)} windows; accepted: at most {layers} (num_layers)"
    for name in ("primary_blocks", "secondary_blocks", "window_shares"):
        given, count = getattr(config, name), len(windows_of(config))
        alike = len(set(windows or ())) > count
        why = ", those of at least max_sequence_length being one" if alike else ""
        if name != "window_shares" and config.cross_kv_cache_fraction is not None:
            count, why = count + 1, f"{why}, and one for cross attention"
        if isinstance(given, tuple) and len(given) != count:
            yield f"{name}: given {len(given)} numbers; accepted: {count} (one per window{why})"
