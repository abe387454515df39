"""What becomes of slots, event by event, in random programs: blocks meet all that can happen to them there."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

from cuda_ops.copier import Copy, FinishedTicket, Ticket
from events import types as ev
from events.types import PRIMARY, CacheCreated, Event
from kvcache.errors import CapacityError, ComputationLost, TransfersPending, UsageError
from kvcache.inputs import Request, Retention, RetentionRange
from kvcache.manager import KVCacheManager, Substitutes
from tests.support.columns import pack_i32
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of
from tests.support.engines.simulated import FailingCopier, LateCopier


class Step(NamedTuple):
    """What an event has made of a slot, or may make of one."""

    level: str
    before: str
    event: str
    after: str


def steps_of(life: Any, level: str = "") -> set[Step]:
    """A table of states, events and states that may follow, step by step."""
    return {
        Step(level, before.name, occasion_name(occasion), after.name)
        for before, row in life.items()
        for occasion, follow in row.items()
        for after in follow
    }


def occasion_name(occasion: Any) -> str:
    """The event; where only `BlocksMoved` for one reason is meant, the reason."""
    return occasion.__name__ if isinstance(occasion, type) else str(occasion)


def named_slots(event: Any) -> Iterator[tuple[int, bytes]]:
    """The slots that an event names, with their levels."""
    match event:
        case (
            ev.BlocksAllocated()
            | ev.BlocksStored()
            | ev.BlocksFilled()
            | ev.BlocksDetached()
            | ev.BlocksReturned()
        ):
            yield PRIMARY, event.slots
        case ev.BlocksReused():
            yield event.level, event.slots
            yield PRIMARY, event.replaced
        case ev.BlocksCopied():
            yield event.source_level, pack_i32([event.source])
            yield PRIMARY, pack_i32([event.target])
        case ev.BlocksUpdated() | ev.BlocksRemoved():
            yield event.level, event.slots
        case ev.BlocksMoved():
            yield event.from_level, event.from_slots
            yield event.to_level, event.to_slots


class Witness:
    """Folds a program's events one by one, and notes what becomes of the slots that each names or changes."""

    levels = ("primary", "secondary")
    kind: type[IntEnum]

    def __init__(self, created: CacheCreated) -> None:
        self.steps: set[Step] = set()
        self._before: list[list[int]] | None = None
        self.group = len(created.groups) - 1
        """That of cross attention, if there is one."""

    def apply(self, event: Event) -> None:
        raise NotImplementedError

    def states(self) -> list[list[int]]:
        """Of all slots, per level: numbers of `kind`."""
        raise NotImplementedError

    def named(self, event: Event) -> Iterable[tuple[int, bytes]]:
        return named_slots(event)

    def see(self, event: Event) -> None:
        # Between events nothing changes, so what one has left is what the next one finds.
        before = self._before or self.states()
        of_other = getattr(event, "group", self.group) != self.group
        named = (
            (level, slot)
            for level, slots in (() if of_other else self.named(event))
            for slot in array("i", slots)
        )
        concerned = {(level, slot) for level, slot in named if slot >= 0}  # in tables -1 stands for none
        self.apply(event)
        self._before = after = self.states()
        for level, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                concerned |= {(level, slot) for slot, state in enumerate(old) if state != new[slot]}
        name = occasion_name(event.why if isinstance(event, ev.BlocksMoved) else type(event))
        for level, slot in concerned:
            was, then = (self.kind(states[level][slot]).name for states in (before, after))
            self.steps.add(Step(self.levels[level], was, name, then))


def explore(
    witness: Callable[[CacheCreated], Witness], allowed: set[Step], seeds: Iterable[int], more: Iterable[int]
) -> set[Step]:
    """The steps of these programs, and of `more` as long as not all are met that are allowed."""
    met: set[Step] = set()
    for seed in itertools.chain(seeds, itertools.takewhile(lambda _: not met >= allowed, more)):
        program = Program(seed)
        assert program.manager.state.created is not None
        seen = witness(program.manager.state.created)
        program.manager.bus.subscribe(seen.see)
        program.run(300)
        assert seen.steps <= allowed, f"program {seed}: {seen.steps - allowed}"
        met.update(seen.steps)
    return met


