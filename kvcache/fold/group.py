"""What every group of layers has: slots per level, a prefix tree, and what the state asks of it, event by event."""

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
"""Up to so many slots a loop is faster than numpy: it notes 16 in 0.6 µs, numpy in 1.4; 64 in 5.8 µs and in 1.0."""
_SLICED = 512
"""Up to so many slots a slice is faster than numpy: it reverses 256 in 0.7 µs, numpy in 1.1; 1024 in 2.4 and in 1.4."""
_ROWS = 3
"""If more rows than these make up what was chosen, it is in no order: each is found in 6 µs, and all of 32 slots that
stand apart are in 18.
"""
_NEAR = 4096
"""A slot that was chosen is mostly among the blank ones that are next: found there in 6 µs, among 65,536 in 14, among
262,144 in 50.
"""


def last_reversed(slots: array[int], count: int) -> array[int]:
    """The last `count` slots, last first."""
    if count > _SLICED:
        return array("i", np.frombuffer(slots, np.int32)[: -count - 1 : -1].tobytes())
    return slots[: -count - 1 : -1]


def indexes(places: array[int]) -> npt.NDArray[np.intp]:
    """Places as numpy takes them as indexes, without converting them anew for every column."""
    return np.frombuffer(places, np.int32).astype(np.intp)


