"""What an exported state says of the blocks of one window: of the full ones as rows, of all one by one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np

from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys
from events.structs import BLOCK_COLUMNS, RUN_COLUMNS
from events.types import GroupExported, Namespace

_HOLE = -1


class Row(NamedTuple):
    """Consecutive full blocks in one level, brought there by one copy, or by none (0) that is still on its way."""

    level: int
    transfer: int
    slots: array[int]
    names: bytes
    parent: bytes
    """Name of the block before; empty at the start of a prompt."""
    tokens: bytes
    namespace: Namespace


class Block(NamedTuple):
    """A cached block, or the beginning of one."""

    level: int
    priority: int
    parent: bytes
    """The name of the block before; empty at the start of a prompt."""
    symbols: bytes
    namespace: Namespace


def exported_rows(
    exported: GroupExported, tokens_per_block: int, key_bytes: int, *, slides: bool
) -> Iterator[Row]:
    """All rows, parents before children."""
    numbers = np.frombuffer(exported.runs, np.int64).reshape(-1, RUN_COLUMNS).tolist()
    columns = np.frombuffer(exported.blocks, np.int64).reshape(-1, BLOCK_COLUMNS).tolist() if slides else []
    slots = array("i", exported.slots)
    tokens_at = block = 0
    last_names: list[bytes] = []
    namespaces: list[Namespace] = []
    for parent, count, last_tokens, level, *_, transfer in numbers:
        names = names_of_keys(exported.keys[block * key_bytes : (block + count) * key_bytes], key_bytes)
        namespaces.append(namespaces[parent] if parent >= 0 else exported.namespaces[-1 - parent])
        above = last_names[parent] if parent >= 0 else b""
        last_names.append(names[-NAME_BYTES:])
        full = count - (last_tokens < tokens_per_block)
        tokens = exported.symbols[tokens_at : tokens_at + full * tokens_per_block * TOKEN_BYTES]
        row = Row(level, transfer, slots[block : block + full], names, above, tokens, namespaces[-1])
        yield from _without_holes(row, columns[block : block + full]) if slides else [_named(row, full)]
        tokens_at += ((count - 1) * tokens_per_block + last_tokens) * TOKEN_BYTES
        block += count


def _named(row: Row, full: int) -> Row:
    return row._replace(names=row.names[: full * NAME_BYTES])


def _without_holes(run: Row, columns: list[list[int]]) -> Iterator[Row]:
    """The parts of a run whose blocks are cached, in one level and brought by one copy."""
    size = len(run.tokens) // len(columns) if columns else 0
    states = [(slot != _HOLE, of[0], of[-1]) for slot, of in zip(run.slots, columns, strict=True)]
    for (cached, level, transfer), part in groupby(range(len(states)), states.__getitem__):
        blocks = list(part)
        begin, end = blocks[0], blocks[-1] + 1
        if cached:
            yield Row(
                level,
                transfer,
                run.slots[begin:end],
                run.names[begin * NAME_BYTES : end * NAME_BYTES],
                run.names[(begin - 1) * NAME_BYTES : begin * NAME_BYTES] if begin else run.parent,
                run.tokens[begin * size : end * size],
                run.namespace,
            )


def exported_blocks(
    exported: GroupExported, tokens_per_block: int, key_bytes: int, *, slides: bool
) -> Iterator[tuple[bytes, Block]]:
    """All cached blocks with their names, those of which there is a part too, parents first."""
    columns = (
        np.frombuffer(exported.blocks, np.int64).reshape(-1, BLOCK_COLUMNS)[:, :2].tolist() if slides else []
    )
    slots = array("i", exported.slots)
    names = names_of_keys(exported.keys, key_bytes)
    tokens_at = block = 0
    ends: list[tuple[bytes, Namespace]] = []
    numbers = np.frombuffer(exported.runs, np.int64).reshape(-1, RUN_COLUMNS).tolist()
    for parent, count, last_tokens, *state in numbers:
        above, namespace = ends[parent] if parent >= 0 else (b"", exported.namespaces[-1 - parent])
        for number in range(block, block + count):
            size = (tokens_per_block if number < block + count - 1 else last_tokens) * TOKEN_BYTES
            name = names[number * NAME_BYTES : (number + 1) * NAME_BYTES]
            level, priority = columns[number] if slides else state[:2]
            if slots[number] != _HOLE:
                symbols = exported.symbols[tokens_at : tokens_at + size]
                yield name, Block(level, priority, above, symbols, namespace)
            tokens_at += size
            above = name
        block += count
        ends.append((above, namespace))
