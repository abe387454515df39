"""Which earlier request used each block of a prompt last: all that curves and bounds need of a workload.

A prompt uses all blocks of a chain at once, so whoever used a block has used the blocks before it, too. Along a chain
the last users therefore only get older, and the blocks that one request used last lie together. A prompt is told by
a few such *spans*, not block by block. It is the walk that brings a path of a tree to the front: the number of spans is
O(log n) per request on average.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.errors import UsageError


@dataclass(eq=False, repr=False)
class InconsistentBlocks(UsageError):
    """A prompt's blocks do not lie in one tree; `request` counts prompts from 0, `block` the prompt's blocks."""

    request: int
    block: int
    text = (
        "block {block} of prompt {request} was there before behind other blocks: number blocks so that equal numbers "
        "mean equal content and equal blocks before it"
    )


class Span(NamedTuple):
    """Blocks of a prompt that one earlier request was the last to use: right behind those of the span before."""

    user: int
    """The earlier request, counted from 0."""
    blocks: int


class Reuses:
    """The spans of prompts that come one after the other."""

    def __init__(self) -> None:
        self.lengths = array("q")
        """Blocks of each prompt."""
        self._users, self._blocks = array("q"), array("q")
        """Of all spans, in order."""
        self._ends = array("q")
        """By request, how many spans there are up to its last."""
        self._last: dict[int, int] = {}
        """By block, the last request that used it."""
        self._taken = array("q")
        """By request, how many of its leading blocks later ones have used."""

    @property
    def distinct(self) -> int:
        """How many different blocks there are."""
        return len(self._last)

    def prompts(self) -> Iterator[tuple[int, list[Span]]]:
        """Each prompt's length in blocks, and its spans; blocks behind these were never there before."""
        begin = 0
        for length, end in zip(self.lengths, self._ends, strict=True):
            yield length, list(map(Span, self._users[begin:end], self._blocks[begin:end]))
            begin = end

    def add(self, blocks: Sequence[int]) -> None:
        """The next prompt. Equal numbers must mean equal blocks behind equal blocks.

        Raises `InconsistentBlocks` where it sees that they do not; nothing can be added then.
        """
        last, now, begin, length = self._last, len(self.lengths), 0, len(blocks)
        while begin < length and (user := last.get(blocks[begin])) is not None:
            if self._taken[user] != begin:
                raise InconsistentBlocks(now, begin)
            end = self._end(blocks, begin, user)
            self._users.append(user)
            self._blocks.append(end - begin)
            self._taken[user] = begin = end
        known = len(last)
        last.update(dict.fromkeys(blocks, now))
        if len(last) - known != length - begin:
            raise InconsistentBlocks(now, begin)
        self.lengths.append(length)
        self._ends.append(len(self._users))
        self._taken.append(0)

    def _end(self, blocks: Sequence[int], begin: int, user: int) -> int:
        """Where the blocks end that this request was the last to use."""
        last = self._last
        most = min(len(blocks), self.lengths[user])
        return bisect_left(blocks, 1, begin + 1, most, key=lambda block: last.get(block) != user)
