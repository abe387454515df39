"""Copies between host memory and the device, and the requests affected by a failed one."""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.errors import ComputationLost
from kvcache.manager import KVCacheManager


class Copies:
    """Copies of all requests of a cache: one `poll` returns those of all."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._lost = set[object]()

    def start(self) -> None:
        """Start the requested copies; later work on the current stream of the device waits for them."""
        ticket = self._manager.start_transfers()
        if ticket is not None:
            ticket.wait_on()

    def refuse_lost(self, names: Iterable[str]) -> None:
        """Raise `ComputationLost` if a failed copy took tokens that one of these had reused or computed."""
        self._lost.update(name for name, _ in self._manager.poll().invalidated)
        for name in names:
            if name in self._lost:
                raise ComputationLost(name, 0, stuck=True)

    def forget(self, names: Iterable[str]) -> None:
        """Forget ended requests."""
        self._lost.difference_update(names)
