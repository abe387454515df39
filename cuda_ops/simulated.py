"""A simulated GPU: streams that run in any order that their waits allow, and copies in pieces.

It serves `cuda_ops.streams.CopyStreams` as a `Gpu` and `cuda_ops.dma.DmaCopier` as a `Memcpy`, so that the real copier
moves real bytes in host memory, as badly as a device may: the host runs ahead, streams are interleaved at random, the
copies of a call run in any order, torn into pieces of which each is read some time before it is written. Code that
reads or writes a block without waiting for its copies sees wrong bytes, in some of many seeds.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

from cuda_ops.dma import CopyPieces

Operation = Callable[[], bool]
"""Does a part of its work; returns True if that was the last."""
TORN_INTO = 3
PACES = (1, 10, 100)
"""Relative frequencies of a stream's turns."""
CHANGES_PACE = 0.1


class SimulatedEvent:
    """See `cuda_ops.streams.GpuEvent`."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self.happened = False

    def query(self) -> bool:
        """Query the event; the device continues afterwards."""
        happened = self.happened
        self._gpu.run_some()
        return happened

    def synchronize(self) -> None:
        """Run the device until the event has happened."""
        self._gpu.run_until(lambda: self.happened)


class SimulatedStream:
    """See `cuda_ops.streams.GpuStream`."""

    def __init__(self, gpu: SimulatedGpu, number: int) -> None:
        self._gpu = gpu
        self.cuda_stream = number
        self.pace = gpu.dice.choice(PACES)
        self.operations: deque[tuple[Callable[[], bool], Operation]] = deque()
        """Pending work, each with its readiness condition."""

    def do(self, operation: Callable[[], object]) -> None:
        """Put work on the stream that is done at once in its turn."""
        self.put(lambda: operation() is None or True)

    def put(self, operation: Operation, ready: Callable[[], bool] = lambda: True) -> None:
        """Put work on the stream that is done part by part."""
        self.operations.append((ready, operation))

    def wait_event(self, event: SimulatedEvent) -> None:
        """See `cuda_ops.streams.GpuStream`."""
        self.put(lambda: True, lambda: event.happened)

    def wait_stream(self, stream: SimulatedStream) -> None:
        """See `cuda_ops.streams.GpuStream`."""
        self.wait_event(stream.record_event(SimulatedEvent(self._gpu)))

    def record_event(self, event: SimulatedEvent) -> SimulatedEvent:
        """See `cuda_ops.streams.GpuStream`."""
        self.do(partial(setattr, event, "happened", True))
        return event

    def synchronize(self) -> None:
        """See `cuda_ops.streams.GpuStream`."""
        self._gpu.run_until(lambda: not self.operations)


class SimulatedGpu:
    """See `cuda_ops.streams.Gpu` and `cuda_ops.dma.Memcpy`. Its behaviour depends on the seed alone."""

    def __init__(self, seed: int, failing: Container[int] = ()) -> None:
        """`failing`: the calls of `copy`, counted from 0, that put half of their copies on the stream and fail."""
        self.dice = random.Random(seed)
        self.failing = failing
        self.calls = 0
        self._streams: list[SimulatedStream] = []
        self._current = self.new_stream()

    def new_stream(self) -> SimulatedStream:
        """See `cuda_ops.streams.Gpu`."""
        self._streams.append(SimulatedStream(self, len(self._streams) + 1))
        return self._streams[-1]

    def new_event(self) -> SimulatedEvent:
        """See `cuda_ops.streams.Gpu`."""
        return SimulatedEvent(self)

    def current_stream(self) -> SimulatedStream:
        """See `cuda_ops.streams.Gpu`."""
        return self._current

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """See `cuda_ops.streams.Gpu`."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def copy(self, pieces: CopyPieces, stream: SimulatedStream) -> None:
        """See `cuda_ops.dma.Memcpy`."""
        self.calls += 1
        failed = self.calls - 1 in self.failing
        whole = list(zip(*(each.tolist() for each in pieces), strict=True))
        copy = _TornCopy(whole[: len(whole) // 2] if failed else whole, self.dice)
        stream.put(copy.step)
        self.run_some()
        if failed:
            raise RuntimeError(f"call {self.calls - 1} was chosen to fail")

    def step(self) -> bool:
        """Do a part of the work of some stream; False if nothing can be done."""
        ready = [each for each in self._streams if each.operations and each.operations[0][0]()]
        if not ready:
            return False
        if self.dice.random() < CHANGES_PACE:
            self.dice.choice(self._streams).pace = self.dice.choice(PACES)
        (stream,) = self.dice.choices(ready, [each.pace for each in ready])
        if stream.operations[0][1]():
            stream.operations.popleft()
        return True

    def run_some(self, most: int = 6) -> None:
        """Run a random number of steps, fewer than `most`."""
        for _ in range(self.dice.randrange(most)):
            self.step()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run until the condition is true. Raises AssertionError if that can never be."""
        while not condition():
            assert self.step(), "the streams wait for each other"

    def synchronize(self) -> None:
        """Run all submitted work."""
        self.run_until(lambda: not any(each.operations for each in self._streams))


class _TornCopy:
    """The copies of one call: those still to be read, and those read and still to be written."""

    def __init__(self, pieces: list[tuple[int, int, int]], dice: random.Random) -> None:
        self._dice = dice
        self._unread: list[tuple[int, int, int]] = []
        self._held: list[tuple[int, bytes]] = []
        for target, source, size in pieces:
            cuts = sorted({0, size, *(dice.randrange(size + 1) for _ in range(dice.randrange(TORN_INTO)))})
            self._unread += [(target + begin, source + begin, end - begin) for begin, end in pairwise(cuts)]

    def step(self) -> bool:
        """Read or write a part, chosen at random."""
        number = self._dice.randrange(len(self._unread) + len(self._held) or 1)
        if number < len(self._unread):
            target, source, size = self._unread.pop(number)
            self._held.append((target, ctypes.string_at(source, size)))
        elif self._held:
            target, content = self._held.pop(number - len(self._unread))
            ctypes.memmove(target, content, len(content))
        return not self._unread and not self._held
