"""Prefix cache by blocks, with a choice of eviction orders; compiled if numba is installed.

The rule is that of `kvcache.audit.curve`: a prompt hits the longest cached prefix, then all of its blocks are cached,
and only leaves are evicted. A request can hold its blocks for a time; held blocks are not evicted, and a prompt that
does not fit next to them is cached up to the available room.

Unheld leaves are in heaps with the next victim at the top, and the victim is taken from the lowest heap that is not
empty. So a hit takes a few array accesses, and an eviction time logarithmic in the number of leaves. Everything here is
a function of arrays: numba compiles these; without it they run uncompiled, a hundred times slower or more.

Numba's files on disk contain the names of the classes here and of this module: if a class is renamed, the module must
be renamed as well, or numba loads older files that do not match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import numba
except ImportError:
    COMPILED = False
else:
    COMPILED = True


def compiled(function: Function) -> Function:
    """Compile a function at its first call, and cache the result on disk; return it unchanged without numba."""
    return cast(Function, numba.njit(cache=True)(function)) if COMPILED else function


LEVELS, FIFO, RANK, SEGMENTS, S3FIFO = range(5)
"""Kinds of order: LRU within levels; FIFO; a rank that grows with uses; two segments, each LRU; S3-FIFO."""
HEAPS = 6
_TAIL = 5
"""Heap of protected blocks without a protected child; the others are of leaves."""
_STAMP, _USED, _PART, _GHOSTS = range(4)
"""Indices of `PrefixCache.numbers`: clock of uses, cached blocks, blocks that are protected or in the small queue, and
number of evictions from the small queue."""
_MOST_USES = 3
"""Upper limit of S3-FIFO's counts."""


class PlayedRequests(NamedTuple):
    """Requests to replay: the blocks of all prompts one after the other, numbered from 0."""

    blocks: Any
    begins: Any
    """Per request: index of its first block; with one more entry for the end."""
    parents: Any
    """Per block: the previous one; -1: none."""
    depths: Any
    """Per block: number of blocks before it."""
    moments: Any
    """Events in order of time: a request's arrival, or ``~request`` for its end."""
    arrivals: Any
    """Per request: arrival in seconds."""
    ends: Any


class Order(NamedTuple):
    """Eviction order for one workload."""

    kind: int
    heaps: Any
    """Per request: heap of the blocks that it was the last to use. The lowest goes first."""
    splits: Any
    """Per request: depth from which on its blocks are in heap 0 instead."""
    ages: Any
    """Per heap: seconds after the end of their last request at which blocks leave it."""
    below: Any
    """Per heap: the heap that they move to."""
    weights: Any
    """Per depth: increase of a rank by a use; deeper ones count as the last."""
    part: int
    """Limit of protected blocks, or target of the small queue."""


_BLOCK = np.dtype(
    [
        ("keys", np.float64),
        ("ties", np.int64),
        ("ghosts", np.int64),
        ("children", np.int32),
        ("users", np.int32),
        ("uses", np.int32),
        ("protected", np.int32),
        ("places", np.int32),
        ("tail_places", np.int32),
        ("cached", np.int8),
        ("segments", np.int8),
        ("in_heap", np.int8),
    ],
    align=True,
)
"""State of a block:

- `keys`, `ties`: the lowest key, then the lowest tie, is the top of a heap
- `ghosts`: its last eviction from the small queue, as a number of `_GHOSTS`; 0: none since it was stored
- `children`: number of cached children, and of requests that hold the block as their last
- `users`: the last request that used it; `uses`: number of uses
- `protected`: protected children
- `places`, `tail_places`: its index in a heap of leaves, and in that of the tail; -1: none
- `segments`: 1 if it is protected, or in the main queue
- `in_heap`: the heap of leaves in which it is
"""


class PrefixCache(NamedTuple):
    """State of one cache."""

    blocks: Any
    """Array of `_BLOCK`."""
    trees: Any
    """The heaps."""
    sizes: Any
    """Per heap: number of its blocks."""
    numbers: Any
    clock: Any
    """Single entry: the highest rank of a victim."""
    hits: Any
    """Per request: number of blocks that hit."""
    held: Any
    """Per request: number of blocks that it found and stored."""


