"""Eviction orders to compare: the default, other known ones, two clairvoyant ones, and those of other packages.

A block *returns* with the next prompt in which it lies whole, and not with its last token: a prompt's last token is
always computed. Prompts come in the order of admission in the log; waiting requests are still to come.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from importlib.metadata import entry_points
from itertools import takewhile
from typing import Any

from events.errors import type_and_place
from events.packed import NAME_BYTES, names_of_keys
from events.tokens.names import ALGORITHMS, DEFAULT_ALGORITHM
from events.types import PRIMARY
from kvcache.decide.eviction_order import ORDERS, EvictionOrder, LeastRecentlyUsed, refuse_no_order
from kvcache.errors import CapacityError, ConfigError, UsageError, invariant
from kvcache.fold.full_group import FullGroup
from kvcache.fold.prefix_tree import Run
from kvcache.whatif.commands import RecordedPrompt

_NONE = -1


class Future:
    """All uses of all blocks, in the order of the prompts."""

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}
        """Block numbers by name."""
        self.first = array("q")
        """Per block: its first use."""
        self.following = array("q")
        """Per use: the next one of the same block."""
        self.prompt_of = array("q")
        """Per use: the number of the prompt."""
        self.numbers: dict[int, int] = {}
        """Prompt numbers by handle."""
        self._last = array("q")

    @classmethod
    def of(cls, prompts: Iterable[tuple[int, RecordedPrompt]]) -> Future:
        """Build the future from prompts, each with the block size of its cache in tokens."""
        future = cls()
        for tokens_per_block, prompt in prompts:
            future._add(tokens_per_block, prompt)
        return future

    def _add(self, tokens_per_block: int, prompt: RecordedPrompt) -> None:
        number = self.numbers[prompt.handle] = len(self.numbers)
        names = names_in(prompt, tokens_per_block) if prompt.lookup else b""
        for begin in range(0, len(names), NAME_BYTES):
            block = self.ids.setdefault(names[begin : begin + NAME_BYTES], len(self.ids))
            use = len(self.prompt_of)
            self.prompt_of.append(number)
            self.following.append(_NONE)
            if block < len(self.first):
                self.following[self._last[block]] = use
                self._last[block] = use
            else:
                self.first.append(use)
                self._last.append(use)


def names_in(prompt: RecordedPrompt, tokens_per_block: int) -> bytes:
    """Return the names of the full blocks that a prompt can reuse."""
    hashing, namespace = ALGORITHMS[DEFAULT_ALGORITHM], prompt.played_namespace
    count, content = (prompt.num_tokens - 1) // tokens_per_block, prompt.content
    size, root = tokens_per_block * 4, hashing.root_key(namespace)
    if not count:
        return b""
    if content.extra_ids is None and not content.items:
        keys = hashing.chain(namespace, root, content.tokens[: count * size], size)
    else:
        keys = hashing.chain_rich(namespace, root, content, size)[: count * hashing.key_bytes]
    return names_of_keys(keys, hashing.key_bytes)


class Outlook:
    """Future uses that are still to come during a replay."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self._next = array("q", future.first)
        self._admitted = bytearray(len(future.numbers))

    def note(self, handle: int, admitted: bool) -> None:
        """Mark a request's uses as past because it is about to be admitted, or as future because it was not admitted
        after all.

        A child that is replayed as a request has no prompt of its own in the log: its uses are not foreseen.
        """
        number = self._future.numbers.get(handle)
        if number is not None:
            self._admitted[number] = admitted

    def next_use(self, name: bytes) -> int | None:
        """Return the number of the next prompt that has the block; None if there is none."""
        future = self._future
        block = future.ids.get(name)
        if block is None:
            return None
        use = self._next[block]
        while use != _NONE and self._admitted[future.prompt_of[use]]:
            use = future.following[use]
        self._next[block] = use
        return None if use == _NONE else future.prompt_of[use]


