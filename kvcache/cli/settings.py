"""Settings from the command line: ``--config FILE`` and ``--set FIELD=VALUE``, and what was given where.

The commands load settings here rather than by `KVCacheConfig.load`, which cannot say which of its sources a wrong
value came from.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kvcache.cli.output import Output
from kvcache.config import KVCacheConfig, merged, read_file
from kvcache.errors import ConfigError, UsageError
from kvcache.settings.environment import ENV_NESTING, ENV_PREFIX, may_be_none, read_environment, variables_of

Values = dict[str, Any]

RUN_DEFAULTS: Values = {"tokens_per_block": 64, "log": {"overflow": "block"}}
"""Where `kvcache run` has defaults of its own."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that name settings."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings: a .toml, .yaml or .yml file")
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        dest="sets",
        help="one setting, as in head_dim=128 or log.fsync=never; wins over the file and KVCACHE_* variables",
    )


def parse_sets(sets: list[str]) -> Values:
    """The settings of all ``--set``; raises UsageError. What they accept is checked with all others later."""
    values: Values = {}
    known = variables_of(KVCacheConfig)
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text}: write FIELD=VALUE, as in --set head_dim=128")
        *outer, field = name.split(".")
        target = values
        for step in outer:
            target = target.setdefault(step, {})
            if not isinstance(target, dict):
                raise UsageError(f"--set {text}: {step} has no settings inside")
        setting = known.get(_variable(name))
        unset = value.lower() == "none" and setting is not None and may_be_none(setting)
        target[field] = None if unset else value
    return values


def _variable(name: str) -> str:
    """The variable of the environment that sets a setting."""
    return ENV_PREFIX + name.upper().replace(".", ENV_NESTING)


def by_source(path: Path | None, sets: Values) -> dict[str, Values]:
    """What is given, by where; later ones win. Raises ConfigError."""
    return {
        "file": {} if path is None else _from_file(path),
        "environment": read_environment(KVCacheConfig, os.environ).values,
        "--set": sets,
    }


def warn_of_unknown(out: Output) -> None:
    """Tell of variables that may have been meant as settings and are none."""
    warning = read_environment(KVCacheConfig, os.environ).warning(KVCacheConfig)
    if warning is not None:
        out.warning(warning)


def _from_file(path: Path) -> Values:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], str(path)) from error
    return read_file(path)


def given(path: Path | None, sets: Values) -> Values:
    """Everything that is given anywhere."""
    values: Values = {}
    for each in by_source(path, sets).values():
        values = merged(values, each)
    return values


def derived(known: Values) -> dict[str, str]:
    """The settings that `kvcache run` takes from its requests if these are given, and how."""
    found = {"max_sequence_length": "from the requests"}
    if "max_tokens" not in known:
        found["primary_blocks"] = "from the requests"
    if "host_cache_size" not in known:
        found["secondary_blocks"] = "as many as primary" if "primary_blocks" in known else "from the requests"
    return {name: how for name, how in found.items() if name not in known}


def load(path: Path | None, sets: Values, defaults: Values) -> KVCacheConfig:
    """The settings, with `defaults` for what is given nowhere. Raises ConfigError."""
    values = given(path, sets)
    try:
        return KVCacheConfig(**merged(defaults, values))
    except ConfigError as error:
        sources = by_source(path, sets)
        raise ConfigError([_located(problem, sources, path) for problem in error.problems]) from None


def inside(values: Any, name: str) -> Any:
    """The value of a setting by its full name; ... if it is not there."""
    for step in name.split("."):
        values = values.get(step, ...) if isinstance(values, dict) else ...
    return values


def origin(name: str, sources: dict[str, Values]) -> str | None:
    """Where a setting was given last, the environment by the variable's name; None: nowhere."""
    found = None
    for source, values in sources.items():
        if inside(values, name) is not ...:
            found = _variable(name) if source == "environment" else source
    return found


def _located(problem: str, sources: dict[str, Values], path: Path | None) -> str:
    """The problem behind the place where the setting that it begins with was given."""
    place = origin(problem.partition(":")[0], sources)
    if place is None or place == "--set":
        return problem
    return f"{path if place == 'file' else place}: {problem}"
