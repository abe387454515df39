"""Hit curves: reused blocks of a log's prompts at every cache size, exact or sampled, and the optimum.

A prompt uses all blocks of a chain at once, so a request that used a block also used the blocks before it. Along a
chain the last users therefore only get older, and the blocks that one request used last lie together: a prompt is
described by a few such *spans*, not block by block. This is the walk that brings a path of a tree to the front: the
number of spans is O(log n) per request on average.

**LRU.** Evicting leaves, least recently used first and the deepest first among those of one request, is plain LRU over
blocks where a request's shallower block counts as the more recent: no request uses a block without those before it, so
the least recent block of that order is always a leaf. What a cache of C blocks holds is then the C most recent ones,
whatever C is, and a block hits from the size that is its place in the order (its *stack distance*). Along a chain
places only grow, so that a prefix ends at its first absent block by itself.

**The bound.** The optimal policy, which knows the future, first evicts leaves that are never used again, then the leaf
used again last. A block is used again no later than the blocks after it, so that leaf is also the block that is used
again last (Belady's choice); among equals it is the deepest. At any time the cached blocks that one later request uses
next lie together in its prompt, and the last of them go first. So counts of blocks suffice: their identity does not
matter.

**Samples.** A sample has the blocks with a hash below a bound, in any prompt, and is a workload of its own, in which
everything is `rate` times as far apart. It is drawn block by block, not by conversations: most
prompts may begin with the same few blocks, and a sample by first blocks would have nearly everything or nearly
nothing. Misses are estimated from the samples, and hits are all block requests, which are counted, minus the misses:
misses are spread over many blocks that are each requested once or twice, while a block that every prompt begins with
has a large part of the hits alone, so that the curve would depend on its being in a sample.

**Timeouts.** An unbounded cache drops a block that was not used for longer than a timeout. A request uses all blocks of
its prompt, so using a block uses all before it. Therefore along a prompt the times since the last use only grow: after
the first dropped block all were dropped, and the prefix ends there. A block therefore hits if it was there before, and
the time since its last use is at most the timeout. The spans of `Reuses` have these times.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from events.ids import Handle
from events.log import LogReader
from events.packed import SLOT_BYTES, TOKEN_BYTES, names_of_keys, unpack_names
from events.structs import GroupCreated
from events.tokens.names import ALGORITHMS, DEFAULT_ALGORITHM, chain_symbols
from events.tokens.symbols import SymbolTable, has_symbols
from events.types import (
    CROSS,
    FULL,
    AnyEvent,
    BlocksStored,
    CacheCreated,
    EpochStarted,
    EventBatch,
    Gap,
    PoolShared,
    SequenceAdded,
    SequenceRemoved,
    SequenceRewound,
    StateExported,
)
from kvcache.audit.history import EpochClock
from kvcache.audit.prefill import hours_between
from kvcache.errors import Unsupported, UsageError
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed, fitting
from kvcache.workload.tokens import mix64

Int64s = npt.NDArray[np.int64]


class PrefixSums:
    """Row of numbers with prefix sums, all 0 at first. Both operations take O(log n)."""

    def __init__(self, length: int) -> None:
        self._sums = [0] * (length + 1)

    def add(self, place: int, amount: int) -> None:
        """Add `amount` to one number; places count from 0."""
        sums, at = self._sums, place + 1
        while at < len(sums):
            sums[at] += amount
            at += at & -at

    def through(self, place: int) -> int:
        """Return the sum of the numbers up to and including this place."""
        sums, at, total = self._sums, place + 1, 0
        while at:
            total += sums[at]
            at &= at - 1
        return total


@dataclass(eq=False, repr=False)
class InconsistentBlocks(UsageError):
    """Prompts that do not lie in one tree; `request` counts prompts from 0, `block` the prompt's blocks."""

    request: int
    block: int
    text = (
        "block {block} of prompt {request} was seen before after other blocks: number blocks so that equal numbers "
        "mean equal content and equal blocks before it"
    )


