"""How a block is kept: with which priority, and for how long it has that once nobody holds it.

A block takes what its request states for its first token. A copy takes what its source had, where nothing is stated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcache.fold.sequence import Sequence
from kvcache.fold.slots import DEFAULT_PRIORITY


class Kept(NamedTuple):
    """How a block is kept."""

    priority: int
    duration: int
    """In nanoseconds from when the last sequence lets go of it; 0: for good."""


DEFAULT = Kept(DEFAULT_PRIORITY, 0)


def kept(sequence: Sequence, group: int, block: int, size: int) -> Kept:
    """How a block of a sequence is to be kept when it is stored."""
    retention, start = sequence.retention, block * size
    if retention is not None:
        if start >= sequence.num_prompt_tokens:
            return Kept(retention.priority, retention.duration)
        for stated in retention.ranges:
            if stated.start <= start and (stated.stop is None or start < stated.stop):
                return Kept(stated.priority, stated.duration)
    for copied in sequence.inherited:
        if (copied.group, copied.block) == (group, block):
            return Kept(copied.priority, copied.duration)
    return DEFAULT


def rows(sequence: Sequence, group: int, first: int, last: int, size: int) -> Iterator[tuple[int, int, Kept]]:
    """Consecutive blocks that are to be kept alike: from, up to, and how."""
    begin, how = first, kept(sequence, group, first, size)
    for cut in _cuts(sequence, size):
        if begin < cut < last:
            beyond = kept(sequence, group, cut, size)
            if beyond != how:
                yield begin, cut, how
                begin, how = cut, beyond
    yield begin, last, how


def _cuts(sequence: Sequence, size: int) -> list[int]:
    """The blocks before which what is stated may change, ascending."""
    cuts = {-(-sequence.num_prompt_tokens // size)}
    for stated in sequence.retention.ranges if sequence.retention is not None else ():
        cuts.add(-(-stated.start // size))
        cuts.add(-(-(stated.stop or 0) // size))
    for copied in sequence.inherited:
        cuts |= {copied.block, copied.block + 1}
    return sorted(cuts)
