"""Symbols: two are equal exactly when they stand for the same, and their numbers come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.ids import Handle
from events.tokens import symbols as module
from events.tokens.rich import ItemSpan, RichTokens
from events.tokens.symbols import UNKNOWN, SymbolTable, has_symbols, pages_in, rich_end
from events.types import (
    CacheCreated,
    ContextComputed,
    StateExported,
    SymbolPage,
    SymbolsForgotten,
    SymbolsInterned,
)
from tests.support.columns import pack_i32, pack_u32

CAT, DOG = b"\xca" * 32, b"\xd0" * 32
Meaning = tuple[int, int, bytes | None, int]


def rich(tokens: Sequence[int], extra_ids: Sequence[int] | None = None, *items: ItemSpan) -> RichTokens:
    return RichTokens(
        pack_i32(tokens), None if extra_ids is None else np.array(extra_ids, np.uint64), tuple(items)
    )


def meanings(prompt: RichTokens) -> list[Meaning]:
    """What each token stands for, one at a time."""
    found: list[Meaning] = []
    for place, token in enumerate(np.frombuffer(prompt.tokens, np.int32).tolist()):
        extra_id = 0 if prompt.extra_ids is None else int(prompt.extra_ids[place])
        around = [each for each in prompt.items if each.begin <= place < each.end]
        assert len(around) <= 1
        digest = around[0].digest if around else None
        offset = around[0].offset + place - around[0].begin if around else 0
        found.append((token, extra_id, digest, offset))
    return found


def interned(table: SymbolTable, *prompts: RichTokens) -> list[list[int]]:
    """Add what is missing; the symbols of each prompt."""
    table.intern(SymbolsInterned(table.missing(prompts)))
    return [np.frombuffer(table.symbols_of(prompt), np.int32).tolist() for prompt in prompts]


@st.composite
def prompts(draw: Any) -> RichTokens:
    """Text and items of a few tokens, long enough to reach over a page now and then, with and without extra ids."""
    tokens, items = list[int](), list[ItemSpan]()
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.sampled_from([1, 2, 3, 255, 256, 300]))
        if draw(st.booleans()):
            digest = draw(st.sampled_from([CAT, DOG]))
            items.append(
                ItemSpan(len(tokens), len(tokens) + size, digest, draw(st.sampled_from([0, 0, 3, 256])))
            )
        first, step = draw(st.integers(0, 600)), draw(st.sampled_from([0, 0, 1]))
        tokens += [first + step * place for place in range(size)]
    ids = draw(st.none() | st.lists(st.sampled_from([0, 0, 1, 2**64 - 1]), min_size=1, max_size=3))
    extra_ids = None if ids is None else [ids[place // 2 % len(ids)] for place in range(len(tokens))]
    return rich(tokens, extra_ids, *items)


@given(st.lists(prompts(), max_size=4))
def test_symbols_are_equal_exactly_when_they_stand_for_the_same(given_prompts: list[RichTokens]) -> None:
    """Token, extra id, item and offset decide, all of them; what has none of the last three is its own symbol."""
    table = SymbolTable()
    symbol_of: dict[Meaning, int] = {}
    for prompt, numbers in zip(given_prompts, interned(table, *given_prompts), strict=True):
        for meaning, symbol in zip(meanings(prompt), numbers, strict=True):
            assert symbol_of.setdefault(meaning, symbol) == symbol
            plain = meaning[1:] == (0, None, 0)
            assert symbol == meaning[0] if plain else UNKNOWN < symbol < 0
    assert len(set(symbol_of.values())) == len(symbol_of)
    assert table.missing(given_prompts) == ()


@given(prompts())
def test_spelling_gives_back_what_was_interned(prompt: RichTokens) -> None:
    """A prompt's symbols spell the prompt, and any part of them the part."""
    table = SymbolTable()
    interned(table, prompt)
    symbols = table.symbols_of(prompt)
    for begin, end in ((0, len(prompt)), (len(prompt) // 3, len(prompt)), (0, len(prompt) // 2)):
        spelled = table.spell(symbols[4 * begin : 4 * end])
        assert meanings(spelled) == meanings(prompt)[begin:end]
        assert rich_end(symbols) == max(
            (n + 1 for n, m in enumerate(meanings(prompt)) if m[1:] != (0, None, 0)), default=0
        )


def test_an_image_takes_few_pages() -> None:
    """4,000 equal tokens of an item are 16 pages; an item's beginning shares the symbols of the whole."""
    table = SymbolTable()
    image = rich([7] * 4000, None, ItemSpan(0, 4000, CAT, 0))
    [whole] = interned(table, image)
    assert len(table.pages) == 16
    [start] = interned(table, rich([1, 7, 7], None, ItemSpan(1, 3, CAT, 0)))
    assert start == [1, *whole[:2]]
    assert len(table.pages) == 16


def test_what_is_not_there_is_unknown_and_stays_so() -> None:
    """Asking for symbols adds none."""
    table = SymbolTable()
    assert table.symbols_of(rich([5, 6], [0, 9])) == pack_i32([5, UNKNOWN])
    assert table.pages == {}
    with pytest.raises(KeyError):
        table.spell(pack_i32([-1]))


def test_forgotten_numbers_are_used_again() -> None:
    """The lowest free numbers come first, whichever way they came to be free."""
    table = SymbolTable()
    interned(table, *[rich([1], [extra_id]) for extra_id in range(1, 6)])
    table.forget(SymbolsForgotten(pack_u32([3, 1])))
    assert sorted(table.pages) == [0, 2, 4]
    copy = SymbolTable()
    copy.install(exported(tuple(table.pages.values()), 0))
    for each in (table, copy):
        pages = each.missing([rich([1, 1, 1], [11, 12, 13])])
        assert [page.number for page in pages] == [1, 3, 5]
    assert table.symbols_of(rich([1], [2])) == pack_i32([UNKNOWN])


def exported(pages: tuple[SymbolPage, ...], forget_at: int) -> StateExported:
    return StateExported((), (), (), 1, 1, 0, 0, pages, forget_at)


def test_looking_for_unused_pages_is_worth_it_after_they_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound follows what is left, not below the least, and an exported table carries it."""
    monkeypatch.setattr(module, "FORGET_ABOVE", 4)
    table = SymbolTable()
    interned(table, *[rich([1], [extra_id]) for extra_id in range(1, 8)])
    assert table.forget_at == 4
    table.forget(SymbolsForgotten(b""))
    assert table.forget_at == 14
    table.forget(SymbolsForgotten(pack_u32(range(6))))
    assert table.forget_at == 4
    table.install(exported((), 9))
    assert table.forget_at == 9


@pytest.mark.parametrize("number", [0, -1, module.MAX_PAGES])
def test_impossible_pages_are_refused(number: int) -> None:
    """No number can be taken twice, or lie beyond what an int32 can tell."""
    table = SymbolTable()
    table.intern(SymbolsInterned((SymbolPage(0, 7, 0, CAT, 0),)))
    with pytest.raises(ValueError, match="page of symbols"):
        table.intern(SymbolsInterned((SymbolPage(number, 8, 0, CAT, 0),)))


def test_a_table_follows_the_events_of_a_log() -> None:
    """Of all events those count that add, drop or replace pages; a new cache begins with none."""
    table = SymbolTable()
    page = SymbolPage(0, 7, 0, CAT, 0)
    table.fold(SymbolsInterned((page,)))
    table.fold(ContextComputed(Handle(1), 2))
    assert table.pages == {0: page}
    table.fold(SymbolsForgotten(pack_u32([0])))
    assert table.pages == {}
    table.fold(exported((page,), 5))
    assert table.pages == {0: page}
    table.fold(CacheCreated("{}", 4, (), "none", 0, ""))
    assert table.pages == {}
    assert table.forget_at == module.FORGET_ABOVE


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_signs_are_found_without_looking_at_numbers(numbers: list[int]) -> None:
    """A packed column has symbols below 0 when one of its numbers is."""
    packed = pack_i32(numbers)
    assert has_symbols(packed) == has_symbols(bytearray(packed)) == any(number < 0 for number in numbers)
    assert pages_in(packed) == {(-1 - number) // 256 for number in numbers if number < 0}


def test_items_are_cut_by_block() -> None:
    """Each block has the spans in it, with their places in block and item."""
    prompt = rich([1] * 9, None, ItemSpan(2, 6, CAT, 0, "cat"), ItemSpan(6, 8, DOG, 10))
    assert prompt.items_by_block(4) == [
        [ItemSpan(2, 4, CAT, 0, "cat")],
        [ItemSpan(0, 2, CAT, 2, "cat"), ItemSpan(2, 4, DOG, 10)],
        [],
    ]
    assert prompt.extra_ids_at(8, 12).tolist() == [0]
