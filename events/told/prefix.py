"""How much of a prompt each worker has, as far as engines say which tokens are in their blocks.

A prefix is there up to the first block that is in no place of the group. Of several groups with full attention the one
that has least decides. In windows that slide, engines do not say which block has which tokens: such groups do not
count.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from events.packed import TOKEN_BYTES
from events.told.blocks import Block
from events.told.state import Worker
from events.types import Hash


class Prefix(NamedTuple):
    """What a worker has of a prompt."""

    worker: Worker
    tokens: int
    blocks: int
    media: dict[str, int]
    """Blocks by the best place that each is in, in the worker's own words."""


def longest_prefixes(
    workers: Iterable[Worker], tokens: bytes, *, lora: str | None = None, salt: str | None = None
) -> list[Prefix]:
    """Of each worker what it has, most first; `tokens` are int32 LE. Also what its last token is in counts."""
    found = [_longest(worker, tokens, lora, salt) for worker in workers]
    return sorted(found, key=lambda prefix: -prefix.tokens)


def _longest(worker: Worker, tokens: bytes, lora: str | None, salt: str | None) -> Prefix:
    groups: dict[int, list[tuple[str, Block]]] = {}
    for place, there in worker.blocks.items():
        for block in there.values():
            groups.setdefault(place.group, []).append((place.medium, block))
    paths = [_path(blocks, tokens, lora, salt) for blocks in groups.values() if blocks[0][1].scope.chained]
    if not paths:
        return Prefix(worker, 0, 0, {})
    path = min(paths, key=lambda found: sum(size for _, size in found))
    media: dict[str, int] = {}
    for medium, _ in path:
        media[medium] = media.get(medium, 0) + 1
    return Prefix(worker, sum(size for _, size in path), len(path), media)


def _path(
    blocks: Iterable[tuple[str, Block]], tokens: bytes, lora: str | None, salt: str | None
) -> list[tuple[str, int]]:
    """The medium and the tokens of each block from the prompt's beginning on."""
    behind: dict[Hash | None, list[tuple[str, Block]]] = {}
    for medium, block in blocks:
        if block.tokens:
            behind.setdefault(block.parent, []).append((medium, block))
    path: list[tuple[str, int]] = []
    parent: Hash | None = None
    at = 0
    while True:
        here = [
            (medium, block)
            for medium, block in behind.get(parent, ())
            if tokens[at : at + len(block.tokens)] == block.tokens
            and _suits(block, lora, salt if not at else None)
        ]
        if not here:
            return path
        medium, block = min(here, key=lambda found: found[0] != "GPU")
        path.append((medium, len(block.tokens) // TOKEN_BYTES))
        at, parent = at + len(block.tokens), block.name


def _suits(block: Block, lora: str | None, salt: str | None) -> bool:
    """Whether a prompt with this adapter and, at its beginning, this salt may have the block.

    Engines tell a salt as it is, or as its SHA-256 in hex. What else a block's hash covers (images), no prompt of plain
    tokens has.
    """
    event = block.scope.event
    adapter = event.lora_name if event.lora_name is not None or event.lora_id is None else str(event.lora_id)
    if adapter != lora:
        return False
    extra = [key for key in block.field("extra_keys") or () if key != adapter]
    told = extra or (
        [block.field("cache_salt")] if block.parent is None and block.field("cache_salt") else []
    )
    if salt is None:
        return not told
    return len(told) == 1 and told[0] in (salt, sha256(salt.encode()).hexdigest())
