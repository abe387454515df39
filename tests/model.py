"""What a cache does, written down as plainly as possible: one block at a time, no runs, no heaps, no slots.

The tests drive it beside the manager and compare. It shares nothing with the manager but the numbers of the levels,
so a mistake would have to be made twice, in two shapes, to stay unseen. A cached block is known by its path: the
namespace, then the tokens of each block up to and including its own. A primary block that takes up a slot has an
arbitrary id; blank slots are what is left. A token may be anything that can be compared, so that one of an image can be
what it stands for.
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
Request = tuple[Hashable, Hashable, Sequence[Hashable]]
"""Id, namespace, tokens."""


def common_tokens(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Refused(Exception):
    """There is no room: (index of the first that does not fit, needed, available)."""


@dataclass
class Block:
    """A cached block. `id` is meaningless in secondary."""

    id: int
    level: int = PRIMARY
    refs: int = 0
    stamp: int = 0
    priority: int = PRIORITY


@dataclass
class Running:
    """A sequence: its first `stored` blocks are cached, `own` are the ids of the others."""

    namespace: Hashable
    tokens: list[Any]
    computed: int = 0
    stored: int = 0
    own: list[int] = field(default_factory=list)


class Model:
    """The cache. `removed` and `offloaded` list what left primary or the cache, in order."""

    def __init__(
        self,
        size: int,
        blocks: tuple[int, int],
        *,
        reuse: bool = True,
        partial: bool = True,
        offload_from: int = 30,
        ahead_share: int = 16,
    ) -> None:
        self.size, self.blocks, self.reuse, self.partial, self.offload_from = (
            size,
            blocks,
            reuse,
            partial,
            offload_from,
        )
        self.ahead = min(64, blocks[PRIMARY] // ahead_share)
        """Decoding that evicts at all makes so many blocks blank before it takes its own, if they can be had."""
        self.cached: dict[Path, Block] = {}
        self.running: dict[Hashable, Running] = {}
        self.stamp = self.ids = 0
        self.removed: list[set[Path]] = []
        """Each set may go in any order that has children before parents."""
        self.offloaded: list[Path] = []

    # -- reading

    def blank(self, level: int) -> int:
        used = {block.id for block in self.cached.values() if block.level == level}
        if level == PRIMARY:
            used.update(own for sequence in self.running.values() for own in sequence.own)
        return self.blocks[level] - len(used)

    def available(self) -> int:
        idle = sum(block.level == PRIMARY and not block.refs for block in self.cached.values())
        return self.blank(PRIMARY) + idle

    def children(self, path: Path) -> list[Path]:
        return [child for child in self.cached if child[:-1] == path]

    def path(self, sequence: Running, blocks: int) -> Path:
        starts = range(0, blocks * self.size, self.size)
        return (sequence.namespace, *(tuple(sequence.tokens[start : start + self.size]) for start in starts))

    def match(self, namespace: Hashable, tokens: Sequence[Hashable]) -> tuple[Path, int, set[Path]]:
        """The path of full blocks, and how many more tokens could be copied from which blocks."""
        path: Path = (namespace,)
        rest = tuple(tokens[:-1])
        if not self.reuse:
            return path, 0, set()
        while len(rest) >= self.size and (*path, rest[: self.size]) in self.cached:
            path, rest = (*path, rest[: self.size]), rest[self.size :]
        common = {child: common_tokens(child[-1], rest) for child in self.children(path)}
        best = max(common.values(), default=0) if self.partial else 0
        return path, best, {child for child in common if best and common[child] == best}

    def fitting(self, requests: Sequence[Request]) -> tuple[int, int, int]:
        """How many of the requests fit, and needed and available blocks at the first that does not (or at the end)."""
        new, claimed = 0, set[Path]()
        needed = available = 0
        for index, (_, namespace, tokens) in enumerate(requests):
            path, _, _ = self.match(namespace, tokens)
            new += -(-len(tokens) // self.size) - (len(path) - 1)
            claimed.update(path[:end] for end in range(2, len(path) + 1))
            idle = [self.cached[each] for each in claimed if not self.cached[each].refs]
            needed = new + sum(self.cached[each].level == SECONDARY for each in claimed)
            available = self.available() - sum(block.level == PRIMARY for block in idle)
            if needed > available:
                return index, needed, available
        return len(requests), needed, available

    # -- eviction

    def victim(self, level: int, exempt: Collection[Path] = ()) -> Path | None:
        candidates = [
            path
            for path, block in self.cached.items()
            if block.level == level and not block.refs and path not in exempt
            if all(self.cached[child].level != level for child in self.children(path))
        ]
        return min(candidates, key=self.order, default=None)

    def order(self, path: Path) -> tuple[int, int, int]:
        return self.cached[path].priority, self.cached[path].stamp, -len(path)

    def evict(self, needed: int, exempt: Collection[Path] = ()) -> None:
        while self.blank(PRIMARY) < needed:
            path = self.victim(PRIMARY)
            assert path is not None
            if self.offload_from <= self.cached[path].priority and self.make_room(path, exempt):
                self.cached[path].level, self.cached[path].id = SECONDARY, self.new_id()
                self.offloaded.append(path)
            else:
                self.remove(
                    below for below in list(self.cached) if below != path and below[: len(path)] == path
                )
                self.remove([path])

    def make_room(self, path: Path, exempt: Collection[Path]) -> bool:
        if self.blocks[SECONDARY] and not self.blank(SECONDARY):
            lower = self.victim(SECONDARY, exempt)
            if lower is not None and self.order(lower) < self.order(path):
                self.remove([lower])
        return self.blank(SECONDARY) > 0

    def remove(self, paths: Iterable[Path]) -> None:
        gone = set(paths)
        for path in gone:
            del self.cached[path]
        if gone:
            self.removed.append(gone)

    # -- commands

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def add(self, requests: Sequence[Request], sources: Collection[Path] = ()) -> list[tuple[int, int, int]]:
        """Admit all or none; returns reused tokens in (primary, secondary, a copy). `sources`: what is copied from."""
        fit, needed, available = self.fitting(requests)
        if fit < len(requests):
            raise Refused(fit, needed, available)
        exempt = {path for path in sources if self.cached[path].level == SECONDARY}
        reused = []
        for request_id, namespace, tokens in requests:
            path, copied, _ = self.match(namespace, tokens)
            held = [self.cached[path[:end]] for end in range(2, len(path) + 1)]
            levels = Counter(block.level for block in held)
            for block in held:
                block.refs, block.stamp = block.refs + 1, 0
            computed = len(held) * self.size + copied
            self.running[request_id] = Running(namespace, list(tokens), computed, len(held))
            reused.append((levels[PRIMARY] * self.size, levels[SECONDARY] * self.size, copied))
        self.evict(needed, exempt)
        for request_id, _, tokens in requests:
            sequence = self.running[request_id]
            sequence.own = [self.new_id() for _ in range(-(-len(tokens) // self.size) - sequence.stored)]
        for block in self.cached.values():
            if block.refs and block.level == SECONDARY:
                block.level, block.id = PRIMARY, self.new_id()
        return reused

    def compute(self, request_id: Hashable, num_tokens: int) -> list[int]:
        """Returns the indices of the blocks swapped for another's."""
        sequence = self.running[request_id]
        sequence.computed = max(sequence.computed, num_tokens)
        return self.store(sequence)

    def append(
        self, ids: Sequence[Hashable], tokens: Sequence[int], counts: Sequence[int]
    ) -> dict[Hashable, list[int]]:
        """Returns the swapped blocks of each sequence that has any."""
        growth = []
        for index, (request_id, count) in enumerate(zip(ids, counts, strict=True)):
            sequence = self.running[request_id]
            blocks = sequence.stored + len(sequence.own)
            growth.append(-(-(len(sequence.tokens) + count) // self.size) - blocks)
            if sum(growth) > self.available():
                raise Refused(index)
        if sum(growth) > self.blank(PRIMARY):
            self.evict(max(sum(growth), min(self.ahead, self.available())))
        rest = list(tokens)
        for request_id, count, more in zip(ids, counts, growth, strict=True):
            sequence = self.running[request_id]
            sequence.own += [self.new_id() for _ in range(more)]
            sequence.tokens += rest[:count]
            sequence.computed = len(sequence.tokens) - 1
            del rest[:count]
        swapped = {
            each: self.store(self.running[each]) for each, more in zip(ids, growth, strict=True) if more
        }
        return {each: swaps for each, swaps in swapped.items() if swaps}

    def set_priority(self, request_id: Hashable, priority: int, start: int, stop: int) -> list[Path]:
        """Returns the blocks that had another priority, shallowest first."""
        sequence = self.running[request_id]
        changed = []
        for block in range(sequence.stored):
            path = self.path(sequence, block + 1)
            if max(start, block * self.size) < min(stop, (block + 1) * self.size):
                if self.cached[path].priority != priority:
                    changed.append(path)
                self.cached[path].priority = priority
        return changed

    def end(self, request_id: Hashable, *, store: bool) -> None:
        sequence = self.running[request_id]
        if store:
            self.store(sequence)
            self.store_partial(sequence)
        del self.running[request_id]
        self.stamp += 1
        for blocks in range(1, sequence.stored + 1):
            path = self.path(sequence, blocks)
            # The last one may be partial, and tokens may follow that are not computed.
            block = (
                self.cached.get(path) or self.cached[*path[:-1], path[-1][: sequence.computed % self.size]]
            )
            block.refs -= 1
            block.stamp = 0 if block.refs else self.stamp

    def clear(self) -> None:
        for sequence in self.running.values():
            ids = [self.cached[self.path(sequence, blocks + 1)].id for blocks in range(sequence.stored)]
            sequence.own, sequence.stored = ids + sequence.own, 0
        self.cached.clear()

    # -- storing

    def may_store(self, sequence: Running) -> bool:
        """Whether the next block is the sequence's alone."""
        holders = Counter(own for each in self.running.values() for own in each.own)
        return self.reuse and bool(sequence.own) and holders[sequence.own[0]] == 1

    def store(self, sequence: Running) -> list[int]:
        swapped = []
        while sequence.stored < sequence.computed // self.size and self.may_store(sequence):
            path, own = self.path(sequence, sequence.stored + 1), sequence.own.pop(0)
            if path not in self.cached:
                self.supersede(path)
                self.cached[path] = Block(own)
            elif self.cached[path].level == SECONDARY:
                self.cached[path].level, self.cached[path].id = PRIMARY, own
            else:
                swapped.append(sequence.stored)
            self.cached[path].refs, self.cached[path].stamp = self.cached[path].refs + 1, 0
            sequence.stored += 1
        return swapped

    def store_partial(self, sequence: Running) -> None:
        """The computed part of the last block, of use only to copy from."""
        rest = tuple(sequence.tokens[sequence.stored * self.size : sequence.computed])
        parent = self.path(sequence, sequence.stored)
        if not self.partial or not 0 < len(rest) < self.size or not self.may_store(sequence):
            return
        if all(child[-1][: len(rest)] != rest for child in self.children(parent)):
            self.supersede((*parent, rest))
            self.cached[*parent, rest] = Block(sequence.own.pop(0), refs=1)
            sequence.stored += 1

    def supersede(self, path: Path) -> None:
        """A block makes shorter ones with the same beginning useless."""
        shorter = [child for child in self.children(path[:-1]) if len(child[-1]) < len(path[-1])]
        self.remove(child for child in shorter if path[-1][: len(child[-1])] == child[-1])
