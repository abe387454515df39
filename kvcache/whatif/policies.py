"""Orders of eviction to compare: our own, others that are known, two that know what comes, and those of other packages.

A block *returns* with the next prompt in which it lies whole, and not with its last token: a prompt's last token is
always computed. Prompts come in the order in which the log has them admitted; whoever waits is still to come.
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
        """Blocks by name."""
        self.first = array("q")
        """By block, its first use."""
        self.following = array("q")
        """By use, the next one of the same block."""
        self.prompt_of = array("q")
        """By use, the number of the prompt."""
        self.numbers: dict[int, int] = {}
        """By handle, the number of its prompt."""
        self._last = array("q")

    @classmethod
    def of(cls, prompts: Iterable[tuple[int, RecordedPrompt]]) -> Future:
        """What prompts say, each with the tokens of a block of the cache that it comes to."""
        future = cls()
        for tokens_per_block, prompt in prompts:
            future._add(tokens_per_block, prompt)
        return future

    def _add(self, tokens_per_block: int, prompt: RecordedPrompt) -> None:
        number = self.numbers[prompt.handle] = len(self.numbers)
        names = names_in(prompt, tokens_per_block)
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
    """The names of the blocks that a prompt can reuse whole."""
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
    """What is still to come while requests are played."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self._next = array("q", future.first)
        self._admitted = bytearray(len(future.numbers))

    def note(self, handle: int, admitted: bool) -> None:
        """A request is about to be admitted, so that its uses are no longer to come, or was not admitted after all.

        A branch that is played as a request has no prompt of its own in the log: its uses are not foreseen.
        """
        number = self._future.numbers.get(handle)
        if number is not None:
            self._admitted[number] = admitted

    def next_use(self, name: bytes) -> int | None:
        """The number of the next prompt that has the block; None: there is none."""
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

    A block's rank is worked out when its turn may come, and stays until something happens to the block.
    """

    needs_names = True

    def __init__(self, group: FullGroup) -> None:
        self._group, self._key_bytes = group, group.tree.key_bytes
        self._ranks: tuple[dict[int, int], ...] = tuple({} for _ in group.levels)
        """By level and slot."""
        super().__init__(group)

    @abstractmethod
    def rank(self, run: Run, at: int) -> int:
        """The rank of a block, by its place in its run, from 0; the lowest goes first."""

    def name(self, run: Run, at: int) -> bytes:
        """The name of a block, by its place in its run."""
        begin = at * self._key_bytes
        return bytes(run.keys[begin : begin + NAME_BYTES])

    def key(self, run: Run) -> Any:
        """By the rank of the last block."""
        slot = run.slots[-1]
        ranks = self._ranks[run.level]
        rank = ranks.get(slot)
        if rank is None:
            rank = ranks[slot] = self.rank(run, len(run.slots) - 1)
        return (run.priority, rank, run.released_at, -run.end)

    def _key_behind(self, run: Run, gone: int) -> Any:
        """The key that a run will have when so many of its blocks are gone."""
        rank = self.rank(run, len(run.slots) - 1 - gone)
        return (run.priority, rank, run.released_at, gone - run.end)

    # -- what happens

    def evictable(self, run: Run) -> None:
        """Make the run a candidate."""
        self._ranks[run.level].pop(run.slots[-1], None)
        super().evictable(run)

    def held(self, level: int, slots: array[int]) -> None:
        """Forget ranks: something happened to these blocks."""
        self._forget(level, slots)

    def gone(self, level: int, slots: array[int]) -> None:
        """Forget ranks."""
        self._forget(level, slots)

    def cleared(self) -> None:
        """Forget everything."""
        super().cleared()
        for ranks in self._ranks:
            ranks.clear()

    def _forget(self, level: int, slots: array[int]) -> None:
        ranks = self._ranks[level]
        for slot in slots:
            ranks.pop(slot, None)

    # -- what goes next

    lowest = EvictionOrder.lowest

    def alike(self, run: Run, count: int, other: Run | None = None) -> int:
        """How many blocks of the next run go before any other run's, and before `other`."""
        heap = self._heaps[run.level]
        if count == 1 or heap[0][2] != run.id:
            return 1
        limits = [] if other is None else [self.key(other)]
        entry = heappop(heap)
        if self.next(run.level) is not None:
            limits.append(heap[0][0])
        heappush(heap, entry)
        limit, take = min(limits, default=None), 1
        while take < count and (limit is None or self._key_behind(run, take) < limit):
            take += 1
        return take


_REMEMBERED = 5
"""Capacities of names whose counts are kept: one for what is cached, four for what was."""


