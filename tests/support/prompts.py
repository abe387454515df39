"""Prompts as numbers of blocks, that stand for a block and all before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvcache.audit.curve import Reuses

Blocks = tuple[int, ...]
"""A block, by the contents of all blocks up to it."""
Prompts = list[list[int]]


def numbered(contents: Sequence[Sequence[int]]) -> Prompts:
    """Prompts of block contents, as numbers that stand for a block and all before it."""
    numbers: dict[Blocks, int] = {}
    return [
        [
            numbers.setdefault(tuple(prompt[: end + 1]), len(numbers) * 977 % 100_003)
            for end in range(len(prompt))
        ]
        for prompt in contents
    ]


def some_prompts(random_: random.Random, requests: int, alphabet: int, longest: int) -> Prompts:
    """Prompts that often begin like earlier ones."""
    contents: list[list[int]] = []
    for _ in range(requests):
        start = list(random_.choice(contents)) if contents and random_.random() < 0.7 else []
        kept = start[: random_.randint(0, len(start))]
        more = [random_.randrange(alphabet) for _ in range(random_.randint(0, longest))]
        contents.append((kept + more)[:longest])
    return numbered(contents)


def reuses_of(prompts: Prompts) -> Reuses:
    reuses = Reuses()
    for prompt in prompts:
        reuses.add(prompt)
    return reuses