class ReuseSpan(NamedTuple):
    """Blocks of a prompt that one earlier request was the last to use, directly after those of the previous span."""

    user: int
    """Earlier request, counted from 0."""
    blocks: int


class Reuses:
    """Spans of consecutive prompts."""

    def __init__(self) -> None:
        self.lengths = array("q")
        """Number of blocks of each prompt."""
        self.times = array("q")
        """Arrival time of each prompt, in ns."""
        self._users, self._blocks = array("q"), array("q")
        """User and number of blocks of each span, in order."""
        self._ends = array("q")
        """Per request: number of spans up to its last."""
        self._last: dict[int, int] = {}
        """Per block: the last request that used it."""
        self._taken = array("q")
        """Per request: number of its leading blocks that later requests have used."""

    @property
    def distinct(self) -> int:
        """Number of distinct blocks."""
        return len(self._last)

    @property
    def users(self) -> Int64s:
        """Earlier request of each span."""
        return np.array(self._users, np.int64)

    @property
    def counts(self) -> Int64s:
        """Number of blocks of each span."""
        return np.array(self._blocks, np.int64)

    def by_request(self, blocks: Int64s) -> Int64s:
        """Return the sum of each request's spans, given a number for each span."""
        sums = np.concatenate([[0], np.cumsum(blocks)])
        return np.diff(sums[np.array(self._ends, np.int64)], prepend=0)

    def prompts(self) -> Iterator[tuple[int, list[ReuseSpan]]]:
        """Yield each prompt's length in blocks, and its spans; blocks after these are new."""
        begin = 0
        for length, end in zip(self.lengths, self._ends, strict=True):
            yield length, list(map(ReuseSpan, self._users[begin:end], self._blocks[begin:end]))
            begin = end

    def add(self, blocks: Sequence[int], at: int = 0) -> None:
        """Add the next prompt, which arrived at `at` ns, not before the previous one.

        Equal numbers must mean equal blocks after equal blocks. Raises `InconsistentBlocks` if they visibly do not,
        without adding anything.
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
        self.times.append(at)
        self._ends.append(len(self._users))
        self._taken.append(0)

    def _end(self, blocks: Sequence[int], begin: int, user: int) -> int:
        """Return the end of the blocks that this request was the last to use."""
        last = self._last
        most = min(len(blocks), self.lengths[user])
        return bisect_left(blocks, 1, begin + 1, most, key=lambda block: last.get(block) != user)


@dataclass(frozen=True, slots=True, eq=False)
class SpanDistances:
    """Cache sizes from which the spans of all consecutive prompts hit."""

    reuses: Reuses
    before: Int64s
    """Per span: number of blocks before its first one in LRU order. Larger caches hit."""

    @classmethod
    def of(cls, reuses: Reuses) -> SpanDistances:
        """Compute the stack distances of all spans."""
        before, remaining = array("q"), PrefixSums(len(reuses.lengths))
        """Per request: its blocks that no later request has used. Those of one request are consecutive in the order."""
        seen = 0
        for request, (length, spans) in enumerate(reuses.prompts()):
            new = length
            for user, count in spans:
                # Everything more recent precedes this span: blocks of later requests, and this prompt's own.
                before.append(seen - remaining.through(user))
                remaining.add(user, -count)
                new -= count
            remaining.add(request, length)
            seen += new
        return cls(reuses, np.array(before, np.int64))

    def hits(self, size: int) -> Int64s:
        """Return the number of blocks of each prompt that a cache of `size` blocks serves."""
        return self.reuses.by_request(np.clip(size - self.before, 0, self.reuses.counts))


def misses_by_size(reuses: Reuses) -> Int64s:
    """Return block requests that a cache of C blocks misses, as entry C. Larger caches than the last miss as many."""
    first = SpanDistances.of(reuses).before + 1
    arrivals = np.zeros(reuses.distinct + 2, np.int64)
    """Per size: block requests that hit from this size on, less those that hit from the size before."""
    np.add.at(arrivals, first, 1)
    np.add.at(arrivals, first + reuses.counts, -1)
    return np.asarray(sum(reuses.lengths) - np.cumsum(np.cumsum(arrivals))[:-1], np.int64)


def best_hits(reuses: Reuses, size: int) -> int:
    """Return the block requests that a cache of `size` blocks can serve at best, by the rule of `kvcache.audit.curve`.

    As with LRU, all blocks of a prompt are cached when it is done; the first `size` of a prompt longer than the cache.
    """
    cache = _Cache(size, len(reuses.lengths))
    later = _next_uses(reuses)
    return sum(cache.serve(request, length, later[request]) for request, length in enumerate(reuses.lengths))


def _next_uses(reuses: Reuses) -> list[list[ReuseSpan]]:
    """Return, for each request, the next users of its blocks in block order, up to blocks that are never used again."""
    later: list[list[ReuseSpan]] = [[] for _ in reuses.lengths]
    for request, (_, spans) in enumerate(reuses.prompts()):
        for user, count in spans:
            later[user].append(ReuseSpan(request, count))
    return later


class _Cache:
    """Numbers of cached blocks by the request that uses them next."""

    def __init__(self, size: int, requests: int) -> None:
        self._size = self._free = size
        self._waiting = [0] * requests
        """Per request: cached blocks that it uses next, a prefix of its prompt because the last ones go first."""
        self._farthest: list[int] = []
        """Heap of the requests that use cached blocks next; negated, so that the latest one comes first."""
        self._useless = 0
        """Number of cached blocks that are never used again."""

    def serve(self, request: int, length: int, later: list[ReuseSpan]) -> int:
        """Play one request; return how many of its blocks were cached."""
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
        """Make room for `blocks` blocks. Blocks of the current request have no next user yet, so they stay."""
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


KNEE = 0.01
"""Least gain, as a part of all block requests, for which doubling the cache pays."""
ENOUGH = 32
"""Minimum number of distinct blocks of a sample. If any sample has fewer, knee and standard error are meaningless."""


@dataclass(frozen=True, slots=True, eq=False)
class HitCurve:
    """Block requests that LRU serves, by cache size in blocks."""

    block_requests: int
    """Block requests of all prompts."""
    misses: tuple[Int64s, ...]
    """Per sample: misses by the size of a cache for the sampled blocks alone; entry 0 counts all their requests."""
    rate: float = 1.0
    """Part of the blocks in each sample; 1: all blocks, and the curve is exact."""

    @property
    def distinct_blocks(self) -> int:
        """Number of distinct blocks: a cache of this size hits everything seen before."""
        return round(float(np.mean(self.sampled_blocks)) / self.rate)

    @property
    def sampled_blocks(self) -> tuple[int, ...]:
        """Number of distinct blocks of each sample."""
        return tuple(int(misses[-1]) for misses in self.misses)

    @property
    def is_vague(self) -> bool:
        """True if the samples are too small for a knee and standard errors; `enough_for` returns a sufficient rate."""
        return self.rate < 1 and min(self.sampled_blocks) < ENOUGH

    def hits(self, size: int) -> int:
        """Return the block requests served by a cache of `size` blocks."""
        return round(float(self._hits(np.array([size])).mean()))

    def hit_rate(self, size: int) -> float:
        """Return the hit rate of a cache of `size` blocks, from 0 to 1."""
        return self.hits(size) / max(self.block_requests, 1)

    def error(self, size: int) -> float | None:
        """Return the standard error of the hit rate, estimated from the samples; 0 if the curve is exact.

        None if it is vague.
        """
        if self.is_vague:
            return None
        if len(self.misses) == 1:
            return 0.0
        each = self._hits(np.array([size]))[:, 0] / max(self.block_requests, 1)
        return float(each.std(ddof=1) / np.sqrt(len(each)))

    def by_level(self, primary: int, secondary: int) -> tuple[int, int]:
        """Return the hits in a primary level, and in a secondary level that takes what primary evicts (in blocks)."""
        served = self.hits(primary)
        return served, self.hits(primary + secondary) - served

    @property
    def knee(self) -> int | None:
        """Smallest size from which on no doubling gains a hundredth (`KNEE`) of all block requests.

        None if no size has any hits, or the curve is vague.
        """
        if self.is_vague or not self.hits(self.distinct_blocks):
            return None
        step = max(round(1 / self.rate), 1)
        sizes = np.arange(1, self.distinct_blocks + 1, step)
        gains = (self._hits(2 * sizes) - self._hits(sizes)).mean(axis=0)
        worth = np.flatnonzero(gains >= KNEE * self.block_requests)
        return int(sizes[worth[-1]]) + step if len(worth) else 1

    def _hits(self, sizes: Int64s) -> npt.NDArray[np.float64]:
        """Return hits per sample (rows) and size. A sampled block hits if the sampled blocks expected before it fit."""
        places = np.where(sizes > 0, 1 + np.floor((sizes - 1) * self.rate), 0).astype(np.int64)
        rows = [misses[np.minimum(places, len(misses) - 1)] / self.rate for misses in self.misses]
        hits = np.clip(self.block_requests - np.array(rows), 0, None)
        return np.asarray(np.where(sizes > 0, hits, 0.0))


def enough_for(distinct_blocks: float) -> float:
    """Return a rate at which samples of `distinct_blocks` blocks most likely have `ENOUGH`: one digit, at most 1.

    It aims at twice as many, because samples differ in size.
    """
    rate = 2 * ENOUGH / max(distinct_blocks, 1)
    digit = 10.0 ** math.floor(math.log10(rate))
    return min(1.0, float(f"{math.ceil(rate / digit) * digit:.0e}"))


SAMPLES = 4
"""Number of independent samples; their spread estimates the error of their mean."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1
_ALL = 2.0**64
"""Number of possible hashes."""