class LeastFrequentlyUsed(ByBlock):
    """What was used least goes first: by the sequence that stored it first, and by each that found it.

    Uses are remembered after a block was evicted. They count from the last victim's count on, so that old fame does
    not last. Use by several sequences at a time counts once. A block that is found in secondary is counted when it is
    released.
    """

    def __init__(self, group: FullGroup) -> None:
        self.uses: OrderedDict[bytes, int] = OrderedDict()
        """By name; those that were counted last are last."""
        self._most = _REMEMBERED * sum(level.size for level in group.levels)
        self._known = bytearray(group.levels[PRIMARY].size)
        """Primary slots whose block was counted."""
        self._clock = 0
        self._clock_at: dict[int, int] = {}
        """By release, what the clock showed."""
        super().__init__(group)

    def evictable(self, run: Run) -> None:
        """Count the run's blocks that are new."""
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
        """Whatever lies there next is new; the clock goes on to the count of what was evicted."""
        if level == PRIMARY:
            rank = self._ranks[level].get(slots[0], 0) if slots else 0
            self._clock = max(self._clock, rank)
            for slot in slots:
                self._known[slot] = 0
        super().gone(level, slots)

    def cleared(self) -> None:
        """Counts outlive the blocks."""
        self._known = bytearray(len(self._known))
        super().cleared()

    def _count(self, name: bytes, more: int) -> None:
        uses = self.uses
        uses[name] = uses.pop(name, 0) + more
        if len(uses) > self._most:
            uses.popitem(last=False)

    def rank(self, run: Run, at: int) -> int:
        """Uses, from what the clock showed at the release on."""
        return self._clock_at.setdefault(run.released_at, self._clock) + self.uses.get(self.name(run, at), 1)


_NEVER = -(1 << 62)


class Clairvoyant(ByBlock):
    """Knows the outlook that its class was made for."""

    outlook: Outlook

    def __init__(self, group: FullGroup) -> None:
        self._next_use = self.outlook.next_use
        super().__init__(group)


class Belady(Clairvoyant):
    """The block that returns last goes first: the fewest are missed."""

    def rank(self, run: Run, at: int) -> int:
        """How far away the next use is, below 0."""
        use = self._next_use(self.name(run, at))
        return _NEVER if use is None else -use


class Returns(Clairvoyant):
    """What never returns goes first; what does, as least recently used."""

    def rank(self, run: Run, at: int) -> int:
        """1 if the block returns."""
        return int(self._next_use(self.name(run, at)) is not None)


def with_outlook(order: type[Clairvoyant], future: Future) -> tuple[type[Clairvoyant], Outlook]:
    """The order for one play of the requests, and what has to be told who is admitted."""
    outlook = Outlook(future)
    return type(order.__name__, (order,), {"outlook": outlook}), outlook


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


class AdaptiveReplacement(EvictionOrder):
    """Lower priority first, then what was used once if that exceeds its target, else what was used again; then as
    `LeastRecentlyUsed`.

    Both levels are one cache: moving a block between them changes no list. Ghosts are met when the block that came
    back is released for the first time. Use by several sequences at a time counts once.
    """

    needs_names = True

    def __init__(self, group: FullGroup) -> None:
        self._group, self._runs, self._key_bytes = group, group.tree.runs, group.tree.key_bytes
        self._lists = ArcLists(sum(level.size for level in group.levels))
        self._once, self._again = _Leaves(group, self, False), _Leaves(group, self, True)
        for run in self._runs.values():
            if run.is_leaf:
                self.evictable(run)

    def used_again(self, run: Run) -> bool:
        """Whether the last block of a run was used again."""
        return self._lists.used_again(self._name(run, len(run.slots) - 1))

    def _name(self, run: Run, at: int) -> bytes:
        begin = at * self._key_bytes
        return bytes(run.keys[begin : begin + NAME_BYTES])

    # -- what happens

    def evictable(self, run: Run) -> None:
        """Enter the blocks of the prefix that are new, and make the run a candidate."""
        self._enter(run)
        (self._again if self.used_again(run) else self._once).evictable(run)

    def _enter(self, run: Run) -> None:
        new = list(takewhile(lambda name: name not in self._lists, self._names_up(run)))
        for name in new:
            self._lists.store(name)
        if new:
            self._lists.forget_ghosts()

    def _names_up(self, run: Run) -> Iterator[bytes]:
        """The blocks of the prefix that ends with a run, the deepest first: where one is entered, all before it are."""
        for above in self._group.path(run):
            for at in reversed(range(len(above.slots))):
                yield self._name(above, at)

    def held(self, level: int, slots: array[int]) -> None:
        """Blocks were found."""
        run = self._group.run_at(level, slots[0])
        self._enter(run)
        for at in range(len(slots)):
            self._lists.find(self._name(run, at))

    def gone(self, level: int, slots: array[int]) -> None:
        """What has not only moved to the other level becomes a ghost."""
        run = self._runs.get(self._group.levels[level].run_ids[slots[0]])
        if run is not None and run.level == level:
            last = len(run.slots) - 1
            for at in range(last, last - len(slots), -1):
                self._lists.evict(self._name(run, at))

    def cleared(self) -> None:
        """Forget all candidates."""
        self._lists.clear()
        self._once.cleared()
        self._again.cleared()

    # -- what goes next

    def _turn(self, run: Run) -> tuple[int, bool, int, int]:
        """Lower goes first, until a list gets longer or shorter."""
        return (run.priority, self.used_again(run) == (self._lists.excess > 0), run.released_at, -run.end)

    def next(self, level: int, spares: Collection[int] = ()) -> Run | None:
        """The run whose last block goes next."""
        found = (leaves.next(level, spares) for leaves in (self._once, self._again))
        return min((run for run in found if run is not None), default=None, key=self._turn)

    def alike(self, run: Run, count: int, other: Run | None = None) -> int:
        """How many of the last blocks of the next run go before any other: those in its list, while that is so long."""
        last, again, excess = len(run.slots) - 1, self.used_again(run), self._lists.excess
        most = min(count, excess) if excess > 0 and not again else count
        tail = (self._name(run, at) for at in range(last, last - most, -1))
        return sum(1 for _ in takewhile(lambda name: self._lists.used_again(name) == again, tail))

    def precedes(self, run: Run, other: Run) -> bool:
        """Whether a run goes before the other, or neither before the other."""
        return self._turn(run) <= self._turn(other)

    def check(self) -> None:
        """Compare the next of each level with all runs, and the lists with what is cached."""
        runs = self._runs.values()
        self._lists.check({self._name(run, at) for run in runs for at in range(len(run.slots))})
        for level in range(len(self._group.levels)):
            leaves = [run for run in runs if run.level == level and run.is_leaf]
            heard = self._once.heard_of(level) | self._again.heard_of(level)
            invariant({run.id for run in leaves} == heard, "a block cannot be evicted: unheard of")
            invariant(
                self.next(level) is min(leaves, default=None, key=self._turn),
                "another block would be evicted than the lowest in order",
            )