def new_cache(size: int, requests: int, blocks: int) -> PrefixCache:
    """Return an empty cache of `size` blocks."""
    state = np.zeros(blocks, _BLOCK)
    state["places"] = state["tail_places"] = -1
    return PrefixCache(
        blocks=state,
        trees=np.full((HEAPS, min(size, blocks) + 1), -1, np.int32),
        sizes=np.zeros(HEAPS, np.int64),
        numbers=np.zeros(4, np.int64),
        clock=np.zeros(1, np.float64),
        hits=np.zeros(requests, np.int32),
        held=np.zeros(requests, np.int32),
    )


# -- heaps


@compiled
def _places(cache: PrefixCache, heap: int) -> Any:
    if heap == _TAIL:
        return cache.blocks["tail_places"]
    return cache.blocks["places"]


@compiled
def _rise(cache: PrefixCache, heap: int, at: int) -> None:
    tree, places = cache.trees[heap], _places(cache, heap)
    keys, ties = cache.blocks["keys"], cache.blocks["ties"]
    block = tree[at]
    key, tie = keys[block], ties[block]
    while at:
        above = (at - 1) // 2
        other = tree[above]
        if keys[other] < key or (keys[other] == key and ties[other] <= tie):
            break
        tree[at] = other
        places[other] = at
        at = above
    tree[at] = block
    places[block] = at


@compiled
def _sink(cache: PrefixCache, heap: int, at: int) -> None:
    tree, places = cache.trees[heap], _places(cache, heap)
    keys, ties = cache.blocks["keys"], cache.blocks["ties"]
    size, block = cache.sizes[heap], tree[at]
    key, tie = keys[block], ties[block]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        child = tree[below]
        if below + 1 < size:
            other = tree[below + 1]
            if keys[other] < keys[child] or (keys[other] == keys[child] and ties[other] < ties[child]):
                below, child = below + 1, other
        if key < keys[child] or (key == keys[child] and tie <= ties[child]):
            break
        tree[at] = child
        places[child] = at
        at = below
    tree[at] = block
    places[block] = at


@compiled
def _push(cache: PrefixCache, heap: int, block: int) -> None:
    at = cache.sizes[heap]
    cache.sizes[heap] = at + 1
    cache.trees[heap][at] = block
    if heap != _TAIL:
        cache.blocks["in_heap"][block] = heap
    _rise(cache, heap, at)


@compiled
def _remove(cache: PrefixCache, heap: int, block: int) -> None:
    tree, places = cache.trees[heap], _places(cache, heap)
    at, last = places[block], cache.sizes[heap] - 1
    cache.sizes[heap] = last
    places[block] = -1
    if at < last:
        moved = tree[last]
        tree[at] = moved
        places[moved] = at
        _rise(cache, heap, at)
        _sink(cache, heap, places[moved])


# -- next victims


@compiled
def _offer(cache: PrefixCache, requests: PlayedRequests, order: Order, block: int) -> None:
    """Make a block evictable that is now an unheld leaf."""
    heap = cache.blocks["segments"][block]
    if order.kind == LEVELS:
        user = cache.blocks["users"][block]
        heap = order.heaps[user] if requests.depths[block] < order.splits[user] else 0
    _push(cache, heap, block)


@compiled
def _expire(cache: PrefixCache, requests: PlayedRequests, order: Order, now: float) -> None:
    """Move blocks that have been in their heap long enough. The top is the least recently used one."""
    for heap in range(_TAIL - 1, 0, -1):
        while cache.sizes[heap]:
            block = cache.trees[heap][0]
            if now - requests.ends[cache.blocks["users"][block]] < order.ages[heap]:
                break
            _remove(cache, heap, block)
            _push(cache, order.below[heap], block)


@compiled
def _advance(cache: PrefixCache, order: Order) -> None:
    """Advance the queues of S3-FIFO until the next victim is the top of the lowest heap that is not empty.

    Heap 0 is the small queue, heap 1 the main one; a victim of the main queue is moved to heap 0 for that.
    """
    small, main = cache.trees[0], cache.trees[1]
    while True:
        if cache.sizes[0] and (cache.numbers[_PART] >= order.part or not cache.sizes[1]):
            block = small[0]
            if cache.blocks["uses"][block] <= 1:
                return
            _remove(cache, 0, block)
            cache.blocks["uses"][block] = 0
            cache.blocks["segments"][block] = 1
            cache.numbers[_PART] -= 1
        elif cache.sizes[1]:
            block = main[0]
            _remove(cache, 1, block)
            if not cache.blocks["uses"][block]:
                cache.blocks["keys"][block] = -1.0
                _push(cache, 0, block)
                return
            cache.blocks["uses"][block] -= 1
        else:
            return
        cache.numbers[_STAMP] += 1
        cache.blocks["ties"][block] = cache.numbers[_STAMP]
        _push(cache, 1, block)


