"""How much of a prompt a worker holds, by the tokens that its events carry."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol

from events.formats.vllm import Hash
from events.subscribe.continuity import Received, Report
from events.subscribe.index import GPU, HOST, STORAGE, Block, Index

LEVELS = (GPU, HOST, STORAGE)
Held = tuple[int, int, int]
"""Tokens of the longest prefix that lie on the GPU, in host memory and in storage; each counts where it is fastest."""
NOTHING: Held = (0, 0, 0)


class Prompt(NamedTuple):
    """What is looked for."""

    tokens: tuple[int, ...]
    adapter: str | int | None = None
    """LoRA, by its name or number."""
    salt: str | None = None


class Holders(Protocol):
    """Who holds how much of one prompt."""

    def fold(self, worker: Hashable, report: Report) -> None:
        """Take in what a worker says."""

    def match(self) -> dict[tuple[Hashable, int], Held]:
        """For each worker and rank the longest prefix of which each block is in some level."""


class Walk:
    """Holders by an index for each worker, looked through where something has changed."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._indexes: dict[tuple[Hashable, int], Index] = {}
        self._found: dict[tuple[Hashable, int], tuple[tuple[int, int], Held]] = {}

    def fold(self, worker: Hashable, report: Report) -> None:
        """Take in what a worker says; a batch is about the rank that it names, all else about all ranks."""
        if isinstance(report, Received):
            self._indexes.setdefault((worker, report.batch.rank or 0), Index()).fold(report)
            return
        for (whose, _), index in self._indexes.items():
            if whose == worker:
                index.fold(report)

    def match(self) -> dict[tuple[Hashable, int], Held]:
        """As `Holders` says."""
        for key, index in self._indexes.items():
            version = (index.events, index.restarts)
            if key not in self._found or self._found[key][0] != version:
                self._found[key] = version, held_prefix(index, self._prompt)
        return {key: held for key, (_, held) in self._found.items()}


def held_prefix(index: Index, prompt: Prompt) -> Held:
    """Walk over all blocks once, and then along the prompt; of several attention groups the best one counts."""
    groups = {group for group, _ in index.blocks}
    return max((_in_group(index, group, prompt) for group in groups), key=sum, default=NOTHING)


def _in_group(index: Index, group: int, prompt: Prompt) -> Held:
    by_level = [index.blocks.get((group, level), {}) for level in LEVELS]
    size = next((len(block.tokens) for blocks in by_level for block in blocks.values() if block.tokens), 0)
    if not size:
        return NOTHING
    wanted = set(_chunks(prompt.tokens, size))
    found: dict[tuple[Hash | None, tuple[object, ...]], tuple[Hash, int]] = {}
    for level, blocks in zip(LEVELS, by_level, strict=True):
        for name, block in blocks.items():
            if block.tokens in wanted and _fits(block, prompt):
                found.setdefault((block.parent, block.tokens), (name, level))
    tokens = [0, 0, 0]
    parent: Hash | None = None
    for chunk in _chunks(prompt.tokens, size):
        if (parent, chunk) not in found:
            break
        parent, level = found[parent, chunk]
        tokens[level] += size
    return tokens[0], tokens[1], tokens[2]


def _chunks(tokens: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    return (tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size))


def _fits(block: Block, prompt: Prompt) -> bool:
    """Whether a block belongs to the prompt's adapter and salt. Publishers tell the salt in the first block only."""
    if not block.extra and block.parent is not None:
        return True
    adapters = () if prompt.adapter is None else (prompt.adapter, str(prompt.adapter))
    salts = () if prompt.salt is None else (prompt.salt, hashlib.sha256(prompt.salt.encode()).hexdigest())
    if not all(key in adapters or key in salts for key in block.extra):
        return False
    if block.parent is not None:
        return True
    return all(not names or any(name in block.extra for name in names) for names in (adapters, salts))
