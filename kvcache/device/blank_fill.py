"""Shows who reads what was never written: with `debug_fill_blank`, blocks are overwritten when a sequence gets them.

Bytes of whoever had a block before look like K/V, so a token that is taken for computed and is not gives plausible
nonsense. Overwritten with NaN it gives NaN. That happens in the order of the events, since a block may have a new
owner while the copy that saves its old bytes has yet to be started.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cuda_ops.copier import Copier, JoinedTicket, Ticket
from events.packed import unpack_i32
from events.types import PRIMARY, BlocksAllocated, BlocksCopied
from kvcache.device.transfers import TransferEngine


class Fillable(Protocol):
    """Pools, as far as they are needed here."""

    def fill_blank(self, group: int, slots: npt.NDArray[np.int32]) -> None:
        """Overwrite primary blocks."""


@dataclass(slots=True)
class _Blank:
    """Blocks that were allocated after the first `after` of the copies that are noted."""

    after: int
    group: int
    slots: npt.NDArray[np.int32]


class FillingEngine(TransferEngine):
    """Overwrites allocated blocks, between the copies that were asked for before and after that."""

    events = (*TransferEngine.events, BlocksAllocated)

    def __init__(self, copier: Copier, pools: Fillable) -> None:
        super().__init__(copier)
        self._pools = pools
        self._blank: list[_Blank] = []

    @property
    def pending(self) -> bool:
        """Whether copies are noted and not started, or blocks to be overwritten."""
        return bool(self._pending or self._blank)

    def pending_targets(self, group: int, level: int) -> set[int]:
        """The slots of a level that will be written at the next `start`."""
        blank = [each.slots.tolist() for each in self._blank if (each.group, PRIMARY) == (group, level)]
        return super().pending_targets(group, level).union(*blank)

    def on_event(self, event: Any) -> None:
        """Note what an event asks for."""
        if isinstance(event, BlocksAllocated):
            self._blank.append(_Blank(len(self._pending), event.group, unpack_i32(event.slots)))
            return
        super().on_event(event)
        if isinstance(event, BlocksCopied) and (event.source_level, event.source) == (PRIMARY, event.target):
            self._blank.pop()  # allocated by the event before, for the sake of its old bytes

    def start(self) -> Ticket:
        """Submit everything noted, and overwrite on the current stream, which must be the compute stream."""
        noted, self._pending = self._pending, []
        blank, self._blank = self._blank, []
        tickets, started = [], 0
        for each in blank:
            self._pending, started = noted[started : each.after], each.after
            tickets.append(super().start())
            with suppress(Exception):  # the ticket that is returned says it again
                tickets[-1].wait_on()
            self._pools.fill_blank(each.group, each.slots)
        self._pending = noted[started:]
        return JoinedTicket([*tickets, super().start()])

    def recorded(self) -> None:
        """What `poll` has told last is known; after a failure no copy that was noted so far matters any more."""
        super().recorded()
        for each in self._blank:
            each.after = min(each.after, len(self._pending))
