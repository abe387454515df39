"""The most blocks that any eviction can keep for later: what LRU is to be measured by.

Whoever knows the future evicts the leaf that is used again last, those that never are before all others. A block is
used again no later than the blocks behind it, so that leaf is also the block that is used again last (Belady's choice);
among equals it is the deepest. At any time the cached blocks that one later request uses next lie together in its
prompt, and the last of them go first. So numbers of blocks tell all: which ones they are need not be known.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvcache.curve.reuses import Reuses, Span


def best_hits(reuses: Reuses, size: int) -> int:
    """Block requests that a cache of `size` blocks can serve at best, by the rule of `kvcache.curve`.

    As with LRU, all blocks of a prompt are cached when it is done; of a longer prompt than the cache the first `size`.
    """
    cache = _Cache(size, len(reuses.lengths))
    later = _next_uses(reuses)
    return sum(cache.serve(request, length, later[request]) for request, length in enumerate(reuses.lengths))


def _next_uses(reuses: Reuses) -> list[list[Span]]:
    """For each request, who uses its blocks next: in the order of the blocks, up to those that are never used again."""
    later: list[list[Span]] = [[] for _ in reuses.lengths]
    for request, (_, spans) in enumerate(reuses.prompts()):
        for user, count in spans:
            later[user].append(Span(request, count))
    return later


class _Cache:
    """How many cached blocks wait for which request."""

    def __init__(self, size: int, requests: int) -> None:
        self._size = self._free = size
        self._waiting = [0] * requests
        """By request, the blocks that it uses before all others: the first of its prompt, since only the last go."""
        self._farthest: list[int] = []
        """The requests that blocks wait for, as a heap; below 0, so that the last one comes first."""
        self._useless = 0
        """Blocks that are never used again."""

    def serve(self, request: int, length: int, later: list[Span]) -> int:
        """Play one request; returns how many of its blocks were there."""
        hits, self._waiting[request] = self._waiting[request], 0
        rest = min(length, self._size)
        self._take(rest - hits)
        for user, count in later:
            part = min(count, rest)
            if part and not self._waiting[user]:
                heappush(self._farthest, -user)
            self._waiting[user] += part
            rest -= part
        self._useless += rest
        return hits

    def _take(self, blocks: int) -> None:
        """Take room for these, and evict what must go. The blocks just used wait for nobody yet, so they stay."""
        self._free -= blocks
        evicted = min(max(-self._free, 0), self._useless)
        self._useless -= evicted
        self._free += evicted
        while self._free < 0:
            user = -self._farthest[0]
            evicted = min(-self._free, self._waiting[user])
            self._waiting[user] -= evicted
            self._free += evicted
            if not self._waiting[user]:
                heappop(self._farthest)
