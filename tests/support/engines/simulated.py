"""Copiers that behave as badly as devices do, on any machine and always in the same way.

They wrap a real copier, so that bytes really move, but late, or not at all. Whoever reads a block without
waiting for its ticket then reads old bytes, and tests see it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

from cuda_ops.copier import Copier, Copy, CopyFailed, Ticket


class LateCopier:
    """Carries out each batch a number of `tick` calls after it was submitted.

    Waiting for a ticket brings its batch forward, with all before it. A wait on the device (`wait_on`)
    moves the bytes, as for the device; the host still hears of it only after the ticks.
    """

    def __init__(self, inner: Copier, steps: int) -> None:
        """Delay `inner` by `steps` ticks; 0 delays nothing."""
        self._inner = inner
        self._steps = steps
        self._now = 0
        self._queue: deque[_LateBatch] = deque()

    @property
    def waiting(self) -> int:
        """The number of batches of which the host has not heard."""
        return len(self._queue)

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Queue a batch."""
        batch = _LateBatch(self, copies, self._now + self._steps)
        self._queue.append(batch)
        self._land_due()
        return batch

    def tick(self) -> None:
        """Let one step of time pass."""
        self._now += 1
        self._land_due()

    def move_until(self, batch: _LateBatch) -> None:
        """Move the bytes of all batches up to this one, which must not have landed."""
        for earlier in self._queue:
            earlier.move(self._inner)
            if earlier is batch:
                return

    def land_until(self, batch: _LateBatch) -> None:
        """Let the host hear of all batches up to this one."""
        while not batch.landed:
            self._land_first()

    def _land_due(self) -> None:
        while self._queue and self._queue[0].due <= self._now:
            self._land_first()

    def _land_first(self) -> None:
        batch = self._queue.popleft()
        batch.move(self._inner)
        batch.landed = True


class _LateBatch:
    """A queued batch, and its own ticket."""

    def __init__(self, copier: LateCopier, copies: Sequence[Copy], due: int) -> None:
        self._copier = copier
        self._copies = tuple(copies)
        self._inner_ticket: Ticket | None = None
        self.due = due
        self.landed = False

    def move(self, inner: Copier) -> Ticket:
        if self._inner_ticket is None:
            self._inner_ticket = inner.submit(self._copies)
        return self._inner_ticket

    def done(self) -> bool:
        return self.landed and self._inner_ticket is not None and self._inner_ticket.done()

    def wait(self) -> None:
        self._copier.land_until(self)
        if self._inner_ticket is not None:
            self._inner_ticket.wait()

    def wait_on(self, stream: Any = None) -> None:
        if not self.landed:
            self._copier.move_until(self)
        if self._inner_ticket is not None:
            self._inner_ticket.wait_on(stream)


class FailingCopier:
    """Fails chosen batches, after having moved the first half of their copies."""

    def __init__(self, inner: Copier, which: Container[int]) -> None:
        """`which`: the batches that fail, counted from 0 in the order of submission; may be replaced meanwhile."""
        self._inner = inner
        self.which = which
        self._submitted = 0

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Pass a batch on, or half of it."""
        number = self._submitted
        self._submitted += 1
        if number not in self.which:
            return self._inner.submit(copies)
        half = self._inner.submit(copies[: len(copies) // 2])
        return _FailingTicket(half, f"batch {number} was chosen to fail")


class _FailingTicket:
    """Fails as soon as the inner batch is done."""

    def __init__(self, inner: Ticket, reason: str) -> None:
        self._inner = inner
        self._reason = reason

    def done(self) -> bool:
        if self._inner.done():
            raise CopyFailed(self._reason)
        return False

    def wait(self) -> None:
        self._inner.wait()
        raise CopyFailed(self._reason)

    def wait_on(self, stream: Any = None) -> None:
        self._inner.wait_on(stream)
