"""The settings of a cache: one frozen model, and the ways to fill it.

A configuration comes from code, or from a YAML or TOML file, the environment and code together
(`KVCacheConfig.load`). All of them end in the same validation, which raises one `ConfigError` with a line per
problem: the field, what was given and what is accepted. Unknown fields are refused, since a mistyped setting
that is silently ignored costs more than an error at the start; an unknown variable of the environment, which may be
another program's, is told by a warning.

What each field accepts is said beside its type, for people (`Accepts`) and for pydantic (`Field`); what it means, below
it. The JSON schema (`KVCacheConfig.model_json_schema`) says both.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvcache.errors import ConfigError
from kvcache.settings.byte_sizes import or_size
from kvcache.settings.fields import (
    IN_BYTES,
    MAX_BLOCKS,
    MAX_BYTES,
    MAX_LAYERS,
    Bytes,
    Flag,
    MaybeBlocks,
    MaybeBytes,
    MaybeCount,
    MaybeNoBlocks,
    MaybePart,
    MaybeSeconds,
    MaybeTokens,
    Natural,
    OfLayers,
    OfWindows,
    OneUp,
    Positive,
    Seconds,
    Weight,
    as_numbers,
    one_or_more,
    or_one_in_schema,
    rule_or_numbers,
    storable,
)
from kvcache.settings.problems import Accepts, problems_of
from kvcache.settings.sources import Sources

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


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
        from kvcache.settings.schema import describe

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

    record_tokens: Flag = True
    """Whether token ids, which are the prompts, are written. Without them a log replays to the same fingerprint and
    can be continued, but `KVCacheManager.resume` refuses its state, and `kvcache match` needs the prompt's tokens and
    finds full blocks only, by their names. Sinks that do not say whether they need token ids get none either."""
    overflow: Annotated[Literal["block", "drop"], Accepts("block or drop")] = "drop"
    """When the disk is too slow: let the engine wait, or lose batches and record the loss. While it refuses to be
    written (it is full, or fails), both lose what the queue has no room for, and with `block` each flush raises."""
    segment_bytes: Annotated[
        int,
        Field(ge=4096, le=MAX_BYTES, json_schema_extra=or_size("MGT")),
        IN_BYTES,
        Accepts("bytes, from 4096 to 2**62, also as 64MiB"),
    ] = 64 * 1024 * 1024
    """A file is followed by the next one when it has grown to this size."""
    fsync: Annotated[
        Literal["always", "group", "interval", "never"], Accepts("always, group, interval or never")
    ] = "group"
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
    snapshots: Flag = False
    """Whether snapshots are made though all is kept: replays begin there. They take no more room than the log."""
    compression: Annotated[Literal["zstd", "none"], Accepts("zstd or none")] = "zstd"
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


class KVCacheConfig(_Settings, frozen=True, json_schema_extra={"anyOf": _LIMITS, "not": _NAMELESS}):
    """The settings of a cache. One of `PRIMARY_LIMITS` must be given; where several are, the smallest wins."""

    max_sequence_length: Positive
    """Tokens of the longest sequence, prompt and output."""
    tokens_per_block: Annotated[
        int,
        Field(ge=1, le=2**30),
        Accepts("an integer from 1 to 2**30"),
    ] = 32
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
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"],
        Accepts("float16, bfloat16, float32, float8_e4m3fn or int8"),
    ] = "bfloat16"
    """Type of the elements."""
    kv_layout: Annotated[Literal["NHD", "HND"], Accepts("NHD or HND")] = "NHD"
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
    verify_secondary: Flag = False
    """Whether blocks are compared with their checksums before they are brought back from the file of `secondary_path`.
    One that has changed is a failed copy: everything cached is dropped. Costs as much as its checksum when a block was
    written."""
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
    enable_block_reuse: Flag = True
    """Whether computed blocks are kept and found again by later prompts."""
    enable_partial_reuse: Flag = True
    """Whether the matching start of a block is copied when the rest of the block differs."""
    secondary_offload_min_priority: Annotated[
        int, Field(ge=0, le=100), Accepts("a priority from 0 to 100")
    ] = 30
    """Evicted blocks of a lower priority are dropped instead of being kept in host memory."""
    eviction_policy: Annotated[Literal["lru", "levels"], Accepts("lru or levels")] = "lru"
    """Which blocks of one priority go first. lru: those that were released longest ago. levels: the same, but each use
    after the first counts as if released later, by half the time for which blocks live, three at most; blocks that
    were evicted are remembered by name. Sliding windows keep to lru."""
    block_hash: Annotated[
        Literal["auto", "v2_sha256_64", "v1_block_key", "xxh3_64", "none"],
        Accepts("auto, v2_sha256_64, v1_block_key, xxh3_64 or none"),
    ] = "auto"
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
    debug_fill_blank: Flag = False
    """For debugging, with pools: blocks are overwritten with NaN (int8: 127) when a sequence gets them, so that
    reading K/V that was never written shows. Costs a write of each new block; copies are then started in more
    batches, and `start_transfers` is needed after each call that allocates."""
    debug_check_tables: Flag = False
    """For debugging: `check_tables` finds tables that are older than what changed them, and copies that nothing waits
    for. Costs a copy of each table that is asked for."""
    log: LogConfig = LogConfig()
    """How the event log is written."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Check what no field can say alone."""
        problems = _problems_between(self)
        if problems:
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


