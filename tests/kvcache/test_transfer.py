"""Bytes follow events: late, failing and in batches, compared with one copy after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from cuda_ops.copier import Copier, Copy, CopyFailed, FinishedTicket, Ticket
from cuda_ops.cpu import TorchCopier
from cuda_ops.simulated import FailingCopier, LateCopier
from events.bus import EventBus
from events.packed import pack_i32
from events.types import BlocksCopied, BlocksMoved, MoveReason
from kvcache.transfer import SOURCE_FAILED, TransferEngine

SLOTS, TOKENS = 6, 4
Key = tuple[int, int, int]
"""Group, level, slot."""
Landings = tuple[list[int], list[tuple[int, str]]]


def moved(
    transfer: int, levels: tuple[int, int], pairs: Sequence[tuple[int, int]], group: int = 0
) -> BlocksMoved:
    source, target = zip(*pairs, strict=True)
    return BlocksMoved(
        group, b"", levels[0], pack_i32(source), levels[1], pack_i32(target), MoveReason.OFFLOAD, transfer
    )


def copied(
    transfer: int, level: int, source: int, target: int, num_tokens: int, group: int = 0
) -> BlocksCopied:
    return BlocksCopied(1, group, level, source, target, num_tokens, 0, transfer)


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
    assert [engine.poll(), engine.poll()] == [([7, 8], []), ([], [])]  # each is told once
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
    assert engine.poll() == ([], [])


def test_a_copy_onto_itself_lands_without_the_copier() -> None:
    """A block taken over in place needs no bytes, and lands after what is still under way into its slot."""
    engine, _, recorder = engine_with(lambda copier: LateCopier(copier, steps=5))
    engine.on_event(copied(1, 0, 2, 2, num_tokens=2))
    engine.start()
    assert recorder.batches == []
    assert engine.poll() == ([1], [])
    engine.on_event(moved(2, (1, 0), [(0, 3)]))
    engine.on_event(copied(3, 0, 3, 3, num_tokens=2))
    engine.start()
    assert engine.poll() == ([], [])
    engine.wait()
    assert engine.poll() == ([2, 3], [])
    assert len(recorder.batches) == 1


def test_a_copy_onto_itself_does_not_fail_with_its_batch() -> None:
    """What stays where it is loses nothing when others' bytes get lost, unless they were meant for its slot."""
    engine, _, _ = engine_with(lambda copier: FailingCopier(copier, {0}))
    engine.on_event(moved(1, (1, 0), [(0, 3)]))
    engine.on_event(copied(2, 0, 2, 2, num_tokens=2))
    engine.on_event(copied(3, 0, 3, 3, num_tokens=2))
    engine.start()
    landed, failed = engine.poll()
    assert landed == [2]
    assert [transfer for transfer, _ in failed] == [1, 3]


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
    assert engine.poll() == ([], [])
    assert not ticket.done()
    late.tick()
    assert engine.poll() == ([1], [])
    assert ticket.done()
    late.tick()
    assert engine.poll() == ([2], [])


def test_a_step_of_evictions_and_loads_is_two_batches() -> None:
    """However many sequences are loaded into slots that were offloaded just before, the device is asked twice."""
    engine, memory, recorder = engine_with()
    wanted = [memory.block((0, 1, 3 + slot)).clone() for slot in range(3)]
    saved = [memory.block((0, 0, slot)).clone() for slot in range(3)]
    for slot in range(3):
        engine.on_event(moved(10 + slot, (0, 1), [(slot, slot)]))
        engine.on_event(moved(20 + slot, (1, 0), [(3 + slot, slot)]))
    engine.start().wait()
    assert len(recorder.batches) == 2
    assert engine.poll() == ([10, 20, 11, 21, 12, 22], [])
    for slot in range(3):
        assert torch.equal(memory.block((0, 0, slot)), wanted[slot])
        assert torch.equal(memory.block((0, 1, slot)), saved[slot])


