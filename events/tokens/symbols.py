"""Symbols: the numbers by which prompts are compared.

A plain token is its own symbol. A token of a multimodal item, and one with an extra id, has more than its number: each
different (token, extra id, item's digest, offset in the item) has a number below 0 of its own, so that comparing
symbols compares all of it, exactly.

An image has thousands of tokens, most of them the same placeholder. Numbers are therefore given a page of 256 at a
time: to one token of an item at 256 consecutive offsets, or to 256 consecutive tokens with one extra id. The set of
pages is a fold over events (`SymbolsInterned`, `SymbolsForgotten`, `StateExported`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from events.packed import TOKEN_BYTES
from events.tokens.rich import DIGEST_BYTES, ItemSpan, RichTokens
from events.types import AnyEvent, CacheCreated, StateExported, SymbolPage, SymbolsForgotten, SymbolsInterned

PAGE_SIZE = 256
UNKNOWN = -(2**31)
"""Symbol for tokens without a symbol. It is in no page, so it matches nothing."""
MAX_PAGES = 2**31 // PAGE_SIZE - 1
FORGET_ABOVE = 16_384
"""Number of pages above which unused ones are looked for."""

_Int64s = npt.NDArray[np.int64]


class PageKey(NamedTuple):
    """The common fields of the symbols of a page."""

    token: int
    extra_id: int
    digest: bytes | None
    offset: int


def has_symbols(packed: bytes | bytearray) -> bool:
    """Return True if any int32 (LE) is below 0, by the byte with the sign."""
    return not packed[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()


class SymbolTable:
    """The meanings of the symbols below 0. Changed only by the events that it folds."""

    def __init__(self) -> None:
        self.pages: dict[int, SymbolPage] = {}
        """Pages by number."""
        self.forget_at = FORGET_ABOVE
        """Number of pages above which unused ones are to be forgotten."""
        self._numbers: dict[PageKey, int] = {}
        self._lowest = 0
        """No number below this one is free."""

    @property
    def crowded(self) -> bool:
        """True if there are enough pages that unused ones are to be forgotten."""
        return len(self.pages) > self.forget_at

    def copy(self) -> SymbolTable:
        """Copy the current meanings, unaffected by later folds; for spelling only."""
        copied = SymbolTable()
        copied.pages = self.pages.copy()
        return copied

    # -- the fold

    def fold(self, event: AnyEvent) -> None:
        """Fold any event of a log that holds tokens."""
        if isinstance(event, SymbolsInterned):
            self.intern(event)
        elif isinstance(event, SymbolsForgotten):
            self.forget(event)
        elif isinstance(event, StateExported):
            self.install(event)
        elif isinstance(event, CacheCreated):
            self.clear()

    def clear(self) -> None:
        """Remove all pages."""
        self.pages.clear()
        self._numbers.clear()
        self._lowest = 0
        self.forget_at = FORGET_ABOVE

    def install(self, event: StateExported) -> None:
        """Replace the table by an exported one."""
        self.clear()
        self._add(event.symbols)
        self.forget_at = event.forget_symbols_at or FORGET_ABOVE

    def intern(self, event: SymbolsInterned) -> None:
        """Add pages."""
        self._add(event.pages)

    def forget(self, event: SymbolsForgotten) -> None:
        """Drop pages; the next search is worthwhile at twice the current number."""
        for number in array("I", event.pages):
            page = self.pages.pop(number, None)
            if page is not None:
                del self._numbers[_key(page)]
                self._lowest = min(self._lowest, number)
        self.forget_at = min(max(FORGET_ABOVE, 2 * len(self.pages)), MAX_PAGES // 2)

    def _add(self, pages: Iterable[SymbolPage]) -> None:
        for page in pages:
            if page.number in self.pages or not 0 <= page.number < MAX_PAGES or _key(page) in self._numbers:
                raise ValueError("a page of symbols exists already, or its number is out of range")
            if not _is_possible(page):
                raise ValueError("a page of symbols has no content")
            self.pages[page.number] = page
            self._numbers[_key(page)] = page.number
        while self._lowest in self.pages:
            self._lowest += 1

    # -- reading

    def missing(self, prompts: Iterable[RichTokens]) -> tuple[SymbolPage, ...]:
        """Return the pages that these prompts need and that are missing, in the order of their need."""
        wanted: dict[PageKey, str | None] = {}
        for prompt in prompts:
            for _, _, key, uuid in _page_runs(prompt)[1]:
                if key not in self._numbers:
                    wanted.setdefault(key, uuid)
        free = (number for number in count(self._lowest) if number not in self.pages)
        pages = zip(free, wanted.items(), strict=False)
        return tuple(SymbolPage(number, *key, uuid) for number, (key, uuid) in pages)

    def symbols_of(self, prompt: RichTokens) -> bytes:
        """Return the prompt as int32 LE symbols; `UNKNOWN` if there is none."""
        if prompt.extra_ids is None and not prompt.items:
            return prompt.tokens
        low, runs = _page_runs(prompt)
        symbols = np.frombuffer(prompt.tokens, np.int32).copy()
        for begin, end, key, _ in runs:
            number = self._numbers.get(key)
            if number is None:
                symbols[begin:end] = UNKNOWN
            else:
                symbols[begin:end] = -1 - number * PAGE_SIZE - low[begin:end]
        return symbols.tobytes()

    def spell(self, symbols: bytes) -> RichTokens:
        """Return the meanings of symbols. Raises KeyError for one that is not in the table."""
        packed = np.frombuffer(symbols, np.int32)
        places = np.flatnonzero(packed < 0)
        if not len(places):
            return RichTokens(symbols)
        tokens, extra_ids, items = packed.copy(), np.zeros(len(packed), np.uint64), list[ItemSpan]()
        numbers, low = np.divmod(-1 - packed[places].astype(np.int64), PAGE_SIZE)
        for begin, end in _runs(numbers):
            page, at, index = self.pages[int(numbers[begin])], places[begin:end], low[begin:end]
            extra_ids[at] = page.extra_id
            if page.digest is None:
                tokens[at] = page.token + index
            else:
                tokens[at] = page.token
                _add_spans(items, page, at, page.offset + index)
        return RichTokens(tokens.tobytes(), extra_ids if extra_ids.any() else None, tuple(items))


def rich_end(packed: bytes) -> int:
    """Return the number of tokens up to the last symbol below 0; 0: there is none."""
    if not has_symbols(packed):
        return 0
    return int(np.flatnonzero(np.frombuffer(packed, np.int32) < 0)[-1]) + 1


def pages_in(symbols: bytes | bytearray) -> set[int]:
    """Return the numbers of the pages of these symbols."""
    if not has_symbols(symbols):
        return set()
    packed = np.frombuffer(symbols, np.int32)
    return set(((-1 - packed[packed < 0].astype(np.int64)) // PAGE_SIZE).tolist())


def _key(page: SymbolPage) -> PageKey:
    return PageKey(page.token, page.extra_id, page.digest, page.offset)


def _page_runs(prompt: RichTokens) -> tuple[_Int64s, list[tuple[int, int, PageKey, str | None]]]:
    """Return each token's index in its page; and (begin, end, page, the item's uuid) of those that are in one."""
    tokens = np.frombuffer(prompt.tokens, np.int32).astype(np.int64)
    item = np.full(len(tokens), -1)
    low = tokens & (PAGE_SIZE - 1)
    base, offset = tokens - low, np.zeros_like(tokens)
    for index, span in enumerate(prompt.items):
        inside = slice(span.begin, span.end)
        offsets = np.arange(span.offset, span.offset + span.end - span.begin)
        item[inside], base[inside], low[inside] = index, tokens[inside], offsets & (PAGE_SIZE - 1)
        offset[inside] = offsets - low[inside]
    extra_ids = prompt.extra_ids_at(0, len(tokens))
    plain = (item < 0) & (extra_ids == 0)
    base[plain] = 0
    found = []
    for begin, end in _runs(base, offset, item, extra_ids, plain) if not plain.all() else ():
        if not plain[begin]:
            span_of = prompt.items[item[begin]] if item[begin] >= 0 else None
            digest, uuid = (span_of.digest, span_of.uuid) if span_of is not None else (None, None)
            key = PageKey(int(base[begin]), int(extra_ids[begin]), digest, int(offset[begin]))
            found.append((begin, end, key, uuid))
    return low, found


def _runs(*columns: npt.NDArray[np.generic]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs in which all columns stay the same."""
    changes = np.zeros(max(len(columns[0]) - 1, 0), bool)
    for column in columns:
        changes |= column[1:] != column[:-1]
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(columns[0])]
    yield from pairwise(edges)


