"""Settings of an engine's recording: from the environment, and from vLLM's `--additional-config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from events.log import LogWriter
from kvcache.config import KVCacheConfig, quoted, variable_of
from kvcache.errors import ConfigError
from kvcache.record.outputs import open_log

MODE = "KVCACHE_MODE"
"""Variable: whether the engine's KV cache manager is recorded, or replaced."""
RECORD, MANAGER = "record", "manager"
_KEYS = ("log", "sinks", "settings", "mode")
_SETTINGS = ("log", "model", "model_variant", "checkpoint_spacing")
"""Settings that are not decided by the engine."""
_DECISIONS = ("enable_partial_reuse", "evict_ahead", "eviction_policy", "stop_retention", "block_hash")
"""Settings of a manager, where the engine has none of its own."""
_DEFAULTS = {"KVCACHE_EVICT_AHEAD": "1", "KVCACHE_ENABLE_PARTIAL_REUSE": "false"}
"""With these, the engine reuses what it does with its own manager."""


@dataclass(frozen=True)
class RecorderSettings:
    """Requested recording."""

    log: Path | None
    sinks: tuple[str, ...]
    settings: Mapping[str, Any]
    """Settings as in a file."""
    manages: bool = False
    """True for a manager, which has more settings than a recorder."""

    @property
    def outputs(self) -> str:
        """The log and the number of sinks, for messages."""
        return ", ".join([*([str(self.log)] if self.log is not None else []), f"{len(self.sinks)} sinks"])

    @contextmanager
    def opened_log(self, config: KVCacheConfig) -> Iterator[tuple[LogWriter | None, ExitStack]]:
        """Open the log, if any, for a body that attaches to an engine.

        If the body fails, the log is closed, after the callbacks that the body has added to the stack.
        """
        with ExitStack() as failed:
            log = None if self.log is None else open_log(self.log, config.log, resume=True)
            if log is not None:
                failed.callback(log.close)
            yield log, failed
            failed.pop_all()

    def config(self, **decided: Any) -> KVCacheConfig:
        """Combine the settings with those that the engine has decided. Raises ConfigError."""
        # Other settings in the environment are for caches other than the engine's.
        env = {name: value for name, value in os.environ.items() if name.startswith("KVCACHE_LOG__")}
        if self.manages:
            names = [variable_of(name) for name in (*_SETTINGS, *_DECISIONS)]
            env |= _DEFAULTS | {name: os.environ[name] for name in names if os.environ.get(name, "").strip()}
        return KVCacheConfig.load(env=env, **{**self.settings, **decided})


def mode_of(given: object) -> object:
    """Return the requested mode, `RECORD` or `MANAGER` if it is valid, from the settings under "kvcache" or the
    variable.
    """
    mode = given.get("mode") if isinstance(given, Mapping) else None
    return os.environ.get(MODE, "").strip() or RECORD if mode is None else mode


def recorder_settings(
    given: object, directory: str | None, rank: int | None, *, manages: bool = False
) -> RecorderSettings:
    """Read the settings under "kvcache", and in the variable. Raises ConfigError.

    `rank`: of a data-parallel engine, each of which has a directory of its own. `manages`: they are those of a manager,
    which needs neither a log nor sinks.
    """
    settings = {} if given is None or given is True else given
    if not isinstance(settings, Mapping):
        raise ConfigError(['"kvcache" must be an object, or false'], "--additional-config")
    problems = [
        f"{key!r} is not a setting; known settings: {', '.join(_KEYS)}"
        for key in settings
        if key not in _KEYS
    ]
    if (mode := mode_of(given)) != (MANAGER if manages else RECORD):
        problems.append(f"mode: given {quoted(mode)}; accepted: {RECORD}, or {MANAGER} for vLLM")
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
        problems.append('"settings" must be an object, such as {"log": {"retain_bytes": "20GB"}}')
    else:
        open_to = (*_SETTINGS, *_DECISIONS) if manages else _SETTINGS
        problems += [
            f"{key!r} is determined by vLLM and cannot be set" for key in further if key not in open_to
        ]
    if not problems and log is None and not sinks and not manages:
        problems.append('"log" or "sinks" is required')
    if problems:
        raise ConfigError(problems, "--additional-config")
    path = None if log is None else Path(log).expanduser()
    if path is not None and rank is not None:
        path /= f"rank{rank}"
    return RecorderSettings(path, tuple(sinks), dict(further), manages)
