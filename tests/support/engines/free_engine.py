"""An engine that computes when it likes: what it tells the manager, and in which order, is drawn at random.

It keeps book of its own tokens, and of how many of them have K/V. It takes for computed all that the documentation
allows: what is reused, what the parent of a branch had, what is left after a rewind; as often it computes that anew.
The manager is informed late or, where the documentation allows it, never. K/V of a token is a number that stands for
all tokens up to it (`tests.support.engines.fake_engine`), so each place in memory says which tokens were written there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cuda_ops.copier import Copier
from kvcache.errors import CapacityError, ComputationLost, TransfersPending, UnknownRequest, UsageError
from kvcache.inputs import Request
from kvcache.results import PollResult
from tests.support.engines.fake_engine import FakeEngine, RequestId, expected
from tests.support.engines.inside import sequence_of, slots_of
from tests.support.engines.simulated import FailingCopier, LateCopier

LONGEST = 16
"""Tokens of the longest sequence."""
WINDOWS = ((LONGEST,),) * 4 + ((1,), (3,), (4, LONGEST), (2, 5))
COMMANDS: tuple[tuple[str, int], ...] = (
    ("add", 5),
    ("compute", 10),
    ("report", 2),
    ("append", 5),
    ("step", 8),
    ("draft", 4),
    ("reserve", 4),
    ("fork", 3),
    ("rewind", 5),
    ("end", 4),
    ("start", 1),
    ("clear", 1),
    ("flush", 1),
)


@dataclass
class Line:
    """A running sequence, as the engine sees it."""

    tokens: list[int]
    known: int
    """Leading tokens that have K/V, guesses among them."""
    reported: int
    """Leading tokens that the manager takes for computed."""
    guesses: list[int]
    """Tokens behind the last one that K/V is computed of in reserved slots."""
    reserved: int = 0


class FreeEngine(FakeEngine):
    """Random commands for a tiny cache with memory."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        windows, size = r.choice(WINDOWS), r.choice([2, 4, 4])
        self.fails = r.random() < 0.15
        super().__init__(
            wrap=self._copier(),
            max_sequence_length=LONGEST,
            tokens_per_block=size,
            primary_blocks=r.choice([16, 16, 20, 24, 32]) // size,
            secondary_blocks=r.choice([0, 4, 8]),
            enable_block_reuse=r.random() < 0.9,
            enable_partial_reuse=r.random() < 0.7,
            max_attention_window=windows,
            num_layers=len(windows),
            block_hash="none",
        )
        self.lines: dict[RequestId, Line] = {}
        self.next_name = 0
        self.bases = [[r.randrange(2) for _ in range(LONGEST)] for _ in range(2)]
        self.commands: list[Callable[[], None]] = []
        for name, weight in COMMANDS:
            self.commands += [getattr(self, f"do_{name}")] * weight

    def _copier(self) -> Callable[[Copier], Copier]:
        r = self.random
        if self.fails:
            return lambda copier: FailingCopier(copier, set(r.sample(range(12), 4)))
        return (lambda copier: LateCopier(copier, 2)) if r.random() < 0.3 else lambda copier: copier

    def run(self, commands: int) -> None:
        """Give so many commands, then compare all that is cached or counts as computed with what was written."""
        r = self.random
        for _ in range(commands):
            try:
                r.choice(self.commands)()
            except CapacityError:
                if self.lines:
                    self.do_end()
            except TransfersPending:
                self.start_transfers()
            except UnknownRequest:
                assert self.fails  # a copy has failed meanwhile, and the sequence cannot begin again
            except ComputationLost:
                self.poll()
            if r.random() < 0.05:
                self.compare()
        self.compare()

    def compare(self) -> None:
        """All that may be read is right."""
        if isinstance(self.copier, LateCopier):
            self.copier.tick()
        self.poll()
        self.start_transfers()
        self.poll()
        self.verify()
        for name, line in self.lines.items():
            sequence = sequence_of(self.manager, name)
            assert sequence.tokens.tolist() == line.tokens
            assert sequence.computed == line.reported
            self.compare_line(name, line)

    def compare_line(self, name: RequestId, line: Line) -> None:
        """A sequence finds K/V of its own in all places that no window has left."""
        right = np.array(self.values(name, line), np.float32)
        for group in range(len(self.windows)):
            table = self.table(name, group)[: -(-line.known // self.size)]
            held = table >= 0
            if not held.any():
                continue
            found = self.memories[group].read(0, table[held].tolist()).ravel()
            positions = np.flatnonzero(np.repeat(held, self.size))
            below = positions < line.known
            agree = np.array_equal(found[below], right[positions[below]])
            assert agree, "a sequence reads K/V of other tokens, or that nobody wrote"

    def values(self, name: RequestId, line: Line) -> list[float]:
        sequence = sequence_of(self.manager, name)
        return expected(line.tokens + line.guesses, self.meanings[sequence.namespace])

    def start_transfers(self) -> None:
        super().start_transfers()
        if self.fails:
            self.poll()  # what is read next has come

    def poll(self) -> PollResult:
        polled = super().poll()
        for name, _ in polled.invalidated:
            line = self.lines[name]
            line.known = line.reported = 0
            if name in self.given_up:
                del self.lines[name]
        return polled

    # -- commands

    def some(self, ready: Callable[[Line], bool] = lambda line: True) -> RequestId | None:
        """A running sequence of those that are ready."""
        names = [name for name, line in self.lines.items() if ready(line)]
        return self.random.choice(names) if names else None

    def name(self) -> int:
        self.next_name += 1
        return self.next_name

    def do_add(self) -> None:
        """Most prompts begin alike."""
        r = self.random
        prompts = [
            r.choice(self.bases)[: r.randrange(3, 12)]
            + [r.randrange(2) for _ in range(r.choice([0, 0, 1, 2]))]
            for _ in range(r.choice([1, 1, 1, 1, 2]))
        ]
        requests = [
            Request(self.name(), prompt, reserve_tokens=r.choice([None, None, None, 2, 5]))
            for prompt in prompts
        ]
        for prompt, admitted in zip(prompts, self.admit(*requests), strict=True):
            reused = admitted.reused_tokens
            self.lines[admitted.request_id] = Line(prompt, reused, reused, [])

    def slots(self, name: RequestId) -> int:
        return len(self.table(name, 0)) * self.size

    def do_compute(self) -> None:
        """Some tokens more, or all: the first one reads what is there."""
        r, name = self.random, self.some(lambda line: line.known < len(line.tokens) + line.reserved)
        if name is None:
            return
        self.start_transfers()
        if name not in self.lines:
            return
        line = self.lines[name]
        last = min(len(line.tokens) + line.reserved, self.slots(name))
        if line.known < last:
            stop = last if r.random() < 0.8 else r.randint(line.known + 1, last)
            line.guesses += [r.randrange(2) for _ in range(len(line.tokens) + len(line.guesses), stop)]
            self.compute(name, line, stop)

    def compute(self, name: RequestId, line: Line, stop: int) -> None:
        start, right = line.known, np.array(self.values(name, line), np.float32)
        for group, window in enumerate(self.windows):
            begin = max(0, start - window + 1)
            found = self.read(name, group, begin, start)
            assert found == right[begin:start].tolist(), (
                "a token sees K/V of other tokens, or that nobody wrote"
            )
            mapping = self.manager.tables.slot_mapping([name], window=window, starts=[start], stops=[stop])
            slots, offsets = np.divmod(np.asarray(mapping), self.size)
            self.memories[group].write(slots, offsets, right[start:stop])
        line.known = stop

    def do_report(self) -> None:
        name = self.some()
        if name is not None:
            line = self.lines[name]
            stop = self.random.randint(0, min(line.known, len(line.tokens)))
            self.manager.store_context_blocks(name, stop)
            line.reported = max(line.reported, stop)
            self.overwrite_blank()

    def do_step(self) -> None:
        """All is computed of each sequence that has slots for it, and then most of them get tokens."""
        self.start_transfers()
        for name, line in self.lines.items():
            if line.known < len(line.tokens) <= self.slots(name):
                self.compute(name, line, len(line.tokens))
        self.do_append()

    def do_append(self) -> None:
        """Sequences of which all is computed get a token each, with guesses that were right before it."""
        r = self.random
        ready = [name for name, line in self.lines.items() if line.known >= len(line.tokens)]
        names = r.sample(ready, min(len(ready), r.choice([1, 2, 4])))
        new = [
            [*line.guesses[: r.randint(0, line.known - len(line.tokens))], r.randrange(2)]
            for line in map(self.lines.__getitem__, names)
        ]
        counts = None if all(len(each) == 1 for each in new) and r.random() < 0.8 else list(map(len, new))
        self.manager.add_tokens(names, [token for each in new for token in each], counts)
        for name, tokens in zip(names, new, strict=True):
            line = self.lines[name]
            line.tokens += tokens
            line.known = line.reported = len(line.tokens) - 1
            line.guesses, line.reserved = [], 0
        self.overwrite_blank()

    def do_draft(self) -> None:
        """Tokens that may be taken back, of which the first may have been guessed and computed before."""
        r, name = self.random, self.some()
        if name is None:
            return
        line = self.lines[name]
        guessed = r.randint(0, len(line.guesses))
        drafts = line.guesses[:guessed] + [r.randrange(2) for _ in range(r.randint(0 if guessed else 1, 3))]
        try:
            self.manager.add_tokens([name], drafts, [len(drafts)], draft=True)
        except UsageError:
            return  # of a prompt that has not got all its slots
        line.known = min(line.known, len(line.tokens) + guessed)
        line.tokens += drafts
        line.guesses, line.reserved = [], 0
        self.overwrite_blank()

    def do_reserve(self) -> None:
        r, name = self.random, self.some()
        if name is None:
            return
        line, count = self.lines[name], r.randint(0, 4)
        had_slots = slots_of(self.manager, name) >= len(line.tokens)
        self.manager.reserve([name], [count])
        if had_slots:
            line.reserved = count
            line.known = min(line.known, len(line.tokens) + count)
            del line.guesses[count:]
        self.overwrite_blank()

    def do_fork(self) -> None:
        """What its parent has computed the branch has as well; or it computes anew what nobody was told of."""
        r, name, child = self.random, self.some(), self.name()
        if name is not None:
            self.fork(name, child)
            line = self.lines[name]
            known = min(line.known, len(line.tokens))
            self.lines[child] = Line(
                line.tokens[:], r.choice([known, r.randint(line.reported, known)]), line.reported, []
            )

    def do_rewind(self) -> None:
        """What is left is computed as far as it was; or the last token is computed anew."""
        r, name = self.random, self.some(lambda line: len(line.tokens) > 1)
        if name is None:
            return
        line = self.lines[name]
        left = r.randint(max(1, len(line.tokens) - 6), len(line.tokens) - 1)
        try:
            self.rewind(name, left)
        except UsageError:
            return  # a window has left what would be needed
        del line.tokens[left:]
        line.reported, known = min(line.reported, left - 1), min(line.known, left)
        line.known = r.choice([known, r.randint(line.reported, known)])
        line.guesses, line.reserved = [], 0

    def do_end(self) -> None:
        name = self.some()
        if name is not None:
            del self.lines[name]
            self.end(name, store=self.random.random() < 0.9)

    def do_start(self) -> None:
        self.start_transfers()

    def do_clear(self) -> None:
        if self.random.random() < 0.3:
            self.manager.clear()
            self.overwrite_blank()

    def do_flush(self) -> None:
        self.manager.flush()
        self.poll()