@dataclass(eq=False, repr=False)
class EmptySamples(UsageError):
    """No sample of this `rate` has any of the prompts' blocks; `enough` is a rate that suffices."""

    rate: float
    enough: float

    def __str__(self) -> str:
        more = f"{self.enough:g} or more" if self.enough < 1 else "1, which takes all"
        return (
            f"no block of the prompts is in a sample of {self.rate:g} of them: give a sample rate of {more}"
        )


class CurveRecorder:
    """Recorder of consecutive prompts for a hit curve.

    `rate` is the part of the blocks in each of the samples, which are drawn by `seed`; with 1 there is one, of all
    blocks. Raises `UsageError` for a rate that is not above 0 and at most 1.
    """

    def __init__(self, rate: float = 1.0, *, samples: int = SAMPLES, seed: int = 0) -> None:
        if not 0 < rate <= 1:
            raise UsageError(
                f"a sample has a part of the blocks: give a rate above 0 and at most 1, not {rate}"
            )
        self.rate = rate
        self.prompts = 0
        self.block_requests = 0
        self._first_at: int | None = None
        self._last_at = 0
        seeds = range(seed, seed + samples) if rate < 1 else range(1)
        self._samples = [(each * _GOLDEN & _MASK64, Reuses()) for each in seeds]
        self._lowest = [1.0] * len(self._samples)
        """Per empty sample: the lowest hash, as a part of the range of hashes."""

    @property
    def reuses(self) -> Reuses:
        """The whole workload. Raises `UsageError` if only samples are kept."""
        if self.rate < 1:
            raise UsageError("the bound requires all blocks, not samples: omit the sample rate")
        return self._samples[0][1]

    @property
    def workloads(self) -> list[Reuses]:
        """Each sample as a workload; with a rate of 1 the whole one."""
        return [reuses for _, reuses in self._samples]

    @property
    def seconds(self) -> float:
        """Seconds from the first prompt to the last."""
        return (self._last_at - (self._first_at or 0)) / 1e9

    def add(self, blocks: Sequence[int], at: int = 0) -> None:
        """Add the next prompt's full blocks, numbered from 0 to 2**64 - 1, and its arrival time in ns.

        A time before the previous one, as after a clock was set back, counts as equal to it. Raises
        `InconsistentBlocks` (see `Reuses`).
        """
        self.prompts += 1
        self.block_requests += len(blocks)
        if self._first_at is None:
            self._first_at = self._last_at = at
        self._last_at = at = max(self._last_at, at)
        if self.rate == 1:
            self._samples[0][1].add(blocks, at)
            return
        numbers = np.array(blocks, np.uint64)
        for index, (salt, reuses) in enumerate(self._samples):
            hashed = mix64(numbers + np.uint64(salt))
            chosen = numbers[hashed < self.rate * _ALL]
            if len(chosen):
                reuses.add(chosen.tolist(), at)
            elif len(hashed) and not reuses.distinct:
                self._lowest[index] = min(self._lowest[index], float(hashed.min()) / _ALL)

    def curve(self) -> HitCurve:
        """Return the curve of the prompts added so far. Raises `EmptySamples` if no sample has any of their blocks."""
        if self.block_requests and not any(reuses.distinct for _, reuses in self._samples):
            # The lowest of n hashes is about 1/n of all there can be: within a factor of 2, from several samples.
            raise EmptySamples(self.rate, enough_for(len(self._samples) / sum(self._lowest) / 2))
        misses = tuple(misses_by_size(reuses) for _, reuses in self._samples)
        return HitCurve(self.block_requests, misses, self.rate)


