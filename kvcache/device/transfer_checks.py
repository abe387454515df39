"""Readiness of the K/V that a sequence is read or computed from: copies that were not started, or that failed."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from cuda_ops.copier import CopyFailed, Ticket
from events.types import PRIMARY, RequestId
from kvcache.device.transfers import TransferEngine
from kvcache.errors import ComputationLost, TransfersNotAwaited, TransfersPending
from kvcache.fold.sequence import Sequence
from kvcache.results import PollResult


class WatchedTicket:
    """A ticket that records if anything has waited for it."""

    def __init__(self, inner: Ticket) -> None:
        self._inner = inner
        self.awaited = False
        """True if a stream or the host has waited, or has seen that the copies are done."""

    def done(self) -> bool:
        """See `Ticket`. A caller that learns that the copies are over, or failed, has waited."""
        try:
            done = self._inner.done()
        except CopyFailed:
            self.awaited = True
            raise
        self.awaited = self.awaited or done
        return done

    @property
    def over(self) -> bool:
        """True if the copies are done or failed; does not count as a wait."""
        try:
            return self._inner.done()
        except CopyFailed:  # `poll` reports failures
            return True

    def wait(self) -> None:
        """See `Ticket`."""
        self.awaited = True
        self._inner.wait()

    def wait_on(self, stream: Any = None) -> None:
        """See `Ticket`."""
        self.awaited = True
        self._inner.wait_on(stream)


class TransferChecks:
    """Guard against use of K/V that is not there, and failed copies that are not yet reported to the engine."""

    def __init__(self, transfers: TransferEngine | None, *, watch: bool = False) -> None:
        """`watch`: True if tickets are watched, for `refuse_not_awaited`."""
        self._transfers = transfers
        self._watches = watch
        self._tickets: list[WatchedTicket] = []
        """Watched tickets that were given out."""
        self._failed: list[tuple[int, str]] = []
        self._lost: dict[RequestId, int] = {}
        """Sequences that restart, and the number of their leading tokens that are still computed."""
        self._stuck: set[RequestId] = set()
        """Sequences that cannot restart: they have released the blocks that they would begin with."""

    def watched(self, ticket: Ticket) -> Ticket:
        """Wrap the ticket for an engine."""
        if not self._watches:
            return ticket
        watched = WatchedTicket(ticket)
        self._tickets = [*(each for each in self._tickets if not each.awaited), watched]
        return watched

    def refuse_not_awaited(self) -> None:
        """Raise `TransfersNotAwaited` if nothing has waited for a watched ticket, even if its copies may be done.

        A ticket with ended copies is found once, others until they end.
        """
        missing = [ticket for ticket in self._tickets if not ticket.awaited]
        self._tickets = [ticket for ticket in missing if not ticket.over]
        if missing:
            raise TransfersNotAwaited

    def lose(self, failed: Items[tuple[int, str]], sequences: Items[Sequence]) -> None:
        """Note failed copies, which lose everything that these sequences had computed."""
        self._failed += failed
        self._lost.update((sequence.request_id, 0) for sequence in sequences)
        self._stuck.update(sequence.request_id for sequence in sequences if any(sequence.detached))

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Note resumed sequences, some of which may have been lost and cannot restart."""
        lost = (each for each in sequences if not each.computed and any(each.detached))
        self._stuck.update(each.request_id for each in lost)

    def forget(self, request_id: RequestId) -> None:
        """Forget the loss of an ended sequence."""
        self._lost.pop(request_id, None)
        self._stuck.discard(request_id)

    def report(self, landed: tuple[int, ...]) -> PollResult:
        """Build the result of `poll`: the landed copies, and all losses since the last time."""
        result = PollResult(landed, tuple(self._failed), tuple(self._lost.items()))
        self._failed, self._lost = [], {}
        return result

    def refuse_unreadable(self, sequences: Items[Sequence]) -> None:
        """Raise `ComputationLost` or `TransfersPending` if block tables must not be used yet."""
        self._refuse_lost(sequences)
        if self._transfers is not None and self._transfers.pending:
            raise TransfersPending

    def refuse_uncomputable(self, sequences: Items[Sequence]) -> None:
        """Raise if one of these sequences lacks what it is computed from: as `refuse_lost`, and `TransfersPending`
        where a copy into its blocks has not been started.
        """
        if self._lost or self._stuck:  # not called for nothing: this runs at every step
            self.refuse_lost(sequences)
        if self._transfers is None or not self._transfers.pending:
            return
        for group in range(len(sequences[0].tables) if sequences else 0):
            unwritten = self._transfers.pending_targets(group, PRIMARY)
            if unwritten and not all(
                unwritten.isdisjoint(each.part_in(group).tables[group]) for each in sequences
            ):
                raise TransfersPending

    def refuse_lost(self, sequences: Items[Sequence]) -> None:
        """Raise `ComputationLost` if a failed copy has cut a sequence that is not yet reported, or cannot restart."""
        self._refuse_lost(sequences)
        for sequence in sequences if self._stuck else ():
            if sequence.request_id in self._stuck:
                raise ComputationLost(sequence.request_id, 0, stuck=True)

    def _refuse_lost(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences if self._lost else ():
            if sequence.request_id in self._lost:
                raise ComputationLost(sequence.request_id, self._lost[sequence.request_id])