def _add_spans(items: list[ItemSpan], page: SymbolPage, places: _Int64s, offsets: _Int64s) -> None:
    """Add the tokens of one page, joined with the item's tokens right before them."""
    digest = page.digest
    assert digest is not None
    # If places and offsets grow alike, it is one item; in a gap between two, both jump.
    steps = np.flatnonzero((np.diff(places) != 1) | (np.diff(offsets) != 1)) + 1
    for part_places, part_offsets in zip(np.split(places, steps), np.split(offsets, steps), strict=True):
        begin, offset = int(part_places[0]), int(part_offsets[0])
        end = begin + len(part_places)
        last = items[-1] if items else None
        if (
            last is not None
            and (last.end, last.digest) == (begin, digest)
            and last.offset + last.end - last.begin == offset
        ):
            items[-1] = last._replace(end=end)
        else:
            items.append(ItemSpan(begin, end, digest, offset, page.uuid))


def _is_possible(page: SymbolPage) -> bool:
    """Return True if a cache can have begun such a page; in a log without tokens its meaning is empty."""
    if page.digest is None:
        return page.token >= 0 and page.token % PAGE_SIZE == 0 and page.offset == 0
    begins_page = page.offset >= 0 and page.offset % PAGE_SIZE == 0
    return begins_page and page.token >= 0 and len(page.digest) == DIGEST_BYTES
