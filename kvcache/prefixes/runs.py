"""Runs of blocks, and who has which of their blocks.

As in `kvcache.fold.prefix_tree`, a *run* is consecutive blocks of one prefix. Here it says what the blocks hold and
nothing else, for all publishers; what each of these has of it is a *holding*.

What a block's hash covers besides tokens (images, a salt) is its *extra*, empty for nearly all. Only the first block
of a run can have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from events.formats.vllm import Hash
from kvcache.prefixes.publisher import Publisher

Adapter = str | int | None
"""A LoRA adapter by its name, or by its number where events give no name; None is the base model."""

Plane = int
"""A group's level: three times the group's index, plus the level."""


class Owner(Protocol):
    """Who has blocks."""

    publisher: Publisher

    def split(self, holding: Holding, at: int, upper: Run) -> None:
        """The first `at` blocks of a run belong to `upper` now; `holding` is what this owner has of the run."""


class Node:
    """What runs hang below: a root, or a run."""

    __slots__ = ("children", "size")

    def __init__(self, size: int) -> None:
        self.children: dict[bytes, Run] = {}
        """By tokens and extra of their first block."""
        self.size = size
        """Blocks of its own; 0 for a root, and for a run that is not in the tree any more."""


class Root(Node):
    """The start of all prompts for one adapter, in blocks of one size."""

    __slots__ = ("adapter", "block_bytes")

    def __init__(self, adapter: Adapter, block_bytes: int) -> None:
        super().__init__(0)
        self.adapter = adapter
        self.block_bytes = block_bytes


class Run(Node):
    """Consecutive blocks of one prefix, at least one of which somebody has, or has something behind it."""

    __slots__ = ("extra", "holders", "key", "parent", "tokens")

    def __init__(self, parent: Node, key: bytes, extra: bytes, tokens: bytearray, size: int) -> None:
        super().__init__(size)
        self.parent = parent
        self.key = key
        self.extra = extra
        self.tokens = tokens
        """int32 each."""
        self.holders: dict[Owner, Holding] = {}
        """Who has something of it, or of what is behind it, and what."""


class Holding:
    """The names that one publisher has given to blocks of a run, and at which levels of which groups these are.

    A publisher may have several names for one content (hashes may cover what no event tells). The first name of each
    block is here, the others are in `more`.
    """

    __slots__ = ("children", "masks", "more", "names", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.names: list[Hash | None] = []
        """By place in the run; None has none. They reach as far as anything known does."""
        self.masks: dict[Plane, int] = {}
        """Bit i of a plane's mask: the block named `names[i]` is there. None is 0."""
        self.children = 0
        """Runs right below this one of which the same publisher has something."""
        self.more: Aliases | None = None

    def place(self, name: Hash) -> int:
        """Where in the run a name stands."""
        names = self.names
        # Mostly it is the last one: what is removed goes leaf first, and what is stored continues.
        return len(names) - 1 if names[-1] == name else names.index(name)

    def there(self) -> dict[Plane, int]:
        """By plane, which blocks of the run are there under any name."""
        if self.more is None:
            return self.masks
        union = dict(self.more.masks)
        for plane, mask in self.masks.items():
            union[plane] = union.get(plane, 0) | mask
        return union

    def end(self) -> int:
        """Blocks of the run up to the last one that is anywhere."""
        masks = self.there()
        return max([mask.bit_length() for mask in masks.values()], default=0)

    def in_plane(self, plane: Plane) -> list[Hash]:
        """The names of blocks that are there."""
        mask = self.masks.get(plane, 0)
        return [name for at, name in enumerate(self.names) if name is not None and mask >> at & 1]

    def mark_name(self, name: Hash, plane: Plane) -> int:
        """Note that one block is there; returns 1 if it was not."""
        return self.mark(plane, self.place(name), 1)

    def mark(self, plane: Plane, at: int, count: int) -> int:
        """Note that `count` blocks are there; returns how many of them were not."""
        before = self.masks.get(plane, 0)
        bits = ((1 << count) - 1) << at
        self.masks[plane] = before | bits
        return count - (before & bits).bit_count()

    def unmark(self, plane: Plane, at: int, count: int) -> int:
        """Note that `count` blocks are not there any more; returns how many of them were."""
        before = self.masks.get(plane, 0)
        bits = before & (((1 << count) - 1) << at)
        if bits == before:
            self.masks.pop(plane, None)
        else:
            self.masks[plane] = before ^ bits
        return bits.bit_count()

    def cut(self, at: int, upper: Run) -> Holding:
        """Give what stands before `at` to a holding of another run; returns that one."""
        above = Holding(upper)
        above.names = self.names[:at]
        del self.names[:at]
        low = (1 << at) - 1
        above.masks = {plane: mask & low for plane, mask in self.masks.items() if mask & low}
        self.masks = {plane: mask >> at for plane, mask in self.masks.items() if mask >> at}
        aliases, self.more = self.more, None
        for name, (place, planes) in {} if aliases is None else aliases.names.items():
            first, its_place = (above, place) if place < at else (self, place - at)
            first.add_alias(name, its_place, planes)
        return above

    def add_alias(self, name: Hash, place: int, planes: int = 0) -> Aliases:
        """One more name of a block, which is in these planes; returns what keeps it."""
        if self.more is None:
            self.more = Aliases(self)
        self.more.names[name] = place, 0
        for plane in planes_of(planes):
            self.more.mark_name(name, plane)
        return self.more


