"""What differs in the middle of prompts that are otherwise the same: found, and counted as lists of tokens count it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvcache.audit.volatile import (
    LEAST_ALIKE,
    MOST_VOLATILE,
    PromptSample,
    VolatileCount,
    VolatilePart,
    plain,
)
from tests.support.logs.served import SIZE, Asked, Texts, round_robin, with_a_date, with_an_id

Prompts = Sequence[Sequence[int]]


def found(prompts: Prompts, unit: int = 1) -> VolatilePart | None:
    sample = PromptSample(unit)
    for prompt in prompts:
        sample.add(np.array(prompt, np.int32))
    return sample.part()


def counted(prompts: Prompts, *, scopes: Sequence[str] | None = None) -> VolatileCount:
    """What is found in these, in blocks of `SIZE` tokens."""
    part = found(prompts)
    assert part is not None
    count, numbers = VolatileCount(part, SIZE), dict[tuple[object, ...], int]()
    for number, prompt in enumerate(prompts):
        scope = "" if scopes is None else scopes[number]
        ends = range(SIZE, len(prompt), SIZE)
        blocks = [numbers.setdefault((scope, *prompt[:end]), len(numbers)) for end in ends]
        count.add(number, scope, np.array(prompt, np.int32), blocks)
    return count


def reused(prompts: Prompts, scopes: Sequence[str] | None = None) -> list[int]:
    """Tokens that a cache of any size reuses of each prompt: full blocks, never the last token."""
    seen, tokens = set[tuple[object, ...]](), []
    for number, prompt in enumerate(prompts):
        scope = "" if scopes is None else scopes[number]
        ends = range(SIZE, len(prompt), SIZE)
        tokens.append(max((end for end in ends if (scope, *prompt[:end]) in seen), default=0))
        seen |= {(scope, *prompt[:end]) for end in ends}
    return tokens


def tokens_of(requests: Sequence[Asked]) -> list[list[int]]:
    return [asked.tokens for asked in requests]


class TestAnId:
    """One of each request, at position 38."""

    def test_is_found_and_counted(self) -> None:
        """Where it is, how long, how many have it, and what would be reused if it came last: by moving it by hand."""
        first, last = tokens_of([*with_an_id(150)]), tokens_of([*with_an_id(150, first=False)])
        count = counted(first)
        assert (count.position, count.requests, count.values) == (38, 150, 150)
        assert (count.shortest, count.longest, count.alike) == (12, 14, 600)
        # With the id at the end, and not before the question, it is as in `moved`; the question follows the tail.
        moved = [[*prompt[:38], *prompt[38 + own :], *prompt[38 : 38 + own]] for prompt, own in _ids(first)]
        assert (
            count.tokens == sum(reused(moved)) - sum(reused(first)) == sum(reused(last)) - sum(reused(first))
        )
        assert count.tokens == 149 * (638 // SIZE - 38 // SIZE) * SIZE
        assert count.example in range(1, 150)

    def test_at_the_end_is_none(self) -> None:
        """Nothing follows it that is the same."""
        assert found(tokens_of([*with_an_id(150, first=False)])) is None

    def test_at_the_beginning(self) -> None:
        """No token before it is needed."""
        count = counted(tokens_of([*with_an_id(40, head=0)]))
        assert (count.position, count.requests, count.alike) == (0, 40, 600)
        assert count.tokens == 39 * (600 // SIZE) * SIZE

    def test_among_others(self) -> None:
        """One prompt in eight has it; the others are conversations, and documents that come again."""
        with_it = tokens_of([*with_an_id(100)])
        others = tokens_of([*round_robin(700, 90)])
        prompts = [
            with_it[number // 8] if number % 8 == 0 else others[number - number // 8 - 1]
            for number in range(800)
        ]
        count = counted(prompts)
        assert (count.position, count.requests, count.values) == (38, 100, 100)
        assert count.tokens == 99 * (638 // SIZE - 38 // SIZE) * SIZE

    def test_tenants_share_nothing(self) -> None:
        """What would be reused is counted in each scope by itself."""
        prompts = tokens_of([*with_an_id(60)])
        scopes = ["a" if number % 3 else "b" for number in range(60)]
        moved = [[*prompt[:38], *prompt[38 + own :], *prompt[38 : 38 + own]] for prompt, own in _ids(prompts)]
        assert counted(prompts, scopes=scopes).tokens == sum(reused(moved, scopes)) - sum(
            reused(prompts, scopes)
        )
        assert counted(prompts, scopes=scopes).tokens == 58 * (638 // SIZE - 38 // SIZE) * SIZE


def _ids(prompts: Prompts) -> list[tuple[Sequence[int], int]]:
    tail = prompts[0][-620]
    return [(prompt, prompt.index(tail) - 38) for prompt in prompts]


class TestADate:
    """The same for all requests of a day."""

    def test_begins_where_any_two_differ(self) -> None:
        """At the week, not at the day of it, since other weeks have other ones; each day loses once."""
        prompts = tokens_of([*with_a_date(180, 6)])
        count = counted(prompts)
        assert (count.position, count.requests, count.values) == (2, 180, 6)
        assert count.tokens == 5 * (605 // SIZE) * SIZE
        # What was moved is reused anew behind it on the same day: that is no loss.
        assert sum(reused(prompts)) == 174 * (605 // SIZE) * SIZE

    def test_that_is_the_same_is_none(self) -> None:
        """Prompts of one day differ at their ends only."""
        assert found(tokens_of([*with_a_date(100, 1)])) is None


@pytest.mark.parametrize("seed", range(12))
def test_conversations_with_an_id(seed: int) -> None:
    """Turns that go on, some with an id of their own in front: counted as lists count that move it."""
    dice, texts = random.Random(seed), Texts(seed)
    head, system = texts.fresh(dice.randrange(40)), texts.fresh(200)
    talks = [texts.fresh(30) for _ in range(6)]
    prompts, moved = [], []
    for _ in range(90):
        number = dice.randrange(len(talks))
        talks[number] = [*talks[number], *texts.fresh(dice.randrange(40))]
        own = texts.fresh(dice.randrange(5, 9))
        prompts.append([*head, *own, *system, *talks[number]])
        moved.append([*head, *system, *talks[number], *own])
    count = counted(prompts)
    assert (count.position, count.requests) == (len(head), 90)
    assert count.tokens == sum(reused(moved)) - sum(reused(prompts)) > 0


class TestWhatIsNone:
    """Prompts that differ, and go on alike for too little, or after too much."""

    @pytest.mark.parametrize(("own", "alike"), [(MOST_VOLATILE + 1, 500), (10, LEAST_ALIKE - 1)])
    def test_too_long_or_too_little(self, own: int, alike: int) -> None:
        """By one token."""
        texts = Texts()
        head, tail = texts.fresh(50), texts.fresh(alike)
        assert found([[*head, *texts.fresh(own), *tail, *texts.fresh(9)] for _ in range(40)]) is None

    @pytest.mark.parametrize(("own", "alike"), [(MOST_VOLATILE, 500), (10, LEAST_ALIKE)])
    def test_just_enough(self, own: int, alike: int) -> None:
        """By none."""
        texts = Texts()
        head, tail = texts.fresh(50), texts.fresh(alike)
        count = counted([[*head, *texts.fresh(own), *tail, *texts.fresh(9)] for _ in range(40)])
        assert (count.position, count.shortest, count.longest) == (50, own, own)

    def test_nothing(self) -> None:
        """No prompts, empty ones, equal ones, and ones of which one begins the other."""
        one = Texts().fresh(300)
        cases: list[Prompts] = [
            [],
            [[], [], [1]],
            [one] * 5,
            [one, one[:100], one[:200]],
            [[7] * 300, [7] * 200],
        ]
        assert [found(prompts) for prompts in cases] == [None] * len(cases)

    def test_images(self) -> None:
        """Only the tokens before the first part that is none count."""
        assert plain(np.array([5, 6, -3, 7])).tolist() == [5, 6]
        assert plain(np.array([5, 6])).tolist() == [5, 6]


def test_blocks_in_place_of_tokens() -> None:
    """Where numbers stand for blocks, what differs is told in whole blocks."""
    sample = PromptSample(64)
    prompts = [[1, 2, 1000 + number, 3, 4, 5, 2000 + number] for number in range(30)]
    for prompt in prompts:
        sample.add(np.array(prompt))
    part = sample.part()
    assert part is not None
    count, numbers = VolatileCount(part, 64, 64), dict[tuple[int, ...], int]()
    for number, prompt in enumerate(prompts):
        blocks = [numbers.setdefault(tuple(prompt[:end]), len(numbers)) for end in range(1, 7)]
        count.add(number, None, np.array(prompt), blocks)
    assert (count.position, count.shortest, count.longest, count.alike) == (128, 64, 64, 192)
    assert count.tokens == 29 * 3 * 64


def test_few_of_many_are_kept() -> None:
    """Memory does not grow with the number of prompts; each has the same chance."""
    sample, kept = PromptSample(), []
    for number in range(5_000):
        sample.add(np.array([number]))
    kept = sorted(int(each[0]) for each in sample._kept)
    assert len(kept) == 128
    assert 1_800 < sum(kept) / len(kept) < 3_200
