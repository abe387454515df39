"""The settings of a cache: one frozen model, and the ways to fill it.

A configuration comes from code, or from a YAML or TOML file, the environment and code together
(`KVCacheConfig.load`). All of them end in the same validation, which raises one `ConfigError` with a line per
problem: the field, what was given and what is accepted. Unknown fields are refused, since a mistyped setting
that is silently ignored costs more than an error at the start; an unknown variable of the environment, which may be
another program's, is reported by a warning.

What each field accepts is said by its type and, for people (`Accepts`) and for pydantic (`Field`), beside it; what it
means, below it. The JSON schema (`KVCacheConfig.model_json_schema`) says both.

Variables begin with ``KVCACHE_`` and go on with the name of a setting. Not all that begin so are meant for this
library: for a Service named "kvcache", Kubernetes gives every container ``KVCACHE_SERVICE_HOST``, ``KVCACHE_PORT`` and
more, and for "kvcache-router" ``KVCACHE_ROUTER_SERVICE_HOST`` and so on. So only the names of settings count.
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
    """Says for people what a field accepts, where its type does not; stands among the marks of that."""

    text: str


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
        where = ".".join(map(str, detail["loc"]))
        return [f"{where}.{line}" if name else line for line in nested.problems]
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
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        *most, last = get_args(kind)
        return f"{', '.join(most)} or {last}"
    if kind is bool:
        return "true or false"
    said = next((mark.text for mark in field.metadata if isinstance(mark, Accepts)), None)
    return said or f"a mapping of {', '.join(_fields_inside(field))}"


def _inside(model: type[BaseModel], name: str) -> str | None:
    """The full name of a setting that a model inside this one has; None: none has it."""
    outer = (key for key, field in model.model_fields.items() if name in _fields_inside(field))
    return next((f"{key}.{name}" for key in outer), None)


def _fields_inside(field: FieldInfo) -> Mapping[str, object]:
    kind = field.annotation
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is like an unknown one, or is another software's word for it; None: there is none."""
    names = {each.lower(): each for each in known}
    here = _HERE.get(name.lower().replace("-", "_"), "")
    return names.get(here) or next(iter(difflib.get_close_matches(name, names.values(), n=1)), None)


def in_bytes(value: object) -> object:
    """The number of bytes that a text with a unit stands for; all else stays as it is."""
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_bytes(value)
    return value


def or_size(letters: str = "KMGT") -> Callable[[dict[str, Any]], None]:
    """Say in a setting's schema that a text will do; `letters` begin the units of which one is enough."""

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
    """Refuse what is no Unicode text."""
    value.encode()  # what a variable or a file holds beside UTF-8 has no place in a log
    return value


def as_numbers(value: object) -> object:
    """Read "1024,4096" or "[1024, 4096]", as environments hold them, and a list as the tuple it stands for."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):  # a bracket alone stays, and is refused as no integer
            text = text[1:-1]
        value = text.split(",")
        if len(value) == 1:
            value = value[0]
    return tuple(value) if isinstance(value, list) else value


def one_or_more(value: object) -> object:
    """A single window is the window of all layers."""
    value = as_numbers(value)
    return (value,) if isinstance(value, int | float | str) else value


def rule_or_numbers(value: object) -> object:
    """The name of a rule stays; all else is one number per window."""
    return value if value in ("equal", "window") else one_or_more(value)


def rules_in(value: object) -> object:
    """The mapping that a text of JSON stands for, as environments hold it; a rule that is none is left out."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        return {stop: rule for stop, rule in value.items() if rule not in (None, "none")}
    return value


def rule_in(value: object) -> object:
    """The mapping that "60:300s", or a priority alone, stands for."""
    if isinstance(value, str):
        priority, colon, lasts = value.partition(":")
        with suppress(ValueError):
            lasts = str(round(1000 * parse_seconds(lasts)))
        return {"priority": priority} | ({"duration_ms": lasts} if colon else {})
    return {"priority": value} if type(value) is int else value


def or_rule_as_text(schema: dict[str, Any]) -> None:
    """Say in a schema that rules may be written shorter, or left out."""
    texts = {"type": "string", "pattern": r"^([0-9]{1,3}(:[0-9]+(\.[0-9]+)?(us|ms|s|min)?)?|none)$"}
    priority = {"type": "integer", "minimum": 0, "maximum": 100}
    rules = {"anyOf": [schema["additionalProperties"], priority, texts, {"type": "null"}]}
    schema["additionalProperties"] = rules


