"""Copies follow events: moves in the events are copied here, and their arrival is reported back.

Deciding never waits for bytes. While events are published the engine only notes the requested copies; `start` arranges
all of them in as few batches as their order allows and submits these; `poll` returns the transfers that have landed or
failed, so that the manager can emit events, after which it calls `recorded`.

A ticket that raises anything at all has failed, and so has a batch that the copier refuses: it is then unknown if the
bytes will ever come. With it fail all copies noted before that was recorded, since they may read its targets: those not
started never will be, and the outcome of the rest is ignored. These still write to their slots. The next owner of a
slot is safe, because batches that touch a slot run in the order of submission, and the compute stream waits for the
ticket of each `start`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cuda_ops.copier import Copier, Copy, CopyFailed, FinishedTicket, JoinedTicket, Ticket
from cuda_ops.hazards import schedule
from events.packed import unpack_i32
from events.types import PRIMARY, SECONDARY, BlocksAllocated, BlocksCopied, BlocksMoved, Event
from kvcache.config import KVCacheConfig
from kvcache.errors import ManagerBusy, UsageError
from kvcache.fold.state import CacheState
from kvcache.layout import Layout

if TYPE_CHECKING:
    from kvcache.device.secondary_file import SecondaryFile


_ARRIVED = ""


_Transfer = tuple[int, Copy]
"""The id in an event, and the requested copy."""


class _Batch:
    """Submitted copies. The ticket's outcome is kept here, since it may not be available twice."""

    def __init__(self, transfers: tuple[int, ...], ticket: Ticket) -> None:
        self.transfers = transfers
        """Ids of the transfers; empty if the outcome is ignored."""
        self._ticket = ticket
        self.outcome: str | None = None
        """`_ARRIVED`, or the reason of the failure; None: not known yet."""

    def has_ended(self) -> bool:
        """Check for the end, without blocking."""
        if self.outcome is None:
            try:
                if self._ticket.done():
                    self.outcome = _ARRIVED
            except ManagerBusy:
                raise  # unrelated to the copies
            except Exception as failure:  # noqa: BLE001  a copier's bug must not take with it what has landed
                self.outcome = _reason(failure)
        return self.outcome is not None

    def wait(self) -> None:
        """Block until it has ended."""
        if self.outcome is None:
            try:
                self._ticket.wait()
            except ManagerBusy:
                pass
            except Exception as failure:  # noqa: BLE001
                self.outcome = _reason(failure)


@dataclass(slots=True)
class _Blank:
    """Blocks that were allocated after the first `after` of the noted copies."""

    after: int
    group: int
    slots: npt.NDArray[np.int32]