class ByBlock(LeastRecentlyUsed):
    """Lower priority first, then by the rank of the block, then as `LeastRecentlyUsed`.

    A block's rank is computed when it may be next, and is cached until an event concerns the block.
    """

    needs_names = True

    def __init__(self, group: FullGroup) -> None:
        self._group, self._key_bytes = group, group.tree.key_bytes
        self._ranks: tuple[dict[int, int], ...] = tuple({} for _ in group.levels)
        """Ranks by level and slot."""
        super().__init__(group)

    @abstractmethod
    def rank(self, run: Run, at: int) -> int:
        """Return the rank of a block, by its index in its run, from 0; the lowest goes first."""

    def name(self, run: Run, at: int) -> bytes:
        """Return the name of a block, by its index in its run."""
        begin = at * self._key_bytes
        return bytes(run.keys[begin : begin + NAME_BYTES])

    def key(self, run: Run) -> Any:
        """Return the key of a run, by the rank of its last block."""
        slot = run.slots[-1]
        ranks = self._ranks[run.level]
        rank = ranks.get(slot)
        if rank is None:
            rank = ranks[slot] = self.rank(run, len(run.slots) - 1)
        return (run.priority, rank, run.released_at, -run.end)

    def _key_after(self, run: Run, gone: int) -> Any:
        """Return the key of a run after `gone` of its blocks are gone."""
        rank = self.rank(run, len(run.slots) - 1 - gone)
        return (run.priority, rank, run.released_at, gone - run.end)

    # -- notifications

    def evictable(self, run: Run) -> None:
        """Make the run a candidate."""
        self._ranks[run.level].pop(run.slots[-1], None)
        super().evictable(run)

    def held(self, level: int, slots: array[int]) -> None:
        """Drop the ranks of blocks that an event concerns."""
        self._forget(level, slots)

    def gone(self, level: int, slots: array[int]) -> None:
        """Drop ranks."""
        self._forget(level, slots)

    def cleared(self) -> None:
        """Drop everything."""
        super().cleared()
        for ranks in self._ranks:
            ranks.clear()

    def _forget(self, level: int, slots: array[int]) -> None:
        ranks = self._ranks[level]
        for slot in slots:
            ranks.pop(slot, None)

    # -- next victims

    lowest = EvictionOrder.lowest

    def num_same_rank(self, run: Run, count: int, other: Run | None = None) -> int:
        """Return how many blocks of the next run go before any other run's, and before `other`."""
        heap = self._heaps[run.level]
        if count == 1 or heap[0][2] != run.id:
            return 1
        limits = [] if other is None else [self.key(other)]
        entry = heappop(heap)
        if self.next(run.level) is not None:
            limits.append(heap[0][0])
        heappush(heap, entry)
        limit, take = min(limits, default=None), 1
        while take < count and (limit is None or self._key_after(run, take) < limit):
            take += 1
        return take


_REMEMBERED = 5
"""Number of remembered names, in capacities: one for what is cached, four for what was."""


class LeastFrequentlyUsed(ByBlock):
    """Least frequently used block first; uses are those by the sequence that first stored it and by each that found it.

    Uses are remembered after a block was evicted. They count from the last victim's count on, so that old counts age.
    Use by several sequences at a time counts once. A block that is found in secondary is counted when it is
    released.
    """

    def __init__(self, group: FullGroup) -> None:
        self.uses: OrderedDict[bytes, int] = OrderedDict()
        """Uses by name; the last counted come last."""
        self._most = _REMEMBERED * sum(level.size for level in group.levels)
        self._known = bytearray(group.levels[PRIMARY].size)
        """Primary slots with a counted block."""
        self._clock = 0
        self._clock_at: dict[int, int] = {}
        """Clock value by release."""
        super().__init__(group)

    def evictable(self, run: Run) -> None:
        """Count the new blocks of the run."""
        if run.level == PRIMARY:
            at, known = len(run.slots) - 1, self._known
            while at >= 0 and not known[run.slots[at]]:
                known[run.slots[at]] = 1
                self._count(self.name(run, at), 1)
                at -= 1
        super().evictable(run)

    def held(self, level: int, slots: array[int]) -> None:
        """Count blocks that were found."""
        if level == PRIMARY:
            run = self._group.run_at(level, slots[0])
            names, width = bytes(run.keys), self._key_bytes
            for at, slot in enumerate(slots):
                begin = at * width
                self._count(names[begin : begin + NAME_BYTES], 2 - self._known[slot])
                self._known[slot] = 1
        super().held(level, slots)

    def gone(self, level: int, slots: array[int]) -> None:
        """Mark the slots as unknown; advance the clock to the count of what was evicted."""
        if level == PRIMARY:
            rank = self._ranks[level].get(slots[0], 0) if slots else 0
            self._clock = max(self._clock, rank)
            for slot in slots:
                self._known[slot] = 0
        super().gone(level, slots)

    def cleared(self) -> None:
        """Keep the counts, which outlive the blocks."""
        self._known = bytearray(len(self._known))
        super().cleared()

    def _count(self, name: bytes, more: int) -> None:
        uses = self.uses
        uses[name] = uses.pop(name, 0) + more
        if len(uses) > self._most:
            uses.popitem(last=False)

    def rank(self, run: Run, at: int) -> int:
        """Return the uses, counted from the clock value at the release."""
        return self._clock_at.setdefault(run.released_at, self._clock) + self.uses.get(self.name(run, at), 1)


