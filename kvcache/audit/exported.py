"""What an exported state has cached, as contents."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys
from events.structs import BLOCK_COLUMNS, RUN_COLUMNS
from events.types import GroupExported, Namespace
from kvcache.audit.columns import Ids
from kvcache.audit.contents import ContentIds

Cached = tuple[Ids, npt.NDArray[np.int32], int, int, bytes]
"""Contents, their slots, their level and priority, their names (none: the log has none)."""
_HOLE = -1


def cached_in(
    exported: GroupExported, known: ContentIds, tokens_per_block: int, key_bytes: int, *, with_tokens: bool
) -> Iterator[Cached]:
    """The full blocks of one group, run by run."""
    numbers = np.frombuffer(exported.runs, np.int64).reshape(-1, RUN_COLUMNS).tolist()
    of_blocks = np.frombuffer(exported.blocks, np.int64).reshape(-1, BLOCK_COLUMNS)
    slots = np.frombuffer(exported.slots, np.int32)
    ends: list[tuple[int, int]] = []
    namespaces: list[Namespace] = []
    token = block = 0
    for parent, count, last_tokens, level, priority, *_ in numbers:
        namespaces.append(namespaces[parent] if parent >= 0 else exported.namespaces[-1 - parent])
        full = count - (last_tokens < tokens_per_block)
        own = slots[block : block + full]
        keys = exported.keys[block * key_bytes : (block + full) * key_bytes]
        names = names_of_keys(keys, key_bytes) if keys else b""
        if with_tokens:
            ids = array("q")
            symbols = exported.symbols[token * TOKEN_BYTES : (token + full * tokens_per_block) * TOKEN_BYTES]
            chain, above = ends[parent] if parent >= 0 else (0, -1)
            chain = known.extend(ids, chain, namespaces[-1], symbols, tokens_per_block * TOKEN_BYTES, above)
            ends.append((chain, ids[-1] if ids else above))
        else:
            ids = known.named(names)
        contents = np.array(ids, np.intp)
        if len(of_blocks):
            yield from _one_by_one(contents, own, of_blocks[block : block + full].tolist(), names)
        elif full:
            yield contents, own, level, priority, names
        token += (count - 1) * tokens_per_block + last_tokens
        block += count


def _one_by_one(
    ids: Ids, slots: npt.NDArray[np.int32], columns: list[list[int]], names: bytes
) -> Iterator[Cached]:
    for at, (level, priority, *_) in enumerate(columns):
        if slots[at] != _HOLE:
            name = names[at * NAME_BYTES : (at + 1) * NAME_BYTES]
            yield ids[at : at + 1], slots[at : at + 1], level, priority, name