class TransferEngine:
    """Carries out the copies that events request. Each event has a transfer id of its own, higher than those before.

    `fill_blank` overwrites primary blocks of a group, if allocated ones are to be, between the copies requested before
    and after that.
    """

    def __init__(
        self, copier: Copier, fill_blank: Callable[[int, npt.NDArray[np.int32]], None] | None = None
    ) -> None:
        self.copier, self._fill_blank = copier, fill_blank
        self.events: list[type[Event]] = [BlocksMoved, BlocksCopied]
        """Events that `on_event` subscribes to."""
        if fill_blank is not None:
            self.events.append(BlocksAllocated)
        self._pending: list[_Transfer] = []
        self._blank: list[_Blank] = []
        self._in_flight: deque[_Batch] = deque()

    @property
    def pending(self) -> bool:
        """True if copies are noted and not started, or blocks are to be overwritten."""
        return bool(self._pending or self._blank)

    def pending_targets(self, group: int, level: int) -> set[int]:
        """Return the slots of a level that the next `start` will write."""
        rows = [copy.target for _, copy in self._pending if (copy.group, copy.target_level) == (group, level)]
        rows += [each.slots for each in self._blank if (each.group, PRIMARY) == (group, level)]
        return {slot for row in rows for slot in row.tolist()}

    def on_event(self, event: Any) -> None:
        """Note the copies that an event requests."""
        if isinstance(event, BlocksMoved):
            if event.transfer:
                source, target = unpack_i32(event.from_slots), unpack_i32(event.to_slots)
                copy = Copy(event.from_level, event.to_level, source, target, group=event.group)
                self._pending.append((event.transfer, copy))
        elif isinstance(event, BlocksCopied):
            source, target = np.array([event.source], np.int32), np.array([event.target], np.int32)
            copy = Copy(event.source_level, PRIMARY, source, target, event.num_tokens, event.group)
            self._pending.append((event.transfer, copy))
            if self._blank and (event.source_level, event.source) == (PRIMARY, event.target):
                self._blank.pop()  # allocated by the event before, to reuse its old bytes
        elif isinstance(event, BlocksAllocated):
            self._blank.append(_Blank(len(self._pending), event.group, unpack_i32(event.slots)))

    def start(self) -> Ticket:
        """Submit everything noted. The ticket covers all of it, and fails with whatever the copier refuses.

        Before the forward pass the compute stream must be made to wait for it (`wait_on`). Blocks are overwritten on
        the current stream, which must be that one.
        """
        noted, self._pending = self._pending, []
        blank, self._blank = self._blank, []
        tickets, begin = list[Ticket](), 0
        for each in blank:
            ticket, begin = self._start(noted[begin : each.after]), each.after
            tickets.append(ticket)
            with suppress(Exception):  # the returned ticket raises it again
                ticket.wait_on()
            assert self._fill_blank is not None
            self._fill_blank(each.group, each.slots)
        last = self._start(noted[begin:])
        return JoinedTicket([*tickets, last]) if tickets else last

    def _start(self, transfers: list[_Transfer]) -> JoinedTicket:
        batches = schedule([copy for _, copy in transfers])
        return JoinedTicket([self._submit([transfers[index] for index in batch]) for batch in batches])

    def _submit(self, transfers: list[_Transfer]) -> Ticket:
        """Start a batch. A copy in place lands with its batch, without the copier."""
        copies = [copy for _, copy in transfers if not copy.moves_nothing]
        ticket = self._ticket_of(copies) if copies else FinishedTicket()
        self._in_flight.append(_Batch(tuple(transfer for transfer, _ in transfers), ticket))
        return ticket

    def _ticket_of(self, copies: list[Copy]) -> Ticket:
        try:
            ticket = self.copier.submit(copies)
        except Exception as failure:  # noqa: BLE001  the events stand, so their copies must end in some way
            return FinishedTicket(_reason(failure))
        if all(callable(getattr(ticket, method, None)) for method in ("done", "wait", "wait_on")):
            return ticket
        return FinishedTicket(f"submit must return a ticket, not {type(ticket).__name__}")

    def poll(self) -> tuple[list[int], list[tuple[int, str]]]:
        """Return the ids of the transfers that have landed, and those that failed and why. Never blocks.

        Both are in the order of their events, and are returned again until they are `recorded`. After a failed batch
        nothing lands.
        """
        landed: list[int] = []
        failed: list[tuple[int, str]] = []
        for batch in self._in_flight:
            if not batch.has_ended():
                break
            if batch.outcome:
                failed += [(transfer, batch.outcome) for transfer in batch.transfers]
            elif not failed:
                landed += batch.transfers
        return sorted(landed), sorted(failed)

    def recorded(self) -> None:
        """Acknowledge the last result of `poll`; after a failure nothing noted so far matters any more."""
        failed = False
        while self._in_flight and self._in_flight[0].outcome is not None:
            batch = self._in_flight.popleft()
            failed = failed or bool(batch.outcome and batch.transfers)
        if failed:
            self._pending.clear()
            for batch in self._in_flight:
                batch.transfers = ()
            for each in self._blank:
                each.after = 0

    def wait(self) -> None:
        """Block until everything started has landed or failed; `poll` then returns which."""
        for batch in self._in_flight:
            batch.wait()


