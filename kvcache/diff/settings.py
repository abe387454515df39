"""What two caches are made of: settings that differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from events.types import CacheCreated

_NOTHING = "(none)"
"""Of a setting that only one of the two has, as with logs of two versions."""


@dataclass(frozen=True)
class ChangedSetting:
    """A setting, and what it is in each log, as JSON has it."""

    name: str
    a: Any
    b: Any


def changed_settings(a: CacheCreated, b: CacheCreated) -> list[ChangedSetting]:
    """The settings in which two caches differ, and what followed from them: the blocks of each window and level."""
    one, other = dict(settings_of(a)), dict(settings_of(b))
    names = [*one, *(name for name in other if name not in one)]
    pairs = ((name, one.get(name, _NOTHING), other.get(name, _NOTHING)) for name in names)
    return [ChangedSetting(*pair) for pair in pairs if pair[1] != pair[2]]


def settings_of(created: CacheCreated) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, JSON value) of each setting a cache was created with, and of what followed from them."""
    try:
        config = json.loads(created.config)
    except (ValueError, RecursionError):
        config = created.config
    yield from _flat("", config)
    yield "windows", [[group.window, *group.num_blocks] for group in created.groups]
    yield "key_bytes", created.key_bytes
    yield "hash_algorithm", created.hash_algorithm
    if created.engine:
        yield "engine", created.engine


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Settings by the names that settings have, as in ``log.fsync``."""
    if not isinstance(value, dict):
        yield name or "config", value
        return
    for key, inner in value.items():
        yield from _flat(f"{name}.{key}" if name else key, inner)
