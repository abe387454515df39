"""Interface of a group of layers: slots per level, a prefix tree, and what the state needs of it, event by event."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from events.ids import GroupIndex
from events.packed import CHECKSUM_BYTES, NAME_BYTES
from events.types import PRIMARY, SECONDARY, GroupCreated, Namespace
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.prefix_tree import Node, PrefixTree, Root, Run
from kvcache.fold.sequence import Sequence

_FEW = 16
"""Up to this number of slots a loop is faster than numpy: it notes 16 in 0.6 µs, numpy in 1.4; 64 in 5.8 µs and in 1.0.
"""
_SLICED = 512
"""Up to this number of slots a slice is faster than numpy: it reverses 256 in 0.7 µs, numpy in 1.1; 1024 in 2.4 and in
1.4."""
_ROWS = 3
"""Chosen slots in more rows than this count as unordered: each is found in 6 µs, and all of 32 scattered slots in 18.
"""
_NEAR = 4096
"""Window in which a chosen slot is searched first, among the next blank ones: found there in 6 µs, among 65,536 in 14,
among 262,144 in 50."""


def last_reversed(slots: array[int], count: int) -> array[int]:
    """Return the last `count` slots, last first."""
    if count > _SLICED:
        return array("i", np.frombuffer(slots, np.int32)[: -count - 1 : -1].tobytes())
    return slots[: -count - 1 : -1]


def indexes(places: array[int]) -> npt.NDArray[np.intp]:
    """Convert places to numpy indexes once, rather than again for every column."""
    return np.frombuffer(places, np.int32).astype(np.intp)


def common_slots(slots: array[int], begin: int, places: array[int], done: int) -> int:
    """Count the slots of a run from `begin` on that equal these places from `done` on; the first one does."""
    most = min(len(slots) - begin, len(places) - done)
    if most == 1 or slots[begin + 1] != places[done + 1]:
        return 1
    if slots[begin : begin + most] == places[done : done + most]:
        return most
    differs = np.frombuffer(slots, np.int32, most, begin * 4) != np.frombuffer(
        places, np.int32, most, done * 4
    )
    return int(differs.argmax())


class Level:
    """Slots of one window at one level."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.blank = array("i")
        self.blank.frombytes(np.arange(size - 1, -1, -1, dtype=np.int32).tobytes())
        """Blank slots; the last is taken first, so that a new cache hands out 0, 1, 2, ..."""
        self.run_ids = array("q", [-1]) * size
        """Id of the run that holds the slot, or was the last to do so: readers compare the run's slots."""
        self.run_id_array = np.frombuffer(self.run_ids, np.int64) if size else np.empty(0, np.int64)
        """View of `run_ids` as an array, for vectorised access."""
        self.unreferenced = 0
        """Cached blocks that no sequence holds: all can be evicted, leaf by leaf."""
        self.checksums: npt.NDArray[np.uint64] | None = None
        """Checksums by slot of what the last copy wrote there: valid where a block is cached and has landed. 0:
        unknown. None: none is known, as where the level lies in no file."""

    @property
    def available(self) -> int:
        """Available slots: blank, or cached and unreferenced."""
        return len(self.blank) + self.unreferenced

    def peek(self, count: int) -> array[int]:
        """Return the next `count` blank slots, in the order in which they would be taken."""
        if count > len(self.blank):
            raise InvariantViolated("not enough blank slots")
        return last_reversed(self.blank, count)

    def take_slots(self, slots: array[int]) -> None:
        """Take slots off the blank list: the next ones or, where others have chosen, any."""
        count, free = len(slots), self.blank
        if last_reversed(free, count) == slots:
            del free[len(free) - count :]
            return
        done = rows = 0
        while done < count:
            if rows == _ROWS:
                self._take_scattered(np.frombuffer(slots, np.int32)[done:])
                return
            end, taken = self._row_of(slots, done)
            invariant(taken > 0, "an allocated slot is not blank")
            del free[end - taken : end]
            done, rows = done + taken, rows + 1

    def _take_scattered(self, wanted: npt.NDArray[np.int32]) -> None:
        """Take slots off the blank list that are in no order there, and mostly near the end."""
        chosen = np.zeros(self.size, bool)
        chosen[wanted] = True
        for tail in (len(wanted) + _NEAR, len(self.blank)):
            begin = max(0, len(self.blank) - tail)
            blank = np.array(self.blank[begin:])
            stays = ~chosen[blank]
            if len(blank) - np.count_nonzero(stays) == len(wanted):
                self.blank[begin:] = array("i", blank[stays].tobytes())
                return
        raise InvariantViolated("an allocated slot is not blank, or allocated twice")

    def are_blank(self, slots: array[int]) -> bool:
        """True if all of these are blank and none is named twice."""
        count = len(slots)
        if last_reversed(self.blank, count) == slots:
            return True
        if count == 1:
            return bool(self._row_of(slots, 0)[1])
        wanted, blank = np.frombuffer(slots, np.int32), np.frombuffer(self.blank, np.int32)
        chosen = np.zeros(self.size, bool)
        chosen[wanted] = True
        # Each is chosen once, and is in the blank list once.
        near = np.count_nonzero(chosen[blank[-count - _NEAR :]])
        return bool(np.count_nonzero(chosen) == count in (near, np.count_nonzero(chosen[blank])))

    def _row_of(self, slots: array[int], first: int) -> tuple[int, int]:
        """Find the slot ``slots[first]`` in the blank list, and the row of `slots` from there on that are taken one
        after the other. Returns the end of the row and its length, 0 if the slot is not blank.
        """
        if not self.blank:
            return 0, 0
        blank, wanted = np.frombuffer(self.blank, np.int32), np.frombuffer(slots, np.int32)[first:]
        begin = max(0, len(blank) - _NEAR)
        found = np.flatnonzero(blank[begin:] == wanted[0])
        if not len(found):
            begin, found = 0, np.flatnonzero(blank == wanted[0])
        if not len(found):
            return 0, 0
        end = begin + int(found[-1]) + 1
        most = min(end, len(wanted))
        differs = blank[end - most : end][::-1] != wanted[:most]
        return end, int(differs.argmax()) if differs.any() else most

    def return_slots(self, slots: array[int]) -> None:
        """Append slots to the blank list; the last one will be taken first."""
        self.blank.extend(slots)

    def note_checksums(self, slots: array[int], checksums: bytes) -> None:
        """Note that copies to these slots have landed with these checksums; empty: unknown."""
        if self.checksums is None:
            if not checksums:
                return
            self.checksums = np.zeros(self.size, np.uint64)
        invariant(len(checksums) in (0, CHECKSUM_BYTES * len(slots)), "checksums are missing")
        at = np.frombuffer(slots, np.int32)
        invariant(not len(at) or 0 <= int(at.min()) <= int(at.max()) < self.size, "slot out of range")
        self.checksums[at] = np.frombuffer(checksums, np.uint64) if checksums else 0

    def own(self, slots: array[int], run_id: int) -> None:
        """Note the run that holds the slots."""
        if len(slots) > _FEW:
            # As numpy indexes: the implicit conversion is slower.
            self.run_id_array[np.frombuffer(slots, np.int32).astype(np.intp)] = run_id
            return
        owner = self.run_ids
        for slot in slots:
            owner[slot] = run_id


