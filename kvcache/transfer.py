"""Bytes follow events: what the events say was moved is copied here, and its arrival is reported back.

Deciding never waits for bytes. While events are published the engine only notes the copies they ask for;
`start` arranges all of them in as few batches as their order allows and submits these; `poll` tells which
transfers have landed or failed, so that the manager can make events of that.

A ticket that raises anything at all has failed: whether the bytes will ever come is unknown then.

Failures spread: a block that was copied from a slot that never got its bytes is not there either. That holds
for copies noted before the failure was reported. Later ones were decided by a manager that knew of it, so
what they find in the slot was written since. A slot that a forward pass rewrites before the report counts as
lost as well: the engine does not say when it writes, and losing a cached block is better than a wrong one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_ops.copier import Copier, Copy, CopyFailed, FinishedTicket, JoinedTicket, Ticket
from cuda_ops.hazards import schedule
from events.packed import unpack_i32
from events.types import PRIMARY, BlocksCopied, BlocksMoved
from kvcache.errors import UsageError
from kvcache.layout import Layout

SlotKey = tuple[int, int, int]
"""Group, level, slot."""
SOURCE_FAILED = "the copy it was to be made from failed"


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A noted copy."""

    number: int
    """Counts the transfers in the order of their events."""
    transfer: int
    """The id in the event."""
    copy: Copy


@dataclass(frozen=True, slots=True)
class _Batch:
    transfers: tuple[_Transfer, ...]
    ticket: Ticket


class TransferEngine:
    """Carries out the copies that events ask for. One transfer id belongs to one event."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._noted = 0
        self._pending: list[_Transfer] = []
        self._in_flight: deque[_Batch] = deque()
        self._bad: dict[SlotKey, int] = {}
        """Slots without their bytes, with the number of the first transfer that was decided knowing it."""

    @property
    def pending(self) -> bool:
        """Whether copies are noted and not started."""
        return bool(self._pending)

    @property
    def pending_ids(self) -> frozenset[int]:
        """Ids of the transfers that are noted and not started."""
        return frozenset(noted.transfer for noted in self._pending)

    def on_event(self, event: Any) -> None:
        """Note the copy that an event asks for. Subscribe it to BlocksMoved and BlocksCopied."""
        if isinstance(event, BlocksMoved):
            if event.transfer:
                source, target = unpack_i32(event.from_slots), unpack_i32(event.to_slots)
                self._note(
                    event.transfer,
                    Copy(event.from_level, event.to_level, source, target, group=event.group),
                )
        elif isinstance(event, BlocksCopied):
            source, target = np.array([event.source], np.int32), np.array([event.target], np.int32)
            self._note(
                event.transfer,
                Copy(event.source_level, PRIMARY, source, target, event.num_tokens, event.group),
            )

    def start(self) -> Ticket:
        """Submit everything noted. The ticket stands for all of it.

        Before the forward pass the compute stream must be made to wait for it (`wait_on`). Raises
        ValueError for slots that do not exist.
        """
        transfers, self._pending = self._pending, []
        batches = schedule([transfer.copy for transfer in transfers])
        started = [self._submit(tuple(transfers[index] for index in batch)) for batch in batches]
        return JoinedTicket(started)

    def poll(self) -> tuple[list[int], list[tuple[int, str]]]:
        """Return the ids of the transfers that have landed since the last call, and those that failed and why.

        Both are in the order of their events. Never blocks.
        """
        landed: list[_Transfer] = []
        failed: list[tuple[_Transfer, str]] = []
        while self._in_flight:
            batch = self._in_flight[0]
            try:
                if not batch.ticket.done():
                    break
                arrived = batch.transfers
            except Exception as failure:  # noqa: BLE001  a copier's bug must not take with it what has landed
                # What stays where it is needed nothing from the copier.
                arrived = tuple(each for each in batch.transfers if each.copy.moves_nothing)
                lost = [each for each in batch.transfers if not each.copy.moves_nothing]
                failed += [(transfer, _reason(failure)) for transfer in lost]
                self._spoil(lost)
            self._sort_out(arrived, landed, failed)
            self._in_flight.popleft()
        landed.sort(key=lambda transfer: transfer.number)
        failed.sort(key=lambda entry: entry[0].number)
        return [each.transfer for each in landed], [(each.transfer, reason) for each, reason in failed]

    def wait(self) -> None:
        """Block until everything started has landed or failed; `poll` then tells which."""
        for batch in self._in_flight:
            with suppress(Exception):  # poll() reports it
                batch.ticket.wait()

    def _note(self, transfer: int, copy: Copy) -> None:
        self._pending.append(_Transfer(self._noted, transfer, copy))
        self._noted += 1

    def _submit(self, transfers: tuple[_Transfer, ...]) -> Ticket:
        """Start a batch. What stays where it is lands with its batch, but is not the copier's business."""
        copies = [transfer.copy for transfer in transfers if not transfer.copy.moves_nothing]
        ticket = self._copier.submit(copies) if copies else FinishedTicket()
        self._in_flight.append(_Batch(transfers, ticket))
        return ticket

    def _sort_out(
        self, arrived: Sequence[_Transfer], landed: list[_Transfer], failed: list[tuple[_Transfer, str]]
    ) -> None:
        """Tell the copies that arrived from those that copied what was not there."""
        for transfer in arrived:
            if self._has_bad_source(transfer):
                failed.append((transfer, SOURCE_FAILED))
                self._spoil([transfer])
            else:
                landed.append(transfer)
                self._mend(transfer)

    def _has_bad_source(self, transfer: _Transfer) -> bool:
        if not self._bad:
            return False
        copy = transfer.copy
        return any(
            transfer.number < self._bad.get((copy.group, copy.source_level, slot), 0)
            for slot in copy.source.tolist()
        )

    def _spoil(self, transfers: Sequence[_Transfer]) -> None:
        for transfer in transfers:
            for key in _targets(transfer.copy):
                self._bad[key] = self._noted

    def _mend(self, transfer: _Transfer) -> None:
        if self._bad:
            for key in _targets(transfer.copy):
                self._bad.pop(key, None)


def engine_for(pools: Any, copier: Copier | None, layout: Layout) -> TransferEngine | None:
    """What moves the bytes of `pools`, or whatever `copier` moves; None without either.

    Raises `UsageError`, also for pools that another manager has.
    """
    if pools is not None:
        methods = ("copier", "refuse_taken", "take", "give_back")
        if not all(callable(getattr(pools, method, None)) for method in methods):
            raise UsageError(f"pools must be Pools, not {type(pools).__name__}")
        if getattr(pools, "layout", layout) != layout:
            raise UsageError(
                "the pools have another layout than the config: make them by Pools(Layout.of(config))"
            )
        pools.refuse_taken()
    if copier is None and pools is not None:
        copier = pools.copier()
    if copier is None:
        return None
    if not callable(getattr(copier, "submit", None)):
        raise UsageError(f"a copier must have submit; {type(copier).__name__} has not")
    return TransferEngine(copier)


def _reason(failure: Exception) -> str:
    """Why a batch did not arrive. Of what is no `CopyFailed` only the type is told: its text may say anything."""
    return failure.reason if isinstance(failure, CopyFailed) else type(failure).__name__


def _targets(copy: Copy) -> list[SlotKey]:
    return [(copy.group, copy.target_level, slot) for slot in copy.target.tolist()]
