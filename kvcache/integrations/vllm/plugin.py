"""Entry point `vllm.general_plugins`, which vLLM calls in each of its processes: it hooks the making of schedulers.

A stopping server waits for a recorded engine's process, which closes its log meanwhile.

The rest of this library is imported only with settings for it. Nothing here raises, unless vLLM's manager is to be
replaced (`KVCACHE_MODE=manager`) and cannot be.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "KVCACHE_LOG"
"""Directory of the log."""
MODE = "KVCACHE_MODE"
"""Mode: vLLM's manager is recorded (the default) or replaced."""
KEY = "kvcache"
"""Key in vLLM's `--additional-config`: a dict of settings, or false."""
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_ENGINES = "vllm.v1.engine.utils"
_CORE = "vllm.v1.engine.core"
_SEEN = "_kvcache_seen"
_WAITS = "_kvcache_waits"
_log = logging.getLogger("vllm.kvcache")


def register() -> None:
    """Record the schedulers that this process makes from now on, if requested."""
    try:
        for name, hook in ((_SCHEDULER, _hook), (_ENGINES, _hook_engines), (_CORE, _hook_core)):
            module = sys.modules.get(name)
            if module is not None:
                hook(module)
            elif not any(isinstance(each, _WhenImported) and each.name == name for each in sys.meta_path):
                # Most of vLLM's processes need neither, and do not wait for the imports.
                sys.meta_path.insert(0, _WhenImported(name, hook))
    except Exception as error:  # noqa: BLE001
        _log.warning("The KV cache is not recorded: %s", type(error).__name__)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Import hook for a module."""

    def __init__(self, name: str, hook: Callable[[ModuleType], None]) -> None:
        self.name, self._hook = name, hook

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Delegate to the other finders, and hook the module's execution."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self._hook(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _after_init(owner: Any, then: Callable[..., None]) -> bool:
    """Call `then` with each new object of a class and the arguments that it was made with; False if that is done
    already.
    """
    made = owner.__init__
    if getattr(made, "kvcache", False):
        return False

    @wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        then(self, *args, **kwargs)

    make.kvcache = True  # type: ignore[attr-defined]
    owner.__init__ = make
    return True


def _hook(module: ModuleType) -> None:
    scheduler = getattr(module, "Scheduler", None)
    if scheduler is not None:
        _after_init(scheduler, _look)
    elif os.environ.get(VARIABLE):
        _log.warning("The KV cache is not recorded: this vLLM has no %s.Scheduler", _SCHEDULER)


def _hook_core(module: ModuleType) -> None:
    core = getattr(module, "EngineCore", None)
    if core is not None:
        _after_init(core, _check_core)


def _check_core(core: Any, vllm_config: Any, *_: Any, **__: Any) -> None:
    """Warn in an engine with a scheduler that is not derived from vLLM's, and so is not recorded; hash no blocks for
    a kvcache manager.
    """
    seen, manages = hasattr(getattr(core, "scheduler", None), _SEEN), _manages(vllm_config)
    why = f"the scheduler is not derived from {_SCHEDULER}.Scheduler"
    if manages and not seen:
        raise RuntimeError(f"{MODE}=manager: {why}")
    if manages:
        core.request_block_hasher = None  # names of blocks that nothing needs
    elif _requested(vllm_config) is not None and not seen:
        _log.warning("The KV cache is not recorded: %s", why)


def _hook_engines(module: ModuleType) -> None:
    """Let engine processes close their logs: a server would kill them at once after requesting their end."""
    manager: Any = getattr(module, "CoreEngineProcManager", None)
    seconds = getattr(module, "get_engine_process_shutdown_timeout", None)

    def note(made: Any, *_: Any, vllm_config: Any = None, **__: Any) -> None:
        at_once = getattr(vllm_config, "shutdown_timeout", None) == 0
        setattr(made, _WAITS, at_once and _requested(vllm_config) is not None)

    if manager is None or seconds is None or not _after_init(manager, note):
        return
    shutdown = manager.shutdown

    @wraps(shutdown)
    def shut_down(self: Any, timeout: float | None = None) -> None:
        if timeout == 0 and getattr(self, _WAITS, False) and seconds(0, 0) == 0:
            timeout = None  # vLLM's own: it kills processes that have not ended after five seconds
        shutdown(self, timeout)

    manager.shutdown = shut_down


def _requested(config: Any) -> tuple[object, str | None] | None:
    """Return the settings in the configuration, and the variable; None: nothing is requested."""
    further = getattr(config, "additional_config", None)
    given = further.get(KEY) if isinstance(further, dict) else None
    directory = os.environ.get(VARIABLE, "").strip()
    if given is False or (given is None and not directory and not os.environ.get(MODE, "").strip()):
        return None
    return given, directory or None


def _manages(config: Any) -> bool:
    """Return whether vLLM's manager is to be replaced."""
    requested = _requested(config)
    if requested is None:
        return False
    from kvcache.integrations.settings import MANAGER, mode_of

    return mode_of(requested[0]) == MANAGER


def _look(scheduler: Any, *_: Any, **__: Any) -> None:
    """Record a new scheduler, if there are settings for it, or replace its manager, which raises what that raises."""
    setattr(scheduler, _SEEN, True)
    config = getattr(scheduler, "vllm_config", None)
    try:
        requested, manages = _requested(config), _manages(config)
        if requested is not None and not manages:
            from kvcache.integrations.vllm.attached import attach

            attach(scheduler, *requested)
    except Exception as error:  # noqa: BLE001
        _log.warning("The KV cache is not recorded: %s", type(error).__name__)
        return
    if requested is not None and manages:
        from kvcache.integrations.vllm.replaced import replace_manager

        replace_manager(scheduler, *requested)