_NEVER = -(1 << 62)


class Clairvoyant(ByBlock):
    """Base of orders that use the outlook their class was made for."""

    outlook: Outlook

    def __init__(self, group: FullGroup) -> None:
        self._next_use = self.outlook.next_use
        super().__init__(group)


class Belady(Clairvoyant):
    """Block that returns last first: the optimum, with the fewest misses."""

    def rank(self, run: Run, at: int) -> int:
        """Return the negated distance to the next use."""
        use = self._next_use(self.name(run, at))
        return _NEVER if use is None else -use


class Returns(Clairvoyant):
    """Blocks that never return first; then least recently used."""

    def rank(self, run: Run, at: int) -> int:
        """Return 1 if the block returns, else 0."""
        return int(self._next_use(self.name(run, at)) is not None)


def with_outlook(order: type[Clairvoyant], future: Future) -> tuple[type[Clairvoyant], Outlook]:
    """Return the order for one replay, and the outlook to notify of admissions."""
    outlook = Outlook(future)
    return type(order.__name__, (order,), {"outlook": outlook}), outlook


class AdaptiveReplacement(EvictionOrder):
    """Lower priority first, then blocks used once if they exceed their target, else blocks used again; then as
    `LeastRecentlyUsed`.

    A returning block that was evicted (a ghost) shows which list of cached blocks was too short, that of blocks used
    once or of those used again: the target, the number of blocks used once, moves towards it, by more the shorter its
    list of ghosts is relative to the other. Both levels are one cache: moving a block between them changes no list. A
    ghost is recognized when the returning block is first released. Use by several sequences at a time counts once.
    """

    needs_names = True

    def __init__(self, group: FullGroup) -> None:
        self._group, self._runs, self._key_bytes = group, group.tree.runs, group.tree.key_bytes
        self._capacity = sum(level.size for level in group.levels)
        self._cached: dict[bytes, bool] = {}
        """Cached blocks by name; True for those used again."""
        self._recent = 0
        """Number of cached blocks used once."""
        self._target = 0
        """Target of that number, from 0 to the capacity."""
        self._ghosts: tuple[OrderedDict[bytes, None], ...] = OrderedDict(), OrderedDict()
        """Evicted blocks that were used once, and those used again, in the order of their eviction."""
        self._once, self._again = _Leaves(group, self, False), _Leaves(group, self, True)
        for run in self._runs.values():
            if run.is_leaf:
                self.evictable(run)

    @property
    def _excess(self) -> int:
        """Number of blocks used once above the target: if positive, they go first, else those used again."""
        return self._recent - self._target

    def used_again(self, run: Run) -> bool:
        """Return True if the last block of a run was used again."""
        return self._cached.get(self._name(run, len(run.slots) - 1), False)

    def _name(self, run: Run, at: int) -> bytes:
        begin = at * self._key_bytes
        return bytes(run.keys[begin : begin + NAME_BYTES])

    # -- notifications

    def evictable(self, run: Run) -> None:
        """Add the new blocks of the prefix, and make the run a candidate."""
        self._enter(run)
        (self._again if self.used_again(run) else self._once).evictable(run)

    def _enter(self, run: Run) -> None:
        new = list(takewhile(lambda name: name not in self._cached, self._names_up(run)))
        for name in new:
            self._store(name)
        # Only now, since the blocks that made room for a block may displace its own ghost.
        recent, frequent = self._ghosts
        while new and recent and self._recent + len(recent) > self._capacity:
            recent.popitem(last=False)
        while new and len(recent) + len(frequent) > self._capacity:
            frequent.popitem(last=False)

    def _store(self, name: bytes) -> None:
        """Add a newly cached block as used once, or as used again if its ghost is known."""
        recent, frequent = self._ghosts
        if name in recent:
            self._target = min(self._capacity, self._target + max(1, len(frequent) // len(recent)))
            del recent[name]
        elif name in frequent:
            self._target = max(0, self._target - max(1, len(recent) // len(frequent)))
            del frequent[name]
        else:
            self._recent += 1
            self._cached[name] = False
            return
        self._cached[name] = True

    def _names_up(self, run: Run) -> Iterator[bytes]:
        """Yield the blocks of the prefix that ends with a run, deepest first: if one is known, so are all before it."""
        for above in self._group.path(run):
            for at in reversed(range(len(above.slots))):
                yield self._name(above, at)

    def held(self, level: int, slots: array[int]) -> None:
        """Mark blocks as found."""
        run = self._group.run_at(level, slots[0])
        self._enter(run)
        for at in range(len(slots)):
            name = self._name(run, at)
            self._recent -= not self._cached[name]
            self._cached[name] = True

    def gone(self, level: int, slots: array[int]) -> None:
        """Turn blocks into ghosts, unless they only moved to the other level."""
        run = self._runs.get(self._group.levels[level].run_ids[slots[0]])
        if run is not None and run.level == level:
            last = len(run.slots) - 1
            for at in range(last, last - len(slots), -1):
                name = self._name(run, at)
                again = self._cached.pop(name)
                self._recent -= not again
                self._ghosts[again][name] = None

    def cleared(self) -> None:
        """Drop all candidates; ghosts and target stay, since nothing was evicted."""
        self._cached.clear()
        self._recent = 0
        self._once.cleared()
        self._again.cleared()

    # -- next victims

    def _turn(self, run: Run) -> tuple[int, bool, int, int]:
        """Return the sort key of a run: the lowest goes first, until a list changes its length."""
        return (run.priority, self.used_again(run) == (self._excess > 0), run.released_at, -run.end)

    def next(self, level: int, spares: Collection[int] = ()) -> Run | None:
        """Return the run with the last block that goes next."""
        found = (leaves.next(level, spares) for leaves in (self._once, self._again))
        return min((run for run in found if run is not None), default=None, key=self._turn)

    def num_same_rank(self, run: Run, count: int, other: Run | None = None) -> int:
        """Return how many of the last blocks of the next run go before any others: those in its list, up to its
        excess.
        """
        last, again, excess = len(run.slots) - 1, self.used_again(run), self._excess
        most = min(count, excess) if excess > 0 and not again else count
        tail = (self._name(run, at) for at in range(last, last - most, -1))
        return sum(1 for _ in takewhile(lambda name: self._cached.get(name, False) == again, tail))

    def precedes(self, run: Run, other: Run) -> bool:
        """Return True if `run` goes before `other`, or if they are equal."""
        return self._turn(run) <= self._turn(other)

    def check(self) -> None:
        """Compare the next run of each level with all runs, and the lists with the cached blocks."""
        runs, (recent, frequent) = self._runs.values(), (ghosts.keys() for ghosts in self._ghosts)
        cached = {self._name(run, at) for run in runs for at in range(len(run.slots))}
        invariant(self._cached.keys() <= cached, "a block that was evicted is taken to be cached")
        several = recent & frequent or self._cached.keys() & (recent | frequent)
        invariant(not several, "a block is in two lists")
        invariant(self._recent == list(self._cached.values()).count(False), "blocks used once are miscounted")
        invariant(len(recent) + len(frequent) <= 2 * self._capacity, "there are too many ghosts")
        invariant(0 <= self._target <= self._capacity, "the target is out of bounds")
        for level in range(len(self._group.levels)):
            leaves = [run for run in runs if run.level == level and run.is_leaf]
            tracked = self._once.known_blocks(level) | self._again.known_blocks(level)
            invariant(
                {run.id for run in leaves} == tracked, "a cached block is unknown to the eviction order"
            )
            invariant(
                self.next(level) is min(leaves, default=None, key=self._turn),
                "another block would be evicted than the lowest in order",
            )


class _Leaves(LeastRecentlyUsed):
    """Least recently used leaves, limited to those with their last block in one of the lists."""

    def __init__(self, group: FullGroup, order: AdaptiveReplacement, again: bool) -> None:
        self._order, self._used_again = order, again
        super().__init__(group)

    def _described(self, entry: tuple[object, int, int], level: int) -> Run | None:
        run = super()._described(entry, level)
        return run if run is not None and self._order.used_again(run) == self._used_again else None

    def known_blocks(self, level: int) -> set[int]:
        """Return the ids of its runs."""
        found = (self._described(entry, level) for entry in self._heaps[level])
        return {run.id for run in found if run is not None}


ENTRY_POINT_GROUP = "kvcache.eviction_orders"
"""Entry-point group: an entry's name is the policy's, its object a class derived from `EvictionOrder`."""
BOUND = "belady"
"""Optimal policy, the bound for comparisons."""
BASE = "lru"
"""Baseline for the gap to the bound."""
HINTED = "returns"
"""Policy with the knowledge that an application's hints can provide."""
_BUILT_IN: dict[str, type[EvictionOrder]] = {
    **ORDERS,
    "lfu": LeastFrequentlyUsed,
    "arc": AdaptiveReplacement,
    HINTED: Returns,
    BOUND: Belady,
}


@dataclass(eq=False, repr=False)
class UnknownPolicy(UsageError):
    """No eviction order has this name, or it cannot be loaded; `reason` says which."""

    name: str
    reason: str
    text = "policy {name!r}: {reason}"


@dataclass(eq=False, repr=False)
class PolicyFailed(UsageError):
    """An eviction order of another package raised an exception; `failure` is its type and place."""

    name: str
    provider: str
    failure: str
    text = (
        "policy {name!r} failed: {failure}; it is provided by {provider}, not by kvcache "
        "(kvcache.decide.eviction_order describes the interface)"
    )


@contextmanager
def blaming(name: str | None) -> Iterator[None]:
    """Attribute failures inside to the order of another package that is in use. Raises `PolicyFailed`.

    Failures due to settings and the machine are excepted. None is the order of the settings, which is this library's.
    """
    try:
        yield
    except (ConfigError, CapacityError, MemoryError):
        raise
    except Exception as error:
        if name is None or name in _BUILT_IN:
            raise
        [provider, *_] = [entry.value for entry in entry_points(group=ENTRY_POINT_GROUP, name=name)]
        # SECURITY: without its text, which may quote a request's tokens.
        raise PolicyFailed(name, provider, type_and_place(error)) from error


def known_policies() -> list[str]:
    """Return the sorted names of all policies: this library's and others."""
    others = entry_points(group=ENTRY_POINT_GROUP).names
    return [*_BUILT_IN, *sorted(set(others) - set(_BUILT_IN))]


def policy(name: str) -> type[EvictionOrder]:
    """Return the eviction order of this name. Raises `UnknownPolicy`, also if another package has an entry of a
    built-in name.

    Raises `UsageError` for an entry that is no order.
    """
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if name in _BUILT_IN:
        if found:
            raise UnknownPolicy(
                name, f"{found[0].value} has the name of a built-in policy: rename its entry point"
            )
        return _BUILT_IN[name]
    if not found:
        raise UnknownPolicy(name, f"there are {', '.join(known_policies())}")
    try:
        order: type[EvictionOrder] = found[0].load()
    except (ImportError, AttributeError) as error:
        reason = f"{found[0].value} provides it but cannot be imported ({error}); install what it needs"
        raise UnknownPolicy(name, reason) from error
    except Exception as error:
        reason = (
            f"{found[0].value} provides it but fails when it is imported ({type_and_place(error)}: {error})"
        )
        raise UnknownPolicy(name, reason) from error
    refuse_no_order(order)
    return order
