"""Bytes follow events: late, failing and in batches, compared with one copy after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from cuda_ops.copier import Copier, Copy, CopyFailed, FinishedTicket, Ticket
from cuda_ops.torch_copier import TorchCopier
from events.bus import EventBus
from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex, Slot
from events.types import BlocksCopied, BlocksMoved, MoveReason
from kvcache.device.transfers import TransferEngine
from tests.support.columns import pack_i32
from tests.support.engines.simulated import FailingCopier, LateCopier

SLOTS, TOKENS = 6, 4
CHOSEN = "batch 0 was chosen to fail"
Key = tuple[int, int, int]
"""Group, level, slot."""
Landings = tuple[list[int], list[tuple[int, str]]]


def moved(
    transfer: int, levels: tuple[int, int], pairs: Sequence[tuple[int, int]], group: int = 0
) -> BlocksMoved:
    source, target = zip(*pairs, strict=True)
    return BlocksMoved(
        GroupIndex(group),
        b"",
        LevelIndex(levels[0]),
        pack_i32(source),
        LevelIndex(levels[1]),
        pack_i32(target),
        MoveReason.OFFLOAD,
        transfer,
    )


def copied(
    transfer: int, level: int, source: int, target: int, num_tokens: int, group: int = 0
) -> BlocksCopied:
    return BlocksCopied(
        Handle(1),
        GroupIndex(group),
        LevelIndex(level),
        Slot(source),
        Slot(target),
        num_tokens,
        BlockIndex(0),
        transfer,
    )


@dataclass
class Storage:
    levels: tuple[torch.Tensor, ...]
    token_dim: int = 1


class Memory:
    """Two groups of one pool; a block is TOKENS numbers, all of them different at the start."""

    def __init__(self) -> None:
        numbers = torch.arange(2 * 2 * SLOTS * TOKENS, dtype=torch.int32).view(2, 2, SLOTS, TOKENS)
        self.groups = [Storage((group[0].clone(), group[1].clone())) for group in numbers]

    def block(self, key: Key) -> torch.Tensor:
        group, level, slot = key
        return self.groups[group].levels[level][slot]

    def copier(self) -> TorchCopier:
        return TorchCopier([[storage] for storage in self.groups])


@dataclass
class Recorder:
    """Passes batches on and remembers them."""

    inner: Copier
    batches: list[list[Copy]] = field(default_factory=list)

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        self.batches.append(list(copies))
        return self.inner.submit(copies)


def engine_with(
    wrap: Callable[[Copier], Copier] = lambda copier: copier,
) -> tuple[TransferEngine, Memory, Recorder]:
    memory = Memory()
    recorder = Recorder(wrap(memory.copier()))
    return TransferEngine(recorder), memory, recorder


def reported(engine: TransferEngine) -> Landings:
    """What the engine tells, recorded at once."""
    landings = engine.poll()
    engine.recorded()
    return landings


def test_events_become_bytes_and_landings() -> None:
    """Moves and copies published on the bus are noted, started together, and land in the order of the events."""
    engine, memory, recorder = engine_with()
    bus = EventBus()
    bus.subscribe(engine.on_event, BlocksMoved, BlocksCopied)
    before = {slot: memory.block((1, 0, slot)).clone() for slot in (0, 1, 2)}
    bus.publish(moved(7, (0, 1), [(0, 3), (1, 4)], group=1))
    bus.publish(copied(8, 0, 2, 5, num_tokens=TOKENS, group=1))
    assert engine.pending
    assert recorder.batches == []
    engine.start().wait()
    assert not engine.pending
    assert [reported(engine), reported(engine)] == [([7, 8], []), ([], [])]  # each is told once
    assert len(recorder.batches) == 1
    for source, target in [(0, (1, 1, 3)), (1, (1, 1, 4)), (2, (1, 0, 5))]:
        assert torch.equal(memory.block(target), before[source])


def test_only_the_tokens_of_a_partial_copy_move() -> None:
    """A partial reuse brings its tokens and leaves the rest of the target alone."""
    engine, memory, _ = engine_with()
    source, target = memory.block((0, 1, 2)).clone(), memory.block((0, 0, 3)).clone()
    engine.on_event(copied(1, 1, 2, 3, num_tokens=3))
    engine.start().wait()
    assert memory.block((0, 0, 3)).tolist() == [*source.tolist()[:3], target.tolist()[3]]


def test_moves_without_a_transfer_copy_nothing() -> None:
    """A block that was recomputed changes its level without bytes."""
    engine, _, recorder = engine_with()
    engine.on_event(moved(0, (1, 0), [(0, 1)]))
    assert not engine.pending
    engine.start().wait()
    assert recorder.batches == []
    assert reported(engine) == ([], [])


def test_a_copy_onto_itself_lands_without_the_copier() -> None:
    """A block taken over in place needs no bytes, and lands after what is still under way into its slot."""
    engine, _, recorder = engine_with(lambda copier: LateCopier(copier, steps=5))
    engine.on_event(copied(1, 0, 2, 2, num_tokens=2))
    engine.start()
    assert recorder.batches == []
    assert reported(engine) == ([1], [])
    engine.on_event(moved(2, (1, 0), [(0, 3)]))
    engine.on_event(copied(3, 0, 3, 3, num_tokens=2))
    engine.start()
    assert reported(engine) == ([], [])
    engine.wait()
    assert reported(engine) == ([2, 3], [])
    assert len(recorder.batches) == 1


def test_landings_wait_for_their_batch() -> None:
    """Poll never blocks and reports a batch only when the copier does, oldest first."""
    engine, _, recorder = engine_with()
    late = LateCopier(recorder.inner, steps=2)
    recorder.inner = late
    engine.on_event(moved(1, (0, 1), [(0, 0)]))
    ticket = engine.start()
    late.tick()
    engine.on_event(moved(2, (0, 1), [(1, 1)]))
    engine.start()
    assert reported(engine) == ([], [])
    assert not ticket.done()
    late.tick()
    assert reported(engine) == ([1], [])
    assert ticket.done()
    late.tick()
    assert reported(engine) == ([2], [])


def test_a_step_of_evictions_and_loads_is_two_batches() -> None:
    """However many sequences are loaded into slots that were offloaded just before, the device is asked twice."""
    engine, memory, recorder = engine_with()
    wanted = [memory.block((0, 1, 3 + slot)).clone() for slot in range(3)]
    saved = [memory.block((0, 0, slot)).clone() for slot in range(3)]
    for slot in range(3):
        engine.on_event(moved(10 + 2 * slot, (0, 1), [(slot, slot)]))
        engine.on_event(moved(11 + 2 * slot, (1, 0), [(3 + slot, slot)]))
    engine.start().wait()
    assert len(recorder.batches) == 2
    assert reported(engine) == ([10, 11, 12, 13, 14, 15], [])
    for slot in range(3):
        assert torch.equal(memory.block((0, 0, slot)), wanted[slot])
        assert torch.equal(memory.block((0, 1, slot)), saved[slot])


def test_nothing_lands_after_a_failed_batch() -> None:
    """What was copied after a failure may have been copied from what is not there, so it does not land."""
    engine, _, _ = engine_with(lambda copier: LateCopier(FailingCopier(copier, {1}), steps=9))
    for transfer in (1, 2, 3):
        engine.on_event(moved(transfer, (0, 1), [(transfer, transfer)]))
        engine.start()
    engine.wait()
    assert [reported(engine), reported(engine)] == [([1], [(2, "batch 1 was chosen to fail")]), ([], [])]


def test_a_failure_gives_up_what_was_noted_before() -> None:
    """What was not started never is, what still runs is told nothing of, and what comes later is as usual."""
    engine, memory, recorder = engine_with()
    late = LateCopier(FailingCopier(recorder.inner, {0, 1}), steps=2)
    recorder.inner = late
    engine.on_event(moved(1, (1, 0), [(0, 0)]))
    engine.start()
    late.tick()
    engine.on_event(moved(2, (0, 1), [(4, 4)]))
    engine.start()
    engine.on_event(moved(3, (0, 1), [(5, 5)]))
    late.tick()
    assert reported(engine) == ([], [(1, CHOSEN)])
    assert not engine.pending
    memory.block((0, 0, 0)).fill_(77)
    engine.on_event(moved(4, (0, 1), [(0, 5)]))
    engine.start().wait_on()
    assert reported(engine) == ([], [])
    engine.wait()
    assert reported(engine) == ([4], [])
    assert memory.block((0, 1, 5)).tolist() == [77] * TOKENS
    assert len(recorder.batches) == 3


def test_what_was_reported_is_reported_again_until_it_is_recorded() -> None:
    """Who was interrupted after asking has lost nothing, though a ticket may tell a failure only once."""
    engine = TransferEngine(Forgetful())
    for transfer in (1, 2):
        engine.on_event(moved(transfer, (1, 0), [(transfer, transfer)]))
        engine.start()
    assert [engine.poll(), engine.poll()] == [([], [(1, "gone"), (2, "gone")])] * 2
    engine.recorded()
    assert reported(engine) == ([], [])


class Forgetful:
    """A device whose tickets tell of their failure once, and then that all is well."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        return ForgetfulTicket()