def test_a_failed_copy_fails_what_was_copied_from_it() -> None:
    """Failure passes along a chain of copies, within a start and over several, and names the reason."""
    engine, _, _ = engine_with(lambda copier: LateCopier(FailingCopier(copier, {0}), steps=9))
    engine.on_event(moved(1, (0, 1), [(0, 0)]))
    engine.on_event(moved(2, (1, 0), [(0, 1), (5, 2)]))
    engine.start()
    engine.on_event(moved(3, (0, 1), [(2, 4)]))
    engine.on_event(copied(4, 0, 3, 5, num_tokens=1))
    engine.start()
    engine.wait()
    assert engine.poll() == (
        [4],
        [(1, "batch 0 was chosen to fail"), (2, SOURCE_FAILED), (3, SOURCE_FAILED)],
    )


def test_a_good_copy_ends_the_spreading() -> None:
    """A slot that was overwritten by a copy that landed is a good source again."""
    engine, _, _ = engine_with(lambda copier: LateCopier(FailingCopier(copier, {0}), steps=9))
    engine.on_event(moved(1, (0, 1), [(0, 0)]))
    engine.on_event(moved(2, (0, 1), [(1, 0)]))
    engine.on_event(moved(3, (1, 0), [(0, 2)]))
    engine.start()
    engine.wait()
    assert engine.poll() == ([2, 3], [(1, "batch 0 was chosen to fail")])


def test_what_was_decided_after_the_report_is_not_held_to_it() -> None:
    """After a failure was reported its slot has been written anew, also while other copies are still under way."""
    engine, memory, recorder = engine_with()
    late = LateCopier(FailingCopier(recorder.inner, {0}), steps=1)
    recorder.inner = late
    engine.on_event(moved(1, (1, 0), [(0, 0)]))
    engine.start()
    late.tick()
    engine.on_event(moved(2, (0, 1), [(4, 4)]))
    engine.start()
    assert engine.poll()[1] == [(1, "batch 0 was chosen to fail")]
    memory.block((0, 0, 0)).fill_(77)
    engine.on_event(moved(3, (0, 1), [(0, 5)]))
    engine.start().wait()
    assert engine.poll() == ([2, 3], [])
    assert memory.block((0, 1, 5)).tolist() == [77] * TOKENS


def test_a_batch_fails_as_a_whole() -> None:
    """Which bytes of a failed batch arrived is unknown, so all its transfers fail, in the order of their events."""
    engine, _, _ = engine_with(lambda copier: FailingCopier(copier, {0}))
    engine.on_event(moved(5, (0, 1), [(0, 0)]))
    engine.on_event(moved(4, (1, 0), [(0, 0)]))
    engine.on_event(moved(3, (0, 1), [(1, 1)]))
    ticket = engine.start()
    with pytest.raises(CopyFailed):
        ticket.wait()
    landed, failed = engine.poll()
    assert landed == []
    assert [transfer for transfer, _ in failed] == [5, 4, 3]


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
    assert [engine.poll(), engine.poll()] == [([1], [(2, "RuntimeError")]), ([], [])]


class Model:
    """What must be where: copies one after another, forward passes in between."""

    def __init__(self, memory: Memory) -> None:
        self.blocks = {
            (group, level, slot): memory.block((group, level, slot)).tolist()
            for group in range(2)
            for level in range(2)
            for slot in range(SLOTS)
        }
        self.writer: dict[Key, int | None] = dict.fromkeys(self.blocks)
        """The last transfer into a slot; None: a forward pass."""
        self.suspect: dict[Key, int | None] = dict.fromkeys(self.blocks)
        """The last transfer into a slot, whatever a forward pass did before its failure was reported."""
        self.sources: dict[int, tuple[int | None, int | None]] = {}
        """Per transfer, the writer and the suspect of its source when it was noted."""

    def copy(self, transfer: int, source: Key, target: Key, num_tokens: int) -> None:
        self.sources[transfer] = self.writer[source], self.suspect[source]
        self.blocks[target] = self.blocks[source][:num_tokens] + self.blocks[target][num_tokens:]
        self.writer[target] = self.suspect[target] = transfer

    def reported(self, failed: Container[int | None]) -> None:
        for key, transfer in self.suspect.items():
            if transfer in failed:
                self.suspect[key] = None