def or_one_in_schema(schema: dict[str, Any]) -> None:
    """Say so in the schema of the list of windows."""
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
    """The text below each field of the class; nothing where Python has no source."""
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
"""What Kubernetes tells containers of a Service, behind its name."""
_OF_EACH_SERVICE = ("SERVICE_HOST", "SERVICE_PORT", "PORT")
"""What there is for every Service."""


_OF_ENGINES = ("KVCACHE_LOG", "KVCACHE_SINKS")
"""What other engines look at: where vLLM and SGLang are to be recorded."""


class Environment(NamedTuple):
    """What an environment holds for a model of settings."""

    values: dict[str, Any]
    """By the setting's name, as in ``log.fsync``."""
    unknown: tuple[str, ...]
    """Other variables that may have been meant as settings."""

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that hold settings."""
        return tuple(map(variable_of, self.values))

    def warning(self, model: type[BaseModel]) -> str | None:
        """What to tell of the unknown variables, without their values; None: there are none."""
        if not self.unknown:
            return None
        known = [variable_of(name).removeprefix(ENV_PREFIX) for name in fields_of(model)]
        names = ", ".join(_with_closest(name, known) for name in self.unknown)
        verb = "is no setting and is" if len(self.unknown) == 1 else "are no settings and are"
        return f"{names} {verb} ignored"


def read_environment(model: type[BaseModel], env: Mapping[str, str]) -> Environment:
    """Read the settings of a model; an empty variable counts as an unset one. What they accept is checked later."""
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
    """The settings of a model, and of the models inside it, by their full name."""
    found = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.update(fields_of(kind, f"{prefix}{name}."))
        else:
            found[prefix + name] = field
    return found


def variable_of(name: str) -> str:
    """The variable that holds a setting."""
    return ENV_PREFIX + name.upper().replace(".", "__")


def value_in(text: str, field: FieldInfo | None) -> str | None:
    """What a text gives a setting: "none" is no value, where the setting may be without one."""
    may_be_none = field is not None and type(None) in get_args(field.annotation)
    return None if may_be_none and text.lower() == "none" else text


def problems_in(model: type[BaseModel], env: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables, each by itself: whether they fit together depends on what else is given."""
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
    """How the variables of each Service begin: one named "kvcache", and those of which the usual ones are there."""
    ends = _OF_EACH_SERVICE[0]
    begins = [name.removesuffix(ends) for name in given if name.endswith(f"_{ends}")]
    return [ENV_PREFIX, *(each for each in begins if all(each + end in given for end in _OF_EACH_SERVICE))]


def _is_of(services: list[str], name: str) -> bool:
    return any(name.startswith(each) and _OF_SERVICE.fullmatch(name, len(each)) for each in services)


def _with_closest(name: str, known: list[str]) -> str:
    shown = name if name.isidentifier() else quoted(name)
    # Without what all of them begin with, which would make any two alike.
    meant = closest(name.removeprefix(ENV_PREFIX), known)
    return f"{shown} (did you mean {ENV_PREFIX}{meant}?)" if meant else shown


Values = dict[str, Any]
"""Settings by their names; inside `log` once more."""


class Sources:
    """What is given for a model of settings, and where. Raises ConfigError if the file holds no settings."""

    def __init__(
        self, model: type[BaseModel], path: Path | None, env: Mapping[str, str], by_name: Values
    ) -> None:
        self._file = {} if path is None else _read_file(path)
        self.environment = read_environment(model, env)
        self._by_name = by_name

    @property
    def values(self) -> Values:
        """All of it, as a file would give it."""
        values = self._file
        for name, value in self.environment.values.items():
            values = merged(values, nested(name, value))
        return merged(values, self._by_name)

    def origin(self, name: str) -> Literal["by name", "environment", "file"] | None:
        """Where a setting was given last; None: nowhere."""
        if look_up(self._by_name, name) is not ...:
            return "by name"
        if name in self.environment.values:
            return "environment"
        return None if look_up(self._file, name) is ... else "file"


