"""Who waits for whom: the copier by DMA on a simulated GPU, whose streams run in any order that the waits allow.

Each wait is a mutation: without it some of the same programs go wrong. Where there is a real GPU the last tests run on
it, with the copies held up on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cuda_ops import dma, hazards, streams
from cuda_ops.copier import Copier, Copy, CopyFailed, Ticket
from cuda_ops.dma import CopyLimits
from cuda_ops.hazards import schedule
from cuda_ops.probe import probed
from cuda_ops.simulated import SimulatedGpu, SimulatedStream
from cuda_ops.streams import CopyStreams, EventTicket, TorchGpu
from cuda_ops.torch_copier import TorchCopier
from tests.support.engines.storage import Storage, pair
from tests.support.seeds import seeds

SLOTS, ROWS, TOKENS, WIDTH = 4, 2, 3, 2
GROUPS = (0, 0, 1)
"""The group of each pool."""
Levels = list[npt.NDArray[np.uint8]]


class Program:
    """Copies and forward passes at random, beside what a single thread makes of the same."""

    def __init__(self, seed: int, failing: bool = False) -> None:
        self.dice = random.Random(f"program {seed}")
        chosen = {number for number in range(100) if failing and self.dice.random() < 0.15}
        self.gpu = SimulatedGpu(seed, chosen)
        self.compute, self.other = self.gpu.current_stream(), self.gpu.new_stream()
        pools = []
        for _ in GROUPS:
            raw = self.dice.randbytes(2 * SLOTS * ROWS * TOKENS * WIDTH)
            both = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(2, SLOTS, ROWS, TOKENS, WIDTH)
            pools.append(Storage((both[0], both[1]), 2))
        limits = CopyLimits(self.dice.choice([1, 3, 256]), self.dice.choice([5, 12, 1 << 20]))
        kernel = self.kernel if self.dice.random() < 0.5 else None
        self.copier = dma.DmaCopier([pools[:2], pools[2:]], self.gpu, self.gpu, limits, kernel)
        self.memory: list[Levels] = [[level.numpy() for level in pool.levels] for pool in pools]
        self.expected: list[Levels] = [[level.copy() for level in levels] for levels in self.memory]
        self.seen: list[bytes] = []
        self.should_see: list[bytes] = []
        self.in_flight: list[tuple[Ticket, list[Copy]]] = []
        self.values = count(1)
        self.failures = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            copies = [self.copy() for _ in range(self.dice.randrange(10))]
            for indices in schedule(copies):
                self.submit([copies[index] for index in indices])
                self.poll()
            for ticket, _ in self.in_flight:
                self.wait_on(ticket)
            for slot in range(SLOTS):
                self.compute.do(partial(self.read, self.memory, 0, slot, self.seen))
                self.read(self.expected, 0, slot, self.should_see)
            self.overwrite(self.dice.choice(GROUPS), 0, self.dice.randrange(SLOTS))
            self.gpu.run_some()
        if self.dice.random() < 0.5:
            for ticket, _ in self.in_flight:
                ticket.wait()
            assert all(ticket.done() for ticket, _ in self.in_flight)
            self.poll()
        self.gpu.synchronize()
        self.poll()
        assert not self.in_flight
        assert self.seen == self.should_see, "the model reads something else"
        for found, right in zip(self.memory, self.expected, strict=True):
            for level in range(2):
                np.testing.assert_array_equal(found[level], right[level])

    def wait_on(self, ticket: Ticket) -> None:
        """Make the model wait, which may have another stream than the current one for that."""
        if self.dice.random() < 0.5:
            ticket.wait_on()
        else:
            with self.gpu.on(self.other):
                ticket.wait_on(self.compute)

    def copy(self) -> Copy:
        levels = self.dice.choice([(0, 1), (1, 0), (0, 0)])
        number = self.dice.randrange(1, 3)
        slots = self.dice.sample(range(SLOTS), 2 * number)
        pairs = np.array(slots, np.int32).reshape(2, number)
        tokens = self.dice.choice([None, None, 1, 2, TOKENS])
        return Copy(*levels, pairs[0], pairs[1], tokens, self.dice.choice(GROUPS))

    def kernel(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        pairs: npt.NDArray[np.int32],
        num_tokens: int | None,
    ) -> None:
        """Copy on the current stream, row by row."""
        rows = [(*pair, row) for pair in pairs.tolist() for row in range(ROWS)]
        pieces = dma.CopyPieces(
            np.array([target[to, row].data_ptr() for _, to, row in rows], np.uint64),
            np.array([source[from_, row].data_ptr() for from_, _, row in rows], np.uint64),
            np.full(len(rows), (num_tokens or TOKENS) * WIDTH, np.uint64),
        )
        self.gpu.copy(pieces, self.gpu.current_stream())

    def submit(self, batch: list[Copy]) -> None:
        ticket = self.copier.submit(batch)
        for copy in batch:
            for levels in of_group(self.expected, copy.group):
                part = slice(copy.num_tokens)
                levels[copy.target_level][copy.target, :, part] = levels[copy.source_level][
                    copy.source, :, part
                ]
        try:
            ticket.done()
        except CopyFailed:
            # Nothing of it is in flight any more: host and model may write there at once.
            self.failures += 1
            for copy in batch:
                for slot in copy.target.tolist():
                    self.overwrite(copy.group, copy.target_level, slot)
        else:
            self.in_flight.append((ticket, batch))

    def overwrite(self, group: int, level: int, slot: int) -> None:
        value = next(self.values)
        self.write(of_group(self.expected, group), level, slot, value)
        write = partial(self.write, of_group(self.memory, group), level, slot, value)
        if level == 0:
            self.gpu.current_stream().do(write)
        else:
            write()

    @staticmethod
    def write(pools: list[Levels], level: int, slot: int, value: int) -> None:
        for number, levels in enumerate(pools):
            levels[level][slot] = value + number

    @staticmethod
    def read(pools: list[Levels], level: int, slot: int, into: list[bytes]) -> None:
        into.append(b"".join(levels[level][slot].tobytes() for levels in pools))

    def poll(self) -> None:
        """The host looks at what it is told has arrived, where nothing else is on its way."""
        left = [(ticket, batch) for ticket, batch in self.in_flight if not ticket.done()]
        ended = [batch for ticket, batch in self.in_flight if all(ticket is not each for each, _ in left)]
        self.in_flight = left
        awaited = {place for _, batch in left for copy in batch for place in on_host(copy)}
        for group, slot in {place for batch in ended for copy in batch for place in on_host(copy)} - awaited:
            both = (of_group(each, group) for each in (self.memory, self.expected))
            for found, right in zip(*both, strict=True):
                np.testing.assert_array_equal(found[1][slot], right[1][slot])


def of_group(pools: list[Levels], group: int) -> list[Levels]:
    return [levels for levels, each in zip(pools, GROUPS, strict=True) if each == group]


def on_host(copy: Copy) -> list[tuple[int, int]]:
    """What a copy writes there, as groups and slots."""
    return [(copy.group, slot) for slot in copy.target.tolist() if copy.target_level == 1]


def play(seed: int) -> Program:
    program = Program(seed, failing=seed % 3 == 0)
    program.run(5)
    return program


@pytest.mark.parametrize("first", seeds(range(0, 400, 50), quick=4))
def test_any_order_that_the_waits_allow_gives_the_bytes_of_plain_order(first: int) -> None:
    """Copies and forward passes on three free-running streams read and leave what a single thread would."""
    failures = sum(play(seed).failures for seed in range(first, first + 50))
    assert failures


NOTED = "        self._read[copy.group][copy.source_level][copy.target_level][copy.source] = number"
MUTATIONS: dict[str, tuple[ModuleType, str, str]] = {
    "a batch does not wait for the model": (
        streams,
        "        stream.wait_stream(self._gpu.current_stream())\n",
        "",
    ),
    "a batch does not wait for other lanes": (
        streams,
        "                stream.wait_event(event)\n",
        "                pass\n",
    ),
    "a batch waits for the oldest of a lane": (streams, "if each >= number", "if each"),
    "the model waits for one lane": (
        streams,
        "        for event in self._events:\n            stream",
        "        for event in self._events[:1]:\n            stream",
    ),
    "the model does not wait": (
        streams,
        "        for event in self._events:\n            stream",
        "        for event in self._events[:0]:\n            stream",
    ),
    "a batch is done when one lane is": (
        streams,
        "return all(event.query() for event in self._events)",
        "return all(event.query() for event in self._events[:1])",
    ),
    "the host waits for one lane": (
        streams,
        "for event in self._events:\n                event.sync",
        "for event in self._events[:1]:\n                event.sync",
    ),
    "copies are not on their stream": (streams, "with self._gpu.on(self._lanes[lane]):", "if True:"),
    "a stream that is named does not wait": (
        streams,
        "stream = stream or self._gpu.current_stream()",
        "stream = self._gpu.current_stream()",
    ),
    "a failed batch goes on": (streams, "self._lanes[lane].synchronize()", "pass"),
    "the writer of a source is not waited for": (
        hazards,
        "copy.source_level], copy.source)]",
        "copy.source_level], copy.source[:0])]",
    ),
    "readers of a target are not waited for": (
        hazards,
        "numbers, copy.target) for",
        "numbers, copy.target[:0]) for",
    ),
    "writers are not noted": (
        hazards,
        "self._written[copy.group][copy.target_level][copy.target] = number",
        "pass",
    ),
    "readers are not noted": (
        hazards,
        NOTED,
        "",
    ),
    "one reader event per slot": (
        hazards,
        NOTED,
        "        for numbers in self._read[copy.group][copy.source_level]:\n            numbers[copy.source] = 0\n"
        + NOTED,
    ),
}


def mutated(module: ModuleType, old: str, new: str) -> dict[str, Any]:
    """What is in a module with another text."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, "the mutation is of a text that is there once"
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), names)
    return names


