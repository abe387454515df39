"""Stack distances: from how many blocks on a cache would have had each block.

Evicting leaves, least recently used first and the deepest first among those of one request, is plain LRU over blocks
where a request's shallower block counts as the more recent: nobody uses a block without those before it, so the least
recent block of that order is always a leaf. What a cache of C blocks holds is then the C most recent ones, whatever
C is, and a block hits from the size that is its place in the order. Along a chain places only grow, so that a
prefix ends at its first absent block by itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.curve.prefix_sums import PrefixSums
from kvcache.curve.reuses import Reuses

Int64s = npt.NDArray[np.int64]


def misses_by_size(reuses: Reuses) -> Int64s:
    """Entry C: the block requests that a cache of C blocks does not serve. Larger caches than the last are like it."""
    arrivals = np.zeros(reuses.distinct + 2, np.int64)
    """At each size, how many of the block requests hit from there on, less those that do so from the size before."""
    remaining = PrefixSums(len(reuses.lengths))
    """By request, its blocks that no later one has used. Those of one request follow each other in the order."""
    seen = 0
    for request, (length, spans) in enumerate(reuses.prompts()):
        new = length
        for user, count in spans:
            # Whatever is not as old as this span is before it: blocks of later requests, and this prompt's own.
            first = seen - remaining.through(user)
            arrivals[first + 1] += 1
            arrivals[first + 1 + count] -= 1
            remaining.add(user, -count)
            new -= count
        remaining.add(request, length)
        seen += new
    return np.asarray(sum(reuses.lengths) - np.cumsum(np.cumsum(arrivals))[:-1], np.int64)
