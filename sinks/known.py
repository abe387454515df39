"""What a stream of events has said so far that its later lines need: the width of keys, and whose handles are whose.

A handle means nothing to people; the request's id, which their engine gave, does. It is told when the sequence begins
and with the whole state, so whoever begins in the middle of a stream, or has lost a part, knows some only by handle.
"""

from __future__ import annotations

from events.told.state import name_of
from events.types import (
    AnyEvent,
    CacheCreated,
    RequestId,
    SequenceAdded,
    SequenceForked,
    SequenceRemoved,
    StateExported,
    WorkerSeen,
)

MAX_REQUESTS = 1 << 16
"""Of more, the oldest are forgotten: where batches are lost, not every end is heard of."""


class Known:
    """To be told every event of a stream, in order, each before its line is made."""

    def __init__(self, key_bytes: int = 0) -> None:
        self.key_bytes = key_bytes
        """Of the cache (`CacheCreated.key_bytes`)."""
        self._requests: dict[int, RequestId] = {}
        self._ended: int | None = None
        self._workers: dict[int, str] = {}

    def request(self, handle: int) -> RequestId | None:
        """The id of the request that runs, or has just ended, under a handle; None if it is not known, or if the handle
        is that of an encoder's input: `EncoderAdded` says who reads it, and branches of that may do so longer.
        """
        return self._requests.get(handle)

    def worker(self, number: int) -> str | None:
        """The name of a worker in a log of what engines tell; None if it is not known."""
        return self._workers.get(number)

    def see(self, event: AnyEvent) -> None:
        """Learn from one event."""
        if self._ended is not None:
            # Not when it ended: its last line names it, too.
            self._requests.pop(self._ended, None)
            self._ended = None
        if isinstance(event, SequenceAdded):
            self._add(event.handle, event.request_id)
        elif isinstance(event, SequenceForked):
            self._add(event.child, event.request_id)
        elif isinstance(event, SequenceRemoved):
            self._ended = event.handle
        elif isinstance(event, StateExported):
            inputs = {each.encoder for each in event.sequences}
            self._requests = {
                each.handle: each.request_id for each in event.sequences if each.handle not in inputs
            }
        elif isinstance(event, CacheCreated):
            self.key_bytes = event.key_bytes
        elif isinstance(event, WorkerSeen):
            self._workers[event.worker] = name_of(event)

    def _add(self, handle: int, request_id: RequestId) -> None:
        self._requests[handle] = request_id
        if len(self._requests) > MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
