"""Notes of refused admissions: one per request until it is admitted, however often it is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from events.types import AdmissionRefused, Event, RequestId
from kvcache.errors import OutOfBlocks

_REMEMBERED = 65_536
"""A request that was refused longer ago may be noted again."""


class RefusalNotes:
    """Publishes `AdmissionRefused`, which no fold reads."""

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish
        self._noted: dict[RequestId, None] = {}
        """Oldest first."""

    def note(self, request_id: RequestId, refusal: OutOfBlocks) -> None:
        """A request did not fit."""
        if request_id in self._noted:
            return
        self._noted[request_id] = None
        if len(self._noted) > _REMEMBERED:
            del self._noted[next(iter(self._noted))]
        self._publish(AdmissionRefused(request_id, refusal.needed[0], refusal.available[0]))

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """These requests were admitted."""
        if self._noted:
            for request_id in request_ids:
                self._noted.pop(request_id, None)
