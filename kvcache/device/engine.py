"""What moves the bytes of a manager, made of what it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuda_ops.copier import Copier
from kvcache.config import KVCacheConfig
from kvcache.device.blank_fill import FillingEngine
from kvcache.device.checking import CheckingCopier
from kvcache.device.transfers import TransferEngine
from kvcache.errors import UsageError
from kvcache.layout import Layout


def engine_for(
    pools: Any, copier: Copier | None, layout: Layout, config: KVCacheConfig
) -> TransferEngine | None:
    """What moves the bytes of `pools`, or whatever `copier` moves; None without either.

    With `debug_fill_blank` it also overwrites the blocks of the pools that are allocated. Raises `UsageError`, also for
    pools that another manager has.
    """
    if pools is not None:
        methods = ("copier", "refuse_taken", "take", "give_back")
        if not all(callable(getattr(pools, method, None)) for method in methods):
            raise UsageError(f"pools must be Pools, not {type(pools).__name__}")
        if getattr(pools, "layout", layout) != layout:
            raise UsageError(
                "the pools have another layout than the config: make them by Pools(Layout.of(config))"
            )
        _refuse_other_place(pools, config.secondary_path)
        pools.refuse_taken()
    if copier is None and pools is not None:
        copier = pools.copier()
    if copier is None:
        return None
    if not callable(getattr(copier, "submit", None)):
        raise UsageError(f"a copier must have submit; {type(copier).__name__} has not")
    file = getattr(pools, "secondary_file", None)
    if file is not None and config.verify_secondary:
        copier = CheckingCopier(copier, file)
    if pools is not None and config.debug_fill_blank:
        return FillingEngine(copier, pools)
    return TransferEngine(copier)


def _refuse_other_place(pools: Any, secondary_path: str | None) -> None:
    """Raise `UsageError` if secondary lies elsewhere than the settings say."""
    file = getattr(pools, "secondary_file", None)
    lies = None if file is None else file.path
    if lies != (None if secondary_path is None else Path(secondary_path)):
        raise UsageError(
            "the pools have their secondary level elsewhere than config.secondary_path says: make them by "
            "Pools(Layout.of(config), secondary_path=config.secondary_path)"
        )
