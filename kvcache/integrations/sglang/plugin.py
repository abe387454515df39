"""Entry point `sglang.srt.plugins`, which SGLang calls in each of its processes: it registers two hooks.

Without a variable that requests a recording, it does nothing, and nothing else of this library is imported. Nothing
here raises.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from typing import Any

VARIABLE = "KVCACHE_LOG"
"""Directory of the log."""
SINKS = "KVCACHE_SINKS"
"""URLs of sinks, separated by spaces."""
REFUSED = "_kvcache_refused"
"""Attribute of a recorded cache that is called with each request without room."""
_MANAGERS = "sglang.srt.managers"
_log = logging.getLogger("sglang.kvcache")


def register() -> None:
    """Record the scheduler of this process, if requested."""
    try:
        if not os.environ.get(VARIABLE, "").strip() and not os.environ.get(SINKS, "").strip():
            return
        _hook()
    except Exception as error:  # noqa: BLE001
        _log.warning("The KV cache is not recorded: %s", type(error).__name__)


@cache
def _hook() -> None:
    """Register the hooks, once however often SGLang loads its plugins."""
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    after = hooks.HookType.AFTER
    hooks.HookRegistry.register(f"{_MANAGERS}.scheduler.Scheduler.__init__", _made, after)
    hooks.HookRegistry.register(f"{_MANAGERS}.schedule_policy.PrefillAdder.add_one_req", _tried, after)


def _made(_: None, scheduler: Any, *__: Any, **___: Any) -> None:
    """Attach to a scheduler after `Scheduler.__init__`."""
    try:
        from kvcache.integrations.sglang.attached import attach

        refused = attach(scheduler, os.environ.get(VARIABLE, "").strip(), os.environ.get(SINKS, "").split())
        if refused is not None:
            setattr(scheduler.tree_cache, REFUSED, refused)
    except Exception as error:  # noqa: BLE001
        _log.warning("The KV cache is not recorded: %s", type(error).__name__)


def _tried(result: Any, adder: Any, request: Any, *_: Any, **__: Any) -> None:
    """Record the outcome of `PrefillAdder.add_one_req`: a request is admitted or not."""
    refused = vars(adder.tree_cache).get(REFUSED)
    if refused is not None and result.name == "NO_TOKEN":
        refused(request)