def _problems_between(config: KVCacheConfig) -> list[str]:
    problems = []
    if all(getattr(config, name) is None for name in PRIMARY_LIMITS):
        problems.append(f"{', '.join(PRIMARY_LIMITS)}: missing; accepted: one of them, or more")
    if config.max_tokens is not None and config.max_tokens < config.tokens_per_block:
        problems.append(
            f"max_tokens: given {config.max_tokens}; accepted: at least one block of {config.tokens_per_block} tokens"
        )
    problems += _problems_of_lists(config)
    if config.secondary_path is not None:
        problems += _problems_of_file(config)
    elif config.verify_secondary:
        problems.append("verify_secondary: given; accepted: with secondary_path, whose blocks have checksums")
    if config.block_hash == "none" and config.eviction_policy == "levels":
        problems.append(
            "block_hash: given 'none'; accepted: another one with eviction_policy=levels, which counts uses by name"
        )
    if config.block_hash == "none" and not config.log.record_tokens:
        problems.append(
            "block_hash: given 'none'; accepted: another one with log.record_tokens=false, since a log without "
            "tokens tells blocks apart by their names"
        )
    return problems


def _problems_of_file(config: KVCacheConfig) -> list[str]:
    """What a cache lacks whose secondary level is to outlive it."""
    problems = []
    if not config.model:
        problems.append(
            "model: given ''; accepted: a name with secondary_path, whose blocks are never served to another model"
        )
    if not (config.secondary_blocks or config.host_cache_size):
        problems.append("secondary_path: given; accepted: with secondary_blocks or host_cache_size")
    return problems


def _problems_of_lists(config: KVCacheConfig) -> list[str]:
    """What has another number of entries than there are layers or windows."""
    problems = []
    heads, windows = config.num_kv_heads, config.max_attention_window
    if isinstance(heads, tuple) and len(heads) != config.num_layers:
        problems.append(
            f"num_kv_heads: given {len(heads)} numbers; accepted: one, or {config.num_layers} (num_layers)"
        )
    if windows is not None and len(windows) > config.num_layers:
        problems.append(
            f"max_attention_window: given {len(windows)} windows; accepted: at most {config.num_layers} (num_layers)"
        )
    for name in ("primary_blocks", "secondary_blocks", "window_shares"):
        given, count = getattr(config, name), len(windows_of(config))
        alike = len(set(windows or ())) > count
        why = ", those of at least max_sequence_length being one" if alike else ""
        if name != "window_shares" and config.cross_kv_cache_fraction is not None:
            count, why = count + 1, f"{why}, and one for cross attention"
        if isinstance(given, tuple) and len(given) != count:
            problems.append(f"{name}: given {len(given)} numbers; accepted: {count} (one per window{why})")
    return problems
