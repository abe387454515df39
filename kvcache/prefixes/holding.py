"""What one publisher has of one run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from events.formats.vllm import Hash

if TYPE_CHECKING:
    from kvcache.prefixes.tree import Run

Plane = int
"""A group's level: three times the group's index, plus the level."""


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
