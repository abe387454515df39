"""Checksums of the blocks that have landed in secondary, where this lies in a file: what a warm restart trusts."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from events.packed import CHECKSUM_BYTES
from events.types import SECONDARY
from kvcache.errors import invariant
from kvcache.fold.sliding_group import AnyGroup


def landed_checksums(group: AnyGroup) -> npt.NDArray[np.uint64] | None:
    """One per secondary slot; 0 where no block is cached, its copy has not landed, or nothing is known.

    None: nothing is known of any.
    """
    noted = group.levels[SECONDARY].checksums
    if noted is None:
        return None
    landed = array("i")
    for level, slots, _, in_flight in group.cached():
        if level == SECONDARY and not in_flight:
            landed += slots
    known, at = np.zeros_like(noted), np.frombuffer(landed, np.int32)
    known[at] = noted[at]
    return known if known.any() else None


def export_checksums(group: AnyGroup) -> bytes:
    """As `GroupExported` has them."""
    known = landed_checksums(group)
    return b"" if known is None else known.tobytes()


def install_checksums(group: AnyGroup, exported: bytes) -> None:
    """What an exported group says of them."""
    level = group.levels[SECONDARY]
    if exported:
        invariant(len(exported) == CHECKSUM_BYTES * level.size, "there is no checksum for each slot")
        level.checksums = np.frombuffer(exported, np.uint64).copy()