class Run:
    """A random program on a late and failing device."""

    def __init__(self, seed: int, which: set[int]) -> None:
        self.dice = random.Random(seed)
        self.engine, self.memory, recorder = engine_with()
        self.late = LateCopier(FailingCopier(recorder.inner, which), steps=self.dice.randrange(3))
        recorder.inner = self.late
        self.model = Model(self.memory)
        self.landed: set[int] = set()
        self.failed: dict[int, str] = {}
        self.transfers = 0

    def step(self, number: int) -> None:
        self.report(self.engine.poll())
        for _ in range(self.dice.randrange(6)):
            self.note()
        self.engine.start().wait_on()
        for _ in range(self.dice.randrange(3)):
            self.compute((self.dice.randrange(2), 0, self.dice.randrange(SLOTS)), 10_000 + number)
        self.late.tick()

    def report(self, landings: Landings) -> None:
        """Note landings and failures; a forward pass computes anew what a failure has lost in primary."""
        self.landed.update(landings[0])
        self.failed.update(landings[1])
        for key, writer in self.model.writer.items():
            if writer in self.failed and self.usable(key) and key[1] == 0:
                self.compute(key, 20_000 + self.transfers)
        self.model.reported(self.failed)

    def compute(self, key: Key, value: int) -> None:
        self.memory.block(key).fill_(value)
        self.model.blocks[key] = [value] * TOKENS
        self.model.writer[key] = None

    def usable(self, key: Key) -> bool:
        return key[1] == 0 or self.model.writer[key] not in self.failed

    def note(self) -> None:
        group = self.dice.randrange(2)
        source_level, target_level = self.dice.choice([(0, 1), (1, 0), (0, 0)])
        sources = [slot for slot in range(SLOTS) if self.usable((group, source_level, slot))]
        if not sources:
            return
        self.transfers += 1
        source, target = self.dice.choice(sources), self.dice.randrange(SLOTS)
        num_tokens = TOKENS
        if target_level == 0 and self.dice.random() < 0.5:
            num_tokens = self.dice.randrange(1, TOKENS + 1)
            self.engine.on_event(copied(self.transfers, source_level, source, target, num_tokens, group))
        elif source_level == target_level:
            self.engine.on_event(copied(self.transfers, 0, source, target, TOKENS, group))
        else:
            levels = (source_level, target_level)
            self.engine.on_event(moved(self.transfers, levels, [(source, target)], group))
        keys = (group, source_level, source), (group, target_level, target)
        self.model.copy(self.transfers, *keys, num_tokens)

    def finish(self) -> None:
        self.engine.start()
        self.engine.wait()
        self.landed.update((result := self.engine.poll())[0])
        self.failed.update(result[1])


def run(seed: int, which: set[int]) -> Run:
    program = Run(seed, which)
    for number in range(8):
        program.step(number)
    program.finish()
    return program


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_on_a_late_device_all_bytes_are_those_of_plain_order(first_seed: int) -> None:
    """Without failures everything lands, and every block is what copies one after another make of it."""
    for seed in range(first_seed, first_seed + 50):
        program = run(seed, which=set())
        assert program.landed == set(range(1, program.transfers + 1))
        for key, expected in program.model.blocks.items():
            assert program.memory.block(key).tolist() == expected, (seed, key)


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_on_a_failing_device_what_landed_is_right(first_seed: int) -> None:
    """Each transfer lands or fails once; failures by dependence have a failed source, and landed ones none."""
    chosen = random.Random(first_seed)
    dependent = 0
    for seed in range(first_seed, first_seed + 50):
        program = run(seed, which={number for number in range(20) if chosen.random() < 0.2})
        assert program.landed.isdisjoint(program.failed)
        assert program.landed | program.failed.keys() == set(range(1, program.transfers + 1))
        for transfer, (writer, suspect) in program.model.sources.items():
            if program.failed.get(transfer) == SOURCE_FAILED:
                assert suspect in program.failed, (seed, transfer)
                dependent += 1
            elif transfer in program.landed:
                assert writer not in program.failed, (seed, transfer)
    assert dependent > 0


def test_a_start_without_anything_noted_is_done() -> None:
    """There is nothing to wait for."""
    engine = TransferEngine(Recorder(NoCopier()))
    ticket = engine.start()
    ticket.wait_on()
    ticket.wait()
    assert ticket.done()
    assert engine.poll() == ([], [])


class NoCopier:
    """Refuses to be asked."""

    def submit(self, copies: Sequence[Copy]) -> FinishedTicket:
        raise AssertionError("nothing was to be copied")
