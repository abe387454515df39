"""Whether the K/V that a sequence is read or computed from is there: copies that were not started, or that failed."""

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


class Readiness:
    """Refuses what would touch K/V that is not there, and keeps what the engine has yet to be told of failed copies."""

    def __init__(self, transfers: TransferEngine | None, *, watch: bool = False) -> None:
        """`watch`: whether tickets are watched, for `refuse_not_awaited`."""
        self._transfers = transfers
        self._watches = watch
        self._tickets: list[AwaitedTicket] = []
        """Those that were given out, and are watched."""
        self._failed: list[tuple[int, str]] = []
        self._lost: dict[RequestId, int] = {}
        """Sequences that begin again, and how many leading tokens are still computed."""
        self._stuck: set[RequestId] = set()
        """Those that cannot: they have let go of blocks that they would have to begin with."""

    def watched(self, ticket: Ticket) -> Ticket:
        """The ticket that an engine is given."""
        if not self._watches:
            return ticket
        watched = AwaitedTicket(ticket)
        self._tickets = [*(each for each in self._tickets if not each.awaited), watched]
        return watched

    def refuse_not_awaited(self) -> None:
        """Raise `TransfersNotAwaited` if nothing has waited for a watched ticket, though its copies may be done.

        One whose copies are over is found once, others until they are.
        """
        missing = [ticket for ticket in self._tickets if not ticket.awaited]
        self._tickets = [ticket for ticket in missing if not ticket.over]
        if missing:
            raise TransfersNotAwaited

    def lose(self, failed: Items[tuple[int, str]], sequences: Items[Sequence]) -> None:
        """Copies have failed, and all that these sequences had computed is lost with them."""
        self._failed += failed
        self._lost.update((sequence.request_id, 0) for sequence in sequences)
        self._stuck.update(sequence.request_id for sequence in sequences if any(sequence.detached))

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Of these sequences, which run already, some may have been lost in a way that they cannot begin again."""
        lost = (each for each in sequences if not each.computed and any(each.detached))
        self._stuck.update(each.request_id for each in lost)

    def forget(self, request_id: RequestId) -> None:
        """The sequence has ended: its loss is of no interest any more."""
        self._lost.pop(request_id, None)
        self._stuck.discard(request_id)

    def report(self, landed: tuple[int, ...]) -> PollResult:
        """What `poll` returns: what landed, and all that was lost since the last time."""
        told = PollResult(landed, tuple(self._failed), tuple(self._lost.items()))
        self._failed, self._lost = [], {}
        return told

    @property
    def certain(self) -> bool:
        """Whether nothing can be refused; asked at every step."""
        return not self._lost and not self._stuck and (self._transfers is None or not self._transfers.pending)

    def refuse_unreadable(self, sequences: Items[Sequence]) -> None:
        """Raise `ComputationLost` or `TransfersPending` if block tables must not be used yet."""
        self._refuse_lost(sequences)
        if self._transfers is not None and self._transfers.pending:
            raise TransfersPending

    def refuse_uncomputable(self, sequences: Items[Sequence]) -> None:
        """Raise if one of these sequences has not got what it is computed from: as `refuse_lost`, and
        `TransfersPending` where a copy into its blocks has not been started.
        """
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
        """Raise `ComputationLost`: a copy has failed, and a sequence has not heard of it, or cannot begin again."""
        self._refuse_lost(sequences)
        for sequence in sequences if self._stuck else ():
            if sequence.request_id in self._stuck:
                raise ComputationLost(sequence.request_id, 0, stuck=True)

    def _refuse_lost(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences if self._lost else ():
            if sequence.request_id in self._lost:
                raise ComputationLost(sequence.request_id, self._lost[sequence.request_id])