class Aliases:
    """The further names that a publisher has given to blocks of a run; there is any number of them for each block.

    Each is kept only while its block is in some plane under that name.
    """

    __slots__ = ("_counts", "first", "masks", "names")

    def __init__(self, first: Holding) -> None:
        self.first = first
        self.names: dict[Hash, tuple[int, int]] = {}
        """Each name's place in the run, and its planes as bits."""
        self.masks: dict[Plane, int] = {}
        """Bit i of a plane's mask: some alias of block i is there. None is 0."""
        self._counts: dict[tuple[Plane, int], int] = {}
        """How many aliases of a block are in a plane."""

    @property
    def run(self) -> Run:
        """Whose blocks they name."""
        return self.first.run

    def place(self, name: Hash) -> int:
        """Where in the run a name stands."""
        return self.names[name][0]

    def in_plane(self, plane: Plane) -> list[Hash]:
        """The names of blocks that are there."""
        return [name for name, (_, planes) in self.names.items() if planes >> plane & 1]

    def mark_name(self, name: Hash, plane: Plane) -> int:
        """Note that one block is there; returns 1 if it was not."""
        place, planes = self.names[name]
        if planes >> plane & 1:
            return 0
        self.names[name] = place, planes | 1 << plane
        self._counts[plane, place] = self._counts.get((plane, place), 0) + 1
        self.masks[plane] = self.masks.get(plane, 0) | 1 << place
        return 1

    def unmark_name(self, name: Hash, plane: Plane) -> int:
        """Note that one block is not there any more; returns 1 if it was. One that is nowhere has lost the name."""
        place, planes = self.names[name]
        if not planes >> plane & 1:
            return 0
        planes ^= 1 << plane
        if planes:
            self.names[name] = place, planes
        else:
            del self.names[name]
        left = self._counts.pop((plane, place)) - 1
        if left:
            self._counts[plane, place] = left
        elif mask := self.masks[plane] ^ 1 << place:
            self.masks[plane] = mask
        else:
            del self.masks[plane]
        if not self.names:
            self.first.more = None
        return 1


def planes_of(bits: int) -> Iterator[Plane]:
    """The planes that stand in a set of bits."""
    while bits:
        plane = bits.bit_length() - 1
        yield plane
        bits ^= 1 << plane
