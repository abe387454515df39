"""Settings of an engine's recording: from the environment, and from vLLM's `--additional-config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.config import KVCacheConfig
from kvcache.errors import ConfigError

_KEYS = ("log", "sinks", "settings")
_SETTINGS = ("log", "model", "model_variant", "checkpoint_spacing")
"""Settings that are not decided by the engine."""


@dataclass(frozen=True)
class RecorderSettings:
    """Requested recording."""

    log: Path | None
    sinks: tuple[str, ...]
    settings: Mapping[str, Any]
    """Settings as in a file."""

    def config(self, **decided: Any) -> KVCacheConfig:
        """Combine the settings with those that the engine has decided. Raises ConfigError."""
        # Other settings in the environment are for caches other than the engine's.
        env = {name: value for name, value in os.environ.items() if name.startswith("KVCACHE_LOG__")}
        return KVCacheConfig.load(env=env, **{**self.settings, **decided})


def recorder_settings(given: object, directory: str | None, rank: int | None) -> RecorderSettings:
    """Read the settings under "kvcache", and in the variable. Raises ConfigError.

    `rank`: of a data-parallel engine, each of which has a directory of its own.
    """
    settings = {} if given is None or given is True else given
    if not isinstance(settings, Mapping):
        raise ConfigError(['"kvcache" must be an object, or false'], "--additional-config")
    problems = [
        f"{key!r} is no setting; there are {', '.join(_KEYS)}" for key in settings if key not in _KEYS
    ]
    log, sinks, further = (
        settings.get("log", directory),
        settings.get("sinks", ()),
        settings.get("settings", {}),
    )
    sinks = (sinks,) if isinstance(sinks, str) else sinks
    if log is not None and (not isinstance(log, str) or not log):
        problems.append('"log" must be a directory')
    if not isinstance(sinks, list | tuple) or not all(isinstance(sink, str) for sink in sinks):
        problems.append('"sinks" must be a list of URLs')
    if not isinstance(further, Mapping):
        problems.append('"settings" must be an object, as {"log": {"retain_bytes": "20GB"}}')
    else:
        problems += [f"vLLM decides {key!r}" for key in further if key not in _SETTINGS]
    if not problems and log is None and not sinks:
        problems.append('"log" or "sinks" is needed')
    if problems:
        raise ConfigError(problems, "--additional-config")
    path = None if log is None else Path(log).expanduser()
    if path is not None and rank is not None:
        path /= f"rank{rank}"
    return RecorderSettings(path, tuple(sinks), dict(further))
