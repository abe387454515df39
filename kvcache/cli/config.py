"""``kvcache config``: the settings that an engine would get here (`KVCacheConfig.load`), and the source of each.

For settings that are not given, `kvcache run` has some defaults of its own, and derives some from its requests. These
are shown next to an engine's settings, and a file that `run` accepts is also accepted here.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from events.structs import LEVEL_NAMES
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Output
from kvcache.config import (
    PRIMARY_LIMITS,
    KVCacheConfig,
    Sources,
    Values,
    fields_of,
    look_up,
    merged,
    nested,
    read_environment,
    value_in,
    variable_of,
)
from kvcache.errors import ConfigError, UsageError
from kvcache.layout import Layout
from kvcache.phrases import printable

RUN_DEFAULTS: Values = {"tokens_per_block": 64, "log": {"overflow": "block"}}
"""Defaults of `kvcache run` that differ."""

_PLACEHOLDERS = {"max_sequence_length": 1, "primary_blocks": 1}
"""Values for required settings, so that all others can be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show the effective settings, from defaults, the file, the environment (KVCACHE_*) and --set."
    )
    parser.epilog = (
        "These are the settings that KVCacheConfig.load gives an engine; where `kvcache run` has another default, it "
        "is\nshown in brackets. If no setting is missing, the resulting windows and block counts are shown as well.\n"
        "Exits with 2 and the reason if a setting is invalid, so this also checks a file. The JSON omits settings "
        "that\n`kvcache run` derives from its requests: an engine sets max_sequence_length, and primary_blocks or the "
        "like."
    )
    add_settings(parser)
    form = parser.add_mutually_exclusive_group()
    option(form, "--schema", "print the JSON schema of the settings")
    add_shared(form, json="print the settings as JSON")


def run(args: argparse.Namespace, out: Output) -> int:
    """Print settings or schema."""
    if args.schema:
        out.json(KVCacheConfig.model_json_schema())
        return 0
    sets = parse_sets(args.sets)
    warn_of_unknown(out)
    sources = read_settings(args.config, sets)
    derived = derived_settings(sources.values)
    missing = {name: value for name, value in _PLACEHOLDERS.items() if name in derived}
    config = load_settings(args.config, sets, missing)
    if args.json:
        out.json(config.model_dump(mode="json", exclude=set(derived)))
        return 0
    values = config.model_dump()
    rows = [
        {"setting": name, "value": "(missing)" if name in missing else spelled(look_up(values, name))}
        | {"from": _origin(name, sources) or _default(name, derived.get(name))}
        for name in fields_of(KVCacheConfig)
    ]
    out.table(rows)
    if not missing and config.free_gpu_memory_fraction is None:
        windows = [
            {"window": group.window, "attention": group.kind, "layers": len(group.layers)}
            | {f"{level} blocks": blocks for level, blocks in zip(LEVEL_NAMES, group.num_blocks, strict=True)}
            for group in Layout.of(config).groups
        ]
        out.table(windows, gap=True)
    return 0


def _origin(name: str, sources: Sources) -> str | None:
    """Return the source of a setting."""
    origin = sources.origin(name)
    return {"by name": "--set", "environment": variable_of(name)}.get(origin, origin) if origin else None


def _default(name: str, derived: str | None) -> str:
    """Return the default, or that there is none, and that of `kvcache run` if it differs."""
    own = look_up(RUN_DEFAULTS, name)
    in_run = derived if derived is not None else None if own is ... else spelled(own)
    default = "required for an engine" if name in _PLACEHOLDERS and derived is not None else "default"
    return default if in_run is None else f"{default} ({in_run} in run)"


def spelled(value: Any) -> str:
    """Format a setting for tables, in a form that can be given."""
    if value is None:
        return "none"
    if isinstance(value, dict) and "priority" in value:
        lasts = value["duration_ms"]
        return f"{value['priority']}" + (f":{lasts / 1000:.10g}s" if lasts else "")
    if isinstance(value, dict):
        return json.dumps({stop: spelled(rule) for stop, rule in value.items()})
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return printable(str(value)) or '""'


# -- settings on the command line, of this and other commands


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare the options for settings."""
    option(parser, "--config FILE", "file of settings (.toml, .yaml or .yml)")
    option(
        parser,
        "--set FIELD=VALUE",
        "a setting, as in head_dim=128 or log.fsync=never; overrides the file and KVCACHE_* variables; repeatable",
        action="append",
        default=[],
        dest="sets",
    )


def parse_sets(sets: list[str]) -> Values:
    """Parse all ``--set``; raises UsageError. Values are checked later, with all others."""
    fields = fields_of(KVCacheConfig)
    values: Values = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text}: write FIELD=VALUE, as in --set head_dim=128")
        outer = name.rpartition(".")[0]
        if outer and not isinstance(look_up(values, outer), dict | type(...)):
            raise UsageError(f"--set {text}: {outer} has no nested settings")
        values = merged(values, nested(name, value_in(value, fields.get(name))))
    return values


def read_settings(path: Path | None, sets: Values) -> Sources:
    """Read the given settings; raises ConfigError."""
    return Sources(KVCacheConfig, path, os.environ, sets)


def warn_of_unknown(out: Output) -> None:
    """Warn about environment variables that look like settings but are not."""
    warning = read_environment(KVCacheConfig, os.environ).warning(KVCacheConfig)
    if warning is not None:
        out.warning(warning)


def derived_settings(known: Values) -> dict[str, str]:
    """Return the settings that `kvcache run` derives from its requests, among those given, and how."""
    found = {"max_sequence_length": "from the requests"}
    if not any(name in known for name in PRIMARY_LIMITS):
        found["primary_blocks"] = "from the requests"
    if "host_cache_size" not in known:
        found["secondary_blocks"] = "as many as primary" if "primary_blocks" in known else "from the requests"
    return {name: how for name, how in found.items() if name not in known}


def load_settings(path: Path | None, sets: Values, defaults: Values) -> KVCacheConfig:
    """Return the settings, with `defaults` for those not given. Raises ConfigError with the source of a wrong one."""
    sources = read_settings(path, sets)
    try:
        return KVCacheConfig(**merged(defaults, sources.values))
    except ConfigError as error:
        raise ConfigError([_place(problem, sources, path) + problem for problem in error.problems]) from None


def _place(problem: str, sources: Sources, path: Path | None) -> str:
    """Return the source of the setting that a problem is about, unless it is the command line."""
    name = problem.partition(":")[0]
    return {"file": f"{path}: ", "environment": f"{variable_of(name)}: "}.get(sources.origin(name) or "", "")
