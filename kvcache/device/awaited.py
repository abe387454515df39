"""For debugging: tickets of copies that the engine has started, and has not waited for."""

from __future__ import annotations

from typing import Any

from cuda_ops.copier import CopyFailed, Ticket


class AwaitedTicket:
    """A ticket that knows whether anybody has waited for it."""

    def __init__(self, inner: Ticket) -> None:
        self._inner = inner
        self.awaited = False
        """Whether a stream or the host has been made to wait, or was told that the copies are done."""

    def done(self) -> bool:
        """As the ticket. Whoever is told that the copies are over, or failed, has waited."""
        try:
            done = self._inner.done()
        except CopyFailed:
            self.awaited = True
            raise
        self.awaited = self.awaited or done
        return done

    @property
    def over(self) -> bool:
        """Whether the copies are done or failed, without anybody being told."""
        try:
            return self._inner.done()
        except CopyFailed:  # `poll` tells of failures
            return True

    def wait(self) -> None:
        """As the ticket."""
        self.awaited = True
        self._inner.wait()

    def wait_on(self, stream: Any = None) -> None:
        """As the ticket."""
        self.awaited = True
        self._inner.wait_on(stream)


class AwaitedTickets:
    """Those that were given out."""

    def __init__(self) -> None:
        self._open: list[AwaitedTicket] = []

    def watched(self, ticket: Ticket) -> Ticket:
        """The same ticket, of which is known from now on whether it was waited for."""
        self._open = [each for each in self._open if not each.awaited]
        self._open.append(AwaitedTicket(ticket))
        return self._open[-1]

    def missing(self) -> bool:
        """Whether one was not waited for. One whose copies are over is found once, others until they are."""
        missing = [ticket for ticket in self._open if not ticket.awaited]
        self._open = [ticket for ticket in missing if not ticket.over]
        return bool(missing)
