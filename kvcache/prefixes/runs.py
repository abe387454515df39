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

    A publisher may have several names for one content (hashes may cover what no event tells). The first names of the
    blocks are in the holding that the run knows, the second ones in the one behind it (`more`), and so on.
    """

    __slots__ = ("children", "masks", "more", "names", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.names: list[Hash | None] = []
        """By place in the run; None has none. Those of the first holding reach as far as anything known does."""
        self.masks: dict[Plane, int] = {}
        """Bit i of a plane's mask: the block named `names[i]` is there. None is 0."""
        self.children = 0
        """Runs right below this one of which the same publisher has something. Counts in the first holding only."""
        self.more: Holding | None = None

    def place(self, name: Hash) -> int:
        """Where in the run a name stands."""
        names = self.names
        # Mostly it is the last one: what is removed goes leaf first, and what is stored continues.
        return len(names) - 1 if names[-1] == name else names.index(name)

    def layers(self) -> Iterator[Holding]:
        """This holding and those behind it."""
        layer: Holding | None = self
        while layer is not None:
            yield layer
            layer = layer.more

    def there(self) -> dict[Plane, int]:
        """By plane, which blocks of the run are there under any name."""
        if self.more is None:
            return self.masks
        union = dict(self.masks)
        for layer in self.more.layers():
            for plane, mask in layer.masks.items():
                union[plane] = union.get(plane, 0) | mask
        return union

    def end(self) -> int:
        """Blocks of the run up to the last one that is anywhere."""
        if self.more is None and len(self.masks) < 2:
            for mask in self.masks.values():
                return mask.bit_length()
            return 0
        return max((mask.bit_length() for layer in self.layers() for mask in layer.masks.values()), default=0)

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
        return above


def chained(layers: list[Holding]) -> Holding:
    """Holdings of one run behind each other; without those, but for the first, that name nothing."""
    first = layers[0]
    last = first
    for layer in layers[1:]:
        if layer.masks:
            last.more = layer
            last = layer
    last.more = None
    return first
