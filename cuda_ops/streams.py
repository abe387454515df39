"""Copies on a GPU, concurrent with the model: the streams, and their waits for each other.

Each level that is written has a stream of its own, a *lane*, because a GPU has separate engines for the directions: one
lane for writes to the GPU's memory, one for writes to the host's. Neither is the default stream, with which everything
else would have to wait.

- A batch waits for all work submitted to the compute stream so far: the model may still be writing blocks to be
  offloaded, or reading blocks to be overwritten.
- A batch waits for those earlier ones on the other lane that have touched its slots (`cuda_ops.hazards.SlotOrder`). So
  both directions run at once if they are independent. On its own lane it follows all of them.
- A batch ends in one event on each lane that it uses. The compute stream is made to wait for these by the ticket, on
  the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, cast

import torch

from cuda_ops.copier import Copy, CopyFailed, FinishedTicket, Ticket, first_line
from cuda_ops.hazards import SlotOrder


class GpuEvent(Protocol):
    """A place in a stream's work, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return True if all work before it has ended; never blocks. Raises RuntimeError if the device is broken."""
        ...

    def synchronize(self) -> None:
        """Block the host until it has."""
        ...


class GpuStream(Protocol):
    """Work in order, as `torch.cuda.Stream`."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle."""
        ...

    def wait_event(self, event: Any) -> None:
        """Make later work wait for an event."""
        ...

    def wait_stream(self, stream: Any) -> None:
        """Make later work wait for all work submitted to another stream so far."""
        ...

    def record_event(self, event: Any) -> Any:
        """Record an event after the work submitted so far."""
        ...

    def synchronize(self) -> None:
        """Block the host until the work submitted so far has ended."""
        ...


class Gpu(Protocol):
    """A device with streams."""

    def new_stream(self) -> GpuStream:
        """Make a stream of its own."""
        ...

    def new_event(self) -> GpuEvent:
        """Make an event that has not been recorded."""
        ...

    def current_stream(self) -> GpuStream:
        """The compute stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream, and the device, current."""
        ...


class TorchGpu:
    """A GPU by torch; see `Gpu`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> Any:
        """A stream that does not wait for the default one."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def new_event(self) -> Any:
        """Make an event without timing. A host that waits for it sleeps instead of spinning on a core."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """Torch's current stream of this device."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream, and the device, current, as torch does."""
        return torch.cuda.stream(stream)


Job = tuple[Copy, Callable[[GpuStream], None]]
"""A copy, and the function that puts it on a stream, which is the current one."""


class CopyStreams:
    """The streams of one GPU on which copies run."""

    def __init__(self, gpu: Gpu, sizes: Sequence[Sequence[int]], on_gpu: Iterable[torch.Tensor] = ()) -> None:
        """`sizes`: the number of slots, per group and level; `on_gpu`: the tensors there.

        When these are freed, torch reuses their memory after the copies that were submitted.
        """
        self._gpu = gpu
        lanes = max((len(levels) for levels in sizes), default=0)
        self._lanes = [gpu.new_stream() for _ in range(lanes)]
        for tensor in on_gpu:
            for lane in self._lanes:
                tensor.record_stream(cast("torch.Stream", lane))
        self._order = SlotOrder(sizes)
        self._numbers = [0] * lanes
        """Number of the last batch on each lane."""
        self._events: list[deque[tuple[int, GpuEvent]]] = [deque() for _ in range(lanes)]
        """Events of batches on each lane that were not seen to have ended, with their numbers."""

    def submit(self, jobs: Sequence[Job]) -> Ticket:
        """Start a batch of copies that need no order among themselves.

        A RuntimeError of a job gives a failed ticket. After any error of a job, nothing is in flight on its lanes:
        targets, of which some may have been written, can be reused at once.
        """
        by_lane: dict[int, list[Job]] = {}
        for job in jobs:
            by_lane.setdefault(job[0].target_level, []).append(job)
        try:
            for lane, own in by_lane.items():
                self._wait(lane, [copy for copy, _ in own])
            for lane, own in by_lane.items():
                with self._gpu.on(self._lanes[lane]):
                    for _, put in own:
                        put(self._lanes[lane])
            return EventTicket([self._finish(lane, own) for lane, own in by_lane.items()], self._gpu)
        except BaseException as error:
            for lane in by_lane:
                with suppress(RuntimeError):  # a broken device does nothing more
                    self._lanes[lane].synchronize()
            if isinstance(
                error, RuntimeError
            ):  # torch's way, and ours, to report that memory or the device gave out
                return FinishedTicket(failure=first_line(error))
            raise

    def _wait(self, lane: int, copies: Sequence[Copy]) -> None:
        """Make a lane wait for all that these copies must follow."""
        stream = self._lanes[lane]
        stream.wait_stream(self._gpu.current_stream())
        for other, number in self._order.before(copies).items():
            # Events are recorded in order, so the first one that is late enough is that of the batch with this number.
            event = next((event for each, event in self._outstanding(other) if each >= number), None)
            if event is not None:
                stream.wait_event(event)

    def _finish(self, lane: int, jobs: Sequence[Job]) -> GpuEvent:
        self._numbers[lane] += 1
        for copy, _ in jobs:
            self._order.note(copy, self._numbers[lane])
        event = self._gpu.new_event()
        self._lanes[lane].record_event(event)
        self._outstanding(lane).append((self._numbers[lane], event))
        return event

    def _outstanding(self, lane: int) -> deque[tuple[int, GpuEvent]]:
        """Drop the events of a lane that have happened, and return the others."""
        events = self._events[lane]
        while events and events[0][1].query():
            events.popleft()
        return events


class EventTicket:
    """A batch on a GPU, which ends with these events; see `cuda_ops.copier.Ticket`."""

    def __init__(self, events: Sequence[GpuEvent], gpu: Gpu) -> None:
        self._events, self._gpu = events, gpu

    def done(self) -> bool:
        """Query the events, without waiting."""
        try:
            return all(event.query() for event in self._events)
        except RuntimeError as error:
            raise CopyFailed(first_line(error)) from error

    def wait(self) -> None:
        """Block the host until the events have happened."""
        try:
            for event in self._events:
                event.synchronize()
        except RuntimeError as error:
            raise CopyFailed(first_line(error)) from error

    def wait_on(self, stream: Any = None) -> None:
        """Make `stream` wait (None: the current one)."""
        stream = stream or self._gpu.current_stream()
        for event in self._events:
            stream.wait_event(event)