class Program:
    """Random commands for a manager that is always short of room, and whose copies are late and seldom fail."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.keeps = seed % 3 == 2
        """Whether blocks are pinned, and kept for a time: every third program, since that leaves less to the rest."""
        settings = strategies.config(
            tokens_per_block=rng.choice([1, 2, 3, 4]),
            primary_blocks=rng.randint(4, 12),
            secondary_blocks=rng.choice([0, 2, 4, 8]),
            secondary_offload_min_priority=rng.choice([0, 35]),
            max_attention_window=rng.choice([None, None, 3, 5]),
            enable_block_reuse=not self.keeps or rng.random() < 0.7,
            cross_kv_cache_fraction=0.5 if seed % 4 == 3 else None,
            append_only_tables=seed % 11 == 10,
        )
        self.reads = seed % 4 == 3
        """Whether the model has an encoder, which reads one of a few inputs for each request."""
        self.copier = LateCopier(FailingCopier(NoBytes(), Seldom(rng)), rng.choice([0, 2, 5]))
        self.ticks = strategies.Ticks()
        self.manager = KVCacheManager(
            settings, copier=self.copier, substitutes=Substitutes(monotonic_ns=self.ticks)
        )
        # Requests begin in a few ways, so that they meet.
        self.beginnings = [rng.choices(range(2), k=4 * settings.tokens_per_block) for _ in range(3)]
        self.running: list[int] = []
        self.admitted = 0

    def run(self, steps: int) -> None:
        commands = [self.admit, self.compute, self.end] * 4 + [self.decode] * 3
        commands += [self.set_priority, self.tick, self.tick, self.flush, self.clear]
        if self.keeps:
            commands += [self.pin, self.unpin, self.fork, self.rewind, self.reserve]
        if self.reads:
            commands += [self.encode] * 4
        for _ in range(steps):
            with suppress(CapacityError, TransfersPending, ComputationLost):
                self.rng.choice(commands)()
        self.manager.close()

    def some(self) -> list[int]:
        return self.rng.sample(self.running, min(len(self.running), self.rng.randint(1, 3)))

    def admit(self) -> None:
        count = self.rng.choice([1, 1, 2, 3])
        ids = range(self.admitted, self.admitted + count)
        self.admitted += count
        requests = [
            Request(each, self.prompt(), retention=self.retention(), encoder_tokens=self.input())
            for each in ids
        ]
        self.manager.add_sequences(requests)
        self.running += ids
        if self.rng.random() < 0.8:
            self.manager.start_transfers()

    def input(self) -> list[int] | None:
        return [0] * self.rng.choice([1, 3, 5]) if self.reads else None

    def encode(self) -> None:
        for request_id in self.some():
            self.manager.store_encoder_blocks(request_id)

    def retention(self) -> Retention | None:
        """For one in three, all blocks for a millisecond or for good."""
        if not self.keeps:
            return None
        kept = [RetentionRange(0, None, self.rng.choice([20, 80]), self.rng.choice([1, None]))]
        return Retention(kept) if self.rng.random() < 0.3 else None

    def pin(self) -> None:
        for request_id in self.some()[:1]:
            self.manager.pin(request_id, self.rng.randint(0, 4))

    def fork(self) -> None:
        for request_id in self.some()[:1]:
            self.manager.fork(request_id, self.admitted)
            self.running.append(self.admitted)
            self.admitted += 1

    def rewind(self) -> None:
        for request_id in self.some()[:1]:
            length = sequence_of(self.manager, request_id).num_tokens
            with suppress(UsageError):  # a window has let go of what would be needed
                self.manager.rewind(request_id, self.rng.randint(max(1, length - 5), length))

    def reserve(self) -> None:
        ids = self.some()
        self.manager.reserve(ids, [self.rng.randint(0, 6) for _ in ids])

    def unpin(self) -> None:
        for pin in list(self.manager.pins())[:1]:
            self.manager.unpin(pin)

    def prompt(self) -> list[int]:
        beginning = self.rng.choice(self.beginnings)
        kept, more = self.rng.randint(1, len(beginning)), self.rng.randint(0, 3)
        return [*beginning[:kept], *self.rng.choices(range(2), k=more)]

    def compute(self) -> None:
        for request_id in self.some():
            sequence = sequence_of(self.manager, request_id)
            computed = self.rng.randint(sequence.computed, sequence.num_tokens)
            self.manager.store_context_blocks(request_id, computed)

    def decode(self) -> None:
        ids = self.some()
        counts = [self.rng.randint(1, 3) for _ in ids] if self.rng.random() < 0.5 else None
        tokens = self.rng.choices(range(2), k=len(ids) if counts is None else sum(counts))
        self.manager.add_tokens(ids, tokens, counts)

    def end(self) -> None:
        for request_id in self.some()[:1]:
            self.running.remove(request_id)
            self.manager.remove_sequence(request_id, self.rng.random() < 0.8)

    def set_priority(self) -> None:
        for request_id in self.some():
            self.manager.set_priority(request_id, self.rng.choice([0, 34, 36]), start=self.rng.randint(0, 4))

    def tick(self) -> None:
        self.manager.start_transfers()
        self.copier.tick()
        self.manager.poll()

    def flush(self) -> None:
        self.ticks.now += strategies.MS // 2
        self.manager.flush()
        self.manager.check()

    def clear(self) -> None:
        if self.rng.random() < 0.2:
            self.manager.clear()


class NoBytes:
    """Copies nothing, at once."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        return FinishedTicket()


class Seldom:
    """The batches that fail: one in forty."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __contains__(self, number: object) -> bool:
        return self._rng.random() < 0.025