def measure(prompts: Iterable[Sequence[int]], rate: float = 1.0) -> HitCurve:
    """Return the curve of prompts, each given by numbers for its blocks: equal ones for equal blocks after equal
    blocks.

    Raises what `CurveRecorder` does.
    """
    recorder = CurveRecorder(rate)
    for blocks in prompts:
        recorder.add(blocks)
    return recorder.curve()


# -- idle times

TIMEOUTS = (10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 86_400)
"""Timeouts in a table, in seconds."""
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class SpanAges:
    """Idle times of the blocks of all prompts' spans."""

    reuses: Reuses
    ages: Int64s
    """Idle time of each span, in ns."""

    @classmethod
    def of(cls, reuses: Reuses) -> SpanAges:
        """Return the idle times of a workload."""
        at, spans = np.array(reuses.times, np.int64), [len(each) for _, each in reuses.prompts()]
        return cls(reuses, np.repeat(at, spans) - at[reuses.users])

    def hits(self, timeout: float = np.inf) -> Int64s:
        """Return the blocks of each prompt that hit if blocks are dropped after `timeout` idle seconds."""
        return self.reuses.by_request(np.where(self.ages <= timeout * _NS, self.reuses.counts, 0))

    def quantile(self, part: float) -> float:
        """Return the ns that this part of the hits, of which there are some, does not exceed."""
        order = np.argsort(self.ages, kind="stable")
        blocks = np.cumsum(self.reuses.counts[order])
        return float(self.ages[order[np.searchsorted(blocks, part * blocks[-1])]])


