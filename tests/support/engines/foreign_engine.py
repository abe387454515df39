"""An engine with a block manager of its own, beside a recorder that it tells what it decides.

It knows nothing of this library but the recorder's calls: which block holds what is a dictionary from beginnings of
prompts, as tuples, to block ids. What it does when is left to chance, and how it does things to its traits.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from events.types import EventBatch
from kvcache import KVCacheConfig, LogConfig
from kvcache.fold.prefix_tree import Run, runs_below
from kvcache.recorder import Recorder

Content = tuple[str | None, tuple[int, ...]]
"""A salt, and all tokens up to the end of a block."""
FIRST_ID = 3
VOCABULARY = 2


class Traits(NamedTuple):
    """How an engine goes about it."""

    copies: bool
    """Whether it names blocks whose content another one holds already; else it takes the other one instead."""
    names: bool
    """Whether it names blocks itself."""
    late_slots: bool
    """Whether a sampled token gets its slot only when it is computed."""
    at_once: bool
    """Whether a prompt gets all its slots when it is admitted."""
    unnamed_first: bool
    """Whether blocks without a name are the next to be given out; else they wait behind the cached ones."""
    secondary: int
    drops_last_hit: bool
    """Whether it computes the last block of a hit again."""


def traits(rng: random.Random) -> Traits:
    """Choose an engine."""
    copies, names, late_slots, at_once, unnamed_first = (rng.random() < 0.5 for _ in range(5))
    secondary = rng.choice((0, 0, 6))
    return Traits(copies, names, late_slots, at_once, unnamed_first, secondary, rng.random() < 0.3)


def continues(content: Content, other: Content) -> bool:
    """Whether one begins with all of the other."""
    return content[0] == other[0] and content[1][: len(other[1])] == other[1]


@dataclass(eq=False)
class Served:
    """A running request."""

    number: int
    salt: str | None
    tokens: list[int]
    prompt: int
    table: list[int]
    computed: int
    stored: int
    """Leading blocks that can be found by others."""
    broken: bool = False
    """What it holds was cleared or invalidated while it ran: what it stores could not be found."""


@dataclass
class Counters:
    """What the engine has counted."""

    prompt_tokens: int = 0
    hits: int = 0
    secondary_hits: int = 0
    refusals: int = 0
    external: int = 0
    not_loaded: int = 0
    dropped: int = 0
    """Tokens of last blocks of hits, where these are dropped."""
    seen: Counter[str] = field(default_factory=Counter)


class ForeignEngine:
    """Blocks, a queue of free ones, and a dictionary of what they hold."""

    def __init__(
        self, seed: int, blocks: int, size: int, log: str | Path | None = None, *, tokens: bool = True
    ) -> None:
        self.rng = random.Random(seed)
        self.traits = traits(self.rng)
        self.size, self.longest = size, blocks * size
        config = KVCacheConfig(
            tokens_per_block=size,
            primary_blocks=blocks,
            secondary_blocks=self.traits.secondary,
            max_sequence_length=self.longest,
            log=LogConfig(record_tokens=tokens),
        )
        self.recorder = Recorder(
            config,
            engine="foreign 1",
            log=log,
            first_block_id=FIRST_ID,
            name_bytes=self.rng.choice((8, 16, 32)) if self.traits.names else None,
            drops_last_hit=self.traits.drops_last_hit,
        )
        self.key_bytes = self.recorder.state.created.key_bytes if self.recorder.state.created else 0
        self.free = deque(range(FIRST_ID, FIRST_ID + blocks))
        self.holders: Counter[int] = Counter()
        self.content: dict[int, Content] = {}
        self.found: dict[Content, list[int]] = {}
        self.below: dict[Content, int] = {}
        self.free_below = list(range(self.traits.secondary))
        self.running: list[Served] = []
        self.counters = Counters()
        self.prompts: list[tuple[str | None, list[int]]] = []
        self.numbers = 0
        self.batches: list[EventBatch] = []
        """What was flushed."""
        self.for_whom: int | None = None
        """The running request that needs room."""

    # -- what it holds

    def of(self, request: Served, blocks: int) -> Content:
        """What the first blocks of a request hold."""
        return request.salt, tuple(request.tokens[: blocks * self.size])

    def name(self, content: Content) -> bytes:
        """The engine's own name for it."""
        return hashlib.sha256(repr(content).encode()).digest()[: self.key_bytes]

    def names(self, request: Served, first: int, last: int) -> list[bytes] | None:
        """The names of some of a request's blocks."""
        if not self.traits.names:
            return None
        return [self.name(self.of(request, block + 1)) for block in range(first, last)]

    # -- blocks

    def forget(self, block: int, avoiding: Content | None) -> None:
        """What a free block holds is gone, or kept in secondary."""
        content = self.content.pop(block)
        others = self.found[content]
        others.remove(block)
        if others:
            self.counters.seen["a copy went"] += 1
            self.recorder.evicted([block], self.for_whom)
            return
        del self.found[content]
        if self.traits.secondary and self.rng.random() < 0.8 and self.room_below(avoiding):
            self.below[content] = slot = self.free_below.pop()
            self.recorder.moved([block], [slot], self.for_whom)
            self.counters.seen["moved"] += 1
            return
        lost = [each for each in self.below if continues(each, content)]
        self.rng.shuffle(lost)
        self.drop(lost)
        self.recorder.evicted([block], self.for_whom)

    def drop(self, contents: list[Content]) -> None:
        """Forget what secondary holds."""
        slots = [self.below.pop(each) for each in contents]
        self.free_below += slots
        self.recorder.evicted(slots, level="secondary")
        self.counters.seen["dropped"] += len(slots)

    def room_below(self, avoiding: Content | None) -> bool:
        """Whether secondary has room, or makes some without what begins as a prompt that is being admitted."""
        if not self.free_below:
            leaves = [
                each
                for each in self.below
                if not any(other != each and continues(other, each) for other in self.below)
                and not (avoiding and continues(avoiding, each))
            ]
            if not leaves:
                return False
            self.drop([self.rng.choice(leaves)])
        return True

    def take(self, count: int, avoiding: Content | None = None) -> list[int]:
        """Blocks off the queue; what they held is forgotten."""
        taken = [self.free.popleft() for _ in range(count)]
        cached = [block for block in taken if block in self.content]
        alone = not self.traits.secondary and all(
            len(self.found[self.content[block]]) == 1 for block in cached
        )
        if alone and len(cached) > 1 and self.rng.random() < 0.5:
            for block in cached:
                del self.found[self.content.pop(block)]
            self.rng.shuffle(cached)  # one call for all says nothing about their order
            self.recorder.evicted(array("i", cached), self.for_whom)
            self.counters.seen["together"] += 1
        else:
            for block in cached:
                self.forget(block, avoiding)
        self.holders.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """One holder fewer; who has none left is free, the last blocks before the first."""
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                if block not in self.content and self.traits.unnamed_first:
                    self.free.appendleft(block)
                else:
                    self.free.append(block)

    # -- what it does

    def admit(self) -> None:
        """A request comes: reuse what is found, and take blocks for its first chunk."""
        resumed, salt, tokens = self.next_prompt()
        most = (len(tokens) - 1) // self.size if self.rng.random() < 0.9 else 0
        hits, lower = self.hits(salt, tokens, most)
        reused = (len(hits) + len(lower)) * self.size
        external, lost = self.loads(len(tokens) - 1 - reused)
        arrived = reused + external - lost
        chunk = len(tokens) - arrived
        if not self.traits.at_once:
            chunk = self.rng.randint(1, chunk)
        needed = -(-max(arrived + chunk, reused + external) // self.size) - len(hits) - len(lower)
        number = self.numbers
        idle = sum(not self.holders[block] for block in hits)
        if needed + len(lower) > len(self.free) - idle:
            self.counters.refusals += number not in self.recorder.state.refused
            self.recorder.refused(number, needed + len(lower), len(self.free) - idle)
            self.prompts.append((salt, tokens))
            self.numbers += 1
            return
        self.numbers += 1
        for block in hits:
            if not self.holders[block]:
                self.free.remove(block)
            self.holders[block] += 1
        self.for_whom = None
        targets = self.take(len(lower), (salt, tuple(tokens)))
        slots = [self.below.pop(content) for content in lower]
        self.free_below += slots
        for block, content in zip(targets, lower, strict=True):
            self.content[block], self.found[content] = content, [block]
        self.recorder.admitted(
            number,
            self.as_given(tokens),
            hits if self.rng.random() < 0.5 else array("i", hits),
            onboarded=slots,
            onto=targets,
            cache_salt=salt,
            resumed=resumed,
            external=external,
        )
        request = Served(number, salt, tokens, len(tokens), hits + targets, reused, len(hits) + len(lower))
        self.running.append(request)
        self.counters.prompt_tokens += len(tokens)
        self.counters.hits += reused
        self.counters.secondary_hits += len(lower) * self.size
        self.counters.external += external
        self.counters.not_loaded += lost
        self.counters.seen["loaded"] += external > lost
        self.grow(request, needed)
        self.recorder.not_loaded(number, lost)
        self.compute(request, arrived)
        self.compute(request, arrived + chunk)

    def loads(self, most: int) -> tuple[int, int]:
        """How many tokens another engine has, and how many of them get lost on the way."""
        if most < 1 or self.rng.random() < 0.7:
            return 0, 0
        external = self.rng.randint(1, most)
        return external, self.rng.randint(0, external) if self.rng.random() < 0.3 else 0

    def as_given(self, tokens: list[int]) -> list[int] | array[int]:
        """Tokens as some engines have them."""
        return tokens if self.rng.random() < 0.5 else array("i", tokens)

    def next_prompt(self) -> tuple[bool, str | None, list[int]]:
        """A prompt: one that was preempted, one that continues an old one, or a new one. Few tokens, so many meet."""
        rng = self.rng
        waiting = [each for each in self.prompts if len(each[1]) > 1]
        if waiting and rng.random() < 0.3:
            salt, tokens = rng.choice(waiting)
            self.prompts.remove((salt, tokens))
            return True, salt, list(tokens)
        salt = rng.choice((None, None, "s"))
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, self.longest // 2))]
        if rng.random() < 0.5:
            tokens[: 2 * self.size] = [1] * len(tokens[: 2 * self.size])
        return False, salt, tokens

    def hits(self, salt: str | None, tokens: list[int], most: int) -> tuple[list[int], list[Content]]:
        """The blocks that hold the prompt's beginning, and what of it behind these is in secondary."""
        hits: list[int] = []
        lower: list[Content] = []
        for block in range(most):
            content = salt, tuple(tokens[: (block + 1) * self.size])
            if content in self.found and not lower:
                hits.append(self.rng.choice(self.found[content]))
            elif content in self.below:
                lower.append(content)
            else:
                break
        if self.traits.drops_last_hit and (hits or lower):
            self.counters.dropped += self.size
            (lower or hits).pop()
        return hits, lower

    def grow(self, request: Served, count: int) -> bool:
        """Give a request more blocks, or preempt others until they are there; False: it was preempted itself."""
        self.for_whom = request.number
        while count > len(self.free):
            victim = self.rng.choice(self.running)
            self.end(victim, "preempted")
            if victim is request:
                return False
        blocks = self.take(count)
        if blocks:
            self.recorder.allocated(request.number, blocks)
            request.table += blocks
        return True

    def compute(self, request: Served, computed: int) -> None:
        """K/V of the first tokens is written, and their full blocks are named."""
        request.computed = computed
        if computed % self.size or self.rng.random() < 0.5:
            self.recorder.computed(request.number, computed)
        self.store(request)

    def store(self, request: Served) -> None:
        """Name the blocks that are full."""
        last = request.computed // self.size
        if request.broken or last <= request.stored:
            return
        if not self.traits.copies:
            self.take_instead(request, last)
        first, request.stored = request.stored, max(last, request.stored)
        for block in range(first, last):
            self.put(request, block)
        if first < last:
            self.recorder.stored(request.number, last, self.names(request, first, last))

    def take_instead(self, request: Served, last: int) -> None:
        """Hold the blocks that hold the same already, and let go of the request's own."""
        taken: list[int] = []
        own: list[int] = []
        while request.stored < last and (content := self.of(request, request.stored + 1)) in self.found:
            (block,) = self.found[content]
            taken.append(block)
            own.append(request.table[request.stored])
            request.table[request.stored] = block
            request.stored += 1
        if taken:
            self.recorder.replaced(request.number, request.stored - len(taken), taken)
            self.counters.seen["replaced"] += 1
        for block in taken:
            if not self.holders[block]:
                self.free.remove(block)
            self.holders[block] += 1
        self.give_back(own)

    def put(self, request: Served, block: int) -> None:
        """A block can be found from now on; what secondary had of it is free."""
        content, at = self.of(request, block + 1), request.table[block]
        self.counters.seen["copied"] += content in self.found
        self.found.setdefault(content, []).append(at)
        self.content[at] = content
        if content in self.below:
            self.free_below.append(self.below.pop(content))
            self.counters.seen["recomputed"] += 1

    def step(self) -> None:
        """Prompts go on by a chunk, the others by a token."""
        for request in list(self.running):
            if request in self.running and request.computed < request.prompt:
                self.chunk(request)
        decoding = [
            each for each in self.running if each.computed >= each.prompt and len(each.tokens) < self.longest
        ]
        if self.rng.random() < 0.3:
            decoding = self.rng.sample(decoding, self.rng.randint(0, len(decoding)))
        self.sample(decoding)

    def chunk(self, request: Served) -> None:
        """Compute more of a prompt."""
        computed = self.rng.randint(request.computed + 1, request.prompt)
        if self.have(request, computed):
            self.compute(request, computed)

    def have(self, request: Served, num_tokens: int) -> bool:
        """See to it that a request has slots for so many tokens."""
        return self.grow(request, max(0, -(-num_tokens // self.size) - len(request.table)))

    def sample(self, requests: list[Served]) -> None:
        """Each of these gets a token, or some get several; then all before the last one is computed."""
        most = self.rng.choice((1, 1, 3))
        counts = {each: min(self.rng.randint(1, most), self.longest - len(each.tokens)) for each in requests}
        if not self.grow_all(counts):
            for each, count in counts.items():
                if each in self.running:
                    self.have(each, len(each.tokens) + count - self.traits.late_slots)
        requests = [each for each in requests if each in self.running]
        new = {each: [self.rng.randrange(VOCABULARY) for _ in range(counts[each])] for each in requests}
        flat = [token for tokens in new.values() for token in tokens]
        sizes = [len(tokens) for tokens in new.values()]
        self.recorder.appended([each.number for each in requests], flat, None if most == 1 else sizes)
        for each, tokens in new.items():
            each.tokens += tokens
            each.computed = len(each.tokens) - 1
        self.fill(requests)

    def grow_all(self, counts: dict[Served, int]) -> bool:
        """Give those that need it one block each, by one call; False: some need more, or there is no room."""
        needed = {
            each: -(-(len(each.tokens) + count - self.traits.late_slots) // self.size) - len(each.table)
            for each, count in counts.items()
        }
        due = [each for each, blocks in needed.items() if blocks == 1]
        if max(needed.values(), default=0) > 1 or len(due) > len(self.free) or self.rng.random() < 0.3:
            return False
        self.for_whom = None
        blocks = self.take(len(due))
        self.recorder.grown([each.number for each in due], blocks)
        for each, block in zip(due, blocks, strict=True):
            each.table.append(block)
        self.counters.seen["grown"] += len(due) > 1
        return True

    def fill(self, requests: list[Served]) -> None:
        """Name what became full: in one call where each has filled one block, and no block is taken instead."""
        due = [each for each in requests if not each.broken and each.computed // self.size == each.stored + 1]
        if self.traits.copies and self.rng.random() < 0.7:
            names = [self.name(self.of(each, each.stored + 1)) for each in due] if self.traits.names else None
            for each in due:
                self.put(each, each.stored)
                each.stored += 1
            self.recorder.filled([each.number for each in due], names)
            self.counters.seen["filled"] += len(due)
        for each in requests:
            self.store(each)

    def end(self, request: Served, why: str = "finished") -> None:
        """A request ends, or makes room."""
        self.running.remove(request)
        self.recorder.ended(request.number, why)  # type: ignore[arg-type]
        self.give_back(request.table)
        self.counters.seen[why] += 1
        if why == "preempted" or self.rng.random() < 0.5:
            self.prompts.append((request.salt, request.tokens))

    def clear(self) -> None:
        """Forget what every block holds."""
        self.recorder.cleared()
        self.content.clear()
        self.found.clear()
        self.free_below += self.below.values()
        self.below.clear()
        for request in self.running:
            request.broken = True
        self.counters.seen["cleared"] += 1

    def invalidate(self) -> None:
        """Some blocks do not hold what they should: nothing that continues them can be found."""
        some = self.rng.sample(sorted(self.content), min(len(self.content), self.rng.randint(1, 3)))
        contents = {self.content[block] for block in some}
        blocks = [block for content in contents for block in self.found[content]]
        gone = self.cut(contents)
        assert set(self.recorder.invalidated(blocks)) == gone
        self.counters.seen["invalidated"] += len(gone) > len(blocks)

    def cut(self, lost: set[Content]) -> set[int]:
        """Forget these contents and what continues them; returns the blocks."""
        gone = set[int]()
        for content in [each for each in self.found if any(continues(each, other) for other in lost)]:
            for block in self.found.pop(content):
                del self.content[block]
                gone.add(block)
        for content in [each for each in self.below if any(continues(each, other) for other in lost)]:
            self.free_below.append(self.below.pop(content))
        for request in self.running:
            request.broken |= request.stored > 0 and self.of(request, request.stored) not in self.found
        return gone

    def act(self) -> None:
        """Do something."""
        kind = self.rng.random()
        if kind < 0.35:
            self.admit()
        elif kind < 0.8:
            self.step()
        elif kind < 0.94 and self.running:
            self.end(
                self.rng.choice(self.running),
                self.rng.choice(("finished", "finished", "aborted", "preempted")),
            )
        elif kind > 0.99:
            self.clear()
        elif kind > 0.94 and self.content:
            self.invalidate()
        self.recorder.counted(self.counters.prompt_tokens, self.counters.hits)
        if self.rng.random() < 0.7 and (batch := self.recorder.flush()) is not None:
            self.batches.append(batch)

    # -- compared

    def mirrored(self) -> tuple[dict[Content, int], dict[Content, int]]:
        """What the recorder's state has cached in primary and in secondary, and where, as this engine says it."""
        found: tuple[dict[Content, int], dict[Content, int]] = ({}, {})
        for namespace, root in self.recorder.state.groups[0].tree.roots.items():
            salt = None if namespace.salt_digest is None else "s"
            for run in runs_below(root):
                above = b""
                node = run.parent
                while isinstance(node, Run):
                    above, node = bytes(node.symbols) + above, node.parent
                tokens = tuple(array("i", above + bytes(run.symbols)))
                for at, slot in enumerate(run.slots):
                    content = salt, tokens[: (run.start + at + 1) * self.size]
                    found[run.level][content] = slot
        return found

    def compare(self) -> None:
        """The recorder knows what this engine holds."""
        primary, secondary = self.mirrored()
        assert primary.keys() == self.found.keys()
        assert secondary == self.below
        if not self.traits.copies:
            assert {content: slot + FIRST_ID for content, slot in primary.items()} == {
                content: block for content, (block,) in self.found.items()
            }
        state = self.recorder.state
        assert sorted(state.handles) == sorted(each.number for each in self.running)
        for request in self.running:
            sequence = state.sequences[state.handles[request.number]]
            assert sequence.tokens.tolist() == request.tokens
            assert len(sequence.tables[0]) == len(request.table)
            if not self.traits.copies:
                assert [slot + FIRST_ID for slot in sequence.tables[0]] == request.table
        self.recorder.check()
