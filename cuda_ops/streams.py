"""Copies on a GPU run beside the model: which stream does what, and who waits for whom.

Each direction has a stream of its own, because a GPU has separate engines for them: one stream for what is
written to the GPU's memory, one for what is written to the host's. Neither is the default stream, with
which everything else would have to wait.

- A batch waits for all work that the compute stream has been given so far: the model may still be writing
  what is offloaded, or reading what is overwritten.
- A batch waits for the batch before it, on whatever stream that ran.
- A batch ends in one event. The compute stream is made to wait for it by the ticket, on the device.

These are all the orders there are: a slot needs no state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuda_ops.copier import CopyFailed

Job = tuple[int, Callable[[], None]]
"""The level that is written, and what puts the copies on the current stream."""


class CopyStreams:
    """The streams of one GPU on which copies run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_level = tuple(torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    def run(self, jobs: Sequence[Job]) -> EventTicket:
        """Start a batch after the compute stream's work and after the batch before.

        A RuntimeError of a job leaves the GPU with nothing in flight, so that the targets, of which some may
        have been written, can be given to others at once.
        """
        used = {level for level, _ in jobs} or {0}
        lanes = [self._by_level[level] for level in sorted(used)]
        for lane in lanes:
            lane.wait_stream(torch.cuda.current_stream(self._device))
            if self._last is not None:
                lane.wait_event(self._last)
        try:
            for level, job in jobs:
                with torch.cuda.stream(self._by_level[level]):
                    job()
        except RuntimeError:
            for lane in lanes:
                lane.synchronize()
            raise
        return EventTicket(self._finish(lanes), self._device)

    def _finish(self, lanes: Sequence[torch.cuda.Stream]) -> torch.cuda.Event:
        """Record the batch's one event on the first lane, after the others."""
        for lane in lanes[1:]:
            lanes[0].wait_stream(lane)
        # Blocking: a host that waits sleeps instead of spinning on a core.
        self._last = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._last.record(lanes[0])
        return self._last


class EventTicket:
    """A batch on a GPU; see `cuda_ops.copier.Ticket`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        """Ask the event, without waiting."""
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise CopyFailed(str(error).splitlines()[0]) from error

    def wait(self) -> None:
        """Block the host until the event has happened."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise CopyFailed(str(error).splitlines()[0]) from error

    def wait_on(self, stream: Any = None) -> None:
        """Put a wait on `stream` (None: the current one)."""
        (stream or torch.cuda.current_stream(self._device)).wait_event(self._event)