def mutate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new = MUTATIONS[name]
    names = mutated(module, old, new)
    if module is streams:
        monkeypatch.setattr(dma, "CopyStreams", names["CopyStreams"])
    else:
        monkeypatch.setattr(streams, "SlotOrder", names["SlotOrder"])


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_wait_is_needed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without it one of 200 programs goes wrong."""
    mutate(monkeypatch, name)
    for seed in range(200):
        try:
            play(seed)
        except AssertionError:
            return
    pytest.fail("not noticed")


# -- single cases


def test_both_directions_run_at_once() -> None:
    """A batch on one lane ends though an earlier one on the other lane is held up, if they share no slot."""
    program = Program(0)
    held = SimulatedGpu(1).current_stream()
    program.copier._streams._lanes[1].wait_stream(program_blocker(program, held))
    program.submit([pair(0, 0, (0, 1))])
    program.submit([pair(1, 1, (1, 0))])
    program.submit([pair(0, 2, (1, 0))])  # reads what the first one writes
    (first, _), (second, _), (third, _) = program.in_flight
    second.wait()
    for _ in range(1000):
        program.gpu.step()
    assert [ticket.done() for ticket in (first, second, third)] == [False, True, False]
    held.operations.clear()
    program.gpu.synchronize()
    assert [ticket.done() for ticket in (first, second, third)] == [True, True, True]


def program_blocker(program: Program, held: Any) -> Any:
    """A stream of the program's device that goes on when another one has nothing more to do."""
    held.do(lambda: None)
    stream = program.gpu.new_stream()
    stream.put(lambda: True, lambda: not held.operations)
    return stream


