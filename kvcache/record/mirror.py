"""State of an engine's cache after the calls so far, by the engine's ids; an impossible call is a `Contradiction`.

Nothing is changed here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any, Literal, NamedTuple

import numpy as np

from events import types as ev
from events.ids import LevelIndex
from events.types import CHUNKED, PRIMARY, SECONDARY, SLIDING, RequestId
from kvcache.decide.full_attention import last_names
from kvcache.errors import Contradiction, UsageError, invariant, shown
from kvcache.fold.full_group import FullGroup
from kvcache.fold.group import last_reversed
from kvcache.fold.positional import KINDS, PositionalGroup
from kvcache.fold.prefix_tree import Node, Piece, Root, Run, common_bytes, match, runs_below
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.inputs import CheckedRequest, checked_integer, checked_natural, listed

Blocks = Items[int] | Any
"""Block ids of an engine: a list, `array` or numpy array of integers."""

_FEW = 48
"""Up to this number of blocks a loop is faster than numpy: it finds 16 in 1.6 µs, numpy in 4.3; 64 in 6.1 and 5.3."""


Kind = Literal["full", "sliding", "chunked", "state", "uncached"]
_WINDOWS = (SLIDING, CHUNKED)


class LayerGroup(NamedTuple):
    """Further layers than those with full attention, with blocks in the pool of these or in one of their own."""

    kind: Kind
    """Part of a prefix that must be cached for these layers to continue after it: ``full``, all of it; ``sliding``, its
    last `window` tokens; ``chunked``, the part after the last multiple of `window`; ``state``, its end; ``uncached``,
    nothing, as none of their blocks are found."""
    tokens_per_block: int
    window: int = 0
    """Window in tokens, for sliding and chunked layers."""
    layers: int = 0
    """Number of layers, for display."""
    blocks: int = 0
    """Blocks of a pool of their own, with ids of its own from `first_block_id` on; 0: they share the first pool."""


def pool_shared(groups: Items[LayerGroup], *, named: bool) -> ev.PoolShared | None:
    """Build the event for these groups; None if there are none. Raises `UsageError`. `named`: True if blocks have
    names.
    """
    shared = [_checked(each) for each in listed(groups, "groups")]
    if shared and not named:
        raise UsageError(
            "groups require block names: pass name_bytes, or choose a block_hash other than none"
        )
    return ev.PoolShared(tuple(shared)) if shared else None


def _checked(group: object) -> ev.SharingGroup:
    if not isinstance(group, LayerGroup):
        raise UsageError(f"groups must contain LayerGroup objects, not {type(group).__name__}")
    if group.kind not in KINDS:
        raise UsageError(f"the kind of a group must be one of {', '.join(KINDS)}")
    size, window = (
        checked_natural(group.tokens_per_block, "tokens_per_block"),
        checked_natural(group.window, "window"),
    )
    if not size or (not window and group.kind in _WINDOWS):
        raise UsageError("a group needs tokens_per_block, and a sliding or chunked one a window")
    blocks = checked_natural(group.blocks, "blocks")
    return ev.SharingGroup(group.kind, size, window, checked_natural(group.layers, "layers"), blocks=blocks)


def contradiction(sequence: Sequence, reason: str, block: Any = None) -> Contradiction:
    """Build the error for a running request with an impossible call of its engine."""
    name, number = shown(sequence.request_id), None if block is None else int(block)
    return Contradiction(f"request {name} {reason}", sequence.request_id, number)


class MirroredCopies:
    """Blocks of an engine with equal content, for which the log has one slot."""

    __slots__ = ("first", "holders", "spares", "unnamed")

    def __init__(self, first: int, holders: int) -> None:
        self.first = first
        """Block of sequences without another entry."""
        self.holders = {first: holders}
        """Holding sequences by block."""
        self.spares: list[int] = []
        """Slots that the other copies left blank."""
        self.unnamed: set[int] = set()
        """Copies that cannot be found any more, and exist only while held."""

    @property
    def can_be_found(self) -> bool:
        """True if there is another copy than these."""
        return len(self.unnamed) < len(self.holders)


class BlockIds:
    """Mapping between the blocks of an engine and the slots of the log. Blocks are counted from the first id here."""

    def __init__(self, first: int, count: int, first_slot: int = 0) -> None:
        self.first, self._count = first, count
        slots = range(first_slot, first_slot + count)
        self._slots, self._blocks = array("i", slots), array("i", slots)
        """Slot by block, and block by slot; for a slot shared by several copies the latter is undefined."""
        self._straight = not first_slot
        """True while each slot has the number of its block."""
        self.copies: dict[int, MirroredCopies] = {}
        """Copies by slot."""
        self._held: dict[int, dict[int, int]] = {}
        """Copy held, by sequence and slot, where it is not the first."""

    def slots(self, blocks: Blocks) -> array[int]:
        """Convert blocks to slots of the log. Raises `UsageError` for invalid ids, `Contradiction` for one out of
        range.
        """
        if not isinstance(blocks, list) or len(blocks) > _FEW:
            return self._many(blocks)
        slots, first, count, found = self._slots, self.first, self._count, array("i")
        for block in blocks:
            at = (block if type(block) is int else checked_integer(block, "a block id")) - first
            if not 0 <= at < count:
                raise self._unknown(at)
            found.append(slots[at])
        return found

    def _many(self, blocks: Blocks) -> array[int]:
        try:
            given = np.asarray(blocks)
        except Exception:  # noqa: BLE001  whatever it is, it is no row of numbers
            raise UsageError(f"block ids must be integers, not {type(blocks).__name__}") from None
        if not given.size:
            return array("i")
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise UsageError(
                "block ids must be a one-dimensional list of integers, not "
                f"{given.ndim}-dimensional {given.dtype}"
            )
        low, high = int(given.min()), int(given.max())
        if low < self.first or high >= self.first + self._count:
            raise self._unknown((low if low < self.first else high) - self.first)
        at = given - self.first if self.first else given
        if self._straight:
            return array("i", at.astype(np.int32, copy=False).tobytes())
        return array("i", np.frombuffer(self._slots, np.int32)[at].tobytes())

    def _unknown(self, at: int) -> Contradiction:
        first, last = self.first, self.first + self._count - 1
        return Contradiction(f"unknown block {at + first}: ids are from {first} to {last}", block=at + first)

    def id_of(self, slot: int) -> int:
        """Return the block in a slot, or one of several."""
        copies = self.copies.get(slot)
        return self.first + (self._blocks[slot] if copies is None else next(iter(copies.holders)))

    # -- copies

    def share(self, handle: int, own: int, slot: int, holders: int) -> None:
        """Note that a sequence's block in the slot `own` is a copy of another slot's, which has `holders` already."""
        block = self._blocks[own]
        copies = self.copies.get(slot)
        if copies is None:
            copies = self.copies[slot] = MirroredCopies(self._blocks[slot], holders)
        copies.holders[block] = 1
        copies.spares.append(own)
        self._slots[block] = slot
        self._held.setdefault(handle, {})[slot] = block
        self._straight = False

    def hold(self, handle: int, blocks: Blocks, slots: array[int]) -> None:
        """Note that a sequence holds these blocks, which are cached in these slots."""
        if not self.copies:
            return
        for block, slot in zip(blocks, slots, strict=True):
            copies = self.copies.get(slot)
            if copies is not None:
                at = int(block) - self.first
                copies.holders[at] += 1
                if at != copies.first:
                    self._held.setdefault(handle, {})[slot] = at

    def release(self, handle: int, table: array[int]) -> None:
        """Note that a sequence with this table has released all its blocks."""
        held = self._held.pop(handle, {})
        if not self.copies:
            return
        for slot in self.copies.keys() & set(table):
            copies = self.copies[slot]
            block = held.get(slot, copies.first)
            copies.holders[block] -= 1
            if block in copies.unnamed and not copies.holders[block]:
                self.leave(block, slot)

    def leave(self, block: int, slot: int) -> None:
        """Note that a copy is gone and others are left: it gets one of the slots that these do not need."""
        copies = self.copies[slot]
        del copies.holders[block]
        copies.unnamed.discard(block)
        spare = copies.spares.pop()
        self._slots[block], self._blocks[spare] = spare, block
        if len(copies.holders) == 1:
            (self._blocks[slot],) = copies.holders
            del self.copies[slot]

    def forget_names(self) -> None:
        """Note that nothing is cached any more: unreferenced copies are blank."""
        for slot, copies in list(self.copies.items()):
            for block in list(copies.holders):
                self._forget(block, slot)

    def _forget(self, block: int, slot: int) -> None:
        """Note that a copy cannot be found any more: it is blank, unless held or the last one."""
        copies = self.copies.get(slot)
        if copies is not None:
            copies.unnamed.add(block)
            if not copies.holders[block]:
                self.leave(block, slot)

    def invalidate(self, blocks: Blocks, slots: array[int]) -> array[int]:
        """Note that these blocks cannot be found any more; returns the slots with content that cannot, either."""
        lost = array("i")
        for block, slot in zip(blocks, slots, strict=True):
            copies = self.copies.get(slot)
            self._forget(int(block) - self.first, slot)
            if copies is None or not copies.can_be_found:
                lost.append(slot)
        return lost

    def lose(self, slots: array[int]) -> list[int]:
        """Note that the content of these slots cannot be found any more; returns the blocks newly affected."""
        lost = list[int]()
        for slot in slots:
            copies = self.copies.get(slot)
            found = [self._blocks[slot]] if copies is None else list(copies.holders.keys() - copies.unnamed)
            lost += [block + self.first for block in found]
            for block in found:
                self._forget(block, slot)
        return lost

    def evictable(self, blocks: Blocks, slots: array[int]) -> tuple[list[tuple[int, int]], array[int]]:
        """Split these blocks into those that leave copies, with their slots, and the slots that lose their content."""
        if not self.copies:
            return [], slots
        leaving, going, left = list[tuple[int, int]](), array("i"), dict[int, int]()
        for block, slot in zip(blocks, slots, strict=True):
            copies, at = self.copies.get(slot), int(block) - self.first
            if copies is None:
                going.append(slot)
                continue
            if copies.holders[at]:
                raise Contradiction(
                    f"block {block} is evicted, but a running request holds it", block=int(block)
                )
            if (at, slot) in leaving:
                raise Contradiction(f"block {block} is evicted twice in one call", block=int(block))
            left[slot] = left.get(slot, len(copies.holders) - len(copies.unnamed)) - 1
            if left[slot]:
                leaving.append((at, slot))
            elif copies.unnamed:
                raise Contradiction(
                    f"block {block} is evicted, but a running request holds a copy of it that was invalidated",
                    block=int(block),
                )
            else:
                going.append(slot)
        return leaving, going

    def check(self) -> None:
        """Raise `InvariantViolated` if two blocks have one slot and are no copies."""
        shared = [slot for copies in self.copies.values() for slot in copies.spares]
        of_block = [slot for slot in self._slots if slot not in self.copies]
        invariant(
            sorted([*of_block, *shared, *self.copies]) == list(range(self._count)),
            "a slot has no block, or two",
        )
        for copies in self.copies.values():
            invariant(
                len(copies.holders) == len(copies.spares) + 1 > 1, "copies have other slots than they need"
            )


def listed_blocks(blocks: Blocks) -> Blocks:
    """Make block ids iterable twice."""
    return blocks if isinstance(blocks, list | array | np.ndarray) else listed(blocks, "block ids")


class Mirror:
    """Lookups and checks for a `Recorder`, in a state with one group of full attention."""

    def __init__(self, state: CacheState, group: FullGroup, ids: BlockIds) -> None:
        self._state, self.group, self.ids = state, group, ids
        self._size, self._key_bytes = group.tokens_per_block, group.tree.key_bytes

    def refuse_uncomputable(self, sequence: Sequence, num_tokens: int) -> None:
        """Raise `Contradiction` if a request has no slots for these tokens, which count as computed."""
        slots = len(sequence.tables[0]) * self._size
        if slots < num_tokens:
            raise contradiction(sequence, f"has slots for {slots} tokens, but {num_tokens} count as computed")

    def refuse_taken(
        self, blocks: Blocks, slots: array[int], request_id: RequestId, into: PositionalGroup | None = None
    ) -> None:
        """Raise `Contradiction` unless these blocks, of the first pool or of the one of the group `into`, are free."""
        level = self.group.levels[PRIMARY]
        for group in self._state.positional:
            for block, slot in zip(blocks, slots, strict=True):
                if group.uses(slot):
                    use = "a request holds it" if slot in group.holders else "it has a name"
                    reason = (
                        f"block {block} is given to request {shown(request_id)}, but {use} in group "
                        f"{group.index}"
                    )
                    raise Contradiction(reason, request_id, int(block))
        own = into is not None and len(into.pool) > 0
        if not slots or (len(set(slots)) == len(slots) if own else level.are_blank(slots)):
            return
        name, seen = shown(request_id), set[int]()
        for block, slot in zip(blocks, slots, strict=True):
            if slot in seen:
                raise Contradiction(f"block {block} is given to request {name} twice", request_id, int(block))
            seen.add(slot)
            if not own and not level.are_blank(array("i", [slot])):
                reason = f"block {block} is given to request {name}, but {self._use_of(slot)}"
                raise Contradiction(reason, request_id, int(block))

    def refuse_taken_below(self, blocks: Blocks, slots: array[int]) -> None:
        """Raise `Contradiction` unless these secondary blocks are free."""
        level = self.group.levels[SECONDARY]
        if level.are_blank(slots):
            return
        for at, slot in enumerate(slots):
            if slot in slots[:at] or not level.are_blank(array("i", [slot])):
                raise Contradiction(f"secondary block {blocks[at]} is not free", block=int(blocks[at]))

    def _use_of(self, slot: int) -> str:
        """Describe the use of a slot, for a message."""
        if slot in self.ids.copies:
            return "other blocks have the same content"
        for sequence in self._state.sequences.values():
            if slot in sequence.tables[0]:
                return f"request {shown(sequence.request_id)} holds it"
        return "it is cached and must be evicted first"

    def keys_at(self, level: int, slots: array[int]) -> bytes:
        """Return the keys of consecutive cached blocks."""
        size, keys, done = self._key_bytes, b"", 0
        while size and done < len(slots):
            run = self.group.run_at(level, slots[done])
            at = run.slots.index(slots[done])
            take = min(len(run.slots) - at, len(slots) - done)
            keys += run.keys[at * size : (at + take) * size]
            done += take
        return keys

    def refuse_unstorable(self, sequence: Sequence, first: int, last: int) -> None:
        """Raise `Contradiction` unless a request holds these blocks, full of its tokens, as their only holder."""
        table = sequence.tables[0]
        if last > len(table) or last * self._size > sequence.num_tokens:
            full = min(len(table), sequence.num_tokens // self._size)
            has = f"{len(table)} blocks and {sequence.num_tokens} tokens, which fill {full} blocks"
            raise contradiction(sequence, f"has {has}, so its first {last} cannot be cached")
        for slot in table[first:last] if self.group.shared else ():
            if slot in self.group.shared:
                block = self.ids.id_of(slot)
                lost = "which lost its name (as when the cache is cleared) and is held by others"
                raise contradiction(sequence, f"cannot name block {block}, {lost}", block)

    def cached_already(self, sequence: Sequence, first: int, last: int) -> list[Piece]:
        """Return the leading blocks of these of a sequence that are already cached."""
        tail = sequence.path_ends[0]
        if (
            not tail.children
            or sequence.packed(first * self._size, (first + 1) * self._size) not in tail.children
        ):
            return []
        symbols = sequence.packed(first * self._size, last * self._size)
        found = match(self.group.tree, tail, symbols, len(symbols), partial=False)
        return found.pieces(0, self._key_bytes)

    def other_name(self, sequence: Sequence, block: int, slot: int) -> Contradiction:
        """Build the error for a block of a sequence with another name than the one in a slot with the same content."""
        return Contradiction(
            f"block {block} of request {shown(sequence.request_id)} has the tokens of block "
            f"{self.ids.id_of(slot)}, but another name: pass what distinguishes them with the request, such "
            "as the LoRA adapter, salt, items or extra ids",
            sequence.request_id,
            self.ids.id_of(slot),
        )

    def refuse_other_path(
        self,
        request: CheckedRequest,
        blocks: Blocks,
        slots: array[int],
        lower: Blocks,
        below: array[int],
        external: int,
    ) -> None:
        """Raise `Contradiction` unless these blocks of primary, and then these of secondary, are the beginning of the
        prompt, and with the external ones not all of it.
        """
        name, count = shown(request.request_id), len(slots) + len(below)
        left = request.num_tokens - count * self._size
        if external >= left:
            loads = f" and loads {external} tokens" if left > 0 else ""
            raise Contradiction(
                f"request {name} reuses {count} blocks of {self._size} tokens{loads}, but its prompt has "
                f"{request.num_tokens}, and at least the last one must be computed",
                request.request_id,
            )
        if count:
            node: Node | None = self.group.tree.roots.get(request.namespace)
            for level, ids, row in ((PRIMARY, blocks, slots), (SECONDARY, lower, below)):
                node = self._follow(request, node, level, ids, row, count - len(below) if level else 0)

    def _follow(
        self,
        request: CheckedRequest,
        node: Node | None,
        level: int,
        blocks: Blocks,
        slots: array[int],
        first: int,
    ) -> Node | None:
        """Follow the path of these blocks, the first of which is a prompt's block `first`; returns its end."""
        tree, done, size = self.group.tree, 0, self.group.tree.block_bytes
        while done < len(slots):
            run = tree.runs.get(self.group.levels[level].run_ids[slots[done]])
            take, begin = 0, (first + done) * size
            if run is None or run.level != level or slots[done] not in run.slots:
                reason = "is not cached"
            elif (
                run.parent is not node
                and run.slots[0] == slots[done]
                and begin == 0
                and isinstance(run.parent, Root)
            ):
                reason = "is cached for another LoRA adapter or salt"
            else:
                take = common_slots(run.slots, slots, done) if run.parent is node else 0
                reason = (
                    "does not continue the block before it" if begin or take else "does not begin a prompt"
                )
            # Copied, as two views would be compared number by number.
            if run is not None and run.symbols[: take * size] != request.symbols[begin : begin + take * size]:
                take = common_bytes(run.symbols, request.symbols, begin, begin + take * size) // size
                reason = "holds other tokens than the prompt has there"
            if take < min(len(slots) - done, len(run.slots) if run is not None else 1):
                raise self._no_hit(request, level, int(blocks[done + take]), first + done + take, reason)
            node, done = run, done + take
        return node

    def _no_hit(self, request: CheckedRequest, level: int, block: int, at: int, reason: str) -> Contradiction:
        where = "" if level == PRIMARY else "secondary "
        return Contradiction(
            f"{where}block {block}, which request {shown(request.request_id)} reuses as its block {at}, {reason}",
            request.request_id,
            block,
        )

    def ends(
        self, level: int, slots: array[int], *, keep_order: bool = False, moving: bool = False
    ) -> list[tuple[array[int], bytes]]:
        """Group these cached blocks into ends of runs, with their names, in a possible order of eviction."""
        try:
            return list(self._in_order(level, slots, moving=moving))
        except Contradiction:
            if keep_order or len(slots) < 2 or not all(self.group.is_cached(level, slot) for slot in slots):
                raise
        ordered = array("i", sorted(slots, key=lambda slot: self._depth(level, slot)))
        return list(self._in_order(level, ordered, moving=moving))

    def _depth(self, level: int, slot: int) -> tuple[int, int, int]:
        """Sort key of a cached block in an order with the deepest first, and runs in one piece."""
        run = self.group.run_at(level, slot)
        return -run.end, run.id, -run.slots.index(slot)

    def _in_order(self, level: int, slots: array[int], *, moving: bool) -> Iterator[tuple[array[int], bytes]]:
        """Yield the same as `ends`, if they can go in this order."""
        runs, owner, left = self.group.tree.runs, self.group.levels[level].run_ids, dict[int, int]()
        size, done = self._key_bytes, 0
        while done < len(slots):
            run = runs.get(owner[slots[done]])
            rest = left.get(run.id, len(run.slots)) if run is not None and run.level == level else 0
            is_end = run is not None and rest > 0 and run.slots[rest - 1] == slots[done]
            if run is None or run.level != level or not (is_end or slots[done] in run.slots[:rest]):
                gone = run is not None and slots[done] in run.slots
                raise self._stays(level, slots[done], "is named twice" if gone else "is not cached")
            if run.refs:
                raise self._stays(level, slots[done], "is held by a running request")
            below = [each for each in run.children.values() if not moving or each.level == level]
            if not is_end or any(left.get(each.id, 1) for each in below):
                raise self._stays(level, slots[done], "is continued by blocks that are still cached")
            take = 1
            while take < min(rest, len(slots) - done) and run.slots[rest - 1 - take] == slots[done + take]:
                take += 1
            keys = run.keys[(rest - take) * size : rest * size]
            yield slots[done : done + take], last_names(keys, size, take)
            left[run.id] = rest - take
            done += take

    def tails(self, slots: array[int]) -> list[tuple[LevelIndex, array[int], bytes]]:
        """Return these cached blocks of primary and all blocks that continue them, with their names, deepest first."""
        cuts: dict[int, tuple[Run, int]] = {}
        for slot in slots:
            run = self.group.run_at(PRIMARY, slot)
            cuts.update((each.id, (each, 0)) for each in runs_below(run))
            at = run.slots.index(slot)
            cuts[run.id] = run, min(at, cuts.get(run.id, (run, at))[1])
        found: list[tuple[LevelIndex, array[int], bytes]] = []
        for run, at in sorted(cuts.values(), key=lambda cut: -cut[0].end):
            gone = last_reversed(run.slots, len(run.slots) - at)
            names = last_names(run.keys, self._key_bytes, len(gone))
            if found and found[-1][0] == run.level:
                found[-1] = run.level, found[-1][1] + gone, found[-1][2] + names
            else:
                found.append((run.level, gone, names))
        return found

    def refuse_uncached(self, blocks: Blocks, slots: array[int]) -> None:
        """Raise `Contradiction` unless these blocks are cached in primary, each named once."""
        for at, slot in enumerate(slots):
            if not self.group.is_cached(PRIMARY, slot):
                raise Contradiction(
                    f"block {blocks[at]} is invalidated, and not cached", block=int(blocks[at])
                )
        if len({int(block) for block in blocks}) < len(slots):
            raise UsageError("a call names a block twice")

    def _stays(self, level: int, slot: int, reason: str) -> Contradiction:
        block = self.ids.id_of(slot) if level == PRIMARY else slot
        where = "block" if level == PRIMARY else "secondary block"
        return Contradiction(f"{where} {block} cannot go: it {reason}", block=block)


def common_slots(slots: array[int], others: array[int], begin: int) -> int:
    """Count the leading slots that equal those of the others from `begin` on."""
    most = min(len(slots), len(others) - begin)
    if slots[:most] == others[begin : begin + most]:
        return most
    return next(at for at in range(most) if slots[at] != others[begin + at])
