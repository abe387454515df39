"""What moves the bytes of a manager, made of what it was given."""

from __future__ import annotations

from typing import Any

from cuda_ops.copier import Copier
from kvcache.device.blank_fill import FillingEngine
from kvcache.device.transfers import TransferEngine
from kvcache.errors import UsageError
from kvcache.layout import Layout


def engine_for(
    pools: Any, copier: Copier | None, layout: Layout, *, fill_blank: bool = False
) -> TransferEngine | None:
    """What moves the bytes of `pools`, or whatever `copier` moves; None without either.

    With `fill_blank` it also overwrites the blocks of the pools that are allocated. Raises `UsageError`, also for
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
        pools.refuse_taken()
    if copier is None and pools is not None:
        copier = pools.copier()
    if copier is None:
        return None
    if not callable(getattr(copier, "submit", None)):
        raise UsageError(f"a copier must have submit; {type(copier).__name__} has not")
    if pools is not None and fill_blank:
        return FillingEngine(copier, pools)
    return TransferEngine(copier)