class ForgetfulTicket:
    """Raises once, whichever method is called first."""

    def __init__(self) -> None:
        self.reported = False

    def done(self) -> bool:
        if not self.reported:
            self.reported = True
            raise CopyFailed("gone")
        return True

    def wait(self) -> None:
        self.done()

    def wait_on(self, stream: object = None) -> None:
        pass


def test_waiting_keeps_what_a_ticket_reports() -> None:
    """A failure that shows while everything is waited for is told by the next poll."""
    engine = TransferEngine(Forgetful())
    engine.on_event(moved(1, (1, 0), [(1, 1)]))
    engine.start()
    engine.wait()
    assert reported(engine) == ([], [(1, "gone")])


def test_a_batch_fails_as_a_whole() -> None:
    """Which bytes of a failed batch arrived is unknown, so all its transfers fail; no later one lands."""
    engine, _, _ = engine_with(lambda copier: FailingCopier(copier, {0}))
    engine.on_event(moved(3, (0, 1), [(0, 0)]))
    engine.on_event(moved(4, (1, 0), [(0, 0)]))
    engine.on_event(moved(5, (0, 1), [(1, 1)]))
    ticket = engine.start()
    with pytest.raises(CopyFailed):
        ticket.wait()
    assert reported(engine) == ([], [(3, CHOSEN), (5, CHOSEN)])


