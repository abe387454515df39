"""The contract between what decides on copies and what carries them out.

A `Copy` names blocks by (group, level, slot), so that the side that plans needs no tensors. A `Copier`
takes one batch of copies in which no order is needed, and answers with a `Ticket`. Batches of one copier
that touch the same slots run one after another, in the order of submission, others in any order or at once, as do the
copies of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class CopyFailed(Exception):
    """A batch did not arrive: what it should have written must not be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def first_line(error: BaseException) -> str:
    """What an error says, in one line; the name of its type if it says nothing."""
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
    """Slots that are read; shape [n]."""
    target: npt.NDArray[np.int32]
    """Slots that are written; shape [n]."""
    num_tokens: int | None = None
    """Only the first tokens of each block; None: whole blocks."""
    group: int = 0

    def __post_init__(self) -> None:
        if self.source.ndim != 1 or self.source.shape != self.target.shape:
            raise ValueError(f"a copy needs pairs of slots, not {self.source.shape} and {self.target.shape}")
        if min(self.source.min(initial=0), self.target.min(initial=0)) < 0:
            raise ValueError("slots are counted from 0")

    @property
    def moves_nothing(self) -> bool:
        """Whether every block is copied onto itself."""
        return self.source_level == self.target_level and bool(np.array_equal(self.source, self.target))


class Ticket(Protocol):
    """Stands for a submitted batch."""

    def done(self) -> bool:
        """Tell without blocking whether the bytes have arrived. Raises `CopyFailed` if they never will."""
        ...

    def wait(self) -> None:
        """Block the host until the bytes have arrived. Raises `CopyFailed` if they never will."""
        ...

    def wait_on(self, stream: Any = None) -> None:
        """Make the work that is put on a device's stream from now on wait for the bytes.

        The host does not wait and learns of no failure here. None means the current stream.
        """
        ...


class Copier(Protocol):
    """Moves blocks."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Start a batch of copies without hazards among them; it runs after all earlier ones that touched its slots.

        A batch that cannot be carried out gives a ticket that fails; the manager takes whatever is raised here for
        that, too. Slots that do not exist are a mistake of the caller and raise ValueError before anything moves.
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
        """There is nothing to wait for."""


class JoinedTicket:
    """Several tickets as one: done when all are, failed when one is."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tuple(tickets)

    def done(self) -> bool:
        """Whether all are done. Raises `CopyFailed` when a failed one follows only on ones that are done."""
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