@compiled
def _evict(cache: PrefixCache, requests: PlayedRequests, order: Order, now: float) -> bool:
    """Evict one block; return False if all are held."""
    if order.kind == LEVELS:
        _expire(cache, requests, order, now)
    elif order.kind == S3FIFO:
        _advance(cache, order)
    for heap in range(_TAIL):
        if cache.sizes[heap]:
            block = cache.trees[heap][0]
            _remove(cache, heap, block)
            break
    else:
        return False
    cache.blocks["cached"][block] = False
    cache.numbers[_USED] -= 1
    if order.kind == RANK:
        cache.clock[0] = max(cache.clock[0], cache.blocks["keys"][block])
    elif order.kind == SEGMENTS and cache.blocks["segments"][block]:
        _unprotect(cache, requests, block)
    elif order.kind == S3FIFO and not cache.blocks["segments"][block]:
        cache.numbers[_PART] -= 1
        cache.numbers[_GHOSTS] += 1
        cache.blocks["ghosts"][block] = cache.numbers[_GHOSTS]
    parent = requests.parents[block]
    if parent >= 0:
        cache.blocks["children"][parent] -= 1
        if not cache.blocks["children"][parent]:
            _offer(cache, requests, order, parent)
    return True


# -- two segments


@compiled
def _unprotect(cache: PrefixCache, requests: PlayedRequests, block: int) -> None:
    """Remove a protected block without protected children from the segment."""
    _remove(cache, _TAIL, block)
    cache.blocks["segments"][block] = 0
    cache.numbers[_PART] -= 1
    parent = requests.parents[block]
    if parent >= 0:
        cache.blocks["protected"][parent] -= 1
        if not cache.blocks["protected"][parent]:
            _push(cache, _TAIL, parent)


@compiled
def _protect(
    cache: PrefixCache, requests: PlayedRequests, order: Order, begin: int, hits: int, count: int
) -> None:
    """Protect the blocks that hit; then unprotect the least recent ones beyond the limit."""
    deepest = -1
    for at in range(begin, begin + count):
        block = requests.blocks[at]
        if at < begin + hits and not cache.blocks["segments"][block]:
            cache.blocks["segments"][block] = 1
            cache.numbers[_PART] += 1
            if deepest >= 0:
                cache.blocks["protected"][deepest] += 1
        if cache.blocks["tail_places"][block] >= 0:
            _remove(cache, _TAIL, block)
        cache.blocks["ties"][block] = cache.numbers[_STAMP]
        if cache.blocks["segments"][block]:
            deepest = block
    if deepest >= 0 and not cache.blocks["protected"][deepest]:
        _push(cache, _TAIL, deepest)
    while cache.numbers[_PART] > order.part:
        block = cache.trees[_TAIL][0]
        _unprotect(cache, requests, block)
        cache.numbers[_STAMP] += 1
        if cache.blocks["places"][block] >= 0:
            _remove(cache, 1, block)
            cache.blocks["ties"][block] = cache.numbers[_STAMP]
            _push(cache, 0, block)
        else:
            cache.blocks["ties"][block] = cache.numbers[_STAMP]


# -- requests


@compiled
def _store(cache: PrefixCache, order: Order, size: int, block: int) -> None:
    cache.blocks["cached"][block] = True
    cache.numbers[_USED] += 1
    cache.blocks["segments"][block] = 0
    cache.blocks["ties"][block] = cache.numbers[_STAMP]
    if order.kind == S3FIFO:
        since = cache.numbers[_GHOSTS] - cache.blocks["ghosts"][block]
        cache.blocks["keys"][block] = 0.0
        cache.blocks["uses"][block] = 0
        if cache.blocks["ghosts"][block] and since < size - order.part:
            cache.blocks["segments"][block] = 1
        else:
            cache.numbers[_PART] += 1
        cache.blocks["ghosts"][block] = 0


