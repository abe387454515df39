"""What one attention window of a cache does, written down as plainly as possible: one block at a time, no slots.

A cached block is known by its path: the namespace, then the tokens of each block up to and including its own. A
primary block that takes up a slot has an arbitrary id; blank slots are what is left. A token may be anything that can
be compared, so that one of an image can be what it stands for.

A window that slides differs from a full one in two ways: its sequences let go of blocks that it has left, and each of
its cached blocks stands alone, whatever is cached before and behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from events.types import PRIMARY, SECONDARY

PRIORITY = 35
Path = tuple[Any, ...]
Entry = None | int | Path
"""Of a block table: let go of (None), the id of a block that is not cached, or the path of one that is."""


def common_tokens(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def path_of(namespace: Hashable, tokens: Sequence[Hashable], blocks: int, size: int) -> Path:
    return namespace, *(tuple(tokens[at * size : at * size + size]) for at in range(blocks))


@dataclass
class Block:
    """A cached block. `id` is meaningless in secondary."""

    id: int
    level: int = PRIMARY
    refs: int = 0
    stamp: int = 0
    credit: int = 0
    """By how much later it counts as released."""
    priority: int = PRIORITY
    duration: int = 0
    """For how long it has that priority once nobody holds it; 0: for good."""
    expiry: int = 0
    """When that is over."""


Kept = tuple[int, int]
"""Priority and duration of a block."""


@dataclass(frozen=True)
class Retention:
    """What a request states: (from, up to or None, priority and duration) of its prompt's tokens; what is sampled."""

    ranges: tuple[tuple[int, int | None, Kept], ...]
    decode: Kept


@dataclass
class Running:
    """What a sequence is, whichever the window."""

    namespace: Hashable
    tokens: list[Any]
    computed: int = 0
    retention: Retention | None = None
    prompt: int = 0
    """Tokens of it."""
    input: int = 0
    """What an encoder has read for it, by number; branches read what their parents read."""

    def stated(self, token: int) -> Kept | None:
        """What holds of a block that begins with this token of the prompt."""
        for start, stop, kept in self.retention.ranges if self.retention else ():
            if start <= token and (stop is None or token < stop):
                return kept
        return None