class Broken:
    """A device whose tickets raise what no copier should, from the second batch on."""

    def __init__(self) -> None:
        self.batches = 0

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        self.batches += 1
        return FinishedTicket() if self.batches == 1 else BrokenTicket()


class BrokenTicket:
    """Raises."""

    def done(self) -> bool:
        raise RuntimeError("device lost")

    def wait(self) -> None:
        raise RuntimeError("device lost")

    def wait_on(self, stream: object = None) -> None:
        pass


def test_a_ticket_that_raises_anything_has_failed() -> None:
    """A batch whose ticket is broken fails by the type of its error, and takes no landing of another one with it."""
    engine = TransferEngine(Broken())
    for transfer in (1, 2):
        engine.on_event(moved(transfer, (1, 0), [(transfer, transfer)]))
        engine.start()
    engine.wait()
    assert [reported(engine), reported(engine)] == [([1], [(2, "RuntimeError")]), ([], [])]


class Model:
    """What must be where: copies one after another, forward passes in between."""

    def __init__(self, memory: Memory) -> None:
        self.blocks = {
            (group, level, slot): memory.block((group, level, slot)).tolist()
            for group in range(2)
            for level in range(2)
            for slot in range(SLOTS)
        }

    def copy(self, source: Key, target: Key, num_tokens: int) -> None:
        self.blocks[target] = self.blocks[source][:num_tokens] + self.blocks[target][num_tokens:]


