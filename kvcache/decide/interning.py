"""Symbols for what new prompts hold, and which of the old ones nothing uses any more: reads state, decides events."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from events.tokens import symbols
from events.tokens.rich import RichTokens
from events.types import Event, SymbolPage, SymbolsForgotten, SymbolsInterned
from kvcache.errors import OutOfSymbols
from kvcache.fold.state import CacheState


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
    unused = sorted(state.symbols.pages.keys() - state.used_pages())
    emit(SymbolsForgotten(array("I", unused).tobytes()))
