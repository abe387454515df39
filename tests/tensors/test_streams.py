"""Who waits for whom: tried on a stand-in GPU whose streams run in any order that the waits allow.

Where there is a real GPU the last tests run on it, with the copies held up on purpose.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch

from cuda_ops.copier import Copy, CopyFailed
from cuda_ops.hazards import schedule
from cuda_ops.streams import CopyStreams, EventTicket, Job
from cuda_ops.torch_copier import TorchCopier

SLOTS = 4
CPU = torch.device("cpu")


class Gpu:
    """In-order streams of small operations, interleaved at random."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def step(self) -> bool:
        """Run one operation that may run; False if there is none."""
        ready = [stream for stream in self.streams if stream.ready]
        if ready:
            self.dice.choice(ready).operations.popleft()[1]()
        return bool(ready)

    def run_some(self) -> None:
        for _ in range(self.dice.randrange(6)):
            self.step()

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.step(), "the streams wait for each other"

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.operations: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.gpu = gpu
        gpu.streams.append(self)

    @property
    def ready(self) -> bool:
        return bool(self.operations) and self.operations[0][0]()

    def do(self, operation: Callable[[], None]) -> None:
        self.operations.append((lambda: True, operation))

    def wait_event(self, event: Event) -> None:
        self.operations.append((event.query, lambda: None))

    def wait_stream(self, stream: Stream) -> None:
        event = Event(self.gpu)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.operations)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.happened = False

    def record(self, stream: Stream) -> None:
        stream.do(lambda: setattr(self, "happened", True))

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.gpu.run_until(self.query)


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Gpu]:
    def make(seed: int) -> Gpu:
        gpu = Gpu(seed)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(gpu))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(gpu))
        monkeypatch.setattr(torch.cuda, "stream", gpu.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: gpu.current)
        return gpu

    return make


class Memory:
    """Both levels, and what the model has read."""

    def __init__(self) -> None:
        self.levels = [list(range(SLOTS)), list(range(100, 100 + SLOTS))]
        self.seen: list[int] = []

    def job(self, gpu: Gpu, copy: Copy) -> Job:
        """A copy whose reading and writing are apart in time."""

        def enqueue() -> None:
            held: list[int] = []
            source, target = int(copy.source[0]), int(copy.target[0])
            gpu.current.do(lambda: held.append(self.levels[copy.source_level][source]))
            gpu.current.do(lambda: self.write(copy.target_level, target, held[0]))

        return copy.target_level, enqueue

    def write(self, level: int, slot: int, value: int) -> None:
        self.levels[level][slot] = value

    def read(self, slot: int) -> None:
        self.seen.append(self.levels[0][slot])


def random_copy(dice: random.Random) -> Copy:
    source_level, target_level = dice.choice([(0, 1), (1, 0), (0, 0)])
    source, target = dice.sample(range(SLOTS), 2)
    return Copy(source_level, target_level, np.array([source], np.int32), np.array([target], np.int32))


def model_step(dice: random.Random, value: int) -> list[Callable[[Memory], None]]:
    """What the model does in a forward pass: read all of primary, then write a slot."""
    slot = dice.randrange(SLOTS)
    reads = [methodcaller("read", each) for each in range(SLOTS)]
    return [*reads, methodcaller("write", 0, slot, value)]


def play(gpu: Gpu, seed: int) -> tuple[Memory, Memory, list[EventTicket]]:
    """Run a random program; return what became of it, what should have, and its tickets."""
    dice, streams, memory, expected = random.Random(seed), CopyStreams(CPU), Memory(), Memory()
    compute = gpu.current
    tickets: list[EventTicket] = []
    for step in range(6):
        copies = [random_copy(dice) for _ in range(dice.randrange(5))]
        for copy in copies:
            value = expected.levels[copy.source_level][copy.source[0]]
            expected.write(copy.target_level, int(copy.target[0]), value)
        for batch in schedule(copies):
            tickets.append(streams.run([memory.job(gpu, copies[index]) for index in batch]))
            gpu.run_some()
        for ticket in tickets:
            ticket.wait_on()
        for operation in model_step(dice, 1000 + step):
            operation(expected)
            compute.do(partial(operation, memory))
        gpu.run_some()
    compute.synchronize()
    return memory, expected, tickets


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_any_order_that_the_waits_allow_gives_the_bytes_of_plain_order(
    make_gpu: Callable[[int], Gpu], first_seed: int
) -> None:
    """Copies and forward passes on three free-running streams read and leave what a single thread would."""
    for seed in range(first_seed, first_seed + 50):
        memory, expected, tickets = play(make_gpu(seed), seed)
        assert (memory.seen, memory.levels) == (expected.seen, expected.levels)
        assert all(ticket.done() for ticket in tickets)