class _Leaves(LeastRecentlyUsed):
    """Of the leaves those whose last block is in one of the lists."""

    def __init__(self, group: FullGroup, order: AdaptiveReplacement, again: bool) -> None:
        self._order, self._used_again = order, again
        super().__init__(group)

    def _described(self, entry: tuple[object, int, int], level: int) -> Run | None:
        run = super()._described(entry, level)
        return run if run is not None and self._order.used_again(run) == self._used_again else None

    def heard_of(self, level: int) -> set[int]:
        """The ids of its runs."""
        found = (self._described(entry, level) for entry in self._heaps[level])
        return {run.id for run in found if run is not None}


ENTRY_POINT_GROUP = "kvcache.eviction_orders"
"""The entry's name is the policy's; its object is a class derived from `EvictionOrder`."""
BOUND = "belady"
"""What others are compared with."""
BASE = "lru"
"""From where the gap to the bound is measured."""
HINTED = "returns"
"""Knows what hints of an application can tell."""
_BUILT_IN: dict[str, type[EvictionOrder]] = {
    **ORDERS,
    "lfu": LeastFrequentlyUsed,
    "arc": AdaptiveReplacement,
    HINTED: Returns,
    BOUND: Belady,
}


@dataclass(eq=False, repr=False)
class UnknownPolicy(UsageError):
    """There is no order of eviction of this name, or it cannot be had; `reason` says which."""

    name: str
    reason: str
    text = "policy {name!r}: {reason}"


@dataclass(eq=False, repr=False)
class PolicyFailed(UsageError):
    """An order of eviction of another package raised an exception; `failure` is its type and place."""

    name: str
    provider: str
    failure: str
    text = (
        "policy {name!r} failed: {failure}; it is {provider}, no part of kvcache, and "
        "kvcache.decide.eviction_order says what it must do"
    )


@contextmanager
def blaming(name: str | None) -> Iterator[None]:
    """What fails inside while an order of another package is at work is its fault. Raises `PolicyFailed`.

    But for what settings and the machine are to blame for. None is the order of the settings, which is ours.
    """
    try:
        yield
    except (ConfigError, CapacityError, MemoryError):
        raise
    except Exception as error:
        if name is None or name in _BUILT_IN:
            raise
        [provider, *_] = [entry.value for entry in entry_points(group=ENTRY_POINT_GROUP, name=name)]
        # SECURITY: without its text, which may quote a run's tokens.
        raise PolicyFailed(name, provider, type_and_place(error)) from error


def known_policies() -> list[str]:
    """The names of all that `policy` finds: ours, then others, sorted."""
    others = entry_points(group=ENTRY_POINT_GROUP).names
    return [*_BUILT_IN, *sorted(set(others) - set(_BUILT_IN))]


def policy(name: str) -> type[EvictionOrder]:
    """The order of this name. Raises `UnknownPolicy`, also where another package has an entry of a name of ours.

    Raises `UsageError` for an entry that is no order.
    """
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if name in _BUILT_IN:
        if found:
            raise UnknownPolicy(
                name, f"{found[0].value} has a name of ours, too: give its entry point another one"
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
