"""How events about pins change the state. Only `CacheState.apply` calls what is here."""

from __future__ import annotations

from array import array

from events import types as ev
from kvcache.errors import invariant
from kvcache.fold.blocks import BlockFold
from kvcache.fold.pin import Pin


class PinFold(BlockFold):
    """Folds pins."""

    def _pin(self, event: ev.BlocksPinned) -> None:
        invariant(self.next_pin == event.pin, "a pin has another number than the next")
        sequence = self.sequences[event.handle]
        slots = [array("i", packed) for packed in event.slots]
        ends = [
            group.pin(sequence.part_in(group.index), own)
            for group, own in zip(self.groups, slots, strict=True)
        ]
        self.pins[event.pin] = Pin(sequence.request_id, slots, ends)
        self.next_pin += 1

    def _unpin(self, event: ev.BlocksUnpinned) -> None:
        pin = self.pins.pop(event.pin)
        self.tell_time(event.clock)
        self.releases += 1
        for group, slots, end, freed in zip(self.groups, pin.slots, pin.ends, event.freed, strict=True):
            if pin.named:
                group.unpin(slots, end, self.releases, self.clock)
                blank = array("i")
            else:
                blank = group.return_uncached(slots[::-1])
            invariant(blank.tobytes() == freed, "other slots were freed")

    def _forget_names_of_pins(self) -> None:
        """The cache was cleared: pins hold blocks without names from now on."""
        for pin in self.pins.values():
            pin.named, pin.ends = False, [None] * len(self.groups)
