"""The interface between the planning of copies and their execution.

A `Copy` names blocks by (group, level, slot), so that planning needs no tensors. A `Copier` takes one batch of copies
in which no order is needed, and answers with a `Ticket`. Batches of one copier that touch the same slots run one after
another, in the order of submission, others in any order or at once, as do the copies of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class CopyFailed(Exception):
    """A batch failed: its targets must not be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def first_line(error: BaseException) -> str:
    """Return an error's message in one line; the name of its type if it is empty."""
    return (str(error) or type(error).__name__).splitlines()[0]


@dataclass(frozen=True, eq=False, slots=True)
class Copy:
    """Copies of blocks between two levels of one group, one per pair of slots.

    No slot may be written twice or be both source and target; only a copy of slots onto themselves, which
    moves nothing, is fine.
    """

    source_level: int
    target_level: int
    source: npt.NDArray[np.int32]
    """Slots to read; shape [n]."""
    target: npt.NDArray[np.int32]
    """Slots to write; shape [n]."""
    num_tokens: int | None = None
    """Number of leading tokens to copy of each block; None: whole blocks."""
    group: int = 0

    def __post_init__(self) -> None:
        if self.source.ndim != 1 or self.source.shape != self.target.shape:
            raise ValueError(
                "source and target slots must be one-dimensional and of equal length, not "
                f"{self.source.shape} and {self.target.shape}"
            )
        if min(self.source.min(initial=0), self.target.min(initial=0)) < 0:
            raise ValueError("slots must not be negative")

    @property
    def moves_nothing(self) -> bool:
        """True if every block is copied onto itself."""
        return self.source_level == self.target_level and bool(np.array_equal(self.source, self.target))


class Ticket(Protocol):
    """A submitted batch."""

    def done(self) -> bool:
        """Return True if the bytes have arrived, without blocking. Raises `CopyFailed` if they never will."""
        ...

    def wait(self) -> None:
        """Block the host until the bytes have arrived. Raises `CopyFailed` if they never will."""
        ...

    def wait_on(self, stream: Any = None) -> None:
        """Make later work on a device's stream wait for the bytes.

        The host does not wait, and failures are not reported here. None means the current stream.
        """
        ...


class Copier(Protocol):
    """Moves blocks."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Start a batch of copies without hazards among them; it runs after all earlier ones that touched its slots.

        A batch that cannot be carried out gives a ticket that fails; the manager treats any error raised here as that,
        too. Slots that do not exist are a mistake of the caller and raise ValueError before anything moves.
        """
        ...


class FinishedTicket:
    """A batch that was complete, or had failed, before `submit` returned."""

    def __init__(self, failure: str | None = None) -> None:
        self._failure = failure

    def done(self) -> bool:
        """Return True, or raise `CopyFailed`."""
        if self._failure is not None:
            raise CopyFailed(self._failure)
        return True

    def wait(self) -> None:
        """Return at once, or raise `CopyFailed`."""
        self.done()

    def wait_on(self, stream: Any = None) -> None:
        """Do nothing: the batch has ended."""


class JoinedTicket:
    """Several tickets as one: done once all are, failed once one is."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tuple(tickets)

    def done(self) -> bool:
        """Return True if all are done. Raises `CopyFailed` once a failed one follows only on ones that are done."""
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        """Block until all have ended, then raise the first `CopyFailed` if there was one."""
        failures = []
        for ticket in self._tickets:
            try:
                ticket.wait()
            except CopyFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def wait_on(self, stream: Any = None) -> None:
        """Make a device's stream wait for all."""
        for ticket in self._tickets:
            ticket.wait_on(stream)
