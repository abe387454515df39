"""Caches of prefixes that are played block by block with lists and dicts: each order of eviction by its definition.

Nothing is shared with `kvcache.audit.block_cache`, neither code nor method: no heaps, no counters of children; what
can be evicted is looked up among all blocks, each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Prompt:
    """A request; `blocks` are numbers that stand for a block and all before it."""

    blocks: list[int]
    arrival: float = 0.0
    held: float = 0.0
    stop: str | None = None

    @property
    def end(self) -> float:
        return self.arrival + self.held


class Model:
    """Evicts the first leaf of `queue` that nobody holds: the base of first in, first out."""

    def __init__(self, prompts: list[Prompt], size: int) -> None:
        self.prompts, self.size = prompts, size
        self.queue: list[int] = []
        """All cached blocks, the next victims first."""
        self.parents = {b: p.blocks[at - 1] if at else None for p in prompts for at, b in enumerate(p.blocks)}
        self.users: dict[int, int] = {}
        self.order: dict[int, int] = {}
        """By block, when it was used last, as a number of ends."""
        self.running: dict[int, list[int]] = {}

    def play(self) -> list[int]:
        """By prompt, the blocks that were there."""
        moments = [(p.arrival, 2 * at) for at, p in enumerate(self.prompts)]
        moments += [(p.end, 2 * at + 1) for at, p in enumerate(self.prompts)]
        hits = [0] * len(self.prompts)
        self.ends = 0
        for now, moment in sorted(moments):
            number, ends = divmod(moment, 2)
            blocks = self.prompts[number].blocks[: self.size]
            if ends:
                self.ends += 1
                used = self.running.pop(number)
                for block in used:
                    self.users[block], self.order[block] = number, self.ends
                self.used(used, hits[number])
                continue
            while hits[number] < len(blocks) and blocks[hits[number]] in self.queue:
                hits[number] += 1
            found = blocks[: hits[number]]
            self.running[number] = found
            room = self.size - len(self.queue)
            for _ in range(len(blocks) - len(found) - room):
                victim = self.victim(self.leaves(), now)
                if victim is None:
                    break
                self.queue.remove(victim)
                self.evicted(victim)
                room += 1
            room = self.size - len(self.queue)
            self.running[number] = blocks[: len(found) + room]
            self.stored(self.running[number][len(found) :])
            assert len(self.queue) <= self.size
        return hits

    def leaves(self) -> list[int]:
        """In the order of the queue, what can be evicted."""
        inner = {self.parents[block] for block in self.queue}
        held = {block for blocks in self.running.values() for block in blocks}
        return [block for block in self.queue if block not in inner and block not in held]

    def depth(self, block: int | None) -> int:
        return -1 if block is None else 1 + self.depth(self.parents[block])

    # -- to be overridden

    def victim(self, leaves: list[int], now: float) -> int | None:
        return leaves[0] if leaves else None

    def stored(self, blocks: list[int]) -> None:
        self.queue += reversed(blocks)

    def used(self, blocks: list[int], hits: int) -> None:
        """A request ends that has used these, of which the first were there."""

    def evicted(self, block: int) -> None:
        """It is in no queue any more."""


class Levels(Model):
    """Lowest level first, then the least recently used."""

    level: Callable[[int, float], int] = staticmethod(lambda block, now: 0)

    def victim(self, leaves: list[int], now: float) -> int | None:
        return min(leaves, key=lambda block: (self.level(block, now), self.order[block]), default=None)

    def age(self, block: int, now: float) -> float:
        return now - self.prompts[self.users[block]].end


FINAL = ("end_turn", "stop", "stop_sequence", "refusal")


class Stop(Levels):
    def __init__(self, prompts: list[Prompt], size: int, seconds: float) -> None:
        super().__init__(prompts, size)
        self.level = lambda block, now: (
            prompts[self.users[block]].stop not in FINAL and self.age(block, now) < seconds
        )


class Tail(Levels):
    def __init__(self, prompts: list[Prompt], size: int, blocks: int) -> None:
        super().__init__(prompts, size)
        self.level = lambda block, now: self.depth(block) < len(prompts[self.users[block]].blocks) - blocks


class Gap(Levels):
    def __init__(self, prompts: list[Prompt], size: int, seconds: float) -> None:
        super().__init__(prompts, size)
        self.seconds = seconds
        self.usual = [self._usual(self._gaps(at)) for at in range(len(prompts))]
        self.level = self._level

    def _before(self, at: int) -> int | None:
        """The request that this one continues."""
        users: dict[int, int] = {}
        for earlier, prompt in enumerate(self.prompts[:at]):
            users |= dict.fromkeys(prompt.blocks, earlier)
        known = [block for block in self.prompts[at].blocks if block in users]
        if not known or 2 * len(known) <= len(self.prompts[users[known[-1]]].blocks):
            return None
        return users[known[-1]]

    def _gaps(self, at: int) -> list[float]:
        """The last one first."""
        before = self._before(at)
        if before is None:
            return []
        return [max(self.prompts[at].arrival - self.prompts[before].end, 0.5), *self._gaps(before)]

    def _usual(self, gaps: list[float]) -> float:
        if not gaps:
            return math.inf
        weights = [0.7**index for index in range(len(gaps))]
        return math.exp(
            sum(weight * math.log(gap) for weight, gap in zip(weights, gaps, strict=True)) / sum(weights)
        )

    def _level(self, block: int, now: float) -> int:
        user, age = self.users[block], self.age(block, now)
        if self.prompts[user].stop in FINAL:
            return 0
        if age >= self.seconds:
            return int(age < 600)
        usual = self.usual[user] / self.seconds
        return 4 if usual < 0.4 else 3 if usual < 0.8 else 2


class Ranked(Model):
    """Least frequently used, with aging; a use counts `weight` of the block's depth."""

    def __init__(self, prompts: list[Prompt], size: int, weight: Callable[[int], float]) -> None:
        super().__init__(prompts, size)
        self.weight = weight
        self.uses: dict[int, int] = {}
        self.ranks: dict[int, float] = {}
        self.clock = 0.0

    def used(self, blocks: list[int], hits: int) -> None:
        for depth, block in enumerate(blocks):
            self.uses[block] = self.uses.get(block, 0) + 1
            self.ranks[block] = self.clock + self.uses[block] * self.weight(depth)

    def victim(self, leaves: list[int], now: float) -> int | None:
        return min(leaves, key=lambda block: (self.ranks[block], self.order[block]), default=None)

    def evicted(self, block: int) -> None:
        self.clock = max(self.clock, self.ranks[block])


