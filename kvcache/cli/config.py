"""``kvcache config``: the settings that would hold here, and where each comes from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from kvcache.cli import settings
from kvcache.cli.output import Output, printable
from kvcache.config import KVCacheConfig


def add_parser(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "config",
        parents=parents,
        help="the effective settings, or their schema",
        description="Show the settings from the file, the environment (KVCACHE_*) and --set, over the defaults.",
        epilog="Settings that cannot be used exit with 2 and say why, so this checks a file, too.",
    )
    parser.set_defaults(run=run)
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
    config = settings.load(args.config, sets, {})
    if args.json:
        out.json(config.model_dump(mode="json"))
        return 0
    sources = settings.by_source(args.config, sets)
    rows = [(name, _spelled(value), _origin(name, sources)) for name, value in _leaves(config)]
    out.table(("setting", "value", "from"), rows)
    return 0


def _leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All settings by their full name."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _origin(name: str, sources: dict[str, settings.Values]) -> str:
    found = "default"
    for source, values in sources.items():
        inner: Any = values
        for step in name.split("."):
            inner = inner.get(step, ...) if isinstance(inner, dict) else ...
        if inner is not ...:
            found = f"KVCACHE_{name.upper().replace('.', '__')}" if source == "environment" else source
    return found


def _spelled(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return printable(str(value)) or '""'
