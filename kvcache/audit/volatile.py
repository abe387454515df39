"""Volatile parts of prompts, such as a date or an id: parts that differ between otherwise equal prompts.

A block is reused only if all before it is the same, so that one token at the beginning of a system prompt can keep
everything after it from being reused. The search takes two passes. The first keeps a sample of the prompts and compares
all pairs: two prompts that are equal up to a position, differ in at most `MOST_VOLATILE` tokens there, and are equal
again for `LEAST_ALIKE` or more. The second counts all prompts that have the part before (`VolatilePart.head`) and the
part after it (`VolatilePart.tail`), and what these would reuse if the volatile part came last.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache.audit.contents import leading_alike

Symbols = npt.NDArray[np.int64]
"""Token ids, or numbers that stand for blocks of tokens."""
MOST_VOLATILE = 64
"""Maximum number of tokens that may differ; an id of 36 letters has at most about as many."""
LEAST_ALIKE = 64
"""Minimum number of equal tokens after the difference."""
_SAMPLED = 128
_LONGEST = 1 << 15
"""Maximum number of leading tokens kept of a sampled prompt."""
_MOST_CANDIDATES = 64
_ITEM = 8


def plain(symbols: npt.NDArray[np.integer]) -> Symbols:
    """Return the leading symbols that are tokens: negative numbers stand for parts of images and the like."""
    others = np.flatnonzero(symbols < 0)
    return symbols[: int(others[0]) if len(others) else None].astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class VolatilePart:
    """Place where otherwise equal prompts differ."""

    head: Symbols
    """Part before it, from the prompt's beginning."""
    tail: Symbols
    """Part after it."""

    def find(self, symbols: Symbols, unit: int) -> tuple[int, int] | None:
        """Return where `tail` begins in a prompt with `head`, and its length there; None if the prompt lacks either. A
        symbol stands for `unit` tokens.
        """
        at, least = len(self.head), _least(unit)
        if not np.array_equal(symbols[:at], self.head):
            return None
        hay = symbols[at : at + _most(unit) + least].tobytes()
        begin = _index(hay, self.tail[:least].tobytes())
        return None if begin is None else (at + begin, leading_alike(symbols[at + begin :], self.tail))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two prompts of the sample that are equal but for a part."""

    one: int
    position: int
    resumes_at: int
    """Place where `one` continues like the other."""
    alike: int


class PromptSample:
    """Uniform sample of the prompts, of bounded size.

    Args:
        unit: Tokens that a symbol stands for: 1, or those of a block.
    """

    def __init__(self, unit: int = 1) -> None:
        self.unit = unit
        self._random = random.Random(0)
        self._kept: list[Symbols] = []
        self._seen = 0

    def add(self, symbols: npt.NDArray[np.integer]) -> None:
        """Add the next prompt."""
        self._seen += 1
        place = self._seen - 1 if self._seen <= _SAMPLED else self._random.randrange(self._seen)
        if place < _SAMPLED:
            self._kept[place : place + 1] = [plain(symbols[:_LONGEST])]

    def part(self) -> VolatilePart | None:
        """Return the part that costs the most tokens in the sample; None if there is none."""
        pairs = self._pairs()
        best, most = None, 0
        for position, head in self._candidates(pairs):
            of = [
                each
                for each in pairs
                if position <= each.position < position + _most(self.unit)
                and self._kept[each.one][:position].tobytes() == head
            ]
            alike = sum(each.alike for each in of)
            if alike > most:
                best, most = self._template(position, of), alike
        return best

    def _pairs(self) -> list[_Pair]:
        found = []
        for one, symbols in enumerate(self._kept):
            for other in self._kept[:one]:
                position = leading_alike(symbols, other)
                if (again := _again(symbols[position:], other[position:], self.unit)) is not None:
                    found.append(_Pair(one, position, position + again[0], again[1]))
        return found

    def _candidates(self, pairs: list[_Pair]) -> list[tuple[int, bytes]]:
        """Return possible starts of parts and what precedes each, the first ones first, so that a date begins with its
        year.
        """
        found = Counter((each.position, self._kept[each.one][: each.position].tobytes()) for each in pairs)
        return sorted(candidate for candidate, _ in found.most_common(_MOST_CANDIDATES))

    def _template(self, position: int, pairs: list[_Pair]) -> VolatilePart:
        """Return the part as in the prompt that equals others for longest; `tail` ends where the last of these does."""
        alike: dict[int, int] = {}
        for each in pairs:
            alike[each.one] = alike.get(each.one, 0) + each.alike
        one = max(alike, key=alike.__getitem__)
        own = [each for each in pairs if each.one == one]
        # Parts may end alike by chance, as two days of a month do; other pairs show the true end.
        resumes_at, stop = (
            max(each.resumes_at for each in own),
            max(each.resumes_at + each.alike for each in own),
        )
        symbols = self._kept[one]
        return VolatilePart(symbols[:position].copy(), symbols[resumes_at:stop].copy())


@dataclass(slots=True)
class VolatileCount:
    """Count of the prompts with a volatile part, and of their reuse if it came last.

    Args:
        part: Part to look for.
        tokens_per_block: Block size for reuse.
        unit: Tokens per symbol.
    """

    part: VolatilePart
    tokens_per_block: int
    unit: int = 1
    shortest: int = -1
    """Minimum number of differing tokens; `longest` is the maximum."""
    longest: int = 0
    tokens: int = 0
    """Prompt tokens that would be reused in a cache of any size, and are not."""
    example: Hashable = None
    """Request that would reuse most."""
    _alike: array[int] = field(default_factory=lambda: array("q"))
    """Per request: tokens after the part that equal those of `part.tail`."""
    _values: set[int] = field(default_factory=set)
    _known: set[int] = field(default_factory=set)
    """Blocks seen in prompts."""
    _moved: set[int] = field(default_factory=set)
    """Blocks that prompts would have if the part came last, by hashes of all tokens up to their ends."""
    _most: int = 0

    @property
    def position(self) -> int:
        """Tokens before the part."""
        return len(self.part.head) * self.unit

    @property
    def requests(self) -> int:
        """Number of requests with the part."""
        return len(self._alike)

    @property
    def values(self) -> int:
        """Number of distinct values."""
        return len(self._values)

    @property
    def alike(self) -> int:
        """Median of the equal tokens after the part."""
        return sorted(self._alike)[len(self._alike) // 2] if self._alike else 0

    def add(
        self,
        request: Hashable,
        scope: Hashable,
        symbols: npt.NDArray[np.integer],
        blocks: Sequence[int],
    ) -> None:
        """Add the next request.

        Args:
            request: Its name.
            scope: Requests reuse only what others of the same scope have computed.
            symbols: Its prompt.
            blocks: The numbers of the full blocks before the prompt's last token, equal for equal blocks after equal
                blocks.
        """
        reused = _leading(blocks, self._known)
        own = plain(symbols)
        if (found := self.part.find(own, self.unit)) is None:
            return
        begin, alike = found
        head = len(self.part.head)
        differing = (begin - head) * self.unit
        self.shortest = differing if self.shortest < 0 else min(self.shortest, differing)
        self.longest = max(self.longest, differing)
        self._alike.append(alike * self.unit)
        self._values.add(hash(own[head:begin].tobytes()))
        moved = np.concatenate([own[:head], own[begin:], own[head:begin]])
        gained = _leading(self._names(scope, moved)[: len(blocks)], self._moved) - reused
        self.tokens += max(gained, 0) * self.tokens_per_block
        if gained > self._most:
            self._most, self.example = gained, request

    def _names(self, scope: Hashable, symbols: Symbols) -> list[int]:
        names, name = list[int](), hash(scope)
        size = self.tokens_per_block // self.unit
        for at in range(0, len(symbols) - size + 1, size):
            name = hash((name, symbols[at : at + size].tobytes()))
            names.append(name)
        return names


def _leading(blocks: Sequence[int], known: set[int]) -> int:
    """Return the number of leading blocks that are known, and add all blocks."""
    leading = next((at for at, block in enumerate(blocks) if block not in known), len(blocks))
    known.update(blocks)
    return leading


def _most(unit: int) -> int:
    """Return the most symbols that may differ: `MOST_VOLATILE` tokens may touch one block more than they fill."""
    return MOST_VOLATILE if unit == 1 else -(-MOST_VOLATILE // unit) + 1


def _least(unit: int) -> int:
    return max(LEAST_ALIKE // unit, 1)


def _again(one: Symbols, other: Symbols, unit: int) -> tuple[int, int] | None:
    """Return where `one`, which differs from `other` in its first symbol, continues like it, and for how long."""
    most, least = _most(unit), _least(unit)
    hay = other[: most + least].tobytes()
    # Each window of `one` holds one of these pieces whole, and few pairs of prompts have any in common.
    half = (least + 1) // 2
    pieces = (one[at : at + half].tobytes() for at in range(0, most + least - half + 1, half))
    if not any(piece in hay for piece in pieces):
        return None
    for begin in range(most + 1):
        window = one[begin : begin + least]
        if len(window) < least:
            return None
        if (at := _index(hay, window.tobytes())) is not None:
            return begin, leading_alike(one[begin:], other[at:])
    return None


def _index(hay: bytes, needle: bytes) -> int | None:
    """Return the first index of `needle` in `hay`, or None."""
    at = hay.find(needle)
    while at >= 0 and at % _ITEM:
        at = hay.find(needle, at + 1)
    return at // _ITEM if at >= 0 else None
