"""Pinning blocks of a sequence, and releasing them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.types import Event
from kvcache.decide.window_manager import WindowManager
from kvcache.errors import PinsExceeded, invariant
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState


class Pins:
    """Decides about pins. Counts how many hold a block, so that a pin costs what it holds, however many there are."""

    def __init__(
        self,
        windows: Items[WindowManager],
        state: CacheState,
        emit: Callable[[Event], None],
        share: float,
    ) -> None:
        self._windows, self._state, self._emit, self._share = windows, state, emit, share
        self._counts = self._counted()
        """Per window, by slot."""

    def _counted(self) -> list[npt.NDArray[np.int64]]:
        counts = [np.zeros(window.primary.size, np.int64) for window in self._windows]
        for pin in self._state.pins.values():
            for of_window, slots in zip(counts, pin.slots, strict=True):
                of_window[slots] += 1
        return counts

    def pin(self, sequence: Sequence, blocks: tuple[int, int]) -> int:
        """Hold the cached ones of a sequence's blocks, from and up to; returns the pin's number.

        With full attention those before them as well: no block is reached without them. Raises `PinsExceeded` if more
        than the share of a window's blocks were pinned then.
        """
        slots = []
        for window, counts in zip(self._windows, self._counts, strict=True):
            part, (start, stop) = sequence.part_in(window.index), blocks
            if part is not sequence:
                # What is pinned is of use only with all that an encoder has made of its input.
                overlaps = start < min(stop, window.blocks_for(sequence.num_tokens))
                start, stop = 0, len(part.tables[window.index]) * overlaps
            end = min(stop, part.path_ends[window.index].end)
            first = window.first_pinned(sequence, start)
            own = part.tables[window.index][first:end] if start < end else array("i")
            pinned = int(np.count_nonzero(counts) + np.count_nonzero(counts[own] == 0))
            most = int(self._share * window.primary.size)
            if pinned > most:
                raise PinsExceeded(pinned, most, window.window)
            slots.append(own)
        number = self._state.next_pin
        packed = tuple([own.tobytes() for own in slots])
        self._emit(ev.BlocksPinned(pin=number, handle=sequence.handle, slots=packed))
        for counts, own in zip(self._counts, slots, strict=True):
            counts[own] += 1
        return number

    def unpin(self, number: int, clock: int) -> None:
        """Release what a pin holds."""
        state, held = self._state, self._state.pins[number]
        freed = []
        for group, slots in zip(state.groups, held.slots, strict=True):
            blank = (
                array("i") if held.named else array("i", [slot for slot in slots if slot not in group.shared])
            )
            freed.append(blank[::-1].tobytes())
        self._emit(ev.BlocksUnpinned(pin=number, freed=tuple(freed), clock=clock))
        for counts, slots in zip(self._counts, held.slots, strict=True):
            counts[slots] -= 1

    def check(self) -> None:
        """Raise `InvariantViolated` if blocks are counted that are not pinned, or otherwise."""
        pairs = zip(self._counts, self._counted(), strict=True)
        invariant(all(np.array_equal(*pair) for pair in pairs), "pinned blocks are miscounted")