def test_events_do_not_pile_up() -> None:
    """Those of a lane for which nothing waits go when they have happened, too."""
    program = Program(0)
    for _ in range(50):
        program.submit([pair(0, 0, (0, 1))])
        program.gpu.synchronize()
    assert len(program.copier._streams._events[1]) <= 1


def test_memory_that_is_freed_is_not_reused_before_the_copies_have_ended() -> None:
    """Torch is told of each stream that uses the GPU's memory, which is not the one that it was taken on."""
    noted: list[Any] = []

    class OnGpu(torch.Tensor):
        is_cuda = True

        def record_stream(self, s: Any) -> None:
            noted.append((self, s))

    there, host = torch.zeros(2, 1, 1, 1, dtype=torch.uint8).as_subclass(OnGpu), torch.zeros(2, 1, 1, 1)
    copier = dma.DmaCopier([[Storage((there, host.to(torch.uint8)), 2)]], SimulatedGpu(0), SimulatedGpu(0))
    assert [(tensor is there, lane) for tensor, lane in noted] == [
        (True, lane) for lane in copier._streams._lanes
    ]


def test_whatever_a_job_raises_leaves_nothing_in_flight() -> None:
    """Copies that were started before it have ended by the time the caller learns of it."""
    gpu, done = SimulatedGpu(0), list[str]()

    def put(stream: Any) -> None:
        stream.do(lambda: done.append("copied"))
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        CopyStreams(gpu, [[1, 1]]).submit([(pair(0, 0, (0, 1)), put)])
    assert done == ["copied"]