class Watcher:
    """Observer of the cached blocks of a group, which decides what is evicted next; must not change anything itself.

    This one ignores everything, for a replay.
    """

    def evictable(self, run: Run) -> None:
        """Note that the last block of this run has become evictable, or that what decides its turn has changed."""

    def released(self, level: int, places: array[int]) -> None:
        """Note that these blocks of a sliding window have become evictable at this level, lowest first."""

    def held(self, level: int, slots: array[int]) -> None:
        """Note that cached blocks that were unreferenced are held by a sequence."""

    def gone(self, level: int, slots: array[int]) -> None:
        """Note that these blocks are no longer cached in this level."""

    def cleared(self) -> None:
        """Note that nothing is cached any more."""


def _ignore(expiry: int, number: int) -> None:
    """Ignore an expiry: a replay decides nothing."""


MOST_USES = 4
"""Counts stop at this number."""
REMEMBERED = 5
"""Blocks per slot of the window with known uses: the cached ones, and four times as many former ones."""
MAX_TURN = 1 << 60
"""No cache has this many releases; anything derived from fewer fits in an int64."""


class UseCounts:
    """Use counts of blocks, by name. A block is used once when the last sequence that holds it releases it."""

    def __init__(self, slots: int) -> None:
        self._most = REMEMBERED * slots
        self.by_name: OrderedDict[bytes, int] = OrderedDict()
        """Counts from 1 to `MOST_USES`, most recently used last. A plain dict would step over all entries deleted
        before its first one."""
        self.last_turn = 0
        """Turn of the block that was last evicted for good; 0: none so far."""

    def life(self, now: int) -> int:
        """Age in releases of the blocks that are evicted now."""
        return max(0, now - self.last_turn) if self.last_turn else 0

    def count(self, names: bytes) -> list[int]:
        """Count a use of each of these blocks, the last one first; returns their counts in that order."""
        by_name, counts = self.by_name, []
        for at in range(len(names) - NAME_BYTES, -1, -NAME_BYTES):
            name = names[at : at + NAME_BYTES]
            uses = by_name.pop(name, 0)
            if uses < MOST_USES:
                uses += 1
            by_name[name] = uses
            counts.append(uses)
        return counts

    def remember(self, slots: int) -> None:
        """Limit the memory to that of a window with this number of slots."""
        self._most = REMEMBERED * slots
        self.forget()

    def forget(self) -> None:
        """Forget the least recently used names beyond the limit."""
        while len(self.by_name) > self._most:
            self.by_name.popitem(last=False)

    def numbers(self) -> array[int]:
        """Export everything in order: the turn, then name and uses of each block."""
        numbers = array("q", [self.last_turn]) + array("q", bytes(2 * NAME_BYTES * len(self.by_name)))
        numbers[1::2] = array("q", b"".join(self.by_name))
        numbers[2::2] = array("q", self.by_name.values())
        return numbers

    def install(self, numbers: array[int]) -> None:
        """Restore from the result of `numbers`; raises `InvariantViolated` for an impossible one."""
        invariant(len(numbers) % 2 == 1, "use counts are incomplete")
        names, self.last_turn = numbers[1::2].tobytes(), numbers[0]
        cut = range(0, len(names), NAME_BYTES)
        self.by_name = OrderedDict(
            zip([names[at : at + NAME_BYTES] for at in cut], numbers[2::2], strict=True)
        )
        invariant(2 * len(self.by_name) + 1 == len(numbers), "duplicate use count of a block")
        self.check()

    def check(self) -> None:
        """Raise `InvariantViolated` if these counts are impossible."""
        invariant(0 <= self.last_turn <= MAX_TURN, "the turn of the last evicted block is impossible")
        invariant(len(self.by_name) <= self._most, "too many evicted blocks are remembered")
        uses = self.by_name.values()
        invariant(
            not uses or 0 < min(uses) <= max(uses) <= MOST_USES, "the use count of a block is impossible"
        )


