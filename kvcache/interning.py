"""Symbols for what new prompts hold, and which of the old ones nothing uses any more: reads state, decides events."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from events import symbols
from events.rich_tokens import RichTokens
from events.symbols import pages_in
from events.types import Event, SymbolPage, SymbolsForgotten, SymbolsInterned
from kvcache.errors import OutOfSymbols
from kvcache.state import CacheState


def missing_pages(state: CacheState, prompts: Iterable[RichTokens]) -> tuple[SymbolPage, ...]:
    """What must be interned before these prompts are admitted; raises `OutOfSymbols`."""
    table = state.symbols
    pages = table.missing(prompts)
    available = symbols.MAX_PAGES - len(table.pages)
    if len(pages) > available:
        raise OutOfSymbols(len(pages), available)
    return pages


def intern(emit: Callable[[Event], None], pages: tuple[SymbolPage, ...]) -> None:
    """Add pages, if there are any to add."""
    if pages:
        emit(SymbolsInterned(pages))


def forget_unused(state: CacheState, emit: Callable[[Event], None]) -> None:
    """Drop the pages that nothing uses."""
    unused = sorted(state.symbols.pages.keys() - used_pages(state))
    emit(SymbolsForgotten(array("I", unused).tobytes()))


def used_pages(state: CacheState) -> set[int]:
    """The pages whose symbols occur in cached blocks and running sequences."""
    used: set[int] = set()
    for group in state.groups:
        for run in group.tree.runs.values():
            used |= pages_in(run.symbols)
    for handle, end in state.rich.items():
        used |= pages_in(state.sequences[handle].tokens[:end].tobytes())
    return used
