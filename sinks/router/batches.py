"""Cuts changes into batches of bounded size, in order.

Sizes are bounds from above, computed from lengths alone: encoding to find out would cost more than everything
else. A store of many blocks is cut between two blocks; a single block is never cut, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from events.feed.changes import AnyChange, Removed, Stored, Told
from events.packed import NAME_BYTES, TOKEN_BYTES
from events.types import Namespace

BATCH_BYTES = 64
CHANGE_BYTES = 512
"""Bounds what surrounds the columns of a batch and of a change: field names, headers, a salt's digest."""
BLOCK_BYTES = 16
"""Bounds a name and what else is said about a block, besides its LoRA adapter."""
NUMBER_BYTES = 24
EXTRA_BYTES = 80
"""Bounds an item in a block: its digest in hex, and where it begins."""
WIRE_TOKEN_BYTES = 5
_PLAIN = Namespace()


def change_bytes(change: AnyChange) -> int:
    """A bound for the size of the encoded change."""
    if isinstance(change, Stored):
        # Without calls: this is asked for every block that decoding fills.
        blocks = len(change.names) // NAME_BYTES
        size = CHANGE_BYTES + blocks * BLOCK_BYTES + len(change.tokens) // TOKEN_BYTES * WIRE_TOKEN_BYTES
        if change.extras:
            size += sum(map(len, change.extras)) * EXTRA_BYTES
        return size if change.namespace == _PLAIN else size + (blocks + 1) * _lora_bytes(change)
    if isinstance(change, Removed):
        return CHANGE_BYTES + len(change.names) // NAME_BYTES * BLOCK_BYTES
    return len(change.encoded) if isinstance(change, Told) else CHANGE_BYTES


def in_batches(changes: Iterable[AnyChange], max_bytes: int) -> Iterator[list[AnyChange]]:
    """The changes, in order, in lists that encode to at most `max_bytes` where single blocks allow it."""
    batch: list[AnyChange] = []
    total = BATCH_BYTES
    for change in changes:
        size = change_bytes(change)
        fits = size <= max_bytes - BATCH_BYTES
        for piece in (change,) if fits else _cut(change, max_bytes - BATCH_BYTES):
            if not fits:
                size = change_bytes(piece)
            if batch and total + size > max_bytes:
                yield batch
                batch, total = [], BATCH_BYTES
            batch.append(piece)
            total += size
    if batch:
        yield batch


def _cut(change: AnyChange, max_bytes: int) -> Iterator[AnyChange]:
    if isinstance(change, Stored):
        lora = _lora_bytes(change)
        items = max(map(len, change.extras), default=0)
        block = BLOCK_BYTES + lora + change.tokens_per_block * WIRE_TOKEN_BYTES + items * EXTRA_BYTES
        yield from _cut_stored(change, max(1, (max_bytes - CHANGE_BYTES - lora) // block))
    elif isinstance(change, Removed):
        step = max(1, (max_bytes - CHANGE_BYTES) // BLOCK_BYTES) * NAME_BYTES
        for at in range(0, len(change.names), step):
            yield Removed(change.group, change.level, change.names[at : at + step])
    else:
        yield change


def _cut_stored(change: Stored, blocks: int) -> Iterator[Stored]:
    step = blocks * NAME_BYTES
    tokens_step = blocks * change.tokens_per_block * TOKEN_BYTES
    parent = change.parent
    for index, at in enumerate(range(0, len(change.names), step)):
        names = change.names[at : at + step]
        yield Stored(
            change.group,
            change.level,
            names,
            parent,
            change.tokens[index * tokens_step : (index + 1) * tokens_step],
            change.tokens_per_block,
            change.namespace,
            change.extras[index * blocks : (index + 1) * blocks],
            change.padded[index * tokens_step : (index + 1) * tokens_step],
        )
        parent = names[-NAME_BYTES:]


def _lora_bytes(change: Stored) -> int:
    # A character is up to 4 bytes in UTF-8. An adapter without a name goes by its number.
    name = change.namespace.lora_name
    return 4 * len(name) if name is not None else NUMBER_BYTES * (change.namespace.lora_id is not None)