@compiled
def _come(cache: PrefixCache, requests: PlayedRequests, order: Order, size: int, request: int) -> None:
    """Handle an arrival: count hits, and store the rest of the prompt."""
    blocks, begin = requests.blocks, requests.begins[request]
    count = min(requests.begins[request + 1] - begin, size)
    hits = 0
    while hits < count and cache.blocks["cached"][blocks[begin + hits]]:
        hits += 1
    cache.hits[request] = hits
    if hits:
        last = blocks[begin + hits - 1]
        cache.blocks["children"][last] += 1
        if cache.blocks["places"][last] >= 0:
            _remove(cache, cache.blocks["in_heap"][last], last)
    while cache.numbers[_USED] + count - hits > size:
        if not _evict(cache, requests, order, requests.arrivals[request]):
            count = size - cache.numbers[_USED] + hits
    cache.numbers[_STAMP] += 1
    for at in range(begin + hits, begin + count):
        _store(cache, order, size, blocks[at])
        if at > begin:
            cache.blocks["children"][blocks[at - 1]] += 1
    if hits:
        cache.blocks["children"][blocks[begin + hits - 1]] -= 1
    if count:
        cache.blocks["children"][blocks[begin + count - 1]] += 1
    cache.held[request] = count


@compiled
def _end(cache: PrefixCache, requests: PlayedRequests, order: Order, request: int) -> None:
    """Handle the end of a request, which releases its blocks."""
    blocks, begin, count = requests.blocks, requests.begins[request], cache.held[request]
    hits = cache.hits[request]
    cache.numbers[_STAMP] += 1
    stamp, clock, deepest = cache.numbers[_STAMP], cache.clock[0], len(order.weights) - 1
    if order.kind == SEGMENTS:
        _protect(cache, requests, order, begin, hits, count)
    elif order.kind == S3FIFO:
        for at in range(begin, begin + hits):
            cache.blocks["uses"][blocks[at]] = min(cache.blocks["uses"][blocks[at]] + 1, _MOST_USES)
    elif order.kind == LEVELS:
        for at in range(begin, begin + count):
            cache.blocks["ties"][blocks[at]] = stamp
            cache.blocks["users"][blocks[at]] = request
    elif order.kind == RANK:
        for at in range(begin, begin + count):
            block = blocks[at]
            cache.blocks["ties"][block] = stamp
            cache.blocks["uses"][block] += 1
            cache.blocks["keys"][block] = (
                clock + cache.blocks["uses"][block] * order.weights[min(at - begin, deepest)]
            )
    if count:
        last = blocks[begin + count - 1]
        cache.blocks["children"][last] -= 1
        if not cache.blocks["children"][last]:
            _offer(cache, requests, order, last)


@compiled
def play(cache: PrefixCache, requests: PlayedRequests, order: Order, size: int) -> None:
    """Play all requests; the hits of each are in `cache.hits`."""
    for moment in requests.moments:
        if moment < 0:
            _end(cache, requests, order, ~moment)
        else:
            _come(cache, requests, order, size, moment)


@compiled
def usual_gaps(requests: PlayedRequests, aging: float, shortest: float) -> Any:
    """Return, per request, the mean gap from the end of a conversation's request to its next, as known then; at first
    infinite.

    The mean is geometric, with more weight on later gaps. A request continues the one that last used the deepest
    existing block of its prompt, if it has more than half of that one's blocks.
    """
    count = len(requests.arrivals)
    users = np.full(len(requests.parents), -1, np.int32)
    sums, weights, usual = np.zeros(count), np.zeros(count), np.full(count, np.inf)
    for request in range(count):
        begin, end = requests.begins[request], requests.begins[request + 1]
        at = begin
        while at < end and users[requests.blocks[at]] >= 0:
            at += 1
        if at > begin:
            before = users[requests.blocks[at - 1]]
            if 2 * (at - begin) > requests.begins[before + 1] - requests.begins[before]:
                gap = max(requests.arrivals[request] - requests.ends[before], shortest)
                sums[request] = aging * sums[before] + np.log(gap)
                weights[request] = aging * weights[before] + 1.0
                usual[request] = np.exp(sums[request] / weights[request])
        for place in range(begin, end):
            users[requests.blocks[place]] = request
    return usual