@dataclass(frozen=True, slots=True, eq=False)
class TimeoutCurve:
    """Block requests that an unbounded cache serves, by timeout."""

    block_requests: int
    samples: tuple[SpanAges, ...]
    rate: float = 1.0
    """Part of the blocks in each sample; 1: all blocks, and the curve is exact."""
    seconds: float = 0.0
    """Seconds from the first request to the last: no idle time is longer."""

    @classmethod
    def of(cls, recorder: CurveRecorder) -> TimeoutCurve:
        """Return the curve of the prompts recorded so far."""
        ages = tuple(map(SpanAges.of, recorder.workloads))
        return cls(recorder.block_requests, ages, recorder.rate, recorder.seconds)

    def hits(self, timeout: float = np.inf) -> int:
        """Return the block requests served if blocks are dropped after `timeout` idle seconds."""
        misses = [sum(each.reuses.lengths) - int(each.hits(timeout).sum()) for each in self.samples]
        return max(round(self.block_requests - float(np.mean(misses)) / self.rate), 0)

    def hit_rate(self, timeout: float = np.inf) -> float:
        """Return the hit rate at a timeout, from 0 to 1."""
        return self.hits(timeout) / max(self.block_requests, 1)

    def quantile(self, part: float) -> float | None:
        """Return the seconds that this part of the served block requests does not exceed; None if none are served."""
        ages = [each.quantile(part) for each in self.samples if len(each.ages)]
        return float(np.mean(ages)) / _NS if ages else None


