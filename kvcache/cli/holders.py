"""How much of a prompt each worker holds, by the tokens that its events carry."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from events.subscribe.continuity import Report
from kvcache.prefixes.index import PrefixIndex

Held = tuple[int, int, int]
"""Tokens of the longest prefix that lies on the GPU, and by how many host memory, and then storage, makes it longer."""
NOTHING: Held = (0, 0, 0)


class Prompt(NamedTuple):
    """What is looked for."""

    tokens: tuple[int, ...]
    adapter: str | int | None = None
    """LoRA, by its name or number."""
    salt: str | None = None


class Holders:
    """Who holds how much of one prompt."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._index = PrefixIndex()

    def fold(self, worker: Hashable, report: Report) -> None:
        """Take in what a worker says."""
        self._index.fold(worker, report)

    def match(self) -> dict[tuple[Hashable, int], Held]:
        """For each worker and rank the longest prefix of which all blocks are there, as all groups have it."""
        found: dict[tuple[Hashable, int], Held] = {
            (each.worker, each.rank): NOTHING for each in self._index.publishers
        }
        for adapter, salt in _spellings(self._prompt):
            for whose, overlap in self._index.match(self._prompt.tokens, lora=adapter, salt=salt).items():
                primary, secondary, storage = overlap
                held = (primary, secondary - primary, storage - secondary)
                key = (whose.worker, whose.rank)
                found[key] = max(found.get(key, NOTHING), held, key=sum)
        return found


def _spellings(prompt: Prompt) -> Iterator[tuple[str | int | None, str | None]]:
    """The prompt's adapter and salt as publishers may tell them: a number as a name, a salt by its digest."""
    adapters: list[str | int | None] = [prompt.adapter]
    if isinstance(prompt.adapter, int):
        adapters.append(str(prompt.adapter))
    salt = prompt.salt
    salts = [None] if salt is None else [salt, hashlib.sha256(salt.encode()).hexdigest()]
    yield from ((adapter, salt) for adapter in adapters for salt in salts)
