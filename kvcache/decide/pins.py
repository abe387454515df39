"""Pinning blocks of a sequence, and letting go of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items

from events import types as ev
from events.types import Event
from kvcache.decide.sliding_manager import SlidingWindowManager
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.errors import PinsExceeded
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState


def pin(
    windows: Items[WindowBlockManager],
    state: CacheState,
    emit: Callable[[Event], None],
    sequence: Sequence,
    blocks: tuple[int, int],
    share: float,
) -> int:
    """Hold the cached ones of a sequence's blocks, from and up to; returns the pin's number.

    With full attention those before them as well: no block is reached without them. Raises `PinsExceeded` if more than
    this share of a window's blocks were pinned then.
    """
    slots = []
    for window in windows:
        end = min(blocks[1], sequence.path_ends[window.index].end)
        sliding = isinstance(window, SlidingWindowManager)
        first = max(blocks[0], sequence.detached[window.index]) if sliding else 0
        own = sequence.tables[window.index][first:end] if blocks[0] < end else array("i")
        pinned = {slot for each in state.pins.values() for slot in each.slots[window.index]}
        most = int(share * window.primary.size)
        if len(pinned.union(own)) > most:
            raise PinsExceeded(len(pinned.union(own)), most, window.window)
        slots.append(own.tobytes())
    number = state.next_pin
    emit(ev.BlocksPinned(pin=number, handle=sequence.handle, slots=tuple(slots)))
    return number


def unpin(state: CacheState, emit: Callable[[Event], None], number: int, clock: int) -> None:
    """Let go of what a pin holds."""
    held = state.pins[number]
    freed = []
    for group, slots in zip(state.groups, held.slots, strict=True):
        blank = array("i") if held.named else array("i", [slot for slot in slots if slot not in group.shared])
        freed.append(blank[::-1].tobytes())
    emit(ev.BlocksUnpinned(pin=number, freed=tuple(freed), clock=clock))
