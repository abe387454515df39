"""The fingerprint of a state: equal states have the same one, so a replay that gives another one is wrong.

SHA-256 over columns ordered by (group, level, slot), the order of the free slots, and the sequences by handle: where
everything is, and in which order it goes. Where runs begin and end does not enter.

The same fingerprint does not prove that two states decide alike. Contents enter by the names of blocks alone, so that
a log without tokens replays to the same one: with `block_hash="none"` they do not enter. Nor do the tokens, ids and
namespaces of running sequences, what symbols stand for, and `changed_blocks`, which decides when the next checkpoint
is due.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from events.packed import NAME_BYTES
from kvcache.fold.group_state import GroupState
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState

_COLUMNS = 8
"""Per slot: name, parent's name, tokens, priority, expiry, stamp, references, landed."""


def fingerprint(state: CacheState) -> bytes:
    """32 bytes; equal states have equal ones in every process and on every platform."""
    digest = hashlib.sha256()
    for group in state.groups:
        _add_group(digest, group)
    for handle in sorted(state.sequences):
        _add_sequence(digest, state.sequences[handle])
    digest.update(array("q", [state.next_handle, state.next_transfer, state.stamp]).tobytes())
    return digest.digest()


def _add_group(digest: Any, group: GroupState) -> None:
    for level in group.levels:
        columns = np.zeros((_COLUMNS, level.size), np.int64)
        for run in group.tree.runs.values():
            if run.level == level.index:
                _fill(columns, group, run)
        digest.update(columns.tobytes())
        digest.update(level.free.tobytes())
    digest.update(array("q", [n for item in sorted(group.shared.items()) for n in item]).tobytes())


def _fill(columns: npt.NDArray[np.int64], group: GroupState, run: Run) -> None:
    at = np.frombuffer(run.slots, np.int32)
    key_bytes = group.tree.key_bytes
    if key_bytes:
        words = np.frombuffer(bytes(run.keys), "<i8").reshape(-1, key_bytes // NAME_BYTES)
        names = words[:, 0]
        columns[0, at] = names
        columns[1, at[1:]] = names[:-1]
        parent_key = run.parent.key_of_last(key_bytes)
        columns[1, at[0]] = int.from_bytes(parent_key[:NAME_BYTES], "little", signed=True)
    columns[2, at] = group.tokens_per_block
    if run.partial:
        columns[2, at[-1]] = run.partial
    columns[3, at] = run.priority
    columns[4, at] = run.expiry
    columns[5, at] = run.stamp
    columns[6, at] = run.refs
    columns[7, at] = run.transfer == 0


def _add_sequence(digest: Any, sequence: Sequence) -> None:
    extents = [sequence.handle, sequence.num_tokens, sequence.num_prompt_tokens, sequence.computed]
    digest.update(array("q", [*extents, *sequence.stored]).tobytes())
    for table in sequence.tables:
        digest.update(table.tobytes())
