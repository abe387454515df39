"""``kvcache config``: the settings that an engine would get here (`KVCacheConfig.load`), and where each comes from.

Where nothing is given, `kvcache run` has some defaults of its own, and takes some settings from its requests. That is
told beside what an engine gets, and a file that `run` accepts is accepted here, too.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvcache.cli import settings
from kvcache.cli.messages import printable
from kvcache.cli.output import Output
from kvcache.config import KVCacheConfig
from kvcache.layout import Layout
from kvcache.settings.environment import fields_of, variable_of
from kvcache.settings.sources import Sources, look_up

_PLACEHOLDERS = {"max_sequence_length": 1, "primary_blocks": 1}
"""What no cache can be without, to check all the rest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Show the settings from the file, the environment (KVCACHE_*) and --set, over the defaults."
    )
    parser.epilog = (
        "Shown is what KVCacheConfig.load gives an engine; what `kvcache run` has instead stands in brackets.\n"
        "If nothing is missing, the windows and blocks that follow are shown, too.\n"
        "Settings that cannot be used exit with 2 and say why, so this checks a file, too. The JSON leaves out what\n"
        "`kvcache run` takes from its requests: an engine gives max_sequence_length, and primary_blocks or the like."
    )
    settings.add_options(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--schema", action="store_true", help="the JSON schema of the settings")
    form.add_argument("--json", action="store_true", help="the settings as JSON")


def run(args: argparse.Namespace, out: Output) -> int:
    """Show settings or schema."""
    if args.schema:
        out.json(KVCacheConfig.model_json_schema())
        return 0
    sets = settings.parse_sets(args.sets)
    settings.warn_of_unknown(out)
    sources = settings.read(args.config, sets)
    derived = settings.derived(sources.values)
    missing = {name: value for name, value in _PLACEHOLDERS.items() if name in derived}
    config = settings.load(args.config, sets, missing)
    if args.json:
        out.json(config.model_dump(mode="json", exclude=set(derived)))
        return 0
    values = config.model_dump()
    rows = [
        (
            name,
            "(missing)" if name in missing else _spelled(look_up(values, name)),
            _origin(name, sources) or _default(name, derived.get(name)),
        )
        for name in fields_of(KVCacheConfig)
    ]
    out.table(("setting", "value", "from"), rows)
    if not missing and config.free_gpu_memory_fraction is None:
        _show_windows(Layout.of(config), out)
    return 0


def _show_windows(layout: Layout, out: Output) -> None:
    """What the settings come to."""
    out.line()
    rows = [
        (
            f"{group.window:,}",
            group.kind,
            f"{len(group.layers):,}",
            *(f"{each:,}" for each in group.num_blocks),
        )
        for group in layout.groups
    ]
    header = ("window", "attention", "layers", "primary blocks", "secondary blocks")
    out.table(header, rows, right=("window", "layers", "primary blocks", "secondary blocks"))


def _origin(name: str, sources: Sources) -> str | None:
    """Where a setting was given."""
    origin = sources.origin(name)
    return {"by name": "--set", "environment": variable_of(name)}.get(origin, origin) if origin else None


def _default(name: str, derived: str | None) -> str:
    """Say that it is the default, or that there is none, and what `kvcache run` has instead."""
    own = look_up(settings.RUN_DEFAULTS, name)
    in_run = derived if derived is not None else None if own is ... else _spelled(own)
    default = "an engine has to give it" if name in _PLACEHOLDERS and derived is not None else "default"
    return default if in_run is None else f"{default} ({in_run} in run)"


def _spelled(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return printable(str(value)) or '""'