# -- the prompts that a log records

_HASHING = ALGORITHMS[DEFAULT_ALGORITHM]
"""Algorithm that names blocks here, independent of the names in the log."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Cache size of a log for the window with full attention."""

    primary: int
    """Primary blocks."""
    secondary: int
    bytes_per_block: int
    """Bytes of a block in all its pools."""


class LoggedPrompt(NamedTuple):
    """One admission of a log, with its block numbers."""

    event: SequenceAdded
    numbers: list[int]
    """Numbers of all full blocks of the prompt; in a log without tokens incomplete until the request has ended."""
    at: int
    """Time of its batch, as `LoggedPrompts.at`."""


class NumberedPrompts:
    """Numbers of the blocks of a log without tokens: the names under which requests reused or stored them.

    A request names its blocks one by one, so a prompt is complete when its request has ended. A block that it has
    never stored has no name: its number is one of its own, as if no other prompt had it.
    """

    def __init__(self, replayed: Replayed, log_id: bytes) -> None:
        self._replayed, self._log_id = replayed, log_id
        self.incomplete: dict[Handle, LoggedPrompt] = {}
        """Prompts of running requests."""
        self.unnamed = 0
        """Number of blocks without a name."""
        self.admitted: dict[Handle, LoggedPrompt] = {}
        """Prompts of this batch."""
        self.at = 0
        """Time of this batch."""
        self._cut: dict[Handle, int] = {}
        """By request: its first block that was stored when it was not full, as only the last one of an ended one is."""
        self._algorithm = ""
        self._tokens_per_block = self._key_bytes = 0

    def before(self, event: AnyEvent) -> None:
        """Take the names that a sequence is about to lose."""
        match event:
            case SequenceRemoved(handle=handle) if handle in self.incomplete:
                self._complete(handle)
            case SequenceRewound(handle=handle) if handle in self.incomplete:
                if event.num_tokens < self.incomplete[handle].event.num_tokens:
                    self._complete(handle)
            case BlocksStored(handle=handle) if handle in self.incomplete:
                if event.last_tokens < self._tokens_per_block:
                    self._cut[handle] = event.first_block + len(event.slots) // SLOT_BYTES - 1
            case StateExported():
                for handle in self.incomplete:
                    self._learn(handle)

    def after(self, event: AnyEvent) -> None:
        """Follow the cache and its requests. Raises `UsageError` if blocks are named in another way than before."""
        if isinstance(event, CacheCreated):
            made = event.hash_algorithm, event.tokens_per_block
            if self._algorithm and made != (self._algorithm, self._tokens_per_block):
                raise UsageError(
                    f"the log records no tokens, and its blocks are {made[1]:,} tokens named by {made[0]} after "
                    f"{self._tokens_per_block:,} named by {self._algorithm}: nobody can say which of them are equal"
                )
            (self._algorithm, self._tokens_per_block), self._key_bytes = made, event.key_bytes
        elif isinstance(event, SequenceAdded):
            self.incomplete[event.handle] = self.admitted[event.handle] = LoggedPrompt(event, [], self.at)
        elif isinstance(event, StateExported):
            for handle in self.incomplete.keys() - self._replayed.state.sequences.keys():
                self._complete(handle)

    def finish(self) -> None:
        """Complete the prompts of requests that run at the end of the log."""
        for handle in list(self.incomplete):
            self._complete(handle)

    def _learn(self, handle: Handle) -> None:
        event, numbers, _ = self.incomplete[handle]
        sequence = self._replayed.state.sequences.get(handle)
        if sequence is not None:
            size, first = self._key_bytes, len(numbers)
            full = event.num_tokens // self._tokens_per_block
            keys = sequence.keys[first * size : min(full, self._cut.pop(handle, full)) * size]
            numbers += unpack_names(names_of_keys(bytes(keys), size)).tolist()

    def _complete(self, handle: Handle) -> None:
        self._learn(handle)
        event, numbers, _ = self.incomplete.pop(handle)
        for block in range(len(numbers), event.num_tokens // self._tokens_per_block):
            digest = blake2b(b"%d %d" % (handle, block), digest_size=8, key=self._log_id).digest()
            numbers.append(int.from_bytes(digest, "big"))
            self.unnamed += 1


class LoggedPrompts:
    """Prompts of a log, iterable once: for each admission the numbers of the full blocks that end before its last
    token.

    A block's number is the name that `v2_sha256_64` gives it, which stands for its tokens, all before them, and the
    namespace; in a log without tokens its name there (`NumberedPrompts`). Other attributes are complete when
    the iteration has ended. It raises `Unsupported` for a log without full attention, `UsageError` for one without a
    cache, or whose blocks are named in several ways, `Unreplayable`, and what `LogReader` raises.
    """

    def __init__(self, log: str | Path, progress: Callable[[int], None] = lambda _: None) -> None:
        self.reader = LogReader(log)
        """Reader of the log, which also reports how it ends."""
        self._log = Path(log)
        self._replayed = Replayed(CacheState())
        self._progress = progress
        self._symbols = SymbolTable()
        self.log_id = b""
        self.names: NumberedPrompts | None = None
        """Names of blocks in a log without tokens; None if it records tokens."""
        self._created: CacheCreated | None = None
        self.tokens_per_block = 0
        """Block size of the log's first cache, in tokens: all prompts are cut into such blocks."""
        self.last_seq = -1
        self.admissions = 0
        self.skipped = 0
        """Number of admissions with unknown tokens, because batches before them are missing."""
        self.gaps = 0
        self.windows = 0
        """Number of windows of the last cache."""
        self.shared = False
        """True if layers of other kinds take blocks of the same pool."""
        self.reused_primary = 0
        """Tokens in full blocks that the log's own cache served from primary."""
        self.reused_secondary = 0
        self.at = 0
        """Time of the last batch read: wall-clock ns, shifted by an `EpochClock`."""
        self._group = 0
        self.lengths = array("q")
        """Number of tokens of each prompt iterated over."""
        self._times = 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        for prompt in self.numbered():
            yield prompt.numbers

    def numbered(self) -> Iterator[LoggedPrompt]:
        """Iterate likewise; yield each admission with its numbers."""
        waiting = deque[LoggedPrompt]()
        for _, prompts in self.batches():
            waiting += prompts
            while waiting and (self.names is None or waiting[0].event.handle not in self.names.incomplete):
                yield self._cut(waiting.popleft())
        yield from map(self._cut, waiting)

    def _cut(self, prompt: LoggedPrompt) -> LoggedPrompt:
        """Return a prompt without the block that its last token ends: that one is always computed."""
        event, numbers, self.at = prompt
        self.lengths.append(event.num_tokens)
        return LoggedPrompt(event, numbers[: max(event.num_tokens - 1, 0) // self.tokens_per_block], self.at)

    @property
    def state(self) -> CacheState:
        """State after the last batch read."""
        return self._replayed.state

    def batches(self) -> Iterator[tuple[EventBatch, list[LoggedPrompt]]]:
        """Iterate likewise by batch; yield each batch with its admissions of known tokens."""
        clock = EpochClock()
        for batch in self.reader:
            self.at = clock.of_batch(batch)
            self._begin_epoch(batch)
            if (names := self.names) is None:
                self._replayed.fold(batch, verify=False)
            else:
                names.at = self.at
                names.admitted.clear()
                self._replayed.fold(batch, verify=False, before=names.before, after=names.after)
            with fitting(batch.seq):
                prompts = self._read(batch)
            yield batch, prompts
            self.last_seq = batch.seq
            self._times = self._times[0] or batch.ts, batch.ts
            self._progress(batch.seq)
        if self.names is not None:
            self.names.finish()
        if self._created is None:
            raise UsageError(f"{self._log} has no cache: its first batch is missing")

    @property
    def hours(self) -> float | None:
        """Hours from the first batch to the last; None if no time has passed."""
        return hours_between(*self._times)

    @property
    def window(self) -> int:
        """Window with full attention, in tokens."""
        assert self._created is not None, "before the iteration has ended"
        return self._created.groups[self._group].window

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the last cache."""
        assert self._created is not None, "before the iteration has ended"
        settings: dict[str, Any] = json.loads(self._created.config)
        return settings

    @property
    def size(self) -> CacheSize:
        """Size of the last cache, in blocks of `tokens_per_block` tokens."""
        assert self._created is not None, "before the iteration has ended"
        group, tokens = self._created.groups[self._group], self._created.tokens_per_block
        primary, secondary = (blocks * tokens // self.tokens_per_block for blocks in group.num_blocks)
        in_block = sum(pool.bytes_per_block for pool in group.pools) * self.tokens_per_block // tokens
        return CacheSize(primary, secondary, in_block)

    def _read(self, batch: EventBatch) -> list[LoggedPrompt]:
        prompts = list[LoggedPrompt]()
        # Events of a batch before a gap continue missing ones; symbols begin with the whole state after the gap.
        known = max((index for index, event in enumerate(batch.events) if isinstance(event, Gap)), default=-1)
        for index, event in enumerate(batch.events):
            if index > known:
                self._symbols.fold(event)
            if isinstance(event, CacheCreated):
                self._create(event)
            elif isinstance(event, Gap):
                self.gaps += 1
            elif isinstance(event, PoolShared):
                self.shared = True
            elif isinstance(event, SequenceAdded):
                if (prompt := self._numbered(event, known=index > known)) is None:
                    self.skipped += 1
                else:
                    self.admissions += 1
                    self.reused_primary += event.reused_primary[self._group]
                    self.reused_secondary += event.reused_secondary[self._group]
                    prompts.append(prompt)
        return prompts

    def _numbered(self, event: SequenceAdded, *, known: bool) -> LoggedPrompt | None:
        """Return an admission with its numbers; None if nobody knows them, because batches before it are missing."""
        if self.names is not None:
            return self.names.admitted[event.handle] if known else None
        if event.num_tokens and not event.tokens:
            raise UsageError(
                "the log claims to record tokens, and has a prompt without: nothing is known of it"
            )
        if known or not has_symbols(event.tokens):
            return LoggedPrompt(event, self._blocks(event), self.at)
        return None

    def _begin_epoch(self, batch: EventBatch) -> None:
        """Begin to read names if the log records no tokens. Raises `UsageError` if it did, or did not, before."""
        started = next((event for event in batch.events if isinstance(event, EpochStarted)), None)
        if started is None:
            return
        self.log_id = started.log_id
        if self._created is None and not started.tokens_recorded:
            self.names = NumberedPrompts(self._replayed, started.log_id)
        elif started.tokens_recorded != (self.names is None):
            begins = "begins" if started.tokens_recorded else "ceases"
            raise UsageError(
                f"the log {begins} to record tokens in batch {batch.seq}: nobody can say which prompts before and "
                "after begin alike"
            )

    def _create(self, created: CacheCreated) -> None:
        self._created = created
        self.tokens_per_block = self.tokens_per_block or created.tokens_per_block
        self.windows = sum(group.kind != CROSS for group in created.groups)
        self._group = _full_group(created.groups)

    def _blocks(self, event: SequenceAdded) -> list[int]:
        size = self.tokens_per_block * TOKEN_BYTES
        whole = len(event.tokens) // size * size
        if not whole:
            return []
        namespace, tokens = event.namespace, event.tokens[:whole]
        root = _HASHING.root_key(namespace)
        keys = chain_symbols(_HASHING, self._symbols, namespace, root, tokens, size)
        numbers: list[int] = unpack_names(names_of_keys(keys, _HASHING.key_bytes)).tolist()
        return numbers


def _full_group(groups: tuple[GroupCreated, ...]) -> int:
    for index, group in enumerate(groups):
        if group.kind == FULL:
            return index
    raise Unsupported(
        "a curve of a cache whose windows all slide",
        "use the log of a cache with full attention",
    )