def _reason(failure: Exception) -> str:
    """Describe the failure of a batch. Other errors than `CopyFailed` are given by type only: their text may contain
    anything.
    """
    reason = str(failure.reason) if isinstance(failure, CopyFailed) else ""
    return reason or type(failure).__name__


CHANGED = "a block in the file of secondary_path does not match its checksum"


class CheckingCopier:
    """Copier that submits only batches with intact sources in the file; the others fail unmoved."""

    def __init__(self, copier: Copier, file: SecondaryFile) -> None:
        self._copier, self._file = copier, file
        self._known: list[npt.NDArray[np.uint64]] = []
        """Checksums per group and slot; 0: unknown."""
        self._awaited: list[npt.NDArray[np.int32]] = []
        """Copies in flight per group and target slot."""

    def begin(self, state: CacheState) -> None:
        """Set the checksums of the file when a cache begins, or has restarted."""
        self._known, self._awaited = [], []
        for group in state.groups:
            size, known = group.levels[SECONDARY].size, group.landed_checksums()
            self._known.append(np.zeros(size, np.uint64) if known is None else known)
            self._awaited.append(np.zeros(size, np.int32))

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """See `Copier`. The ticket has failed where a block has other bytes than were written."""
        if any(copy.source_level == SECONDARY and self._has_changed(copy) for copy in copies):
            return FinishedTicket(CHANGED)
        for copy in copies:
            if copy.target_level == SECONDARY:
                self._known[copy.group][copy.target] = 0
                self._awaited[copy.group][copy.target] += 1
        return self._copier.submit(copies)

    def landed(self, group: int, slots: npt.NDArray[np.int32], checksums: bytes) -> None:
        """Note that a copy to these slots has landed, with these checksums."""
        awaited = self._awaited[group]
        awaited[slots] = np.maximum(awaited[slots] - 1, 0)
        # Slots that a later copy is about to overwrite, or has in part, are not this one's.
        last = awaited[slots] == 0
        self._known[group][slots[last]] = np.frombuffer(checksums, np.uint64)[last]

    def _has_changed(self, copy: Copy) -> bool:
        expected = self._known[copy.group][copy.source]
        slots, expected = copy.source[expected != 0], expected[expected != 0]
        found: bytes = self._file.checksums(copy.group, slots)
        return found != bytes(expected.tobytes())


def engine_for(
    pools: Any, copier: Copier | None, layout: Layout, config: KVCacheConfig
) -> TransferEngine | None:
    """Return the engine that moves the bytes of `pools`, or that `copier` moves; None without either.

    With `debug_fill_blank` it also overwrites allocated blocks of the pools. Raises `UsageError`, also for pools that
    belong to another manager.
    """
    if pools is not None:
        methods = ("copier", "refuse_taken", "take", "release")
        if not all(callable(getattr(pools, method, None)) for method in methods):
            raise UsageError(f"pools must be Pools, not {type(pools).__name__}")
        if pools.layout != layout:
            raise UsageError(
                "the pools do not match the layout of config: create them by Pools(Layout.of(config))"
            )
        file, path = pools.secondary_file, config.secondary_path
        if (None if file is None else file.path) != (None if path is None else Path(path)):
            raise UsageError(
                "the pools and config.secondary_path disagree about the secondary level: create the pools by "
                "Pools(Layout.of(config), secondary_path=config.secondary_path)"
            )
        pools.refuse_taken()
        copier = copier or pools.copier()
    if copier is None:
        return None
    if not callable(getattr(copier, "submit", None)):
        raise UsageError(f"a copier must have a method submit; {type(copier).__name__} does not")
    if pools is not None and pools.secondary_file is not None and config.verify_secondary:
        copier = CheckingCopier(copier, pools.secondary_file)
    fills = pools is not None and config.debug_fill_blank
    return TransferEngine(copier, pools.fill_blank if fills else None)