def common_slots(slots: array[int], begin: int, places: array[int], done: int) -> int:
    """How many slots of a run from `begin` on are these places from `done` on, of which the first one is."""
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

    __slots__ = ("blank", "checksums", "index", "run_id_array", "run_ids", "size", "unreferenced")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.blank = array("i")
        self.blank.frombytes(np.arange(size - 1, -1, -1, dtype=np.int32).tobytes())
        """Blank slots; the last is taken first, so that a new cache hands out 0, 1, 2, ..."""
        self.run_ids = array("q", [-1]) * size
        """Id of the run that holds the slot, or was the last to do so: whoever asks compares the run's slots."""
        self.run_id_array = np.frombuffer(self.run_ids, np.int64) if size else np.empty(0, np.int64)
        """The same memory, for many slots at a time."""
        self.unreferenced = 0
        """Cached blocks that no sequence holds: all can be evicted, leaf by leaf."""
        self.checksums: npt.NDArray[np.uint64] | None = None
        """By slot, of what the last copy brought there: they mean something where a block is cached that has landed.
        0: not known. None: none is known, as where the level lies in no file."""

    @property
    def available(self) -> int:
        """Slots that can be had: blank, or cached and unreferenced."""
        return len(self.blank) + self.unreferenced

    def peek(self, count: int) -> array[int]:
        """The next `count` blank slots, in the order in which they would be taken."""
        if count > len(self.blank):
            raise InvariantViolated("not enough blank slots")
        return last_reversed(self.blank, count)

    def take_slots(self, slots: array[int]) -> None:
        """Take slots off the blank ones: the next ones or, where others have chosen, any."""
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
            invariant(taken > 0, "a slot that is not blank cannot be taken")
            del free[end - taken : end]
            done, rows = done + taken, rows + 1

    def _take_scattered(self, wanted: npt.NDArray[np.int32]) -> None:
        """Take slots off the blank ones that stand there in no order, and mostly near the end."""
        chosen = np.zeros(self.size, bool)
        chosen[wanted] = True
        for tail in (len(wanted) + _NEAR, len(self.blank)):
            begin = max(0, len(self.blank) - tail)
            blank = np.array(self.blank[begin:])
            stays = ~chosen[blank]
            if len(blank) - np.count_nonzero(stays) == len(wanted):
                self.blank[begin:] = array("i", blank[stays].tobytes())
                return
        raise InvariantViolated("a slot that is not blank cannot be taken, and none twice")

    def are_blank(self, slots: array[int]) -> bool:
        """Whether all of these are blank, and none of them is named twice."""
        count = len(slots)
        if last_reversed(self.blank, count) == slots:
            return True
        if count == 1:
            return bool(self._row_of(slots, 0)[1])
        wanted, blank = np.frombuffer(slots, np.int32), np.frombuffer(self.blank, np.int32)
        chosen = np.zeros(self.size, bool)
        chosen[wanted] = True
        # Each is chosen once, and each of the blank ones stands there once.
        near = np.count_nonzero(chosen[blank[-count - _NEAR :]])
        return bool(np.count_nonzero(chosen) == count in (near, np.count_nonzero(chosen[blank])))

    def _row_of(self, slots: array[int], first: int) -> tuple[int, int]:
        """Where the slot ``slots[first]`` stands among the blank ones, and how many of those behind it stand in a row
        with it, so that they are taken one after the other: the end of the row and its length, 0 if it is not blank.
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
        """Add slots to the blank ones; the last one will be taken first."""
        self.blank.extend(slots)

    def note_checksums(self, slots: array[int], checksums: bytes) -> None:
        """What was copied to these slots has landed, and has these checksums; empty: nobody knows them."""
        if self.checksums is None:
            if not checksums:
                return
            self.checksums = np.zeros(self.size, np.uint64)
        invariant(len(checksums) in (0, CHECKSUM_BYTES * len(slots)), "checksums are missing")
        at = np.frombuffer(slots, np.int32)
        invariant(not len(at) or 0 <= int(at.min()) <= int(at.max()) < self.size, "there is no such slot")
        self.checksums[at] = np.frombuffer(checksums, np.uint64) if checksums else 0

    def own(self, slots: array[int], run_id: int) -> None:
        """Note which run holds the slots."""
        if len(slots) > _FEW:
            # As numpy indexes: it would convert them more slowly itself.
            self.run_id_array[np.frombuffer(slots, np.int32).astype(np.intp)] = run_id
            return
        owner = self.run_ids
        for slot in slots:
            owner[slot] = run_id


class Watcher:
    """Told what becomes of cached blocks, to be able to say which are evicted next; must not change anything itself.

    This one ignores it: a replay tells nobody.
    """

    def evictable(self, run: Run) -> None:
        """The last block of this run can be evicted from now on, or something that decides when has changed."""

    def released(self, level: int, places: array[int]) -> None:
        """Sliding windows: these blocks can be evicted from now on, at this level, lowest first."""

    def held(self, level: int, slots: array[int]) -> None:
        """A sequence holds these cached blocks, which none held before."""

    def gone(self, level: int, slots: array[int]) -> None:
        """These blocks are not cached in this level any more."""

    def cleared(self) -> None:
        """Nothing is cached any more."""


def _ignore(expiry: int, number: int) -> None:
    """A replay decides nothing, so it need not know."""


MOST_USES = 4
"""More are not counted."""
REMEMBERED = 5
"""Blocks for each slot of the window whose uses are known: what is cached, and four times as much that was."""
MAX_TURN = 1 << 60
"""No cache has so many releases; what is worked out from fewer has room in an int64."""


class UseCounts:
    """A block is used once when the last sequence that holds it lets go of it. Blocks are known by name."""

    __slots__ = ("_most", "by_name", "last_turn")

    def __init__(self, slots: int) -> None:
        self._most = REMEMBERED * slots
        self.by_name: OrderedDict[bytes, int] = OrderedDict()
        """From 1 to `MOST_USES`; the blocks that were used last are last. A plain dict would step over all that was
        deleted before its first entry.
        """
        self.last_turn = 0
        """The turn of the block that was evicted for good last; 0: none was yet."""

    def life(self, now: int) -> int:
        """How many releases ago those blocks were released that are evicted now."""
        return max(0, now - self.last_turn) if self.last_turn else 0

    def count(self, names: bytes) -> list[int]:
        """Count a use of each of these blocks, the last one first; returns how often they were used, so ordered."""
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
        """Remember no more than a window with this number of slots does."""
        self._most = REMEMBERED * slots
        self.forget()

    def forget(self) -> None:
        """Forget what was used longest ago, as far as more is known than is to be remembered."""
        while len(self.by_name) > self._most:
            self.by_name.popitem(last=False)

    def numbers(self) -> array[int]:
        """All of it, in order: the turn, then name and uses of each block."""
        numbers = array("q", [self.last_turn]) + array("q", bytes(2 * NAME_BYTES * len(self.by_name)))
        numbers[1::2] = array("q", b"".join(self.by_name))
        numbers[2::2] = array("q", self.by_name.values())
        return numbers

    def install(self, numbers: array[int]) -> None:
        """Begin with what `numbers` has given; raises `InvariantViolated` if it cannot have."""
        invariant(len(numbers) % 2 == 1, "use counts are cut short")
        names, self.last_turn = numbers[1::2].tobytes(), numbers[0]
        cut = range(0, len(names), NAME_BYTES)
        self.by_name = OrderedDict(
            zip([names[at : at + NAME_BYTES] for at in cut], numbers[2::2], strict=True)
        )
        invariant(2 * len(self.by_name) + 1 == len(numbers), "the uses of a block are counted twice")
        self.check()

    def check(self) -> None:
        """Raise `InvariantViolated` if these are none that can have been counted."""
        invariant(0 <= self.last_turn <= MAX_TURN, "no block can have been evicted with such a turn")
        invariant(len(self.by_name) <= self._most, "more blocks are remembered than can be")
        uses = self.by_name.values()
        invariant(not uses or 0 < min(uses) <= max(uses) <= MOST_USES, "a block has impossibly many uses")


class Group(ABC):
    """Blocks of the layers that attend alike: cached ones in the tree, the others blank or held by sequences.

    `FullGroup` says of each method which event calls it, or who else; `SlidingGroup` has the same ones. `stamp` is the
    number of releases so far, `now` the state's clock; slots go deepest first where they become blank, so that they are
    taken again in the prompt's order.
    """

    __slots__ = (
        "index",
        "kind",
        "levels",
        "shared",
        "timed",
        "tokens_per_block",
        "tokens_recorded",
        "tree",
        "uses",
        "watcher",
        "window",
    )

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
        """Primary slots without a name that several sequences hold (their blocks were cached once), and how many."""
        self.uses: UseCounts | None = None
        """How often blocks were used, where the order of eviction goes by that: with full attention only."""
        self.watcher = Watcher()
        self.timed: Callable[[int, int], None] = _ignore
        """Told of when something expires: a run's id, or a place in a sliding window."""

    # -- what events do (only `CacheState.apply` calls these)

    def begin(self, sequence: Sequence, reused: int) -> None:
        """`SequenceAdded`: a sequence runs that reuses so many tokens."""
        self.tree.roots[sequence.namespace].users += 1

    # -- what is asked

    @abstractmethod
    def cached(self) -> Iterator[tuple[int, array[int], bool, bool]]:
        """Checks and checksums: cached blocks in pieces, each as level, slots, whether sequences hold them, and whether
        their copy has not landed.
        """

    # -- what both have in common

    def root(self, namespace: Namespace, key: bytes) -> Root:
        """The root of a namespace, made on first use."""
        root = self.tree.roots.get(namespace)
        if root is None:
            root = self.tree.roots[namespace] = Root(namespace, key)
        return root

    def content(self, sequence: Sequence, first: int, last: int, last_tokens: int) -> bytes:
        """What the tree keeps of the sequence's blocks from `first` up to `last`: tokens, or keys without them."""
        size, key_bytes = self.tokens_per_block, self.tree.key_bytes
        if self.tokens_recorded:
            return sequence.packed(first * size, (last - 1) * size + last_tokens)
        return bytes(sequence.keys[first * key_bytes : last * key_bytes])

    def new_content(self, sequence: Sequence, first: int, last: int, last_tokens: int) -> bytearray:
        """The same for the tree to keep: copied only once, as a prompt is too long for the processor's caches."""
        size, key_bytes = self.tokens_per_block, self.tree.key_bytes
        if self.tokens_recorded:
            return sequence.copied(first * size, (last - 1) * size + last_tokens)
        return sequence.keys[first * key_bytes : last * key_bytes]

    def keys_between(self, node: Node, begin: int, end: int) -> bytes:
        """The keys of the blocks from `begin` up to `end` on the path that ends in a node."""
        size = self.tree.key_bytes
        parts: list[bytearray] = []
        while isinstance(node, Run) and node.end > begin and begin < end:
            start = node.start
            parts.append(node.keys[max(begin - start, 0) * size : max(end - start, 0) * size])
            node = node.parent
        return b"".join(reversed(parts))

    def learn_keys(self, sequence: Sequence, node: Node, blocks: int) -> None:
        """Let a sequence know the keys of its first `blocks` blocks, which end in `node`."""
        size = self.tree.key_bytes
        if size and len(sequence.keys) < blocks * size:
            sequence.keys += self.keys_between(node, len(sequence.keys) // size, blocks)

    def first_to_leave(self, sequence: Sequence, blocks: int, needed: int) -> int:
        """The first block that a sequence lets go of when it goes back to the block `blocks`, and needs so many: that
        one as well if others may read it.
        """
        if blocks < sequence.path_ends[self.index].end:
            return blocks
        shared = blocks < needed and sequence.tables[self.index][blocks] in self.shared
        return blocks if shared else needed

    def share_uncached(self, slots: array[int]) -> None:
        """One more sequence holds these uncached blocks."""
        for slot in slots:
            self.shared[slot] = self.shared.get(slot, 1) + 1

    def return_uncached(self, slots: array[int]) -> array[int]:
        """A sequence lets go of uncached slots; returns those that nobody else holds, which are blank now."""
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
        """Of the blocks that have landed in secondary, by slot: what a warm restart trusts. 0 where nothing is known.

        None: nothing is known of any.
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

    def forget_all(self) -> None:
        """Nothing is cached any more; what was is blank, or held without a name."""
        for level in self.levels:
            # A fixed order: that of the runs differs between a live state and one that was exported.
            level.blank = array("i", sorted(level.blank, reverse=True))
            level.unreferenced = 0
        self.tree.runs.clear()
        for root in list(self.tree.roots.values()):
            root.children.clear()
            root.order.clear()
            self.tree.drop_unused(root)
        self.watcher.cleared()