def test_a_batch_without_copies_is_done() -> None:
    """There is nothing to wait for."""
    gpu = SimulatedGpu(0)
    ticket = CopyStreams(gpu, [[1, 1]]).submit([])
    ticket.wait_on()
    ticket.wait()
    assert ticket.done()


def test_a_broken_device_fails_a_batch() -> None:
    """The first error is its reason, not what the device answers when it is asked to end."""

    class Broken(SimulatedStream):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: again")

    class BrokenGpu(SimulatedGpu):
        def new_stream(self) -> SimulatedStream:
            self._streams.append(Broken(self, len(self._streams) + 1))
            return self._streams[-1]

    def put(stream: Any) -> None:
        raise RuntimeError("CUDA error: launch failure")

    ticket = CopyStreams(BrokenGpu(0), [[1, 1]]).submit([(pair(0, 0, (0, 1)), put)])
    with pytest.raises(CopyFailed, match="launch failure"):
        ticket.done()


def test_a_broken_device_fails_the_ticket() -> None:
    """What the driver says to query and synchronize arrives as CopyFailed."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore")

        synchronize = query

    event: Any = Broken()
    ticket = EventTicket([event], SimulatedGpu(0))
    for ask in (ticket.done, ticket.wait):
        with pytest.raises(CopyFailed, match=r"launch failure$"):
            ask()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def by_dma(groups: list[list[Storage]]) -> Copier:
    device = torch.device("cuda", torch.cuda.current_device())
    found = probed(device)
    assert found.memcpy is not None, found.why
    return dma.DmaCopier(groups, found.memcpy, TorchGpu(device), kernel=found.kernel)


@needs_gpu
@pytest.mark.parametrize("num_tokens", [None, 3])
@pytest.mark.parametrize("kind", [TorchCopier, by_dma])
def test_on_a_gpu_delayed_copies_arrive_where_they_are_waited_for(
    num_tokens: int | None, kind: Callable[[list[list[Storage]]], Copier]
) -> None:
    """With all work held up on the device, the model still reads what was brought, and offloads what it wrote."""
    shape = (8, 2, 16, 64)
    secondary = torch.randint(0, 256, shape, dtype=torch.uint8).pin_memory()
    primary = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    copier = kind([[Storage((primary, secondary), 2)]])
    expected = secondary[1].clone()
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # holds the compute stream, hence everything after it
    primary.fill_(7)
    offload = copier.submit([pair(2, 5, (0, 1))])
    onboard = copier.submit([pair(1, 2, (1, 0), num_tokens)])
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
