"""The blocks of one window in an exported state."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys
from events.structs import BLOCK_COLUMNS, RUN_COLUMNS
from events.types import GroupExported, Namespace

_HOLE = -1


class ExportedRun(NamedTuple):
    """Consecutive blocks of one prefix, of which a sliding window may lack some; the last may be a part of one."""

    parent: int
    """Index of the preceding run; below 0: there is none."""
    above: bytes
    """Name of the preceding block; empty at the start of a prompt."""
    names: bytes
    """Empty if blocks have none."""
    symbols: bytes
    """Empty if the state has no tokens."""
    slots: array[int]
    states: list[tuple[int, int, int] | None]
    """Per block: level, priority and the copy in flight to it (0: none); None: it is not cached."""
    full: int
    """Number of full blocks."""
    namespace: Namespace

    def pieces(self) -> Iterator[tuple[tuple[int, int, int], int, int]]:
        """Yield the cached full blocks in runs of one state: the state, the first block, the one after the last."""
        if self.states.count(self.states[0]) == len(self.states):
            parts: list[Sequence[int]] = [range(self.full)]
        else:
            parts = [list(part) for _, part in groupby(range(self.full), self.states.__getitem__)]
        for blocks in parts:
            if blocks and (state := self.states[blocks[0]]) is not None:
                yield state, blocks[0], blocks[-1] + 1

    def name_before(self, block: int) -> bytes:
        """Return the name of the block before `block`."""
        return self.names[(block - 1) * NAME_BYTES : block * NAME_BYTES] if block else self.above


def exported_runs(exported: GroupExported, tokens_per_block: int, key_bytes: int) -> Iterator[ExportedRun]:
    """Yield all runs, parents before children."""
    columns = np.frombuffer(exported.blocks, np.int64).reshape(-1, BLOCK_COLUMNS)[:, [0, 1, -1]].tolist()
    all_slots = array("i", exported.slots)
    token = block = 0
    runs: list[tuple[bytes, Namespace]] = []
    for parent, count, last_tokens, *state in (
        np.frombuffer(exported.runs, np.int64).reshape(-1, RUN_COLUMNS).tolist()
    ):
        above, namespace = runs[parent] if parent >= 0 else (b"", exported.namespaces[-1 - parent])
        keys = exported.keys[block * key_bytes : (block + count) * key_bytes]
        names, slots = names_of_keys(keys, key_bytes), all_slots[block : block + count]
        end = token + (count - 1) * tokens_per_block + last_tokens
        states: list[tuple[int, int, int] | None] = [(state[0], state[1], state[-1])] * count
        if columns:
            rows = zip(slots, columns[block : block + count], strict=True)
            states = [None if slot == _HOLE else (of[0], of[1], of[2]) for slot, of in rows]
        full = count - (last_tokens < tokens_per_block)
        symbols = exported.symbols[token * TOKEN_BYTES : end * TOKEN_BYTES]
        yield ExportedRun(parent, above, names, symbols, slots, states, full, namespace)
        runs.append((names[-NAME_BYTES:], namespace))
        token, block = end, block + count