class Segmented(Model):
    """SLRU: a queue of which the front is probation, and a protected one."""

    def __init__(self, prompts: list[Prompt], size: int, part: int) -> None:
        super().__init__(prompts, size)
        self.part = part
        self.probation: list[int] = []
        self.protected: list[int] = []

    def _rejoin(self) -> None:
        self.queue = self.probation + self.protected

    def stored(self, blocks: list[int]) -> None:
        self.probation += reversed(blocks)
        self._rejoin()

    def evicted(self, block: int) -> None:
        for queue in (self.probation, self.protected):
            if block in queue:
                queue.remove(block)

    def used(self, blocks: list[int], hits: int) -> None:
        for at, block in reversed(list(enumerate(blocks))):
            again = at < hits or block in self.protected
            self.evicted(block)
            (self.protected if again else self.probation).append(block)
        while len(self.protected) > self.part:
            self.probation.append(self.protected.pop(0))
        self._rejoin()


class TwoQueues(Model):
    """S3-FIFO, of which only leaves are looked at."""

    def __init__(self, prompts: list[Prompt], size: int, part: int) -> None:
        super().__init__(prompts, size)
        self.part = part
        self.small: list[int] = []
        self.main: list[int] = []
        self.freq: dict[int, int] = {}
        self.ghosts: list[int] = []

    def used(self, blocks: list[int], hits: int) -> None:
        for block in blocks[:hits]:
            self.freq[block] = min(self.freq[block] + 1, 3)

    def stored(self, blocks: list[int]) -> None:
        remembered = self.ghosts[-(self.size - self.part) :] if self.size > self.part else []
        for block in reversed(blocks):
            self.freq[block] = 0
            (self.main if block in remembered else self.small).append(block)
            if block in self.ghosts:
                self.ghosts[self.ghosts.index(block)] = -1
        self.queue = self.small + self.main

    def victim(self, leaves: list[int], now: float) -> int | None:
        while leaves:
            small = [block for block in self.small if block in leaves]
            main = [block for block in self.main if block in leaves]
            if small and (len(self.small) >= self.part or not main):
                block = small[0]
                if self.freq[block] <= 1:
                    self.small.remove(block)
                    self.ghosts.append(block)
                    return block
                self.freq[block] = 0
                self.small.remove(block)
            else:
                block = main[0]
                self.main.remove(block)
                if not self.freq[block]:
                    return block
                self.freq[block] -= 1
            self.main.append(block)
        return None