@dataclass
class Window:
    """The blocks of one window. `removed` and `offloaded` list what left primary or the cache, in order."""

    size: int
    blocks: tuple[int, int]
    tokens: int
    """How many tokens it attends to, the one that does so included."""
    sliding: bool
    reuse: bool
    partial: bool
    offload_from: int
    ahead: int
    """Decoding that evicts at all makes so many blocks blank before it takes its own, if they can be had."""
    levels: bool = False
    """Whether blocks that were used again go later (`eviction_policy`)."""
    uses: dict[Path, int] = field(default_factory=dict)
    """How often blocks were used, cached or not; those used last are last."""
    last_turn: int = 0
    """Of the block that was evicted for good last."""
    cached: dict[Path, Block] = field(default_factory=dict)
    tables: dict[Hashable, list[Entry]] = field(default_factory=dict)
    ids: int = 0
    removed: list[set[Path]] = field(default_factory=list)
    """Each set may go in any order that has children before parents."""
    offloaded: list[Path] = field(default_factory=list)
    pins: dict[int, list[Entry]] = field(default_factory=dict)
    """By number: what is held beside the tables of sequences."""
    copies: dict[Hashable, tuple[int, Kept]] = field(default_factory=dict)
    """Of a sequence the block that is a copy of a cached one, and how that was kept."""
    let_go: list[tuple[Hashable, int]] = field(default_factory=list)
    """Sequences and how many blocks they let go of before their end, in order."""
    append_only: bool = False
    """Whether a sequence keeps its own block where it came to hold another's."""
    kept_ids: dict[Hashable, list[int]] = field(default_factory=dict)
    """By sequence: such blocks."""

    # -- reading

    def blank(self, level: int) -> int:
        used = {block.id for block in self.cached.values() if block.level == level}
        if level == PRIMARY:
            used.update(entry for table in self.held() for entry in table if isinstance(entry, int))
            used.update(*self.kept_ids.values())
        return self.blocks[level] - len(used)

    def held(self) -> list[list[Entry]]:
        """All that is held: tables and pins."""
        return [*self.tables.values(), *self.pins.values()]

    def idle(self, level: int) -> int:
        return sum(block.level == level and not block.refs for block in self.cached.values())

    def available(self) -> int:
        return self.blank(PRIMARY) + self.idle(PRIMARY)

    def children(self, path: Path) -> list[Path]:
        return [child for child in self.cached if child[:-1] == path]

    def detached(self, request_id: Hashable) -> int:
        """How many blocks a sequence has let go of, or never needed."""
        return self.tables[request_id].count(None)

    def stored(self, request_id: Hashable) -> int:
        """Leading blocks that a sequence need not store (any more)."""
        return sum(1 for _ in takewhile(lambda entry: not isinstance(entry, int), self.tables[request_id]))

    def claims(self, path: Path, tokens: int) -> list[Path]:
        """The blocks of a path that who reuses so many tokens reads."""
        first = max(0, tokens - self.tokens + 1) // self.size
        return [path[: block + 2] for block in range(first, len(path) - 1)]

    def serves(self, path: Path) -> bool:
        """Whether a prefix of just these full blocks can be reused."""
        return all(each in self.cached for each in self.claims(path, (len(path) - 1) * self.size))

    # -- eviction

    def victim(self, level: int, exempt: Collection[Path] = ()) -> Path | None:
        candidates = [
            path
            for path, block in self.cached.items()
            if block.level == level and not block.refs and path not in exempt
            if self.sliding or all(self.cached[child].level != level for child in self.children(path))
        ]
        return min(candidates, key=self.order, default=None)

    def order(self, path: Path) -> tuple[int, ...]:
        depth = len(path) if self.sliding else -len(path)
        block = self.cached[path]
        return block.priority, block.stamp + block.credit, block.stamp, depth

    def evict(self, needed: int, exempt: Collection[Path] = ()) -> None:
        while self.blank(PRIMARY) < needed:
            path = self.victim(PRIMARY)
            assert path is not None
            if self.offload_from <= self.cached[path].priority and self.make_room(path, exempt):
                self.cached[path].level, self.cached[path].id = SECONDARY, self.new_id()
                self.offloaded.append(path)
            else:
                if not self.sliding:
                    later = [each for each in self.cached if each != path and each[: len(path)] == path]
                    self.remove(later)
                self.evict_for_good(path)

    def make_room(self, path: Path, exempt: Collection[Path]) -> bool:
        if self.blocks[SECONDARY] and not self.blank(SECONDARY):
            lower = self.victim(SECONDARY, exempt)
            if lower is not None and self.order(lower) < self.order(path):
                self.evict_for_good(lower)
        return self.blank(SECONDARY) > 0

    def evict_for_good(self, path: Path) -> None:
        block = self.cached[path]
        if block.level == (SECONDARY if self.blocks[SECONDARY] else PRIMARY):
            self.last_turn = block.stamp + block.credit
        self.remove([path])

    def remove(self, paths: Iterable[Path]) -> None:
        gone = set(paths)
        for path in gone:
            del self.cached[path]
        if gone:
            self.removed.append(gone)

    # -- what becomes of a sequence

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def hold(self, path: Path) -> Path:
        block = self.cached[path]
        block.refs, block.stamp, block.credit, block.expiry = block.refs + 1, 0, 0, 0
        return path

    def claim(self, request_id: Hashable, path: Path, tokens: int) -> None:
        """Begin a table with what is reused."""
        held: list[Entry] = [self.hold(each) for each in self.claims(path, tokens)]
        self.tables[request_id] = [None] * (len(path) - 1 - len(held)) + held

    def onboard(self) -> None:
        for block in self.cached.values():
            if block.refs and block.level == SECONDARY:
                block.level, block.id = PRIMARY, self.new_id()

    def grow(self, request_id: Hashable, blocks: int) -> None:
        self.tables[request_id] += [self.new_id() for _ in range(blocks)]

    def release(self, entry: Entry, stamp: int, now: int) -> None:
        if isinstance(entry, tuple):
            block = self.cached[entry]
            block.refs -= 1
            block.expiry = now + block.duration if block.duration and not block.refs else 0
            block.stamp = 0 if block.refs else stamp
            if self.levels and not block.refs:
                self.uses[entry] = uses = self.uses.pop(entry, 0) + 1
                life = max(0, stamp - self.last_turn) if self.last_turn else 0
                block.credit = min(uses - 1, 3) * life // 2

    def to_detach(self, request_id: Hashable, sequence: Running) -> int:
        """Blocks that no token to come attends to."""
        left = min(len(sequence.tokens), sequence.computed + 1) - self.detached(request_id) * self.size
        return max(0, (left - self.tokens) // self.size)

    def detach(self, request_id: Hashable, count: int, stamp: int, now: int) -> None:
        first = self.detached(request_id)
        for at in range(first, first + count):
            self.release(self.tables[request_id][at], stamp, now)
            self.tables[request_id][at] = None
        self.let_go.append((request_id, count))

    def end(self, request_id: Hashable, stamp: int, now: int) -> None:
        for entry in reversed(self.tables.pop(request_id)):
            self.release(entry, stamp, now)
        self.kept_ids.pop(request_id, None)
        self.copies.pop(request_id, None)
        self.forget_uses()

    def forget_uses(self) -> None:
        while len(self.uses) > 5 * sum(self.blocks):
            del self.uses[next(iter(self.uses))]

    def clear(self) -> None:
        """What sequences hold is theirs, or shared by them; nothing is cached."""
        for table in self.held():
            table[:] = [self.cached[each].id if isinstance(each, tuple) else each for each in table]
        self.cached.clear()

    def set_priority(self, request_id: Hashable, priority: int, start: int, stop: int) -> list[Path]:
        """Returns the blocks that had another priority, shallowest first."""
        changed = []
        for at, entry in enumerate(self.tables[request_id]):
            overlaps = max(start, at * self.size) < min(stop, (at + 1) * self.size)
            if isinstance(entry, tuple) and overlaps and self.cached[entry].priority != priority:
                self.cached[entry].priority = priority
                changed.append(entry)
        return changed

    def keep_own(self, request_id: Hashable, kept: Kept, blocks: int | None) -> None:
        """Of the first blocks that a sequence holds, the cached ones that nobody else does are kept otherwise."""
        for entry in self.tables[request_id][:blocks]:
            if isinstance(entry, tuple) and self.cached[entry].refs == 1:
                self.cached[entry].priority, self.cached[entry].duration = kept

    def fork(self, parent: Hashable, child: Hashable, sequence: Running, new: int) -> None:
        """The child holds what is computed, and has so many blocks of its own for the rest: copies."""
        table, blocks = self.tables[parent], sequence.computed // self.size
        shared = [self.hold(entry) if isinstance(entry, tuple) else entry for entry in table[:blocks]]
        if new:
            self.copies[child] = blocks, self.kept(parent, sequence, blocks)
        elif parent in self.copies:
            self.copies[child] = self.copies[parent]
        self.tables[child] = shared
        self.evict(new)
        self.grow(child, new)

    def first_seen(self, token: int) -> int:
        """The first block that a token sees."""
        return max(0, token - self.tokens + 1) // self.size if self.sliding else 0

    def room_to_rewind(self, request_id: Hashable, blocks: int, needed: int) -> bool:
        """Whether there is a block for a copy, if one is needed."""
        table = self.tables[request_id]
        others = self.held_by_others(request_id)
        if all(isinstance(entry, int) and entry not in others for entry in table[blocks : blocks + 1]):
            return True
        freed = [entry for entry in table[blocks:] if entry not in others]
        return self.available() + len(freed) >= needed - blocks

    def held_by_others(self, request_id: Hashable) -> set[Entry]:
        others = [table for name, table in self.tables.items() if name != request_id]
        return {entry for held in (*others, *self.pins.values()) for entry in held}

    def rewind(self, request_id: Hashable, sequence: Running, needed: int, stamp: int, now: int) -> None:
        table, blocks = self.tables[request_id], sequence.computed // self.size
        if self.copies.get(request_id, (0,))[0] > blocks:
            del self.copies[request_id]
        # A prompt may have no block yet for the next token to be computed.
        last, first = table[blocks] if blocks < len(table) else None, needed
        if isinstance(last, tuple) or last in self.held_by_others(request_id) - {None}:
            first, kept = blocks, self.kept(request_id, sequence, blocks)
            if isinstance(last, tuple):
                kept = self.cached[last].priority, self.cached[last].duration
            if blocks < needed:
                self.copies[request_id] = blocks, kept
        for entry in reversed(table[first:]):
            self.release(entry, stamp, now)
        del table[first:]
        self.forget_uses()
        self.evict(needed - first)
        self.grow(request_id, needed - first)

    def to_pin(self, request_id: Hashable, start: int, stop: int) -> list[Entry]:
        """The cached blocks that overlap the tokens; with full attention those before them, too."""
        table = self.tables[request_id]
        first, last = start // self.size, -(-stop // self.size)
        wanted = table[:last] if start < stop and first < len(table) else []
        if not self.sliding:
            cached = list(takewhile(lambda entry: isinstance(entry, tuple), wanted))
            return cached if first < len(cached) else []
        return [entry for entry in wanted[first:] if isinstance(entry, tuple)]

    def pin(self, number: int, entries: list[Entry]) -> None:
        self.pins[number] = [self.hold(entry) if isinstance(entry, tuple) else entry for entry in entries]

    def unpin(self, number: int, stamp: int, now: int) -> None:
        for entry in reversed(self.pins.pop(number)):
            self.release(entry, stamp, now)

    def restate(self, request_id: Hashable, sequence: Running, first: int, last: int) -> None:
        """What the request states holds of the cached blocks, too, that it has come to hold."""
        for at in range(first, last):
            entry, stated = self.tables[request_id][at], sequence.stated(at * self.size)
            if isinstance(entry, tuple) and stated is not None and at * self.size < sequence.prompt:
                self.cached[entry].priority, self.cached[entry].duration = stated

    def expire(self, now: int, stamp: int, reported: dict[Path, int]) -> int:
        """Whose time is over goes last among those of the default priority; returns the last stamp.

        `told` ranks them as the manager has told of them.
        """
        over = [path for path, block in self.cached.items() if 0 < block.expiry <= now]
        for kind in sorted({(self.cached[path].level, self.cached[path].priority) for path in over}):
            alike = [path for path in over if (self.cached[path].level, self.cached[path].priority) == kind]
            before: Path | None = None
            for path in sorted(alike, key=lambda path: (len(path) * self.sliding, reported[path])):
                # Blocks that continue each other as told are released together, in a sliding window none are.
                stamp += self.sliding or path[:-1] != before
                block, before = self.cached[path], path
                block.stamp, block.priority, block.duration, block.expiry = stamp, -1, 0, 0
        for path in over:
            self.cached[path].priority = PRIORITY
        return stamp

    # -- storing

    def kept(self, request_id: Hashable, sequence: Running, at: int) -> Kept:
        """How a new block is kept."""
        if sequence.retention is not None and at * self.size >= sequence.prompt:
            return sequence.retention.decode
        block, copied = self.copies.get(request_id, (-1, (PRIORITY, 0)))
        return sequence.stated(at * self.size) or (copied if block == at else (PRIORITY, 0))

    def new_block(self, request_id: Hashable, sequence: Running, at: int, own: int) -> Block:
        priority, duration = self.kept(request_id, sequence, at)
        return Block(own, priority=priority, duration=duration)

    def may_store(self, request_id: Hashable) -> bool:
        """Whether the next block is the sequence's alone."""
        holders = Counter(entry for table in self.held() for entry in table)
        at = self.stored(request_id)
        table = self.tables[request_id]
        return self.reuse and at < len(table) and holders[table[at]] == 1

    def store(self, request_id: Hashable, sequence: Running) -> list[int]:
        """Store what is computed, full blocks only. Returns the indices of the blocks swapped for another's."""
        table, swapped = self.tables[request_id], []
        while self.stored(request_id) < sequence.computed // self.size and self.may_store(request_id):
            at = self.stored(request_id)
            path, own = path_of(sequence.namespace, sequence.tokens, at + 1, self.size), table[at]
            assert isinstance(own, int)
            if path not in self.cached:
                self.supersede(path)
                self.cached[path] = self.new_block(request_id, sequence, at, own)
            elif self.cached[path].level == SECONDARY:
                self.cached[path].level, self.cached[path].id = PRIMARY, own
            else:
                swapped.append(at)
                if self.append_only:
                    self.kept_ids.setdefault(request_id, []).append(own)
            table[at] = self.hold(path)
            self.restate(request_id, sequence, at, at + 1)
        return swapped

    def store_partial(self, request_id: Hashable, sequence: Running) -> None:
        """The computed part of the last block, of use only to copy from."""
        at = self.stored(request_id)
        rest = tuple(sequence.tokens[at * self.size : sequence.computed])
        parent = path_of(sequence.namespace, sequence.tokens, at, self.size)
        if not self.partial or not 0 < len(rest) < self.size or not self.may_store(request_id):
            return
        if all(child[-1][: len(rest)] != rest for child in self.children(parent)):
            own, path = self.tables[request_id][at], (*parent, rest)
            assert isinstance(own, int)
            self.supersede(path)
            self.cached[path] = self.new_block(request_id, sequence, at, own)
            self.tables[request_id][at] = self.hold(path)

    def supersede(self, path: Path) -> None:
        """A block makes shorter ones with the same beginning useless."""
        shorter = [child for child in self.children(path[:-1]) if len(child[-1]) < len(path[-1])]
        self.remove(child for child in shorter if path[-1][: len(child[-1])] == child[-1])