class Group(ABC):
    """Blocks of the layers that attend alike: cached ones in the tree, the others blank or held by sequences.

    `FullGroup` names the event or the caller of each method; `SlidingGroup` has the same ones. `stamp` is the number of
    releases so far, `now` the state's clock; slots become blank deepest first, so that they are taken again in the
    prompt's order.
    """

    def __init__(
        self,
        index: int,
        created: GroupCreated,
        tokens_per_block: int,
        block_bytes: int,
        key_bytes: int,
        *,
        tokens_recorded: bool,
    ) -> None:
        self.index = GroupIndex(index)
        self.window, self.kind = created.window, created.kind
        self.tree = PrefixTree(block_bytes, key_bytes)
        primary, secondary = created.num_blocks
        self.levels = (Level(PRIMARY, primary), Level(SECONDARY, secondary))
        self.tokens_per_block = tokens_per_block
        self.tokens_recorded = tokens_recorded
        self.shared: dict[int, int] = {}
        """Primary slots without a name that several sequences hold (their blocks were once cached), and the number of
        holders."""
        self.uses: UseCounts | None = None
        """Use counts, where the eviction order depends on them: with full attention only."""
        self.watcher = Watcher()
        self.timed: Callable[[int, int], None] = _ignore
        """Callback for each new expiry: with its time, and a run's id or a place in a sliding window."""

    # -- events (only `CacheState.apply` calls these)

    def begin(self, sequence: Sequence, reused: int) -> None:
        """`SequenceAdded`: begin a sequence that reuses this number of tokens."""
        self.tree.roots[sequence.namespace].users += 1

    def leave(self, namespace: Namespace) -> None:
        """`SequenceRemoved`, `EncoderRemoved`: note the end of a sequence of this namespace."""
        root = self.tree.roots[namespace]
        root.users -= 1
        self.tree.drop_unused(root)

    # -- queries

    @abstractmethod
    def cached(self) -> Iterator[tuple[int, array[int], bool, bool]]:
        """Yield cached blocks for checks and checksums: level, slots, True if sequences hold them, True if their copy
        has not landed.
        """

    # -- shared by both kinds

    def counts(self) -> tuple[tuple[int, int], int]:
        """Count the cached blocks without a holder, per level, and those with one, as in `CacheCleared`."""
        held = sum([len(slots) for _, slots, is_held, _ in self.cached() if is_held])
        return (self.levels[PRIMARY].unreferenced, self.levels[SECONDARY].unreferenced), held

    def root(self, namespace: Namespace, key: bytes) -> Root:
        """Return the root of a namespace, made on first use."""
        root = self.tree.roots.get(namespace)
        if root is None:
            root = self.tree.roots[namespace] = Root(namespace, key)
        return root

    def content(self, sequence: Sequence, first: int, last: int, last_tokens: int) -> bytes:
        """Return the content of the sequence's blocks from `first` up to `last` as the tree keeps it: tokens, or keys
        if none.
        """
        return bytes(self.new_content(sequence, first, last, last_tokens))

    def new_content(self, sequence: Sequence, first: int, last: int, last_tokens: int) -> bytearray:
        """Return the same as `content`, for the tree to keep: copied only once, as a prompt exceeds the processor's
        caches.
        """
        size, key_bytes = self.tokens_per_block, self.tree.key_bytes
        if self.tokens_recorded:
            return sequence.copied(first * size, (last - 1) * size + last_tokens)
        return sequence.keys[first * key_bytes : last * key_bytes]

    def keys_between(self, node: Node, begin: int, end: int) -> bytes:
        """Return the keys of the blocks from `begin` up to `end` on the path that ends in a node."""
        size = self.tree.key_bytes
        parts: list[bytearray] = []
        while isinstance(node, Run) and node.end > begin and begin < end:
            start = node.start
            parts.append(node.keys[max(begin - start, 0) * size : max(end - start, 0) * size])
            node = node.parent
        return b"".join(reversed(parts))

    def copy_keys(self, sequence: Sequence, node: Node, blocks: int) -> None:
        """Copy the keys of the first `blocks` blocks, which end in `node`, to a sequence."""
        size = self.tree.key_bytes
        if size and len(sequence.keys) < blocks * size:
            sequence.keys += self.keys_between(node, len(sequence.keys) // size, blocks)

    def own_slots(self, sequence: Sequence, first: int | None = None) -> array[int]:
        """Return the uncached slots of a sequence from the block `first` on, deepest first.

        None: those of its whole table, and after them the replaced ones that it has kept.
        """
        cached = max(sequence.path_ends[self.index].end, sequence.detached[self.index], first or 0)
        own = sequence.tables[self.index][cached:]
        own.reverse()
        if first is None and sequence.replaced:
            own += sequence.replaced[self.index]
        return own

    def freed_by(self, sequence: Sequence, first: int | None = None) -> bytes:
        """Return those of `own_slots` that become blank when the sequence releases them."""
        own, shared = self.own_slots(sequence, first), self.shared
        return (array("i", [slot for slot in own if slot not in shared]) if shared else own).tobytes()

    def first_to_leave(self, sequence: Sequence, blocks: int, needed: int) -> int:
        """Return the first block that a sequence releases when it goes back to the block `blocks` and needs `needed`
        blocks: the last needed one as well if others may read it.
        """
        if blocks < sequence.path_ends[self.index].end:
            return blocks
        shared = blocks < needed and sequence.tables[self.index][blocks] in self.shared
        return blocks if shared else needed

    def share_uncached(self, slots: array[int]) -> None:
        """Add one reference to these uncached blocks."""
        for slot in slots:
            self.shared[slot] = self.shared.get(slot, 1) + 1

    def return_uncached(self, slots: array[int]) -> array[int]:
        """Release uncached slots of a sequence; returns those without another holder, which are blank now."""
        if self.shared:
            slots = array("i", [slot for slot in slots if not self._still_held(slot)])
        self.levels[PRIMARY].return_slots(slots)
        return slots

    def _still_held(self, slot: int) -> bool:
        holders = self.shared.get(slot, 1) - 1
        if holders > 1:
            self.shared[slot] = holders
        elif holders == 1:
            del self.shared[slot]
        return holders > 0

    def landed_checksums(self) -> npt.NDArray[np.uint64] | None:
        """Checksums by slot of the blocks that have landed in secondary, which a warm restart trusts; 0: unknown.

        None if none is known.
        """
        noted = self.levels[SECONDARY].checksums
        if noted is None:
            return None
        landed = array("i")
        for level, slots, _, in_flight in self.cached():
            if level == SECONDARY and not in_flight:
                landed += slots
        known, at = np.zeros_like(noted), np.frombuffer(landed, np.int32)
        known[at] = noted[at]
        return known if known.any() else None

    def clear_cached(self) -> None:
        """Forget all cached blocks; they become blank, or held without a name."""
        for level in self.levels:
            # A fixed order: run ids differ between a live state and an exported one.
            level.blank = array("i", sorted(level.blank, reverse=True))
            level.unreferenced = 0
        self.tree.runs.clear()
        for root in list(self.tree.roots.values()):
            root.children.clear()
            root.order.clear()
            self.tree.drop_unused(root)
        self.watcher.cleared()
