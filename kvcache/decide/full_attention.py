"""Decisions for a window with full attention: reuse and extension of paths in the prefix tree, and eviction from its
leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from itertools import groupby

import numpy as np

from events.ids import Handle
from events.packed import NAME_BYTES, names_between, names_of_keys
from events.types import PRIMARY, SECONDARY, Event, RemoveReason
from kvcache.config import KVCacheConfig
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.decide.window_manager import Claims, Plan, RetentionRow, WindowManager
from kvcache.fold.full_group import FullGroup
from kvcache.fold.group import last_reversed
from kvcache.fold.prefix_tree import Piece, Run, covered, covered_child, match, runs_below
from kvcache.fold.sequence import BlockRetention, Sequence
from kvcache.fold.sliding_group import AnyMatch
from kvcache.fold.state import CacheState
from kvcache.results import Replacement


class PathClaims(Claims):
    """Claims counted by run: requests of a batch that share a run claim leading parts of it."""

    def __init__(self, available: int) -> None:
        super().__init__(available)
        self._taken: dict[int, int] = {}
        """Number of claimed blocks by run."""

    def add(self, found: AnyMatch, claimed: Items[Piece]) -> None:
        """Count the cached blocks of one more request."""
        for run, take in found.runs:
            more = take - self._taken.get(run.id, 0)
            if more <= 0:
                continue
            self._taken[run.id] = take
            if run.level == SECONDARY:
                self.needed += more
            elif not run.refs:
                self.available -= more


class FullAttentionManager(WindowManager):
    """Decisions for a window in which a sequence holds all its blocks."""

    group: FullGroup
    order: EvictionOrder

    def __init__(
        self,
        state: CacheState,
        group: FullGroup,
        emit: Callable[[Event], None],
        config: KVCacheConfig,
        order: type[EvictionOrder],
    ) -> None:
        super().__init__(state, group, emit, config)
        self.order = group.watcher = order(group)

    # -- queries

    def claims(self) -> Claims:
        """Empty claims of a batch."""
        return PathClaims(self.primary.available)

    def blocks_to_grow(self, sequence: Sequence, num_tokens: int, chunk: int | None = None) -> int:
        """Blocks that a sequence needs, in addition to its own, to grow by this number of tokens."""
        return max(0, self.blocks_for(sequence.num_tokens + num_tokens) - len(sequence.tables[self.index]))

    def blocks_to_complete(self, plan: Plan, total: int) -> int:
        """Blocks that a prompt needs from its admission on, until it has `total` tokens."""
        full = (plan.reused_tokens - plan.reused_partial) // self.tokens_per_block
        return self.blocks_for(total) - full - plan.windows[self.index].new_blocks

    def released_by(self, sequence: Sequence, first: int) -> int:
        """Cached blocks from the block `first` on that become available when the sequence releases them."""
        path = self.group.path(sequence.path_ends[self.index])
        return sum(max(0, run.end - max(run.start, first)) for run in path if run.refs == 1)

    def first_pinned(self, sequence: Sequence, first: int) -> int:
        """First block to pin so that those from `first` on can be found: 0, since none is without those before it."""
        return 0

    # -- storing

    def _store_path(
        self, sequence: Sequence, first: int, full: int, stop: int, replaced: list[Replacement]
    ) -> None:
        size, tail = self.tokens_per_block, sequence.path_ends[self.index]
        if first < full and tail.children:
            first += self._adopt(sequence, first, full, replaced)
        if first * size < stop:
            tail = sequence.path_ends[self.index]
            head = sequence.packed(first * size, min(stop, (first + 1) * size)) if tail.children else b""
            if head and covered(tail, head):
                return  # a block that begins with these tokens serves as well
            shorter = covered_child(tail, head) if head else None
            if shorter is not None:
                self._remove_tails([(shorter, 1)], RemoveReason.SUPERSEDED, sequence.handle)
            self._store_new(sequence, first, stop)

    def _adopt(self, sequence: Sequence, first: int, full: int, replaced: list[Replacement]) -> int:
        """Replace the next blocks by equal ones that another sequence has stored meanwhile; returns their number."""
        size, tail = self.tokens_per_block, sequence.path_ends[self.index]
        if sequence.packed(first * size, (first + 1) * size) not in tail.children:
            return 0
        symbols = sequence.packed(first * size, full * size)
        found = match(self.group.tree, tail, symbols, len(symbols), partial=False)
        for blocks in self._claimed(found, 0):
            self._take_stored(sequence, blocks, replaced)
        return found.blocks

    # -- retention

    def _held_rows(self, sequence: Sequence, first: int, last: int, *, alone: bool) -> Iterator[RetentionRow]:
        """Yield the rows with equal retention of the sequence's path, which it holds as a whole."""
        path = [
            run
            for run in self.group.path(sequence.path_ends[self.index])
            if run.end > first and run.start < last and not (alone and run.refs > 1)
        ]
        path.reverse()
        size = self.key_bytes
        for (level, old), runs in groupby(
            path, lambda run: (run.level, BlockRetention(run.priority, run.duration))
        ):
            slots, keys = array("i"), bytearray()
            for run in runs:
                begin, end = max(first - run.start, 0), max(last - run.start, 0)
                slots += run.slots[begin:end]
                keys += run.keys[begin * size : end * size]
            yield RetentionRow(level, old, slots, names_of_keys(bytes(keys), size))

    # -- eviction

    def free_up(self, needed: int, handle: Handle | None, spares: Collection[int] = ()) -> None:
        """Evict until `needed` primary slots are blank; the secondary slots in `spares` keep their blocks.

        The victims are the first in the order. Blocks go from primary to secondary while secondary has room or holds
        something lower in the same order; otherwise they are dropped, after the blocks that continue them.
        """
        together = not spares
        while (short := needed - len(self.primary.blank)) > 0:
            if together and self.evict_together(self.order.lowest(PRIMARY, short), handle):
                continue
            # Rare: priorities, or more than secondary holds. Finding all of them each time would take too long.
            together = False
            run = self.order.next(PRIMARY)
            assert run is not None, "counted before"
            take = self.order.num_same_rank(run, min(short, len(run.slots)))
            room = self._room_in_secondary(run, take, handle, spares) if self._offloads else 0
            if room:
                self._offload([(run, min(take, room))], handle)
            else:
                if run.children:
                    self._remove_below(run, handle)
                    take = 1  # dropping its descendants has freed slots in secondary, which the next ones may use
                self._remove_tails([(run, take)], RemoveReason.CAPACITY, handle)

    def evict_together(self, victims: list[tuple[Run, int]], handle: Handle | None) -> bool:
        """Evict these, the lowest ones, by an event or two. Returns False, with nothing done, if the outcome might
        differ from that of evicting one block after the other, as `free_up` does then.

            primary    [a a a][b b]·····      victims a:2, b:2, in their order
            secondary  [x x][y]__             two blank slots, missing two: x:2 goes for good

            primary    [a]····[]·····         then all four move down together
            secondary  [y][a a][b b]

        It comes to the same where each victim would go down, and find room:

        - without secondary every victim is dropped, in the order of `lowest`;
        - every victim's priority is high enough for secondary, so none is dropped;
        - what secondary must drop for them goes before the *first* victim in the order. One by one, a victim evicts
          what is lower than itself, and later victims are no lower than the first. Nor can a victim that has just come
          down be chosen: it is no lower than the first, and something lower is still there.

        Runs that are chosen are leaves of their levels, and where the last block of one goes and its parent becomes a
        leaf whose turn comes before the next, `lowest` ends there. O(blocks evicted + runs · log runs).
        """
        if not self._offloads:
            self._remove_tails(victims, RemoveReason.CAPACITY, handle)
            return True
        if min(run.priority for run, _ in victims) < self._offload_min_priority:
            return False
        secondary = self.group.levels[SECONDARY]
        missing = sum(take for _, take in victims) - len(secondary.blank)
        if missing > 0:
            lower = self.order.lowest(SECONDARY, missing)
            room = sum(take for _, take in lower)
            if room < missing or not self.order.precedes(lower[-1][0], victims[0][0]):
                return False
            self._remove_tails(lower, RemoveReason.CAPACITY, handle)
        self._offload(victims, handle)
        return True

    def _room_in_secondary(self, run: Run, take: int, handle: Handle | None, spares: Collection[int]) -> int:
        """Count the victim's blocks that secondary takes now, after evicting what is lower in order there."""
        secondary = self.group.levels[SECONDARY]
        if run.priority < self._offload_min_priority:
            return 0
        if not secondary.blank:
            lower = self.order.next(SECONDARY, spares)
            if lower is None or not self.order.precedes(lower, run):
                return 0
            after = next((n for n, slot in enumerate(reversed(lower.slots)) if slot in spares), take)
            going = self.order.num_same_rank(lower, min(take, after, len(lower.slots)), run)
            self._remove_tails([(lower, going)], RemoveReason.CAPACITY, handle)
        return len(secondary.blank)

    def _remove_below(self, run: Run, handle: Handle | None) -> None:
        """Remove everything cached below a run, leaves first."""
        # Collected first: a removal may join the runs that are left.
        below = [(each.level, *self._tails([(each, len(each.slots))])) for each in reversed(runs_below(run))]
        for level, slots, names in below:
            self.events.remove(level, slots, names, RemoveReason.UNREACHABLE, handle)

    def _offload(self, victims: list[tuple[Run, int]], handle: Handle | None) -> None:
        slots, names = self._tails(victims)
        self.events.offload(slots, names, self.group.levels[SECONDARY].peek(len(slots)), handle)

    def _remove_tails(self, tails: list[tuple[Run, int]], why: RemoveReason, handle: Handle | None) -> None:
        """Remove the ends of childless runs of one level, in this order."""
        self.events.remove(tails[0][0].level, *self._tails(tails), why, handle)

    def _tails(self, tails: list[tuple[Run, int]]) -> tuple[array[int], bytes]:
        """Return the slots and names of the last blocks of each run, deepest first."""
        slots = array("i")
        for run, count in tails:
            slots += last_reversed(run.slots, count)
        return slots, b"".join([last_names(run.keys, self.key_bytes, count) for run, count in tails])


def last_names(keys: bytes | bytearray, size: int, count: int) -> bytes:
    """Return the names of the last `count` blocks of a column of keys of this size, last first."""
    if not size:
        return b""
    blocks = len(keys) // size
    if count == 1:
        return bytes(keys[(blocks - 1) * size :][:NAME_BYTES])
    names = names_between(keys, size, blocks - count, blocks)
    return np.frombuffer(names, f"V{NAME_BYTES}")[::-1].tobytes()