def look_up(values: Values, name: str) -> Any:
    """The value under a full name, as in ``log.fsync``; an ellipsis if there is none."""
    found: Any = values
    for step in name.split("."):
        found = found.get(step, ...) if isinstance(found, dict) else ...
    return found


def nested(name: str, value: Any) -> Values:
    """The values in which this one alone is given, under its full name."""
    *outer, field = name.split(".")
    values = {field: value}
    for step in reversed(outer):
        values = {step: values}
    return values


def merged(below: Values, above: Mapping[str, Any]) -> Values:
    """`above` wins; mappings on both sides are merged."""
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
        # Parsers raise what they like at what is no settings file, RecursionError at the deepest of them.
        told = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise ConfigError([f"cannot be read: {told or type(error).__name__}"], str(path)) from error
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
    """Base of the models here: frozen, nothing unknown, and one readable error."""

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
        """To Python True is 1, but who writes it for a number means something else."""
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
"""The settings that limit what is on the device."""
_LIMITS: list[JsonValue] = [
    {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in PRIMARY_LIMITS
]
"""One of these is given, and not as none."""
_NAMELESS: dict[str, JsonValue] = {
    "properties": {
        "block_hash": {"enum": ["none"]},
        "log": {"properties": {"record_tokens": {"enum": [False]}}, "required": ["record_tokens"]},
    },
    "required": ["block_hash", "log"],
}
"""Of a log without tokens and without names nothing could tell blocks apart."""


class LogConfig(_Settings, frozen=True):
    """How the event log is written."""

    record_tokens: bool = True
    """Whether token ids, which are the prompts, are written. Without them a log replays to the same fingerprint and
    can be continued, but `KVCacheManager.resume` refuses its state, and `kvcache match` needs the prompt's tokens and
    finds full blocks only, by their names. Sinks that do not say whether they need token ids get none either."""
    overflow: Literal["block", "drop"] = "drop"
    """When the disk is too slow: let the engine wait, or lose batches and record the loss. While it refuses to be
    written (it is full, or fails), both lose what the queue has no room for, and with `block` each flush raises."""
    segment_bytes: Annotated[
        int,
        Field(ge=4096, le=MAX_BYTES, json_schema_extra=or_size("MGT")),
        IN_BYTES,
        Accepts("bytes, from 4096 to 2**62, also as 64MiB"),
    ] = 64 * 1024 * 1024
    """A file is followed by the next one when it has grown to this size."""
    fsync: Literal["always", "group", "interval", "never"] = "group"
    """When batches are forced to the disk: at once, all waiting ones together, and each flush waits for it (`always`)
    or not (`group`); at most every `log.fsync_seconds` (`interval`); or when a file of the log ends (`never`)."""
    fsync_seconds: Seconds = 1.0
    """With `interval`, the longest time that a batch is written and not yet on the disk. It is less where the queue is
    half full."""
    retain_bytes: MaybeBytes = None
    """How much of a log is kept, snapshots included: older segments are removed, by a process of its own, whenever one
    has begun, and reading begins with a snapshot. Followers may hold as much again. While an engine writes, a segment
    and a snapshot may come on top; for that the log waits for the process where it must. None: all is kept."""
    retain_seconds: MaybeSeconds = None
    """The same by time: segments that ended so long before the newest one began are removed."""
    retain_segments: MaybeCount = None
    """The same by number, that which is being written included."""
    snapshots: bool = False
    """Whether snapshots are made though all is kept: replays begin there. They take no more room than the log."""
    compression: Literal["zstd", "none"] = "zstd"
    """Whether the log is compressed as it is written: to half of what chats take, and to a fourteenth of what agents
    take, who send all again each turn. It needs the extra `zstd`, as do those who read it; without that the log is
    written as with `none`."""
    window: Annotated[
        int,
        Field(ge=1024, le=MAX_BYTES, json_schema_extra=or_size("MGT")),
        IN_BYTES,
        Accepts("bytes, from 1024 to 2**62, also as 64MiB"),
    ] = 128 * 1024 * 1024
    """How far back compression looks for what comes again: memory that the writer takes, and each reader. More than
    128MiB counts as that."""
    max_queued_batches: Positive = 4096
    """Batches that may wait for the disk."""
    max_queued_bytes: Bytes = 32 * 1024 * 1024
    """Bytes that may wait for the disk."""


ANY_STOP = "*"
"""In `stop_retention`: each reason that has no rule of its own, and none."""


class StopRetention(_Settings, frozen=True):
    """How the blocks of a sequence are kept from its end on."""

    priority: Annotated[int, Field(ge=0, le=100), Accepts("a priority from 0 to 100")]
    """Blocks of a lower one go first; 35 is that of blocks of which nothing is said."""
    duration_ms: Annotated[
        int | None, Field(ge=1, le=MAX_BYTES // 10**6), Accepts("milliseconds, from 1 on, or none")
    ] = None
    """For how long they have it; none: for good."""


class KVCacheConfig(_Settings, frozen=True, json_schema_extra={"anyOf": _LIMITS, "not": _NAMELESS}):
    """The settings of a cache. One of `PRIMARY_LIMITS` must be given; where several are, the smallest wins."""

    max_sequence_length: Positive
    """Tokens of the longest sequence, prompt and output."""
    tokens_per_block: Annotated[int, Field(ge=1, le=2**30), Accepts("an integer from 1 to 2**30")] = 32
    """Tokens of a block, the unit of allocation and reuse."""
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS), Accepts(f"an integer from 1 to {MAX_LAYERS}")] = 2
    """Layers of the model that have a KV cache."""
    num_kv_heads: Annotated[
        OneUp | OfLayers,
        BeforeValidator(as_numbers),
        Accepts(f"an integer from 1 to {MAX_BLOCKS}, or one such integer per layer"),
    ] = 2
    """KV heads, of all layers or of each."""
    head_dim: Positive = 8
    """Elements of one head's K, or V, of one token."""
    kv_factor: Annotated[int, Field(ge=1, le=2), Accepts("2 or 1")] = 2
    """What layers keep of a token: K and V (2), or K only (1), as with MLA, whose latent vectors serve as both."""
    dtype: Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"] = "bfloat16"
    """Type of the elements."""
    kv_layout: Literal["NHD", "HND"] = "NHD"
    """Inside a block: tokens before heads (NHD), or heads before tokens (HND)."""
    max_attention_window: Annotated[
        OfLayers | None,
        BeforeValidator(one_or_more),
        Field(json_schema_extra=or_one_in_schema),
        Accepts(
            "windows in tokens, from 1 on (full: max_sequence_length or more), one per layer or fewer, or none"
        ),
    ] = None
    """Attention windows of the layers in tokens, repeated cyclically; any number from `max_sequence_length` on: the
    layer attends to everything; none: all layers do. Layers with the same window share blocks; a sequence lets go of
    those that its window has left behind."""
    primary_blocks: MaybeBlocks = None
    """Blocks on the device, for each group of layers with the same window, or one number per window, ascending."""
    max_tokens: MaybeTokens = None
    """Tokens that the blocks on the device hold, of all sequences, for each group of layers with the same window.
    How long one sequence may get is `max_sequence_length`."""
    primary_bytes: MaybeBytes = None
    """Memory on the device of all groups together, in bytes, divided by `window_shares`."""
    free_gpu_memory_fraction: MaybePart = None
    """Memory on the device as a fraction of what is free when `kvcache.pools.sized` measures it, divided likewise.
    That gives block counts, and only these are recorded."""
    secondary_blocks: MaybeNoBlocks = None
    """Blocks in host memory, for each group of layers with the same window, or one number per window, ascending."""
    host_cache_size: Annotated[
        int | None,
        Field(ge=0, le=MAX_BYTES, json_schema_extra=or_size()),
        IN_BYTES,
        Accepts("bytes, from 0 to 2**62, also as 64GiB, or none"),
    ] = None
    """Host memory of all groups together, in bytes, divided by `window_shares`. With `secondary_blocks`, the smaller
    wins; with neither, there is none."""
    secondary_path: Annotated[
        Annotated[str, Field(min_length=1), AfterValidator(storable)] | None,
        Accepts("the path of a file, or none"),
    ] = None
    """The file in which secondary lies, on a tmpfs or, without a GPU, on a disk, so that `KVCacheManager.open` finds
    its blocks again when the process has died; made if it is missing. Needs `model`, and the package xxhash."""
    verify_secondary: bool = False
    """Whether blocks are compared with their checksums before they are brought back from the file of `secondary_path`.
    One that has changed is a failed copy: everything cached is dropped. Costs as much as its checksum when a block was
    written."""
    copier: Literal["auto", "dma", "torch"] = "auto"
    """What moves blocks between a GPU and host memory: lists of copies for the GPU's copy engines, or torch's copies, a
    call for each stretch. auto: lists where the driver takes them, and inside the GPU a kernel where Triton is
    installed, as `kvcache doctor` says."""
    copy_pieces: Positive = 256
    """With lists, the copies of one call of the driver."""
    copy_bytes: Bytes = 64 * 1024 * 1024
    """With lists, the bytes of one call of the driver: what the model copies itself comes between two of these."""
    hugepages: Literal["system", "always", "never"] = "system"
    """Whether secondary lies on transparent huge pages, which page-locking and copying like, but which a system may
    have to make room for first: as the system does it, wherever it can, or never. Not in the file of
    `secondary_path`."""
    numa_node: Annotated[int | None, Field(ge=0, le=1023), Accepts("an integer from 0 to 1023, or none")] = (
        None
    )
    """The NUMA node on whose memory secondary lies: best that of the GPU. none: the system chooses."""
    window_shares: Annotated[
        Literal["equal", "window"] | Annotated[tuple[Weight, ...], OfWindows],
        BeforeValidator(rule_or_numbers),
        Accepts("equal, window, or one number above 0 per window"),
    ] = "equal"
    """How windows divide what is given in bytes: equally; in proportion to the window and its bytes per token, so that
    each holds tokens in proportion to its window; or in the proportion of these numbers, ascending windows."""
    cross_kv_cache_fraction: MaybePart = None
    """For encoder-decoder models, of which each layer has K/V of the encoder's tokens, too: a group of blocks for these
    gets this part of what is given in bytes, and the windows the rest. Lists of block counts have a number more for it,
    the last one. none: the model has no encoder."""
    enable_block_reuse: bool = True
    """Whether computed blocks are kept and found again by later prompts."""
    enable_partial_reuse: bool = True
    """Whether the matching start of a block is copied when the rest of the block differs."""
    append_only_tables: bool = False
    """For engines with workers that only append to their block tables, as vLLM's. When a sequence has computed blocks
    that another one stored first, its own slots of these stay its own until it ends, instead of becoming blank at once:
    a worker may read and write them as before, and the engine may ignore `StoreResult.replaced`. Until then such blocks
    take two slots."""
    secondary_offload_min_priority: Annotated[
        int, Field(ge=0, le=100), Accepts("a priority from 0 to 100")
    ] = 30
    """Evicted blocks of a lower priority are dropped instead of being kept in host memory."""
    eviction_policy: Literal["lru", "levels"] = "lru"
    """Which blocks of one priority go first. lru: those that were released longest ago. levels: the same, but each use
    after the first counts as if released later, by half the time for which blocks live, three at most; blocks that
    were evicted are remembered by name. Sliding windows keep to lru."""
    stop_retention: Annotated[
        dict[
            Annotated[str, Field(max_length=64), AfterValidator(storable)],
            Annotated[StopRetention, BeforeValidator(rule_in)],
        ],
        BeforeValidator(rules_in),
        Field(json_schema_extra=or_rule_as_text),
        Accepts("a mapping of stop reasons to a priority, PRIORITY:DURATION as in 60:300s, or both by name"),
    ] = {}
    """How blocks are kept by why the output of their sequence ended (`remove_sequence(stop=)`; `*`: any other reason,
    or none): their priority, and for how long they have it; then it is 35."""
    evict_ahead: Natural = 64
    """Slots that decoding makes blank when it has to evict, at most a sixteenth of primary, so that the next steps find
    one each. 0: each step evicts what it needs, which keeps blocks longest. With 32 sequences in a full cache a step
    takes 84 µs with 0, 68 with 8, 64 with 32, 59 with 64 and 57 with 256 (with secondary 130, 86, 80, 60 and 59)."""
    block_hash: Literal["auto", "v2_sha256_64", "v1_block_key", "xxh3_64", "none"] = "auto"
    """How blocks are named for the outside; reuse never depends on it."""
    model: Annotated[str, AfterValidator(storable), Accepts("text")] = ""
    """What computed the K and V. Caches of different models never exchange bytes."""
    model_variant: Annotated[str, AfterValidator(storable), Accepts("text")] = ""
    """What else K and V depend on: revision and quantization of the weights, adapters merged into them, rope scaling,
    the rank of tensor or pipeline parallelism. As `model`, but told to nobody outside the log."""
    checkpoint_spacing: Positive = 50
    """A log gets a fingerprint whenever this many times as many blocks have changed as the cache has slots, and at
    the end. One takes 0.1 µs per slot where prompts are long, and 0.4 to 0.6 µs where each has a few blocks of its
    own; a changed block takes 0.4 µs and more, so that with 50 it is half a percent to 3 % of the manager's time. It
    comes in one piece: 0.1 to 0.6 s at a million slots. Where no log is kept there is none but at the end."""
    event_buffer_max_size: Natural = 0
    """Events kept for polling consumers; 0: none."""
    attention_dp_rank: Annotated[
        int | None, Field(ge=0, le=2**31 - 1), Accepts("an integer from 0 to 2147483647")
    ] = None
    """The engine's rank where its attention is data-parallel: TensorRT-LLM's dicts tell it."""
    max_pinned_share: Annotated[float, Field(ge=0, le=1), Accepts("a number from 0 to 1")] = 0.5
    """How much of each window's primary blocks may be pinned: what is pinned is not evicted, whatever needs room."""
    debug_fill_blank: bool = False
    """For debugging, with pools: blocks are overwritten with NaN (int8: 127) when a sequence gets them, so that
    reading K/V that was never written shows. Costs a write of each new block; copies are then started in more
    batches, and `start_transfers` is needed after each call that allocates."""
    debug_check_tables: bool = False
    """For debugging: `tables.check` finds tables that are older than what changed them, and copies that nothing waits
    for. Costs a copy of each table that is asked for."""
    log: LogConfig = LogConfig()
    """How the event log is written."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Check what no field can say alone."""
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
        """Fill the settings from a file, then the environment, then `overrides`; later ones win.

        `path` ends in .toml, .yaml or .yml (YAML needs the extra ``kvcache[cli]``). Each variable
        ``KVCACHE_<FIELD>`` sets a field, ``KVCACHE_LOG__<FIELD>`` one of `log`; ``none`` stands for no value,
        and an empty variable for an unset one. `env` defaults to the process's environment. Another variable that
        begins with ``KVCACHE_`` sets nothing: there is a UserWarning, unless it has one of the forms that Kubernetes
        gives to a Service's variables. Raises ConfigError.
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
    """The attention windows of all layers, ascending, each once, in tokens; none exceeds `max_sequence_length`."""
    given = config.max_attention_window or (config.max_sequence_length,)
    return sorted({min(window, config.max_sequence_length) for window in given})


def _problems_between(config: KVCacheConfig) -> Iterator[str]:
    if all(getattr(config, name) is None for name in PRIMARY_LIMITS):
        yield f"{', '.join(PRIMARY_LIMITS)}: missing; accepted: one of them, or more"
    if config.max_tokens is not None and config.max_tokens < config.tokens_per_block:
        least = f"at least one block of {config.tokens_per_block} tokens"
        yield f"max_tokens: given {config.max_tokens}; accepted: {least}"
    yield from _problems_of_lists(config)
    if config.secondary_path is None and config.verify_secondary:
        yield "verify_secondary: given; accepted: with secondary_path, whose blocks have checksums"
    if config.secondary_path is not None and not config.model:
        why = "whose blocks are never served to another model"
        yield f"model: given ''; accepted: a name with secondary_path, {why}"
    if config.secondary_path is not None and not (config.secondary_blocks or config.host_cache_size):
        yield "secondary_path: given; accepted: with secondary_blocks or host_cache_size"
    if config.block_hash == "none" and config.eviction_policy == "levels":
        why = "eviction_policy=levels, which counts uses by name"
        yield f"block_hash: given 'none'; accepted: another one with {why}"
    if config.block_hash == "none" and not config.log.record_tokens:
        why = "log.record_tokens=false, since a log without tokens tells blocks apart by their names"
        yield f"block_hash: given 'none'; accepted: another one with {why}"


def _problems_of_lists(config: KVCacheConfig) -> Iterator[str]:
    """What has another number of entries than there are layers or windows."""
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
