"""The four lists of adaptive replacement, and the target that moves between them."""

from __future__ import annotations

from collections import OrderedDict

from kvcache.errors import invariant


class ArcLists:
    """Which cached blocks were used once and which again, and the same of as many that were evicted (ghosts).

    Blocks are known by name. A ghost that comes back says which list was too short: the target, a number of blocks,
    moves towards it, by more the shorter the list of its ghosts is beside the other.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._again: dict[bytes, bool] = {}
        """Of cached blocks, whether they were used again."""
        self._recent = 0
        """How many were not."""
        self._recent_ghosts: OrderedDict[bytes, None] = OrderedDict()
        """Evicted blocks that were used once, in the order of their eviction."""
        self._frequent_ghosts: OrderedDict[bytes, None] = OrderedDict()
        """Evicted blocks that were used again."""
        self.target = 0
        """How many blocks that were used once are to be cached, from 0 to the capacity."""

    def __contains__(self, name: bytes) -> bool:
        return name in self._again

    @property
    def excess(self) -> int:
        """By how many blocks those used once exceed the target: above 0 they go first, else those used again."""
        return self._recent - self.target

    def used_again(self, name: bytes) -> bool:
        """Whether a cached block was used again."""
        return self._again.get(name, False)

    def store(self, name: bytes) -> None:
        """A block is cached that was not: used once, or again if its ghost is known."""
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        again = True
        if name in recent:
            self.target = min(self._capacity, self.target + max(1, len(frequent) // len(recent)))
            del recent[name]
        elif name in frequent:
            self.target = max(0, self.target - max(1, len(recent) // len(frequent)))
            del frequent[name]
        else:
            again = False
        self._again[name] = again
        self._recent += not again

    def find(self, name: bytes) -> None:
        """A cached block is used again."""
        self._recent -= not self._again[name]
        self._again[name] = True

    def evict(self, name: bytes) -> None:
        """A cached block becomes a ghost."""
        again = self._again.pop(name)
        self._recent -= not again
        (self._frequent_ghosts if again else self._recent_ghosts)[name] = None

    def clear(self) -> None:
        """Nothing is cached any more; ghosts and target stay, since nothing was evicted."""
        self._again.clear()
        self._recent = 0

    def forget_ghosts(self) -> None:
        """Forget the oldest ghosts, until they are no more than the capacity.

        To be called behind what was stored: the blocks that made room for it may have the place of its ghosts. So until
        then ghosts can be twice as many.
        """
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        while recent and self._recent + len(recent) > self._capacity:
            recent.popitem(last=False)
        while len(recent) + len(frequent) > self._capacity:
            frequent.popitem(last=False)

    def check(self, cached: set[bytes]) -> None:
        """Raise `InvariantViolated` if a block is in two lists, or in the wrong one, or there are too many ghosts."""
        recent, frequent = self._recent_ghosts.keys(), self._frequent_ghosts.keys()
        invariant(self._again.keys() <= cached, "a block that was evicted is taken to be cached")
        invariant(
            not (recent & frequent or self._again.keys() & (recent | frequent)), "a block is in two lists"
        )
        invariant(self._recent == list(self._again.values()).count(False), "blocks used once are miscounted")
        invariant(len(recent) + len(frequent) <= 2 * self._capacity, "there are too many ghosts")
        invariant(0 <= self.target <= self._capacity, "the target is out of bounds")
