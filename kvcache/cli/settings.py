"""Settings on the command line: ``--config FILE`` and ``--set FIELD=VALUE``, and where a wrong value came from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kvcache.cli.output import Output
from kvcache.config import PRIMARY_LIMITS, KVCacheConfig
from kvcache.errors import ConfigError, UsageError
from kvcache.settings.environment import fields_of, read_environment, value_in, variable_of
from kvcache.settings.sources import Sources, Values, look_up, merged, nested

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
    fields = fields_of(KVCacheConfig)
    values: Values = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text}: write FIELD=VALUE, as in --set head_dim=128")
        outer = name.rpartition(".")[0]
        if outer and not isinstance(look_up(values, outer), dict | type(...)):
            raise UsageError(f"--set {text}: {outer} has no settings inside")
        values = merged(values, nested(name, value_in(value, fields.get(name))))
    return values


def read(path: Path | None, sets: Values) -> Sources:
    """What is given; raises ConfigError."""
    return Sources(KVCacheConfig, path, os.environ, sets)


def warn_of_unknown(out: Output) -> None:
    """Tell of variables that may have been meant as settings and are none."""
    warning = read_environment(KVCacheConfig, os.environ).warning(KVCacheConfig)
    if warning is not None:
        out.warning(warning)


def given(path: Path | None, sets: Values) -> Values:
    """Everything that is given anywhere."""
    return read(path, sets).values


def derived(known: Values) -> dict[str, str]:
    """The settings that `kvcache run` takes from its requests if these are given, and how."""
    found = {"max_sequence_length": "from the requests"}
    if not any(name in known for name in PRIMARY_LIMITS):
        found["primary_blocks"] = "from the requests"
    if "host_cache_size" not in known:
        found["secondary_blocks"] = "as many as primary" if "primary_blocks" in known else "from the requests"
    return {name: how for name, how in found.items() if name not in known}


def load(path: Path | None, sets: Values, defaults: Values) -> KVCacheConfig:
    """The settings, with `defaults` for what is given nowhere. Raises ConfigError, which says where a wrong one is."""
    sources = read(path, sets)
    try:
        return KVCacheConfig(**merged(defaults, sources.values))
    except ConfigError as error:
        raise ConfigError([_place(problem, sources, path) + problem for problem in error.problems]) from None


def _place(problem: str, sources: Sources, path: Path | None) -> str:
    """Where the setting that a problem begins with was given, but for the command line itself."""
    name = problem.partition(":")[0]
    return {"file": f"{path}: ", "environment": f"{variable_of(name)}: "}.get(sources.origin(name) or "", "")
