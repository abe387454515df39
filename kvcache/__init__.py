"""A paged KV cache manager for LLM inference engines, changed only by emitting events.

Everything below is imported on first use, so that programs that only read logs need neither torch nor the time
to load it. `errors` and `replay` are modules: ``kvcache.replay.replay(directory)``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache._version import __version__

if TYPE_CHECKING:
    from events.types import CROSS_WINDOW
    from kvcache import errors, replay
    from kvcache.config import KVCacheConfig, LogConfig
    from kvcache.inputs import MultimodalItem, Request, Retention, RetentionRange
    from kvcache.layout import Layout
    from kvcache.manager import KVCacheManager
    from kvcache.prefixes.index import PrefixIndex
    from kvcache.record.mirror import LayerGroup
    from kvcache.recorder import Recorder
    from kvcache.results import Admission

__all__ = [
    "CROSS_WINDOW",
    "Admission",
    "KVCacheConfig",
    "KVCacheManager",
    "LayerGroup",
    "Layout",
    "LogConfig",
    "MultimodalItem",
    "PrefixIndex",
    "Recorder",
    "Request",
    "Retention",
    "RetentionRange",
    "__version__",
    "errors",
    "replay",
]

_HOMES = {
    "Admission": "kvcache.results",
    "CROSS_WINDOW": "events.types",
    "KVCacheConfig": "kvcache.config",
    "KVCacheManager": "kvcache.manager",
    "LayerGroup": "kvcache.record.mirror",
    "Layout": "kvcache.layout",
    "LogConfig": "kvcache.config",
    "MultimodalItem": "kvcache.inputs",
    "PrefixIndex": "kvcache.prefixes.index",
    "Recorder": "kvcache.recorder",
    "Request": "kvcache.inputs",
    "Retention": "kvcache.inputs",
    "RetentionRange": "kvcache.inputs",
}
"""Module of each name; a name that is missing here is a module itself."""

_FOREIGN = """\
kvcache needs its own package `{name}`, but `import {name}` {found}.
Another distribution has the same top-level name: PyPI's `events` overwrites files of that name in place.
Uninstall it (`pip uninstall {name}`) and install kvcache again (`pip install --force-reinstall kvcache`), or
take the directory in which the other one lies off the import path."""


_MARK = 'KVCACHE_PACKAGE = "kvcache"'


def _require_own(name: str) -> None:
    """Refuse to work with another distribution's package of the same name, before it does harm."""
    # Found, not imported: callers that need neither should not wait for it.
    spec = find_spec(name)
    if spec is None or not spec.origin or spec.loader is None:
        found = "finds nothing" if spec is None else "found a directory without code"
        raise ImportError(_FOREIGN.format(name=name, found=found))
    source = getattr(spec.loader, "get_source", lambda _: None)(name)
    marked = getattr(import_module(name), "KVCACHE_PACKAGE", None) if source is None else _MARK in source
    # The mark reveals files that were overwritten in place, the path a copy of ours from another installation.
    if not marked or _site(spec.origin) != _site(__file__):
        raise ImportError(_FOREIGN.format(name=name, found=f"found {spec.origin}"))


def _site(file: str) -> Path:
    """Return the parent directory of a package's directory."""
    return Path(file).resolve().parent.parent


for _name in ("events", "sinks"):
    _require_own(_name)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _HOMES:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