class Run:
    """A random program on a late and failing device."""

    def __init__(self, seed: int, which: set[int]) -> None:
        self.dice = random.Random(seed)
        self.engine, self.memory, recorder = engine_with()
        self.late = LateCopier(FailingCopier(recorder.inner, which), steps=self.dice.randrange(4))
        recorder.inner = self.late
        self.model = Model(self.memory)
        self.outstanding: set[int] = set()
        self.transfers = self.landed = self.failures = 0

    def step(self, number: int) -> None:
        self.report(10_000 + number)
        for _ in range(self.dice.randrange(6)):
            self.note()
        self.engine.start().wait_on()
        for _ in range(self.dice.randrange(3)):
            self.compute((self.dice.randrange(2), 0, self.dice.randrange(SLOTS)), 20_000 + number)
        self.late.tick()

    def report(self, value: int) -> None:
        """Each transfer lands once, or is outstanding when a failure ends them all: then all is written anew."""
        landed, failed = reported(self.engine)
        assert self.outstanding.issuperset(landed)
        self.outstanding.difference_update(landed)
        self.landed += len(landed)
        if failed:
            assert self.outstanding.issuperset(transfer for transfer, _ in failed)
            self.outstanding.clear()
            self.failures += 1
            # What is still under way moves first: on the device its order with what is written now is kept.
            self.engine.wait()
            for key in self.model.blocks:
                self.compute(key, value)

    def compute(self, key: Key, value: int) -> None:
        self.memory.block(key).fill_(value)
        self.model.blocks[key] = [value] * TOKENS

    def note(self) -> None:
        group = self.dice.randrange(2)
        source_level, target_level = self.dice.choice([(0, 1), (1, 0), (0, 0)])
        self.transfers += 1
        self.outstanding.add(self.transfers)
        source, target = self.dice.randrange(SLOTS), self.dice.randrange(SLOTS)
        num_tokens = TOKENS
        if target_level == 0 and self.dice.random() < 0.5:
            num_tokens = self.dice.randrange(1, TOKENS + 1)
            self.engine.on_event(copied(self.transfers, source_level, source, target, num_tokens, group))
        elif source_level == target_level:
            self.engine.on_event(copied(self.transfers, 0, source, target, TOKENS, group))
        else:
            levels = (source_level, target_level)
            self.engine.on_event(moved(self.transfers, levels, [(source, target)], group))
        self.model.copy((group, source_level, source), (group, target_level, target), num_tokens)

    def finish(self) -> None:
        self.engine.start()
        self.engine.wait()
        self.report(30_000)
        assert not self.outstanding


def run(seed: int, which: set[int]) -> Run:
    program = Run(seed, which)
    for number in range(8):
        program.step(number)
    program.finish()
    for key, expected in program.model.blocks.items():
        assert program.memory.block(key).tolist() == expected, (seed, key)
    return program


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_on_a_late_device_all_bytes_are_those_of_plain_order(first_seed: int) -> None:
    """Without failures everything lands, and every block is what copies one after another make of it."""
    for seed in range(first_seed, first_seed + 50):
        program = run(seed, which=set())
        assert (program.landed, program.failures) == (program.transfers, 0)


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_on_a_failing_device_each_copy_ends_once(first_seed: int) -> None:
    """Copies land, or end with a failure; those after it land again, and their bytes are right."""
    chosen = random.Random(first_seed)
    landed = failures = 0
    for seed in range(first_seed, first_seed + 50):
        program = run(seed, which={number for number in range(20) if chosen.random() < 0.2})
        landed += program.landed
        failures += program.failures
    assert landed
    assert failures > 50


def test_a_start_without_anything_noted_is_done() -> None:
    """There is nothing to wait for."""
    engine = TransferEngine(Recorder(NoCopier()))
    ticket = engine.start()
    ticket.wait_on()
    ticket.wait()
    assert ticket.done()
    assert reported(engine) == ([], [])


class NoCopier:
    """Refuses to be asked."""

    def submit(self, copies: Sequence[Copy]) -> FinishedTicket:
        raise AssertionError("nothing was to be copied")
