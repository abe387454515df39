"""Laws that the model keeps by itself, under random commands."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest

from events.types import PRIMARY, SECONDARY
from tests.oracles.cache_model import Model, Refused, Request
from tests.oracles.window_model import Window
from tests.support.seeds import seeds

LIMIT = 24
"""Tokens of the longest sequence."""
NAMESPACE = "a namespace"


def readable(window: Window, size: int, tokens: Sequence[int], position: int) -> bool:
    """Whether a cached block has what the window needs to know of one token of a prompt."""
    block = position // size
    before = (NAMESPACE, *(tuple(tokens[at * size : at * size + size]) for at in range(block)))
    rest = tuple(tokens[block * size : position + 1])
    return any(path[:-1] == before and path[-1][: len(rest)] == rest for path in window.cached)


def reusable(model: Model, tokens: Sequence[int]) -> int:
    """What a prompt reuses, token by token."""
    size, most = model.size, len(tokens) - 1
    blocks = max(
        blocks
        for blocks in range(most // size + 1)
        if all(
            readable(window, size, tokens, position)
            for window in model.windows
            for position in range(max(0, blocks * size - window.tokens + 1), blocks * size)
        )
    )
    end = blocks * size
    while end < most and all(readable(window, size, tokens, end) for window in model.windows):
        end += 1
    return end


def check_laws(model: Model) -> None:
    for window in model.windows:
        assert window.blank(PRIMARY) >= 0
        assert window.blank(SECONDARY) >= 0
        check_cached(window)
        for name, sequence in model.running.items():
            table, detached = window.tables[name], window.detached(name)
            assert len(table) == -(-len(sequence.tokens) // model.size)
            assert None not in table[detached:]
            assert detached * model.size <= max(0, sequence.computed - window.tokens + 1)
            spare = min(len(sequence.tokens), sequence.computed + 1) - window.tokens - detached * model.size
            assert spare < model.size, "more is held than is attended to"
            for at, entry in enumerate(table):
                if isinstance(entry, tuple):
                    assert entry[-1] == tuple(sequence.tokens[at * model.size : at * model.size + model.size])


def check_cached(window: Window) -> None:
    holders = Counter(entry for table in window.tables.values() for entry in table)
    for path, block in window.cached.items():
        assert block.refs == holders[path]
        assert bool(block.refs) == (block.stamp == 0)
        assert not block.refs or block.level == PRIMARY
        if not window.sliding and len(path) > 2:
            assert window.cached[path[:-1]].level <= block.level
        siblings = [child for child in window.children(path[:-1]) if child != path]
        assert not any(child[-1][: len(path[-1])] == path[-1] for child in siblings)
    orders = sorted(window.order(path) for path, block in window.cached.items() if not block.refs)
    assert all(one < other for one, other in pairwise(orders)), "two blocks would go at the same time"


class Program:
    """Random commands for a model."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        windows = sorted(rng.sample([1, 2, 3, 4, 5, 7, 8, 12, LIMIT], rng.randint(1, 3)))
        blocks = (rng.randint(6, 16), rng.choice([0, 2, 6]))
        self.model = Model(rng.choice([1, 2, 4]), blocks, windows, LIMIT, partial=rng.random() < 0.8)
        self.beginnings = [rng.choices(range(2), k=10) for _ in range(3)]
        self.admitted = 0

    def run(self, steps: int) -> None:
        commands = [self.admit, self.compute, self.end] * 3 + [self.decode] * 4 + [self.set_priority]
        for _ in range(steps):
            with suppress(Refused, IndexError):
                self.rng.choice([*commands, self.clear] if self.rng.random() < 0.2 else commands)()
            check_laws(self.model)

    def one(self) -> Hashable:
        return self.rng.choice(list(self.model.running))

    def admit(self) -> None:
        requests: list[Request] = []
        for _ in range(self.rng.choice([1, 1, 2])):
            kept, more = self.rng.randint(1, 10), self.rng.randint(0, 4)
            tokens = self.rng.choice(self.beginnings)[:kept] + self.rng.choices(range(2), k=more)
            requests.append((self.admitted, NAMESPACE, tokens, None, None, None))
            self.admitted += 1
            if self.model.partial:
                assert self.model.match(NAMESPACE, tokens).tokens == reusable(self.model, tokens)
        self.model.add(requests)

    def compute(self) -> None:
        name = self.one()
        self.model.compute(name, self.rng.randint(0, len(self.model.running[name].tokens)))

    def decode(self) -> None:
        name, count = self.one(), self.rng.choice([1, 1, 1, 3, 5])
        if len(self.model.running[name].tokens) + count <= LIMIT:
            self.model.append([name], self.rng.choices(range(2), k=count), [count])

    def end(self) -> None:
        self.model.end(self.one(), store=self.rng.random() < 0.8)

    def set_priority(self) -> None:
        self.model.set_priority(self.one(), self.rng.choice([0, 34, 36]), self.rng.randint(0, 8), LIMIT)

    def clear(self) -> None:
        self.model.clear()


@pytest.mark.parametrize("seed", seeds(range(100), quick=10))
def test_laws_hold(seed: int) -> None:
    """Nothing is held twice or lost, all that is needed is held, and reuse is what brute force finds."""
    Program(seed).run(200)
