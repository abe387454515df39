"""Where settings are given: in a file, in variables, and by whoever asks for them. Later ones win.

The library (`KVCacheConfig.load`) and the command line read them here. What they accept is checked together, by the
model.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from kvcache.errors import ConfigError
from kvcache.settings.environment import read_environment
from kvcache.settings.problems import quoted

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
