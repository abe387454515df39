"""What a request that comes back has computed itself: an engine that preempts one removes it and adds it again.

Its blocks are still cached, so it finds them, which says nothing about how much requests share. The counters therefore
keep such tokens apart. A request has come back if it says so (`Request.resumed`), or was removed as preempted. Where an
engine says neither, it has if its id was removed before, its namespace is the same, and its prompt is no shorter than
its earlier one and no longer than what it had with its sampled tokens: a later turn of a conversation, which is longer,
is another request that happens to have its id. A branch owns what its parent owned when it began.

Only events are looked at, so whoever reads a log from its start finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from events.types import (
    EndReason,
    Namespace,
    RequestId,
    SequenceAdded,
    SequenceForked,
    SequenceRemoved,
    SequenceRewound,
    TransferFailed,
)

REMEMBERED = 4096
"""Removed requests that are remembered; the one that was removed first is forgotten first."""


@dataclass(slots=True)
class _Request:
    """A request, and the tokens from `first` to `stop` that it has computed itself."""

    request_id: RequestId
    namespace: Namespace
    num_prompt_tokens: int
    first: int
    num_tokens: int = 0
    stop: int = 0
    preempted: bool = False

    def returns_as(self, event: SequenceAdded) -> bool:
        """Whether this removed request is admitted again, rather than another one that has its id."""
        same_length = self.num_prompt_tokens <= event.num_tokens <= self.num_tokens
        return self.namespace == event.namespace and (event.resumed or self.preempted or same_length)


class OwnTokens:
    """A fold over how sequences begin, go back and end."""

    def __init__(self) -> None:
        self._running: dict[int, _Request] = {}
        self._removed: dict[RequestId, _Request] = {}

    def admit(self, event: SequenceAdded) -> int:
        """Note an admitted request; returns how many of its reused tokens it had computed itself before."""
        first = event.reused
        request = _Request(event.request_id, event.namespace, event.num_tokens, first)
        self._running[event.handle] = request
        before = self._removed.pop(event.request_id, None)
        if before is None and event.resumed:
            return (
                first  # when it ran is forgotten, or was before the manager started: it may have computed all
            )
        if before is None or not before.returns_as(event):
            return 0
        request.num_prompt_tokens = before.num_prompt_tokens
        request.first = min(first, before.first)
        return max(0, min(first, before.stop) - before.first)

    def fork(self, event: SequenceForked) -> None:
        """Note a branch."""
        parent = self._running.get(event.handle)
        if parent is not None:
            self._running[event.child] = replace(parent, request_id=event.request_id)

    def rewind(self, event: SequenceRewound) -> None:
        """What is computed anew in the place of what was taken back is the request's own."""
        request = self._running.get(event.handle)
        if request is not None:
            request.first = min(request.first, event.num_tokens - 1)
            request.num_prompt_tokens = min(request.num_prompt_tokens, event.num_tokens)

    def remove(self, event: SequenceRemoved) -> None:
        """Note a request that has ended, or was preempted."""
        request = self._running.pop(event.handle, None)
        if request is None:
            return
        request.num_tokens, request.stop = event.num_tokens, event.computed
        request.preempted = event.why == EndReason.PREEMPTED
        self._removed[request.request_id] = request
        if len(self._removed) > REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def begin_again(self, event: TransferFailed) -> None:
        """A copy has failed, so that what runs computes all of its tokens itself."""
        for request in self._running.values():
            request.first = 0

    def clear(self) -> None:
        """Another cache begins."""
        self._running.clear()
        self._removed.clear()
