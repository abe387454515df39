"""Distinct types for numbers that are easily mixed up; and the allocation of handles and transfer ids.

Each epoch of a log allocates numbers of its own, so that none is used twice in a log.

The numbers of epoch e are those from e * 2**40 + 1 to (e + 1) * 2**40 - 1. So free numbers are known without reading
earlier epochs, and a number shows its epoch. They fit an int64 up to `MAX_EPOCH`, and are exact in a double, as JSON
readers have it, below epoch 8192.
"""

from __future__ import annotations

from typing import NewType

Handle = NewType("Handle", int)
"""A running sequence, in events; never used twice in a log."""
Slot = NewType("Slot", int)
"""Place of a block: a row of its level's pools."""
LevelIndex = NewType("LevelIndex", int)
"""`PRIMARY` or `SECONDARY`."""
GroupIndex = NewType("GroupIndex", int)
"""The layers of one attention window, and their blocks."""
BlockIndex = NewType("BlockIndex", int)
"""The place of a block in its sequence, from 0 on."""

PER_EPOCH = 1 << 40
MAX_EPOCH = (1 << 23) - 2
MAX_NUMBER = (MAX_EPOCH + 1) * PER_EPOCH - 1


def first_number(epoch: int) -> int:
    """Return the first number of an epoch."""
    return epoch * PER_EPOCH + 1


def epoch_of(number: int) -> int:
    """Return the epoch of a number; for the next number to be used, the epoch in the range of which it is."""
    return max(number - 1, 0) // PER_EPOCH


def numbers_left(number: int) -> int:
    """Return the numbers left in an epoch, if this is the next one."""
    return PER_EPOCH - 1 - (number - 1) % PER_EPOCH