def test_a_ticket_is_done_when_both_directions_are(make_gpu: Callable[[int], Gpu]) -> None:
    """One event stands for the copies into the host and into the GPU; the host can wait for it."""
    for seed in range(20):
        gpu, memory = make_gpu(seed), Memory()
        slot = np.array([0], np.int32), np.array([1], np.int32)
        jobs = [memory.job(gpu, Copy(*levels, *slot)) for levels in [(1, 0), (0, 1)]]
        ticket = CopyStreams(CPU).run(jobs)
        assert not ticket.done()
        ticket.wait()
        assert ticket.done()
        assert memory.levels == [[0, 100, 2, 3], [100, 0, 102, 103]]


def test_an_empty_batch_ends_after_the_one_before(make_gpu: Callable[[int], Gpu]) -> None:
    """A batch without copies keeps its place in the order."""
    gpu, memory = make_gpu(0), Memory()
    streams = CopyStreams(CPU)
    streams.run([memory.job(gpu, Copy(0, 1, np.array([2], np.int32), np.array([0], np.int32)))])
    streams.run([]).wait()
    assert memory.levels[1][0] == 2


def test_a_failure_halfway_leaves_nothing_in_flight(make_gpu: Callable[[int], Gpu]) -> None:
    """When a job fails, those before it have ended by the time the caller hears of it."""

    def fail() -> None:
        raise RuntimeError("no memory left")

    gpu, memory = make_gpu(0), Memory()
    streams = CopyStreams(CPU)
    job = memory.job(gpu, Copy(0, 1, np.array([2], np.int32), np.array([0], np.int32)))
    with pytest.raises(RuntimeError, match="no memory"):
        streams.run([job, (0, fail)])
    assert memory.levels[1][0] == 2
    assert not any(stream.operations for stream in gpu.streams)


def test_a_broken_device_fails_the_ticket() -> None:
    """What the driver says to query and synchronize arrives as CopyFailed."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore")

        synchronize = query

    event: Any = Broken()
    ticket = EventTicket(event, CPU)
    for ask in (ticket.done, ticket.wait):
        with pytest.raises(CopyFailed, match=r"launch failure$"):
            ask()


@dataclass
class Storage:
    levels: tuple[torch.Tensor, ...]
    token_dim: int = 2


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("num_tokens", [None, 3])
def test_on_a_gpu_delayed_copies_arrive_where_they_are_waited_for(num_tokens: int | None) -> None:
    """With all work held up on the device, the model still reads what was brought, and offloads what it wrote."""
    shape = (8, 2, 16, 64)
    secondary = torch.randint(0, 256, shape, dtype=torch.uint8).pin_memory()
    primary = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    copier = TorchCopier([[Storage((primary, secondary))]])
    expected = secondary[1].clone()
    pair = np.array([1], np.int32), np.array([2], np.int32)
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # holds the compute stream, hence everything after it
    primary.fill_(7)
    offload = copier.submit([Copy(0, 1, pair[1], np.array([5], np.int32))])
    onboard = copier.submit([Copy(1, 0, *pair, num_tokens)])
    assert not onboard.done()
    onboard.wait_on()
    read = primary[2].clone()
    onboard.wait()
    torch.cuda.synchronize()
    assert offload.done()
    assert bool((secondary[5] == 7).all())
    count = num_tokens or 16
    assert torch.equal(read[:, :count].cpu(), expected[:, :count])
    assert bool((read[:, count:] == 7).all())
