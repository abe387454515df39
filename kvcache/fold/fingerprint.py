"""The fingerprint of a state: equal states have the same one, so a replay that gives another one is wrong.

SHA-256 over columns ordered by (group, level, slot), the order of the blank slots, and the sequences by handle: the
place of everything, and its order. Run boundaries do not enter.

The same fingerprint does not prove that two states decide alike. Contents enter by the names of blocks alone, so that a
log without tokens replays to the same one: with `block_hash="none"` they do not enter. Nor do the tokens, ids and
namespaces of running sequences, the meaning of symbols, and `changed_blocks`, which decides when the next checkpoint is
due.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from events.packed import NAME_BYTES
from kvcache.fold.group import Level, UseCounts
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import Sequence
from kvcache.fold.sliding_group import AnyGroup, SlidingGroup
from kvcache.fold.state import CacheState

_COLUMNS = 9
"""Per slot: name, parent's name, tokens, priority, duration, expiry, stamp, references, landed."""


def fingerprint(state: CacheState) -> bytes:
    """Return 32 bytes; equal states have equal ones in every process and on every platform."""
    digest = hashlib.sha256()
    for group in state.groups:
        _add_group(digest, group)
    for handle in sorted(state.sequences):
        _add_sequence(digest, state.sequences[handle])
    for shared in [group.export() for group in state.positional]:
        for column in (
            shared.named,
            shared.keys,
            shared.positions,
            shared.handles,
            shared.indices,
            shared.slots,
        ):
            digest.update(column)
    for number, pin in sorted(state.pins.items()):
        digest.update(array("q", [number, pin.named, *map(len, pin.slots)]))
        for slots in pin.slots:
            digest.update(slots)
    digest.update(
        array("q", [state.next_handle, state.next_transfer, state.releases, state.clock, state.next_pin])
    )
    return digest.digest()


def _add_group(digest: Any, group: AnyGroup) -> None:
    for level in group.levels:
        columns = np.zeros((level.size, _COLUMNS), np.int64)
        runs = [run for run in group.tree.runs.values() if run.level == level.index]
        if isinstance(group, SlidingGroup):
            _add_sliding(group, level, columns)
        elif runs:
            # All runs at once: an array for each would be most of the work.
            slots = np.frombuffer(b"".join([run.slots for run in runs]), np.int32)
            columns[slots] = _rows(group, runs)
        digest.update(columns.ravel())
        digest.update(level.blank)
    if group.uses is not None:
        _add_uses(digest, group, group.uses)
    if (checksums := group.landed_checksums()) is not None:
        digest.update(checksums)
    digest.update(array("q", [n for item in sorted(group.shared.items()) for n in item]))


def _add_uses(digest: Any, group: AnyGroup, uses: UseCounts) -> None:
    """Add the credits of cached blocks by level and slot, and the use counts."""
    for level in group.levels:
        column = np.zeros(level.size, np.int64)
        for run in group.tree.runs.values():
            if run.credit and run.level == level.index:
                column[np.frombuffer(run.slots, np.int32)] = run.credit
        digest.update(column)
    digest.update(uses.numbers())


def _add_sliding(group: SlidingGroup, level: Level, columns: npt.NDArray[np.int64]) -> None:
    """Add the rows of the cached blocks of a sliding window in one level."""
    runs = list(group.tree.runs.values())
    if not runs:
        return
    names = _rows(group, runs)[:, :3]
    places = np.frombuffer(b"".join([run.slots for run in runs]), np.int32)
    begin = level.index * group.levels[0].size
    here = (places >= begin) & (places < begin + level.size)
    at = places[here]
    columns[at - begin, :3] = names[here]
    for column, name in enumerate(("priorities", "durations", "expiries", "released_at", "refs"), 3):
        columns[at - begin, column] = group.views[name][at]
    columns[at - begin, 8] = group.views["transfers"][at] == 0


def _rows(group: AnyGroup, runs: list[Run]) -> npt.NDArray[np.int64]:
    """Build a row for each block of these runs, one run after the other."""
    full, key_bytes = group.tokens_per_block, group.tree.key_bytes
    lengths = np.array([len(run.slots) for run in runs])
    ends = lengths.cumsum()
    rows = np.zeros((ends[-1], _COLUMNS), np.int64)
    equal = [
        (full, run.priority, run.duration, run.expiry, run.released_at, run.refs, run.transfer == 0)
        for run in runs
    ]
    rows[:, 2:] = np.repeat(np.array(equal, np.int64), lengths, axis=0)
    rows[ends - 1, 2] = [run.partial or full for run in runs]
    if key_bytes:
        keys = np.frombuffer(b"".join([run.keys for run in runs]), "<i8")
        rows[:, 0] = keys[:: key_bytes // NAME_BYTES]
        rows[1:, 1] = rows[:-1, 0]
        above = b"".join([run.parent.key_of_last(key_bytes)[:NAME_BYTES] for run in runs])
        rows[ends - lengths, 1] = np.frombuffer(above, "<i8")
    return rows


def _add_sequence(digest: Any, sequence: Sequence) -> None:
    extents = [sequence.handle, sequence.num_tokens, sequence.num_prompt_tokens, sequence.computed]
    digest.update(array("q", [*extents, *sequence.stored]))
    for table in sequence.tables:
        digest.update(table)
    if sequence.replaced:
        digest.update(array("q", map(len, sequence.replaced)))
        for slots in sequence.replaced:
            digest.update(slots)
    digest.update(msgspec.msgpack.encode((sequence.retention, sequence.inherited)))
    if sequence.encoder is not None:
        digest.update(array("q", [sequence.encoder.handle]))
