"""What vLLM's entry point `vllm.general_plugins` calls, in each of its processes: it looks when a scheduler is made.

Only if there are settings for it, anything else of this library is imported. Nothing here raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import sys
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "KVCACHE_LOG"
"""The directory of the log."""
KEY = "kvcache"
"""Of vLLM's `--additional-config`: a dict of settings, or false."""
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_log = logging.getLogger("vllm.kvcache")


def register() -> None:
    """Have schedulers recorded that this process makes from now on, if they are to be."""
    try:
        module = sys.modules.get(_SCHEDULER)
        if module is not None:
            _hook(module)
        elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
            # Most of vLLM's processes make none, and do not wait for its module to load.
            sys.meta_path.insert(0, _WhenImported())
    except Exception as error:  # noqa: BLE001
        _log.warning("The KV cache is not recorded: %s", type(error).__name__)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Hooks the scheduler's module as soon as it is imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Let the others find it, and go on when it is executed."""
        if name != _SCHEDULER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            _hook(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _hook(module: ModuleType) -> None:
    scheduler = getattr(module, "Scheduler", None)
    if scheduler is None:
        if os.environ.get(VARIABLE):
            _log.warning("The KV cache is not recorded: this vLLM has no %s.Scheduler", _SCHEDULER)
        return
    made = scheduler.__init__
    if getattr(made, "kvcache", False):
        return

    @wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _look(self)

    make.kvcache = True  # type: ignore[attr-defined]
    scheduler.__init__ = make


def _look(scheduler: Any) -> None:
    """Record a scheduler that has just been made, if there are settings for it."""
    try:
        further = getattr(getattr(scheduler, "vllm_config", None), "additional_config", None)
        given = further.get(KEY) if isinstance(further, dict) else None
        directory = os.environ.get(VARIABLE, "").strip()
        if given is False or (given is None and not directory):
            return
        from kvcache.integrations.vllm.attached import attach

        attach(scheduler, given, directory or None)
    except Exception as error:  # noqa: BLE001
        _log.warning("The KV cache is not recorded: %s", type(error).__name__)
