"""Logs of made-up requests, served by a real manager at times that are given."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvcache import KVCacheConfig, KVCacheManager
from kvcache.errors import OutOfBlocks
from kvcache.manager import Substitutes

SIZE = 16
"""Tokens of a block."""


class Asked(NamedTuple):
    """One request."""

    tokens: list[int]
    tenant: str | None = None
    """As a salt."""
    seconds: float = 1.0
    """After the one before."""
    label: str | None = None
    """The tenant as a label."""
    model: str | None = None
    """The model as a label."""


def serve(log: Path, requests: Iterable[Asked], *, running: int = 1, **settings: Any) -> Path:
    """Serve these, `running` at a time: the oldest ends when there are more, or when there is no room."""
    now = 1_790_000_000.0
    config = KVCacheConfig(
        **{
            "max_sequence_length": 2048,
            "tokens_per_block": SIZE,
            "enable_partial_reuse": False,
            "secondary_blocks": None,
        }
        | settings
    )
    ages = deque[int]()
    stamps = Substitutes(wall_ns=lambda: round(now * 1e9))
    with KVCacheManager(config, log=log, substitutes=stamps) as manager:
        for number, asked in enumerate(requests):
            now += asked.seconds
            given = {"tenant": asked.label, "model": asked.model}
            labels = {name: value for name, value in given.items() if value is not None} or None
            if len(ages) == running:
                manager.remove_sequence(ages.popleft())
            while True:
                try:
                    manager.add_sequence(number, asked.tokens, cache_salt=asked.tenant, labels=labels)
                    break
                except OutOfBlocks:
                    manager.remove_sequence(ages.popleft())
            manager.store_context_blocks(number, len(asked.tokens) - 1)
            manager.flush()
            ages.append(number)
        for number in ages:
            manager.remove_sequence(number)
        manager.flush()
    return log


def write_trace(path: Path, requests: Iterable[Asked]) -> Path:
    """The same requests as a trace with tokens."""
    lines, now = list[str](), 0.0
    for asked in requests:
        now += asked.seconds
        about = {"timestamp": now, "prompt_token_ids": asked.tokens, "cache_salt": asked.tenant}
        lines.append(json.dumps({**about, "usage": {"completion_tokens": 40}}))
    path.write_text("\n".join(lines) + "\n")
    return path


class Texts:
    """Token ids that are made up: equal names are equal tokens."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def fresh(self, length: int) -> list[int]:
        """Tokens that nobody has had before, as good as surely."""
        return [self._random.randrange(10, 10**9) for _ in range(length)]


def with_an_id(requests: int, *, first: bool = True, head: int = 38, tail: int = 600) -> Iterator[Asked]:
    """Requests that begin with an instruction, in which each has an id of 12 to 14 tokens; or that end with it."""
    texts, dice = Texts(1), random.Random(1)
    begin, end = texts.fresh(head), texts.fresh(tail)
    for _ in range(requests):
        own, question = texts.fresh(dice.randint(12, 14)), texts.fresh(20)
        yield Asked([*begin, *own, *end, *question] if first else [*begin, *end, *question, *own])


def with_a_date(requests: int, days: int) -> Iterator[Asked]:
    """Requests that begin with the day: the same year, one of two months, another day of it."""
    texts = Texts(2)
    end = texts.fresh(600)
    for number in range(requests):
        day = number * days // requests
        yield Asked([2026, 5, 11 + day // 3, 5, 1 + day % 3, *end, *texts.fresh(20)])


def round_robin(requests: int, documents: int, *, blocks: int = 10, seconds: float = 1.0) -> Iterator[Asked]:
    """Questions on some documents in turn."""
    texts = Texts(3)
    known = [texts.fresh(SIZE * blocks) for _ in range(documents)]
    for number in range(requests):
        yield Asked([*known[number % documents], *texts.fresh(SIZE)], seconds=seconds)


def with_a_system_prompt(requests: int, *, every: int, blocks: int = 8) -> Iterator[Asked]:
    """One of some requests has a system prompt, the others are long, and nobody asks for them again."""
    texts = Texts(4)
    system = texts.fresh(SIZE * blocks)
    for number in range(requests):
        yield Asked([*(system if number % every == 0 else texts.fresh(SIZE * 20)), *texts.fresh(SIZE)])


def two_tenants(requests: int, *, flood: int, label: bool = False) -> Iterator[Asked]:
    """A tenant that asks for the same documents again and again, and one that floods the cache so many blocks long."""
    texts = Texts(5)
    known = [texts.fresh(SIZE * 10) for _ in range(3)]
    for number in range(requests):
        quiet = number % 2 == 0
        tokens = [*(known[number // 2 % 3] if quiet else texts.fresh(SIZE * flood)), *texts.fresh(SIZE)]
        name = "quiet" if quiet else "loud"
        yield Asked(tokens, label=name) if label else Asked(tokens, name)
